"""`trio-smc check` explains each reason for a fallback, and its remedy.

Each case sets up a server and a checking stack so that the connection falls back for its reason.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import HOST, QUICK, accept, decline, plain_server, read_clc
from tests.timing import PATIENCE
from tests.tools.tools_processes import quick_command
from trio_smc import Config, Fallback, FallbackReason, Origin, SoftRnic, Stack
from trio_smc._base.reasons import Diagnosis
from trio_smc.rendezvous.discovery import (
    announcing,
    directory,
    lookup,
    messages,
    publication,
    tcp_option,
)
from trio_smc.rendezvous.discovery.names import Names
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.stack.policy import SHORT_AFTER
from trio_smc.tools.commands import check
from trio_smc.wire import clc

Reason = FallbackReason
LOCAL, PEER = Origin.LOCAL, Origin.PEER
Patch = pytest.MonkeyPatch
Server = Callable[[Patch], AbstractAsyncContextManager[int]]
"""Applies patches, starts a server, and yields the port to check."""

# --- servers -------------------------------------------------------------------------------------


@asynccontextmanager
async def smc_server(
    patch: Patch,
    config: Config = QUICK,
    prepare: Callable[[Patch, Stack], None] = lambda patch, stack: None,
) -> AsyncIterator[int]:
    """A server over SMC-R, on a stack of its own."""
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(stack.serve, read_until_eof, 0, host=HOST))
        prepare(patch, stack)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def read_until_eof(stream: trio.abc.ReceiveStream) -> None:
    """Handle a connection: wait until the peer ends it."""
    async for _ in stream:
        pass


@asynccontextmanager
async def tcp_server(patch: Patch) -> AsyncIterator[int]:
    """A server without SMC-R."""
    async with plain_server() as listener:
        yield listener.socket.getsockname()[1]


@asynccontextmanager
async def scripted_server(patch: Patch, answer: clc.Message) -> AsyncIterator[int]:
    """A server that answers the CLC Proposal with this message."""
    async with plain_server() as listener, trio.open_nursery() as nursery:

        async def handle(stream: trio.SocketStream) -> None:
            await read_clc(stream)
            await stream.send_all(answer.encode())
            await read_until_eof(stream)

        nursery.start_soon(trio.serve_listeners, handle, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def learned_server(patch: Patch) -> AsyncIterator[int]:
    """A server with `learn_short` that has served only short connections."""
    async with smc_server(patch, Config(receive_buffer=16384, learn_short=True)) as port:
        async with trio_smc.open_stack(QUICK) as stack:
            for _ in range(SHORT_AFTER):
                stream = await open_smc_stream(stack, port)
                await stream.aclose()
        yield port


async def open_smc_stream(stack: Stack, port: int) -> trio_smc.SmcStream:
    """Open a connection, which must use SMC-R."""
    stream = await stack.open_stream(HOST, port)
    assert stream.fallback is None
    return stream


# --- faults of the checking side -----------------------------------------------------------------


def with_config(server: Server, **settings: Any) -> Server:
    """Give the checking stack these settings."""

    def arrange(patch: Patch) -> AbstractAsyncContextManager[int]:
        patch.setattr(check, "Config", partial(Config, **settings))
        return server(patch)

    return arrange


def with_prepared_stack(server: Server, prepare: Callable[[Patch, Stack], None]) -> Server:
    """Change the checking stack before it connects."""

    def arrange(patch: Patch) -> AbstractAsyncContextManager[int]:
        open_stream = Stack.open_stream

        async def prepared(stack: Stack, *arguments: Any) -> trio_smc.SmcStream:
            prepare(patch, stack)
            return await open_stream(stack, *arguments)

        patch.setattr(Stack, "open_stream", prepared)
        return server(patch)

    return arrange


def with_patch(server: Server, change: Callable[[Patch], None]) -> Server:
    """Patch something in this process before the server starts."""

    def arrange(patch: Patch) -> AbstractAsyncContextManager[int]:
        change(patch)
        return server(patch)

    return arrange


def fail_rnic(patch: Patch, stack: Stack) -> None:
    """Take the RNIC's port down."""
    [rnic] = stack.rnics
    assert isinstance(rnic, SoftRnic)
    rnic.fail()


def exhaust_memory(patch: Patch, stack: Stack) -> None:
    """Let the allocation of RMBs fail."""

    def full(size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    [rnic] = stack.rnics
    patch.setattr(rnic, "alloc_memory", full)


def refuse_tcp_option(number: int) -> Callable[[Patch], None]:
    """Let the kernel refuse the BPF program that sends the TCP option."""

    def change(patch: Patch) -> None:
        def refuse(cgroup: object) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(tcp_option, "load_option", refuse)

    return change


def make_directory_public(patch: Patch) -> None:
    """Let other users read the private directory."""
    directory = Config().private_directory()
    directory.mkdir(parents=True)
    directory.chmod(0o755)


def fill_directory(patch: Patch) -> None:
    """Let the file system of the private directory have no inodes left."""

    def full(self: Names, name: str, *, required: bool = False) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(Names, "listen", full)


@asynccontextmanager
async def unaccepting_server(patch: Patch) -> AsyncIterator[int]:
    """A listener that is published in the private directory and never accepts."""
    with socket.create_server((HOST, 0)) as listening:
        async with trio.open_nursery() as nursery:
            discovery = Discovery(Config().private_directory())
            published = discovery.publish(listening.getsockname(), nursery)
            yield listening.getsockname()[1]
            published.close()
        discovery.close()


def break_handshakes(patch: Patch) -> None:
    """Let the server close each connection at its Proposal, because of a defect."""

    def broken(*arguments: object) -> None:
        raise LookupError("a defect")

    patch.setattr("trio_smc.rendezvous.server.ServerNegotiation.receive_untrusted", broken)


def make_another_user(patch: Patch) -> None:
    """Let the listening process belong to another user."""
    patch.setattr(lookup, "admits_user", lambda user, group: False)


def separate_networks(patch: Patch) -> None:
    """Let the listener be in another network namespace, which does not have the address."""

    def refuse_address(connection: bytes, user: int) -> None:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    for place in ("connecting.dial", "stack.rnics"):
        patch.setattr(f"trio_smc.{place}.is_same_host", lambda local, remote: False)
    for module in (announcing, directory):
        patch.setattr(module, "is_named", lambda path: True)
    patch.setattr(directory, "other_namespaces", lambda root, but: [f"{directory.TOP}/{but}"])
    patch.setattr(publication, "Probe", refuse_address)


def answer_as_newer_release(patch: Patch) -> None:
    """Let the other side answer with the protocol version of a newer release."""
    accepted = messages.accepted

    def newer_accepted(token: bytes, rnic_version: int, *, required: bool) -> bytes:
        message = bytearray(accepted(token, rnic_version, required=required))
        message[4:6] = b"\xfe\xff"
        return bytes(message)

    patch.setattr(messages, "accepted", newer_accepted)


def disable_gil(patch: Patch) -> None:
    """Run without the GIL, which the software RNIC needs."""
    patch.setattr("sys._is_gil_enabled", lambda: False, raising=False)


# --- the cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A reason, and the server that causes it.

    Attributes:
      origin: the side that decides, as the checking side reports it.
      arguments: options of the command.
    """

    reason: FallbackReason
    origin: Origin
    arrange: Server
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason.value}-{self.origin.value}"


def declined_by_server(reason: FallbackReason, word: int) -> Case:
    """The server declines with this diagnosis word."""
    server = partial(scripted_server, answer=decline(word))
    return Case(reason, PEER, server, ("--discovery", "assume"))


def declined_locally(reason: FallbackReason, answer: clc.Message) -> Case:
    """The checking side declines because of this answer."""
    return Case(reason, LOCAL, partial(scripted_server, answer=answer), ("--discovery", "assume"))


def configured(reason: FallbackReason, **settings: Any) -> Case:
    """A server with these settings stays on TCP."""
    return Case(reason, PEER, partial(smc_server, config=Config(receive_buffer=16384, **settings)))


OPTION = ("--discovery", "tcp-option")
MISSING_CGROUP = with_config(tcp_server, tcp_option="/nowhere")
CASES = [
    Case(Reason.PEER_NOT_CAPABLE, LOCAL, tcp_server),
    declined_by_server(Reason.PEER_NOT_CAPABLE, Diagnosis.PEER_NOT_CAPABLE),
    Case(Reason.NO_RNIC, LOCAL, with_config(smc_server, rnics=())),
    configured(Reason.NO_RNIC, rnics=()),
    Case(Reason.RNIC_DOWN, LOCAL, with_prepared_stack(smc_server, fail_rnic)),
    Case(Reason.RNIC_DOWN, PEER, partial(smc_server, prepare=fail_rnic)),
    Case(
        Reason.PREFIX_MISMATCH, PEER,
        partial(scripted_server, answer=decline(Diagnosis.PREFIX_MISMATCH)),
        ("--discovery", "assume"),
    ),
    Case(Reason.OUT_OF_RESOURCES, LOCAL, with_prepared_stack(smc_server, exhaust_memory)),
    Case(Reason.OUT_OF_RESOURCES, PEER, partial(smc_server, prepare=exhaust_memory)),
    declined_locally(Reason.OUT_OF_SYNC, accept(first_contact=False)),
    declined_by_server(Reason.OUT_OF_SYNC, Diagnosis.OUT_OF_SYNC),
    declined_locally(Reason.RESERVED_VALUE, accept(qp_mtu=9)),
    declined_by_server(Reason.VERSION_MISMATCH, Diagnosis.VERSION_MISMATCH),
    declined_by_server(Reason.MODE_MISMATCH, Diagnosis.MODE_MISMATCH),
    declined_by_server(Reason.NO_COMMON_UEID, Diagnosis.NO_UEID),
    declined_by_server(Reason.NO_ROUTE, Diagnosis.NO_ROUTE),
    declined_by_server(Reason.ROUTE_MISMATCH, Diagnosis.ROUTE_MISMATCH),
    declined_by_server(Reason.RELEASE_MISMATCH, Diagnosis.RELEASE_MISMATCH),
    declined_by_server(Reason.CONNECTION_LIMIT, Diagnosis.MAX_CONNECTIONS),
    declined_by_server(Reason.LINK_LIMIT, Diagnosis.MAX_LINKS),
    declined_by_server(Reason.EYE_CATCHER, Diagnosis.EYE_CATCHER),
    declined_locally(Reason.LINK_FAILED, accept()),
    declined_by_server(Reason.LINK_FAILED, Diagnosis.CONFIRM_LINK_TIMEOUT),
    configured(Reason.HANDSHAKE_LIMIT, handshake_limit=0),
    Case(
        Reason.TCP_OPTION_UNAVAILABLE, LOCAL,
        with_patch(MISSING_CGROUP, refuse_tcp_option(errno.ENOSYS)), OPTION,
    ),
    Case(
        Reason.TCP_OPTION_NOT_PERMITTED, LOCAL,
        with_patch(MISSING_CGROUP, refuse_tcp_option(errno.EPERM)), OPTION,
    ),
    Case(Reason.DIRECTORY_UNUSABLE, LOCAL, with_patch(tcp_server, make_directory_public)),
    Case(Reason.DIRECTORY_FULL, LOCAL, with_patch(smc_server, fill_directory)),
    Case(Reason.OTHER_USER, LOCAL, with_patch(smc_server, make_another_user)),
    Case(Reason.PATH_NOT_PROVEN, LOCAL, with_patch(smc_server, separate_networks)),
    Case(Reason.NOT_ACCEPTED, LOCAL, unaccepting_server),
    Case(Reason.ENDED_IN_HANDSHAKE, LOCAL, with_patch(smc_server, break_handshakes)),
    Case(Reason.LOCAL_VERSION_MISMATCH, LOCAL, with_patch(smc_server, answer_as_newer_release)),
    Case(Reason.UNSUPPORTED_PLATFORM, LOCAL, with_patch(tcp_server, disable_gil)),
    Case(Reason.NOT_PERMITTED, LOCAL, with_config(smc_server, deny=("127.0.0.0/8",))),
    configured(Reason.NOT_PERMITTED, allow=("192.0.2.0/24",)),
    Case(Reason.SHORT_CONNECTIONS, PEER, learned_server),
    declined_by_server(Reason.DECLINED, 0x12345678),
]  # fmt: skip


# Reasons whose remedy concerns the peer if the peer decided.
PEER_REMEDIES = {
    Reason.NO_RNIC, Reason.RNIC_DOWN, Reason.OUT_OF_RESOURCES, Reason.HANDSHAKE_LIMIT,
    Reason.NOT_PERMITTED,
}  # fmt: skip


def test_every_reason_has_a_case() -> None:
    # Only sockets of programs have these reasons (tests/sockets/test_enable_sockets.py): the
    # command opens its own connection.
    sockets_only = {Reason.ALREADY_CONNECTED, Reason.ALREADY_SHUT_DOWN, Reason.MULTIPATH}
    assert {case.reason for case in CASES} == set(FallbackReason) - sockets_only


@pytest.mark.learns_short
@pytest.mark.v2("v2.6/4")
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_check_explains_each_reason(case: Case, monkeypatch: Patch) -> None:
    local = Fallback.local(case.reason)
    with trio.fail_after(PATIENCE):
        async with case.arrange(monkeypatch) as port:
            done = await quick_command("check", HOST, port, *case.arguments)
    assert (done.code, done.err) == (1, ""), done
    output = done.out.partition("\nThe server, process ")[0]
    decider = "this side" if case.origin is LOCAL else "the server"
    assert f"SMC-R is not used: {local.message}" in output
    assert ("(reported by the peer" in output) is (case.origin is PEER)
    assert f"  reason     {case.reason}, decided by {decider}\n" in output
    if case.reason is Reason.PEER_NOT_CAPABLE and case.origin is LOCAL:
        # The command inspects the listening process in this case: test_check_listener.py.
        assert f"  listener   process {os.getpid()} " in output
        return
    elsewhere = case.origin is PEER and case.reason in PEER_REMEDIES
    assert f"  remedy     {'at the peer: ' * elsewhere}{local.remedy}\n" in output
