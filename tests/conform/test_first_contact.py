"""Peers that cannot be judged: the suite names the cause before the first check."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from scripts import conform
from smc_conform.first_contact import NoContact, first_contact
from smc_conform.roles import Role
from smc_conform.session import Options, Session, open_session
from smc_conform.verdicts import Inconclusive
from tests.timing import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(role=Role.SERVER, host="127.0.0.1", port=1, patience=0.5)
Service = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def session_with(service: Service, directory: Path) -> AsyncIterator[Session]:
    """A session whose server is this service over plain TCP."""
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, service, [listener])
            port = listener.socket.getsockname()[1]
            async with open_session(replace(OPTIONS, port=port, directory=directory)) as session:
                yield session
            nursery.cancel_scope.cancel()


def target(directory: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return conform.target(*arguments, variables={"CONFORM_DIRECTORY": str(directory)})


async def echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def silence(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def garbage(stream: trio.SocketStream) -> None:
    await stream.send_all(b"\x00garbage and more of it")
    await trio.sleep_forever()


async def http(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await stream.aclose()


async def closes(stream: trio.SocketStream) -> None:
    await stream.send_eof()
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("service", "text"),
    [
        (echo, "sends SMC Proposal back"),
        (silence, "sends nothing after SMC Proposal within 0.5 s"),
        (garbage, "garbage"),
        (http, "HTTP/1.1 400"),
        (closes, "ends the TCP connection by FIN"),
    ],
)
async def test_a_server_without_smc_is_named(service: Service, text: str, tmp_path: Path) -> None:
    async with session_with(service, tmp_path) as session:
        with pytest.raises(NoContact, match=r"smc_run.*--tcp-option") as caught:
            await first_contact(session)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sends", "text"),
    [
        (b"", "sends nothing after the TCP connection"),
        (b"GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1"),
    ],
)
async def test_a_client_without_smc_is_named(sends: bytes, text: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, role=Role.CLIENT, port=0, directory=tmp_path)
    with trio.fail_after(PATIENCE):
        async with open_session(options) as session, trio.open_nursery() as nursery:

            async def connect() -> None:
                while True:
                    stream = await trio.open_tcp_stream("127.0.0.1", session.port)
                    async with stream:
                        if sends:
                            await stream.send_all(sends)
                        with contextlib.suppress(trio.BrokenResourceError):
                            await stream.receive_some()

            nursery.start_soon(connect)
            with pytest.raises(NoContact, match="smc_run") as caught:
                await first_contact(session)
            nursery.cancel_scope.cancel()
    assert text in str(caught.value)


async def test_no_client_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smc_conform.first_contact.FIRST_CLIENT", 0.1)
    options = replace(OPTIONS, role=Role.CLIENT, port=0, directory=tmp_path)
    async with open_session(options) as session:
        with pytest.raises(NoContact, match=f"no client has connected to port {session.port}"):
            await first_contact(session)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("shared", [True, False])
async def test_an_implementation_is_reached_in_the_same_directory_only(
    role: Role, shared: bool, tmp_path: Path
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for each in (own, other):
        each.mkdir(mode=0o700)
    options = replace(OPTIONS, role=role, directory=own, patience=PATIENCE / 4)

    async def contact(session: Session) -> None:
        if shared:
            await first_contact(session)
        else:
            with pytest.raises(NoContact, match=r"(no link comes up|declines).*--directory"):
                await first_contact(session)

    with trio.fail_after(2 * PATIENCE):
        if role is Role.SERVER:
            with target(own if shared else other, "server") as process:
                assert process.stdout is not None
                port = int((await trio.to_thread.run_sync(process.stdout.readline)).split()[0])
                async with open_session(replace(options, port=port)) as session:
                    await contact(session)
        else:
            async with open_session(replace(options, port=0)) as session:
                port = session.port
                with target(own if shared else other, "client", "127.0.0.1", str(port)):
                    await contact(session)


async def test_a_closed_port_is_named_by_the_right_word(tmp_path: Path) -> None:
    async with open_session(replace(OPTIONS, directory=tmp_path)) as session:
        with pytest.raises(Inconclusive, match=r"could not open a TCP connection: .*refused"):
            await session.tcp()
        assert "refused" in await session.gone()


@pytest.mark.parametrize("option", ["daytime", "discard"])
@pytest.mark.parametrize(
    ("service", "text"),
    [
        ("echo", {"daytime": "sends nothing; a daytime service", "discard": "sends data"}),
        ("daytime", {"daytime": "", "discard": "sends data"}),
        ("discard", {"daytime": "sends nothing; a daytime service", "discard": ""}),
        ("closed", {"daytime": "refused", "discard": "refused"}),
        ("plain TCP", {"daytime": "over SMC-R", "discard": "over SMC-R"}),
    ],
)
async def test_a_service_of_another_kind_is_named(
    option: str, service: str, text: dict[str, str], tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o700)
    with trio.fail_after(PATIENCE), target(tmp_path, "server") as process:
        assert process.stdout is not None
        line = await trio.to_thread.run_sync(process.stdout.readline)
        ports = dict(zip(("echo", "daytime", "discard"), map(int, line.split()), strict=True))
        with socket.socket() as closed, socket.socket() as plain:
            for each in (closed, plain):
                each.bind(("127.0.0.1", 0))
            plain.listen()
            ports |= {"closed": closed.getsockname()[1], "plain TCP": plain.getsockname()[1]}
            options = replace(
                OPTIONS, port=ports["echo"], directory=tmp_path,
                daytime=ports[service] if option == "daytime" else 0,
                discard=ports[service] if option == "discard" else 0,
            )  # fmt: skip
            problem = ""
            async with open_session(options) as session:
                try:
                    await first_contact(session)
                except NoContact as error:
                    problem = str(error)
    assert text[option] in problem
    assert problem.startswith(f"--{option} {ports[service]}: " if text[option] else "")
    assert bool(problem) == bool(text[option])
