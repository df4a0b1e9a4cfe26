"""Starts two servers, Redis and nginx on this machine, to try several servers behind one address; Ctrl-C ends them.

    python examples/fleet/run.py [MODEL] [--port 8080] [options of onefold serve]

MODEL is `demo` if none is given. nginx and redis-server must be installed: apt install nginx redis-server. A server
that ends, or is killed, is started again. README.md has what to try.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

RECIPE = Path(__file__).with_name("nginx.conf")
HOST = "127.0.0.1"
PORTS = (8080, 8081, 8082)
"""In the recipe: nginx, and the two servers."""
LOOK_SECONDS = 0.1
END_SECONDS = 30.0
"""A process that has not ended by then is killed."""
TOLD_LINES = 10
"""Of the log of a process that did not start."""


class NotStarted(Exception):
    """A process ended before it listened."""


def configuration(port: int, servers: Sequence[int]) -> str:
    """Returns the recipe with other ports. Raises ValueError if the recipe does not have each of its own once."""
    text = RECIPE.read_text(encoding="utf-8")
    wanted = dict(zip(PORTS, (port, *servers), strict=True))
    if sorted(int(found) for found in re.findall(rf"{re.escape(HOST)}:(\d+)", text)) != sorted(PORTS):
        raise ValueError(f"{RECIPE.name} must have each of {HOST}:{PORTS} once")
    return re.sub(rf"({re.escape(HOST)}):(\d+)", lambda found: f"{found[1]}:{wanted[int(found[2])]}", text)


def nginx_command(folder: Path) -> list[str]:
    """Returns the command of an nginx that has its files in this folder, and its configuration in nginx.conf there."""
    files = ["-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    return ["nginx", *files, "-g", "daemon off;"]


def server_command(model: str, port: int, store: str, *options: str) -> list[str]:
    """Returns the command of a server that writes every turn to the store. `options` win."""
    serve = [sys.executable, "-m", "onefold", "serve", model, "--host", HOST, "--port", str(port)]
    return [*serve, "--remote", store, "--remote-write", "all", *options]


def redis_command(port: int) -> list[str]:
    """Returns the command of a Redis that keeps nothing on disk, and evicts what was used least recently."""
    memory = ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    return ["redis-server", "--bind", HOST, "--port", str(port), "--save", "", "--appendonly", "no", *memory]


class Running:
    """One process, whose output goes to a file. It is in a group of its own: Ctrl-C reaches only this program."""

    def __init__(self, name: str, command: list[str], folder: Path, url: str = "", port: int = 0) -> None:
        """It has started when `url` is answered with 200, or else when the port is open."""
        self.name, self.url, self._command, self._port = name, url, command, port
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Waits until the process listens. Raises NotStarted."""
        while not self._listens():
            if self.process.poll() is not None:
                said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TOLD_LINES:]
                raise NotStarted("\n".join([f"{self.name} did not start:", *said]))
            time.sleep(LOOK_SECONDS)

    def _listens(self) -> bool:
        try:
            if self.url:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            with socket.create_connection((HOST, self._port), 1):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """Ends the process, by its id; kills it if it takes too long."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(process: Running) -> Iterator[Running]:
    """Starts the process, does not wait for it, and stops it at the end."""
    process.start()
    try:
        yield process
    finally:
        process.stop()


def free_ports(n: int) -> list[int]:
    """Returns ports that were free a moment ago, each another one."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(n)]
        for one in found:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in found]


def run(model: str, port: int, options: Sequence[str]) -> None:
    """Runs everything until KeyboardInterrupt. Raises NotStarted."""
    redis_port, *ports = free_ports(3)
    store = f"redis://{HOST}:{redis_port}/0"
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="onefold-fleet-")))
        (folder / "nginx.conf").write_text(configuration(port, ports), encoding="utf-8")
        redis = Running("redis", redis_command(redis_port), folder, port=redis_port)
        nginx = Running("nginx", nginx_command(folder), folder, port=port)
        servers = [
            Running(f"server-{i}", server_command(model, at, store, *options), folder, f"http://{HOST}:{at}")
            for i, at in enumerate(ports, 1)
        ]
        for process in (redis, nginx, *servers):
            held.enter_context(running(process))
        for process in (redis, nginx, *servers):
            process.wait()
        print(f"fleet     http://{HOST}:{port}/v1\nstore     {store}\nlogs      {folder}")
        for server in servers:
            print(f"{server.name}  {server.url}  process {server.process.pid}", flush=True)
        while True:
            time.sleep(LOOK_SECONDS)
            for server in servers:
                if server.process.poll() is not None:
                    print(f"{server.name} has ended and is started again", flush=True)
                    server.start()
                    server.wait()
                    print(f"{server.name}  {server.url}  process {server.process.pid}", flush=True)


def main() -> int:
    """Returns the exit code: 0 after Ctrl-C or SIGTERM, 1 if a process did not start, 2 if a program is missing."""
    parser = argparse.ArgumentParser(description="Two servers, Redis and nginx on this machine.", allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="demo", help="a folder, a Hugging Face id, or demo")
    parser.add_argument("--port", type=int, default=PORTS[0], help=f"of nginx; by default {PORTS[0]}")
    given, options = parser.parse_known_args()
    missing = [program for program in ("nginx", "redis-server") if shutil.which(program) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}. On Debian: apt install nginx redis-server", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(given.model, given.port, ["--budget", "1GB", *options])
    except NotStarted as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
