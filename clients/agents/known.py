"""The agents: how each is configured for a server, which of its tools writes a file, and how a session goes on."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTENT = "held once"
"""What the tool call writes."""
MODEL = "onefold-model"


@dataclass(frozen=True)
class Place:
    """Where one agent runs: a home and a folder of its own, and the server that it talks to."""

    home: Path
    work: Path
    url: str
    session: str = field(default_factory=lambda: str(uuid.uuid4()))
    """For agents that let the caller choose the session's id."""

    @property
    def note(self) -> Path:
        """The file that the tool call writes. Its folder is one that agents leave out of listings: Qwen Code lists the
        folder in its first message whenever it starts, and a new file in there would change that message."""
        return self.work / "dist" / "note.txt"


@dataclass(frozen=True)
class Agent:
    name: str
    package: str
    call: Callable[[Place], tuple[str, dict[str, Any]]]
    """One of the agent's own tools, with arguments that write `CONTENT` to the note, in the order of its schema."""
    configure: Callable[[Place], dict[str, str]]
    """Writes the agent's files, and returns its environment variables."""
    first: Callable[[Place, str], list[str]]
    """The command that starts a session with a prompt."""
    again: Callable[[str], list[str]]
    """The command that continues the last session with a prompt."""
    resume: Callable[[str, str], list[str]]
    """The command that resumes a session by its id, with a prompt."""
    session: re.Pattern[str] | None = None
    """Where the output of the first turn has the session's id; None: it is the one that was given."""


def _claude(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _codex(place: Place) -> dict[str, str]:
    (place.home / ".codex").mkdir()
    (place.home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "onefold"\ncheck_for_update_on_startup = false\n\n'
        f'[model_providers.onefold]\nname = "Onefold"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n\n'
        "[analytics]\nenabled = false\n"
    )
    return {}


def _opencode(place: Place) -> dict[str, str]:
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Onefold",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "any"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 8192}}},
    }
    settings = {
        "model": f"onefold/{MODEL}",
        "small_model": f"onefold/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"onefold": provider},
    }
    (folder / "opencode.json").write_text(json.dumps(settings, indent=1))
    return {f"OPENCODE_DISABLE_{name}": "1" for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")}


def _qwen(place: Place) -> dict[str, str]:
    (place.home / ".qwen").mkdir()
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    (place.home / ".qwen" / "settings.json").write_text(json.dumps(settings, indent=1))
    return {
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "OPENAI_API_KEY": "any",
        "OPENAI_MODEL": MODEL,
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }


CLAUDE = ["claude", "--print", "--permission-mode", "acceptEdits"]
CODEX = ["codex", "exec"]
UNGUARDED = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
OPENCODE = ["opencode", "run", "--format", "json"]
QWEN = ["qwen", "--approval-mode", "yolo"]

AGENTS = (
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        call=lambda place: ("Write", {"file_path": str(place.note), "content": CONTENT}),
        configure=_claude,
        first=lambda place, prompt: [*CLAUDE, "--session-id", place.session, prompt],
        again=lambda prompt: [*CLAUDE, "--continue", prompt],
        resume=lambda session, prompt: [*CLAUDE, "--resume", session, prompt],
    ),
    Agent(
        "Codex",
        "@openai/codex",
        call=lambda place: ("exec_command", {"cmd": f"printf '{CONTENT}' > {place.note.relative_to(place.work)}"}),
        configure=_codex,
        first=lambda place, prompt: [*CODEX, *UNGUARDED, prompt],
        again=lambda prompt: [*CODEX, "resume", "--last", *UNGUARDED, prompt],
        resume=lambda session, prompt: [*CODEX, "resume", *UNGUARDED, session, prompt],
        session=re.compile(r"session id: (\S+)"),
    ),
    Agent(
        "opencode",
        "opencode-ai",
        call=lambda place: ("write", {"content": CONTENT, "filePath": str(place.note)}),
        configure=_opencode,
        first=lambda place, prompt: [*OPENCODE, prompt],
        again=lambda prompt: [*OPENCODE, "--continue", prompt],
        resume=lambda session, prompt: [*OPENCODE, "--session", session, prompt],
        session=re.compile(r'"sessionID":\s*"(\w+)"'),
    ),
    Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        call=lambda place: ("write_file", {"file_path": str(place.note), "content": CONTENT}),
        configure=_qwen,
        first=lambda place, prompt: [*QWEN, "--session-id", place.session, prompt],
        again=lambda prompt: [*QWEN, "--continue", prompt],
        resume=lambda session, prompt: [*QWEN, "--resume", session, prompt],
    ),
)
