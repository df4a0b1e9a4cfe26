"""Coding agents against `onefold serve`: each calls a tool of its own, goes on in the same session, and resumes it.

    python clients/agents/run.py [--only NAME ...] [--keep] [--write]

`make agents` installs them first. Each agent gets a home, a folder, a server and a tiny model of its own; the model
says a script (`model.py`). Passed: the tool call wrote its file, every answer is in the agent's output, no request was
refused, and each later turn reused at least 99 % of the prompt of the turn before.

Agents get a proxy that does not exist for every address but this machine's, for those that heed it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import page  # noqa: E402
from agents.known import AGENTS, CONTENT, Agent, Place  # noqa: E402
from model import Script, write_scripted_model  # noqa: E402
from serving import Request, Server, serving  # noqa: E402

from onefold.cli.command_line import ended_in_order  # noqa: E402

ROOT = HERE.parent.parent
INSTALLED = ROOT / ".clients" / "agents"
RUNS = ROOT / ".clients" / "runs"
"""Homes, logs and outputs; Codex warns of a home in the system's temporary folder. The folders that agents work in
are there, as agents look for a repository around them."""
TURN = 240.0
"""Seconds after which an agent hangs."""
LEAST = 0.99

ANSWERS = {
    "write": "The note has been written.",
    "second": "Here comes my second reply.",
    "third": "This is reply number three.",
}
NOWHERE = "http://127.0.0.1:9"


class Failure(Exception):
    """An agent did not do what it should; in words for the table."""


@dataclass
class Result:
    agent: str
    version: str
    problem: str = ""
    seconds: float = 0.0
    requests: int = 0
    prompts: list[int] = field(default_factory=list)
    """Tokens of the longest prompt of each turn."""
    cached: list[int] = field(default_factory=list)
    """Of the first of a turn's long prompts, the tokens that were reused."""
    diverged: list[str] = field(default_factory=list)
    """Where that prompt diverged, in the server's words."""

    def reused(self, turn: int) -> float | None:
        """The share of the prompt of the turn before that this turn found in the cache."""
        return self.cached[turn] / self.prompts[turn - 1] if turn < len(self.cached) else None


def environment(agent: Agent, place: Place) -> dict[str, str]:
    path = os.pathsep.join([str(INSTALLED / "node_modules" / ".bin"), "/usr/local/bin", "/usr/bin", "/bin"])
    proxies = {name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    here = {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
    basic = {"PATH": path, "HOME": str(place.home), "TERM": "dumb", "LANG": "C.UTF-8"}
    return {**basic, **proxies, **here, **agent.configure(place)}


def ask(command: list[str], place: Place, variables: dict[str, str], answer: str) -> str:
    """Runs one turn, and returns all that the agent printed. Raises Failure."""
    try:
        done = subprocess.run(
            command,
            cwd=place.work,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{command[0]} did not end within {TURN:g} s") from None
    said = f"{done.stdout}\n{done.stderr}"
    with (place.home.parent / "output.txt").open("a") as file:
        file.write(f"$ {' '.join(command)}\n{said}\n")
    if done.returncode != 0:
        raise Failure(f"{command[0]} ended with {done.returncode}: {last_line(said)}")
    if answer not in done.stdout:
        raise Failure(f"{answer!r} is not in the output: {last_line(said)}")
    return said


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def note_turn(result: Result, requests: list[Request]) -> None:
    """Requests for titles and the like are short; the agent's own have its system prompt."""
    refused = [r for r in requests if r.status != "200"]
    if refused:
        raise Failure(f"{refused[0].path} answered {refused[0].status}")
    longest = max((r.prompt for r in requests), default=0)
    if longest == 0:
        raise Failure("the agent sent no request")
    same = result.prompts[0] if result.prompts else longest
    result.prompts.append(longest)
    first = next(r for r in requests if r.prompt >= 0.9 * same)
    result.cached.append(first.cached)
    result.diverged.append(first.diverged or "no divergence was logged")


def command_of(agent: Agent, name: str, place: Place, session: str) -> list[str]:
    prompt = f"Please follow the script {name}"
    if name == "write":
        return agent.first(place, prompt)
    return agent.again(prompt) if name == "second" else agent.resume(session, prompt)


def turns(agent: Agent, place: Place, server: Server, result: Result) -> None:
    variables = environment(agent, place)
    session = place.session
    seen = 0
    for name, answer in ANSWERS.items():
        try:
            said = ask(command_of(agent, name, place, session), place, variables, answer)
        finally:
            fresh = server.settled()[seen:]
            seen += len(fresh)
            result.requests = seen
        note_turn(result, fresh)
        if name == "write":
            check_note(place.note)
            if agent.session:
                found = agent.session.search(said)
                if found is None:
                    raise Failure("the output has no session id")
                session = found[1]
    for turn in (1, 2):
        if (result.reused(turn) or 0) < LEAST:
            share = f"{result.reused(turn):.1%} of the prompt before"
            raise Failure(f"turn {turn + 1} reused {share}: {result.diverged[turn]}")


def check_note(note: Path) -> None:
    if not note.is_file():
        raise Failure("the tool call wrote no file")
    if note.read_text().strip() != CONTENT:
        raise Failure(f"the tool call wrote {note.read_text()!r}, not {CONTENT!r}")


def try_agent(agent: Agent, folder: Path) -> Result:
    result = Result(agent.name, version(agent))
    (folder / "home").mkdir(parents=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        place = Place(folder / "home", Path(work).resolve(), "")
        place.note.parent.mkdir()
        call = {"write": agent.call(place)}
        scripts = [Script(name, answer, call.get(name)) for name, answer in ANSWERS.items()]
        model = write_scripted_model(folder / "model", scripts)
        try:
            with serving(model, folder / "server.log", "--budget", "1GB", "--alias", "*") as server:
                turns(agent, replace(place, url=server.url), server, result)
        except Failure as failure:
            result.problem = str(failure)
    result.seconds = time.monotonic() - began
    return result


def version(agent: Agent) -> str:
    manifest = INSTALLED / "node_modules" / agent.package / "package.json"
    if not manifest.is_file():
        raise SystemExit(f"{agent.name} is not installed: run `make agents`, which installs it into .clients")
    return str(json.loads(manifest.read_text())["version"])


def shown(results: list[Result]) -> str:
    head = ["agent", "version", "requests", "prompt tokens", "reused by turn 2", "by the resumed", "seconds", "result"]
    rows = [head]
    for r in results:
        shares = []
        for turn in (1, 2):
            share = r.reused(turn)
            shares.append("" if share is None else f"{r.cached[turn]:,} ({share:.1%})")
        prompt = f"{r.prompts[0]:,}" if r.prompts else ""
        rows.append([r.agent, r.version, str(r.requests), prompt, *shares, f"{r.seconds:.0f}", r.problem or "ok"])
    return page.table(rows, numbers=range(2, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [agent.name for agent in AGENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--keep", action="store_true", help="keep homes, logs and outputs in .clients/runs")
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    options = parser.parse_args()
    if options.write and options.only != names:
        parser.error("--write is for a table of all agents: leave --only out")
    shutil.rmtree(RUNS, ignore_errors=True)
    results = []
    for agent in AGENTS:
        if agent.name in options.only:
            results.append(try_agent(agent, RUNS / agent.name.lower().replace(" ", "-")))
            print(f"{agent.name}: {results[-1].problem or 'ok'}", flush=True)
    print(shown(results))
    if options.write:
        page.write("agents", shown(results))
    failed = [r for r in results if r.problem]
    if failed:
        print(f"\n{len(failed)} of {len(results)} failed; .clients/runs has their outputs and the server's logs")
    elif not options.keep:
        shutil.rmtree(RUNS)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with ended_in_order():  # a run whose terminal closes leaves no server and no client behind
        main()
