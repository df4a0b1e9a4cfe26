"""Peak memory of servers from PyPI on their own prompt cache and on ours.

    python benchmarks/third_party.py SERVER --python VENV/bin/python [--prefix 3000] [--json FILE]

SERVER is one of those in `SERVERS`; VENV is where it is installed, with this project (on PYTHONPATH, or installed). The
model is written by `tests/local_model.py`: no hub, loopback only. Two servers are run one after the other, as they come
and with the launcher that docs/writing-a-server.md gives, and asked the same:

- continue: a conversation of `--prefix` tokens gets a second turn;
- four: four requests whose system prompt of `--prefix` tokens is cached, at once if the server runs them so.

Peaks are MLX's, without the weights, in MB and as multiples of the KV of the tokens. Answers must be the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from local_model import Shape, write_model  # noqa: E402

SHAPE = Shape(layers=16, heads=2, kv_heads=2, head_dim=128, intermediate=64)
"""KV outweighs all else."""
WAIT = 180.0

PROBE = """
import gc, http.server, threading
def probe(port):
    import mlx.core as mx
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            gc.collect(); mx.clear_cache()
            found = b"%d %d" % (mx.get_active_memory(), mx.get_peak_memory())
            if self.path == "/reset":
                mx.reset_peak_memory()
            self.send_response(200); self.end_headers(); self.wfile.write(found)
        def log_message(self, *_): pass
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
"""


@dataclass(frozen=True)
class Server:
    arguments: str
    """Of its command line."""
    own: str
    """Lines that run it as it comes."""
    ours: str
    """Lines before these that put our prompt cache in its place."""
    worker: str
    """The name under which Python runs the launcher in the process that has the model."""
    at_once: int = 4
    """Requests that it runs at once."""


OPENAI = """
import app.utils.prompt_cache
from onefold.mlx_lm import LRUPromptCache

class PromptCache(LRUPromptCache):
    def __init__(self, max_size=10, max_bytes=1 << 63, cache_dir=None):
        super().__init__(max_size, max_bytes)

    def fetch_nearest_cache(self, tokens, *, allowed_sources=None):
        return super().fetch_nearest_cache("model", tokens)

    def insert_cache(self, tokens, prompt_cache, *, cache_type="assistant", source=""):
        super().insert_cache("model", tokens, prompt_cache, cache_type=cache_type)

    def clear(self):
        self.trim_to(n_sequences=0)

    def log_cache_stats(self):
        pass

app.utils.prompt_cache.LRUPromptCache = PromptCache
"""

SERVERS = {
    "mlx-openai-server": Server(
        arguments="launch --model-path {model} --model-type lm --host 127.0.0.1 --port {port} --no-log-file "
        "--log-level WARNING --prefill-step-size 256",
        own="from app.main import main\nmain()",
        ours=OPENAI,
        worker="__mp_main__",
    ),
    "vllm-mlx": Server(
        arguments="serve {model} --host 127.0.0.1 --port {port} --prefix-trie-cache",
        own="from vllm_mlx.cli import main\nmain()",
        ours="import onefold.mlx_lm\nonefold.mlx_lm.install()",
        worker="__main__",
        at_once=1,  # its engine with this cache answers a second request with 500 while it is busy
    ),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(server: Server, python: str, model: Path, *, ours: bool) -> Iterator[tuple[int, int]]:
    """Starts the server; yields its port, and the port that tells its memory."""
    port, memory = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder, "launcher.py")
        begin = f"{PROBE}\nif __name__ == {server.worker!r}:\n    probe({memory})\n"
        end = "".join(f"    {line}\n" for line in server.own.splitlines())
        launcher.write_text(f"{begin}\n{server.ours if ours else ''}\nif __name__ == '__main__':\n{end}")
        command = [python, str(launcher), *server.arguments.format(model=model, port=port).split()]
        log = Path(folder, "log")
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, env={**os.environ, **OFFLINE})
        try:
            until = time.monotonic() + WAIT
            while not (answers(port) and answers(memory)):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server does not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield port, memory
        except Exception:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def bytes_now(port: int, path: str = "/") -> tuple[int, int]:
    """Active and peak memory; "/reset" begins a new peak."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT) as found:
        active, peak = found.read().split()
    return int(active), int(peak)


def ask(port: int, model: Path, messages: list[dict[str, str]], n: int = 8) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    body = {"model": str(model), "messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    said = []
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read().decode()[:500]}")
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if line.startswith(b"data: ") and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(data)
            said += [(c.get("delta") or {}).get("content") or "" for c in event["choices"]]
    connection.close()
    return "".join(said)


def text(n: int, seed: int) -> str:
    words = ["the", "of", "a", "to", "in", "is", "it", "you", "that", "was", "for", "on", "are"]
    return " ".join(words[(i * i + 7 * seed + i // 5) % len(words)] for i in range(n))[:n]


def measure(server: Server, python: str, model: Path, prefix: int, *, ours: bool) -> dict[str, Any]:
    with running(server, python, model, ours=ours) as (port, memory):
        ask(port, model, [{"role": "user", "content": "warm"}])
        weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
        messages = [{"role": "user", "content": text(prefix, 1)}]
        first = ask(port, model, messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
        bytes_now(memory, "/reset")
        second = ask(port, model, messages)
        time.sleep(1)  # answers come before what was computed is put into the prompt cache
        _, continued = bytes_now(memory)

        system = {"role": "system", "content": text(prefix, 2)}
        ask(port, model, [system, {"role": "user", "content": "first"}])
        time.sleep(1)
        before, _ = bytes_now(memory, "/reset")
        with ThreadPoolExecutor(server.at_once) as pool:
            turns = [[system, {"role": "user", "content": f"question {i}"}] for i in range(4)]
            four = list(pool.map(lambda turn: ask(port, model, turn, 24), turns))
        time.sleep(1)
        held, peak = bytes_now(memory)
    return {
        "answers": [first, second, *four],
        "continue": continued - weights,
        "four": peak - before,
        "held": held - weights,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the server")
    parser.add_argument("--prefix", type=int, default=3000, metavar="TOKENS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended, too
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHAPE)
        given = (SERVERS[options.server], options.python, model, options.prefix)
        found = {who: measure(*given, ours=who == "ours") for who in ("own", "ours")}
    kv = options.prefix * SHAPE.token_bytes
    same = found["own"]["answers"] == found["ours"]["answers"]
    print(f"{options.server}, {options.prefix} tokens, {kv / 1e6:.0f} MB of KV; answers equal: {same}")
    names = {"continue": "peak while continuing", "four": "four rows, beyond before", "held": "held at the end"}
    for what, name in names.items():
        own, ours = found["own"][what], found["ours"][what]
        print(f"  {name:26} own {own / 1e6:7.1f} MB ({own / kv:.2f} x)   ours {ours / 1e6:7.1f} MB ({ours / kv:.2f} x)")
    if options.json:
        options.json.write_text(json.dumps({"server": options.server, "prefix": options.prefix, **found}, indent=1))
    if not same:
        print(json.dumps({who: f["answers"] for who, f in found.items()}, indent=1))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
