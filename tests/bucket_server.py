"""A server that speaks S3's protocol, for tests, on loopback, with its buckets in memory. Needs the package `moto`."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from redis_server import DEADLINE, free_port

BUCKET = "tests"


@contextmanager
def bucket_server() -> Iterator[dict[str, str]]:
    """Yields the environment with which a client finds the server. It has one bucket."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + DEADLINE
        while not _makes_bucket(port):
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError("moto's server did not start")
            time.sleep(0.05)
        yield {
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait(DEADLINE)


def _makes_bucket(port: int) -> bool:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
