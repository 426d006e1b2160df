"""Each example with programs of other projects runs in two processes, and reports SMC-R."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

EXPECTED = {
    "tls": ["HELLO OVER TLS - TLSv1.3", "client: smc-r", "server: smc-r"],
    "web": [
        "HTTP/1.1 hello this over HTTP/1.1 - client: smc-r",
        "HTTP/1.1 hello that over HTTP/1.1 - client: smc-r",
        "HTTP/2 hello this over HTTP/2 - client: smc-r",
        "HTTP/2 hello that over HTTP/2 - client: smc-r",
        "{'length': 1000000}",
        # HTTP/1.1 needs one connection for each concurrent request, HTTP/2 one for all.
        "server: connections over smc-r: 4",
    ],
    "websocket": [
        "hello over a websocket",
        "client: smc-r",
        "server: connections over smc-r: 1",
    ],
    "anyio_echo": ["HELLO OVER ANYIO", "AND GOODBYE", "client: smc-r", "server: smc-r"],
}


@pytest.mark.parametrize("name", EXPECTED)
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
    assert set(EXPECTED[name]) <= set(lines), done.stdout
    assert lines[-1] == "server: stopped"


def test_server_and_client_by_themselves() -> None:
    """As from two terminals; the first line of the server has the arguments of the client."""
    command = [sys.executable, "-W", "error", "-u", "-m", "examples.tls"]
    with subprocess.Popen([*command, "serve"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as end:
        assert end.stdout is not None
        *_, port, _, ca = end.stdout.readline().split()
        try:
            client = [*command, "connect", port, ca]
            done = subprocess.run(client, cwd=ROOT, capture_output=True, text=True, check=False)
        finally:
            end.send_signal(signal.SIGINT)
        rest = end.stdout.read()
    assert done.stdout.splitlines() == ["HELLO OVER TLS - TLSv1.3", "client: smc-r"], done
    assert rest.splitlines() == ["server: smc-r", "server: stopped"]
    assert end.returncode == 0


def test_a_wrong_command_line_shows_the_right_one() -> None:
    command = [sys.executable, "-m", "examples.tls", "sevre"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "serve [PORT]" in done.stderr
