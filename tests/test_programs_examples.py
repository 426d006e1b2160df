"""Each example with other people's programs runs, in two processes, and says that it was SMC-R."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SAID = {
    "tls": ["HELLO OVER TLS - TLSv1.3", "client: smc-r", "server: smc-r"],
    "web": [
        "HTTP/1.1 hello this over HTTP/1.1 - client: smc-r",
        "HTTP/1.1 hello that over HTTP/1.1 - client: smc-r",
        "HTTP/2 hello this over HTTP/2 - client: smc-r",
        "HTTP/2 hello that over HTTP/2 - client: smc-r",
        "{'length': 1000000}",
        # HTTP/1.1 needs one for each request under way, HTTP/2 one for all.
        "server: connections over smc-r: 4",
    ],
    "websocket": [
        "hello over a websocket",
        "client: smc-r",
        "server: connections over smc-r: 1",
    ],
    "anyio_echo": ["HELLO OVER ANYIO", "AND GOODBYE", "client: smc-r", "server: smc-r"],
}


@pytest.mark.parametrize("name", SAID)
def test_example(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert set(SAID[name]) <= set(lines), done.stdout
    assert lines[-1] == "server: stopped"
