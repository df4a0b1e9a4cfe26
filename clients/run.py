"""Clients of OpenAI's and Anthropic's API against `onefold serve`: one row per client, one column per feature.

    python clients/run.py [--only CLIENT ...] [--write]

`make clients` installs them first. Each cell is a small program of that client (`cells/`) on a server of the real
command, with a tiny model that says a script (`model.py`). A cell passes if what the client itself made of the answer
is right:

- chat, stream: the text; the joined pieces of a stream
- tools: a call with the right arguments, and the answer after its result
- forced: a call that the model would not have made, with arguments that keep to the schema
- structured: an object of the client's own class, of a model that would have said something else
- responses: the same over /v1/responses
- usage: tokens of prompt and answer, and cached tokens on a repeat

Clients get a proxy that does not exist for every address but this machine's, for those that heed it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import page
from model import Script, write_scripted_model
from serving import Server, serving

from onefold.cli.command_line import ended_in_order

HERE = Path(__file__).resolve().parent
CELLS = HERE / "cells"
INSTALLED = HERE.parent / ".clients"
COLUMNS = ("chat", "stream", "tools", "forced", "structured", "responses", "usage")
CLIENT = 300.0
"""Seconds after which a client hangs."""
NOWHERE = "http://127.0.0.1:9"
QUIET = {
    "PYTHONWARNINGS": "ignore",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
}


@dataclass(frozen=True)
class Client:
    name: str
    program: str
    package: str
    missing: dict[str, str] = field(default_factory=dict, hash=False)
    """Features that the client does not have, and why."""


NO_TOOLS = "it offers the model no tool but the class that it asks for"

CLIENTS = (
    Client("openai (Python)", "openai_cells.py", "openai"),
    Client("anthropic", "anthropic_cells.py", "anthropic", {"responses": "Anthropic's API has nothing like it"}),
    Client("litellm", "litellm_cells.py", "litellm"),
    Client("langchain-openai", "langchain_cells.py", "langchain-openai"),
    Client("instructor", "instructor_cells.py", "instructor", {
        "chat": "every answer is an object of a class: see structured",
        "tools": NO_TOOLS,
    }),
    Client("pydantic-ai", "pydantic_ai_cells.py", "pydantic-ai-slim"),
    Client("llm", "llm_cells.py", "llm", {"forced": "it has no option that makes a model call a tool"}),
    Client("openai (npm)", "openai_cells.mjs", "openai"),
    Client("ai (npm)", "ai_cells.mjs", "ai"),
)  # fmt: skip


def environment(server: Server, home: Path) -> dict[str, str]:
    proxies = {name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    here = {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
    basic = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LANG": "C.UTF-8", "ONEFOLD_URL": server.url}
    return {**basic, **proxies, **here, **QUIET}


def command_of(client: Client) -> list[str]:
    if client.program.endswith(".mjs"):
        return [str(INSTALLED / "npm" / "node_modules" / ".bin" / "node"), str(INSTALLED / "npm" / client.program)]
    return [str(INSTALLED / "python" / "bin" / "python"), str(CELLS / client.program)]


def version(client: Client) -> str:
    if client.program.endswith(".mjs"):
        manifest = INSTALLED / "npm" / "node_modules" / client.package / "package.json"
        return str(json.loads(manifest.read_text())["version"])
    asked = f"import importlib.metadata; print(importlib.metadata.version({client.package!r}))"
    done = subprocess.run([command_of(client)[0], "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def try_client(client: Client, server: Server, home: Path) -> dict[str, str]:
    """Returns what is wrong, by column; an empty text is a cell that passed."""
    given = {"env": environment(server, home), "capture_output": True, "text": True, "timeout": CLIENT}
    try:
        done = subprocess.run(command_of(client), **given)  # type: ignore[call-overload]
        said, why = done.stdout, done.stderr.strip().splitlines()[-1:] or ["no result"]
    except subprocess.TimeoutExpired as error:
        said, why = (error.stdout or b"").decode(), [f"no result within {CLIENT:g} s"]
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"cell"')]
    found = {line["cell"]: line["problem"] for line in lines}
    return {cell: found.get(cell, why[0]) for cell in COLUMNS if cell not in client.missing}


def shown(results: dict[Client, dict[str, str]]) -> str:
    rows = [["client", "version", *COLUMNS]]
    for client, found in results.items():
        marks = ["-" if cell in client.missing else "FAIL" if found[cell] else "ok" for cell in COLUMNS]
        rows.append([client.name, version(client), *marks])
    return page.table(rows)


def install_programs() -> None:
    """Copies programs in JavaScript to where their packages are found."""
    for path in (*CELLS.glob("*.mjs"), CELLS / "said.json"):
        shutil.copy(path, INSTALLED / "npm" / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT", help=", ".join(names))
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    options = parser.parse_args()
    if options.write and options.only != names:
        parser.error("--write is for a table of all clients: leave --only out")
    chosen = [client for client in CLIENTS if client.name in options.only]
    for client in chosen:
        if not Path(command_of(client)[0]).exists():
            raise SystemExit(f"{client.name} is not installed: run `make clients`, which installs it into .clients")
    install_programs()
    said = json.loads((CELLS / "said.json").read_text())
    call = (said["call"]["name"], said["call"]["arguments"])
    scripts = [Script("greet", said["greeting"]), Script("weather", said["report"], call)]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted_model(Path(folder, "model"), scripts)
        flags = ["--budget", "512MB", "--alias", said["model"]]
        with serving(model, Path(folder, "server.log"), *flags) as server:
            for client in chosen:
                print(f"{client.name} ...", flush=True)
                results[client] = try_client(client, server, Path(folder))
    print(shown(results))
    if options.write:
        page.write("clients", shown(results))
    failed = [(client.name, cell, why) for client, found in results.items() for cell, why in found.items() if why]
    for name, cell, why in failed:
        print(f"FAIL {name}, {cell}: {why[:300]}")
    for client in results:
        for cell, why in client.missing.items():
            print(f"-    {client.name}, {cell}: {why}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with ended_in_order():  # a run whose terminal closes leaves no server and no client behind
        main()
