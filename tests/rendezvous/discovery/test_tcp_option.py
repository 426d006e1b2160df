"""The TCP option on a real kernel: the bytes on the wire, and the users that may send them.

Loading a BPF program needs privileges.  Without privileges, these tests are skipped;
`test_api_discovery` tests the behaviour of the API in that case.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.api.api_peers import (
    HOST,
    address_of,
    check_talk,
    close_all,
    connect,
    plain_client,
    plain_server,
    read_exactly,
)
from tests.ports import reserved_port
from tests.rendezvous.discovery.option_wire import SYN, SYN_ACK, Wire, cgroup, cgroup2, requires_bpf
from tests.timing import PATIENCE
from tests.wire import tshark_reader
from trio_smc import Config, Fallback, FallbackReason, Mode, Origin, SmcListener, SoftRnic, Stack
from trio_smc.rendezvous.discovery import bpf as _bpf
from trio_smc.rendezvous.discovery import tcp_option
from trio_smc.rendezvous.discovery.option_program import OPTION, Assembler
from trio_smc.rendezvous.discovery.tcp_option import MAP_NAME, TcpOption, load_option, own_cgroup

pytestmark = requires_bpf

NOWHERE = Path("/nowhere")
STRICT = Config(receive_buffer=16384, discovery="tcp-option", tcp_option=NOWHERE, close_timeout=20)
UNPRIVILEGED = 65534
"""A user and a group without privileges."""
Reason = FallbackReason


@pytest.fixture
def option() -> Iterator[TcpOption]:
    """An option for which this process loads a program of its own."""
    found = TcpOption(NOWHERE)
    yield found
    found.close()


@pytest.fixture
def pins() -> Iterator[Path]:
    """A directory for pins that all users can reach, removed at the end."""
    # Not in tmp_path: each start of pytest denies other users access to the directory above it.
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory, "pins")
        yield path
        trio_smc.tear_down_tcp_option(pins=path)
        assert not path.exists()


@contextlib.contextmanager
def tcp(
    offering: TcpOption | None, accepting: TcpOption | None, host: str = HOST,
    *, wire: Wire | None = None,
) -> Iterator[tuple[socket.socket, socket.socket, int]]:  # fmt: skip
    """Both ends of a connection, and the server's port.

    offering, accepting: the option that the client's and the server's socket use; None: no option.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as client:
        if accepting:
            assert accepting.offer(listener) is None
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        if wire:
            wire.watch(port)
        if offering:
            assert offering.offer(client) is None
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            yield client, server, port


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.rfc("3.1/1", "3.1/2", "3.5.1.1/1", "3.5.1.1/2", "3.5.1.1/3", "3.5.1.1/4", "A.1/1")
@pytest.mark.parametrize("host", [HOST, "::1"])
@pytest.mark.parametrize("offers", [True, False])
@pytest.mark.parametrize("accepts", [True, False])
def test_the_option_is_on_syn_and_syn_ack(
    option: TcpOption, host: str, *, offers: bool, accepts: bool
) -> None:
    """The SYN has the option if the client offers, the SYN-ACK if both do, no other segment."""
    with (
        Wire.open() as wire,
        tcp(option if offers else None, option if accepts else None, host, wire=wire) as (
            one,
            other,
            port,
        ),
    ):
        one.sendall(b"x" * 5000)
        assert len(other.recv(5000, socket.MSG_WAITALL)) == 5000
        both = None if offers and accepts else Reason.PEER_NOT_CAPABLE
        assert (option.answer(one), option.answer(other)) == (both, both)
        segments = wire.segments(port)
    with_option = [each.flags & SYN_ACK for each in segments if 254 in each.kinds]
    assert with_option == [SYN] * offers + [SYN_ACK] * (offers and accepts)
    assert b"\xfe\x06" + "SMCR".encode("cp037") == OPTION  # the letters are those of IBM-1047
    assert {each.kinds[254] for each in segments if 254 in each.kinds} <= {OPTION}
    assert len(segments) > 4, "data was seen as well"


@pytest.mark.rfc("3.1/1", "A.1/1")
@pytest.mark.tshark
def test_tshark_reads_the_option(option: TcpOption, tmp_path: Path) -> None:
    tshark_reader.require_tshark()
    with Wire.open() as wire:
        with tcp(option, option, wire=wire) as (_, _, port):
            pass
        with tcp(None, None, wire=wire) as (_, _, plain):
            pass
        assert len(wire.segments(port)) > 3
        wire.write_pcap(tmp_path / "wire.pcap")
    read = subprocess.run(
        [
            "tshark", "-r", tmp_path / "wire.pcap",
            # Other programs of this host are on the wire, too.
            "-Y", f"tcp.flags.syn == 1 && tcp.port in {{{port}, {plain}}}", "-T", "fields",
            "-e", "tcp.dstport", "-e", "tcp.flags.ack", "-e", "tcp.options.experimental.exid",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
    ).stdout  # fmt: skip
    rows = [line.split("\t") for line in read.splitlines()]
    # tshark 4.2 and newer print False for 0.
    acknowledged = [(tshark_reader.value(ack), exid) for to, ack, exid in rows if to == str(port)]
    assert acknowledged == [(0, "0xe2d4")]
    assert [row[2] for row in rows] == ["0xe2d4", "0xe2d4", "", ""]
    assert [row[0] for row in rows].count(str(plain)) == 1


def test_a_socket_that_connects_again(option: TcpOption) -> None:
    """The result of an earlier connection does not count."""
    with socket.socket() as client, socket.socket() as listener, socket.socket() as plain:
        option.offer(listener)
        for each in (listener, plain):
            each.bind((HOST, 0))
            each.listen()
        option.offer(client)
        client.connect(listener.getsockname())
        assert option.answer(client) is None
        # connect(2) with AF_UNSPEC disconnects the socket; `socket.connect` cannot do that.
        client.shutdown(socket.SHUT_RDWR)
        _disconnect(client)
        client.connect(plain.getsockname())
        assert option.answer(client) is Reason.PEER_NOT_CAPABLE


def _disconnect(sock: socket.socket) -> None:
    import ctypes

    address = ctypes.create_string_buffer(16)  # family 0: AF_UNSPEC
    assert ctypes.CDLL(None).connect(sock.fileno(), address, 16) == 0


def test_a_closed_socket_has_no_option(option: TcpOption) -> None:
    with socket.socket() as sock:
        pass
    assert option.offer(sock) is Reason.TCP_OPTION_UNAVAILABLE
    assert option.answer(sock) is Reason.TCP_OPTION_UNAVAILABLE


# --- other programs -------------------------------------------------------------------------------


def test_another_program_that_wants_header_callbacks(option: TcpOption) -> None:
    """A SYN-ACK has no socket.  Only the guard in the program prevents an option from a plain
    listener."""
    foreign = Assembler()
    foreign.move(6, 1)
    foreign.load(2, 6, 0)
    foreign.jump_if(2, "!=", 11, "leave")  # at listen()
    foreign.move(1, 6)
    foreign.set(2, 1 << 6)  # all listeners' headers
    foreign.call(59)
    foreign.move(1, 6)
    foreign.store_immediate(10, -8, 1)
    foreign.set(2, 6)
    foreign.set(3, 27)  # keep the SYNs of their clients
    foreign.frame_address(4, -8)
    foreign.set(5, 4)
    foreign.call(49)
    foreign.label("leave")
    foreign.set(0, 1)
    foreign.exit()
    program = _bpf.load_sock_ops(foreign.assemble())
    link = _bpf.attach_to_cgroup(program, own_cgroup())
    try:
        with Wire.open() as wire, tcp(option, None, wire=wire) as (one, other, port):
            assert option.answer(one) is Reason.PEER_NOT_CAPABLE
            assert option.answer(other) is Reason.PEER_NOT_CAPABLE
            assert [e.flags for e in wire.segments(port) if 254 in e.kinds] == [SYN]
        with tcp(option, option) as (one, other, _):
            assert (option.answer(one), option.answer(other)) == (None, None)
    finally:
        os.close(link)
        os.close(program)


def test_two_processes_load_a_program_each(option: TcpOption) -> None:
    """Two options with a program each, like those of two processes in one cgroup."""
    another = TcpOption(NOWHERE)
    try:
        with Wire.open() as wire, tcp(option, another, wire=wire) as (one, other, port):
            assert (option.answer(one), another.answer(other)) == (None, None)
            assert [e.kinds[254] for e in wire.segments(port) if e.flags & SYN] == [OPTION] * 2
    finally:
        another.close()


def test_the_verifier_explains_itself() -> None:
    broken = Assembler()
    broken.load(0, 3, 0)  # r3 was never set
    broken.exit()
    with pytest.raises(OSError, match="Permission denied") as caught:
        _bpf.load_sock_ops(broken.assemble())
    assert "R3 !read_ok" in "".join(caught.value.__notes__)


# --- streams --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening(config: Config = STRICT) -> AsyncIterator[tuple[Stack, SmcListener]]:
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        async with listener:
            yield stack, listener


@pytest.mark.rfc("3.1/2")
async def test_streams_agree_by_the_option_alone() -> None:
    """The streams use SMC-R.  A plain socket of the same process sends no option."""
    with Wire.open() as wire:
        async with listening() as (stack, listener), plain_server() as server:
            port, plain = address_of(listener)[1], address_of(server)[1]
            wire.watch(port, plain)
            mine, other = await connect(stack, listener)
            assert (mine.mode, other.mode) == (Mode.SMC_R, Mode.SMC_R)
            await check_talk(mine, other)
            await close_all(mine, other)
            async with await trio.open_tcp_stream(*address_of(server)):
                pass
            segments, others = wire.segments(port), wire.segments(plain)
    assert [e.flags for e in segments if 254 in e.kinds] == [SYN, SYN_ACK]
    assert others
    assert not any(254 in each.kinds for each in others)


async def test_an_unmodified_program_sends_the_option() -> None:
    """`enable`: Trio's own listeners and streams."""
    trio_smc.enable(STRICT)
    try:
        with Wire.open() as wire:
            async with trio_smc.open_stack(STRICT) as stack:
                [listener] = await trio.open_tcp_listeners(0, host=HOST)
                port = listener.socket.getsockname()[1]
                wire.watch(port)
                async with (
                    listener,
                    await trio.open_tcp_stream(HOST, port) as mine,
                    await listener.accept() as other,
                ):
                    await check_talk(mine, other)
                    assert stack.statistics().connections == 2
            segments = wire.segments(port)
    finally:
        trio_smc.disable()
    assert [e.flags for e in segments if 254 in e.kinds] == [SYN, SYN_ACK]


@pytest.mark.rfc("3.1/3", "3.5.1.1/4")
async def test_peers_without_smc_r_see_no_clc_message() -> None:
    """This side sends no byte of CLC to the server, and expects none of the client."""
    with Wire.open() as wire:
        async with listening() as (stack, listener), plain_server() as server:
            wire.watch(address_of(server)[1])
            stream = await stack.open_stream(*address_of(server))
            assert stream.fallback == Fallback.local(Reason.PEER_NOT_CAPABLE)
            accepted = await server.accept()
            await check_talk(stream, accepted)
            await close_all(stream, accepted)
            client = await plain_client(listener)
            stream = await listener.accept()
            assert stream.fallback == Fallback.local(Reason.PEER_NOT_CAPABLE)
            await check_talk(client, stream)
            await close_all(client, stream)
            segments = wire.segments(address_of(server)[1])
    assert [e.data for e in segments if e.data] == [b"some bytes"] * 2


async def test_a_client_that_did_not_see_the_answer(option: TcpOption) -> None:
    """The option of the SYN-ACK was lost, so the client sends application data instead of CLC."""
    async with listening() as (_, listener):
        with trio.socket.socket() as client:
            option.offer(client)
            await client.connect(address_of(listener))
            await client.send(b"hello")
            with trio.fail_after(PATIENCE):
                stream = await listener.accept()
            assert stream.fallback == Fallback.local(Reason.PEER_NOT_CAPABLE)
            assert await read_exactly(stream, 5) == b"hello"
            await stream.aclose()


async def test_a_client_that_lost_its_rnic_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the option the server expects a message: a Decline replaces the Proposal (C.1)."""
    async with listening() as (_, listener), trio_smc.open_stack(STRICT) as stack:
        real = stack.runtime.rnic_set.serving

        def serving(local: str, remote: str, *, near: bool) -> object:
            rnic = real(local, remote, near=near)
            if isinstance(rnic, SoftRnic):
                rnic.fail()
            return rnic

        monkeypatch.setattr(stack.runtime.rnic_set, "serving", serving)
        mine, other = await connect(stack, listener)
        assert mine.fallback == Fallback.local(Reason.RNIC_DOWN)
        assert other.fallback is not None
        assert (other.fallback.origin, other.fallback.peer_code) == (
            Origin.PEER,
            mine.fallback.code,
        )
        await check_talk(mine, other)
        await close_all(mine, other)


async def test_a_server_without_an_rnic_declines() -> None:
    async with listening() as (server, listener), trio_smc.open_stack(STRICT) as stack:
        [rnic] = server.rnics
        assert isinstance(rnic, SoftRnic)
        rnic.fail()
        mine, other = await connect(stack, listener)
        assert other.fallback == Fallback.local(Reason.RNIC_DOWN)
        assert mine.fallback is not None
        assert mine.fallback.origin is Origin.PEER
        await check_talk(mine, other)
        await close_all(mine, other)


async def test_software_rnics_alone_need_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" and only peers on this host, the stack loads no program."""

    def refuse(cgroup: Path) -> None:
        raise AssertionError("a program was loaded")

    monkeypatch.setattr(tcp_option, "load_option", refuse)
    with Wire.open() as wire:
        async with listening(Config(tcp_option=NOWHERE)) as (stack, listener):
            wire.watch(address_of(listener)[1])
            mine, other = await connect(stack, listener)
            assert mine.mode is Mode.SMC_R
            await close_all(mine, other)
            segments = wire.segments(address_of(listener)[1])
    assert segments
    assert not any(254 in each.kinds for each in segments)


# --- set up by root, used by others ---------------------------------------------------------------

AS_UNPRIVILEGED = """
    import os, sys
    sys.path[:0] = {path!r}
    import logging, socket
    from pathlib import Path
    from trio_smc.rendezvous.discovery.tcp_option import TcpOption
    os.setgroups({groups!r})
    os.setgid({number})
    os.setuid({number})
    option = TcpOption(Path({pins!r}))
    with socket.socket() as listener, socket.socket() as client:
        offered = option.offer(listener), option.offer(client)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", {port}))
        listener.listen()
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        print(*offered, option.answer(client), option.answer(server))
        server.close()
    option.close()
"""


def as_unprivileged(
    pins: Path, *, groups: list[int], port: int = 0, cgroup: Path | None = None
) -> list[str]:
    """Run a process without privileges; returns the results of two offers and two answers."""
    program = textwrap.dedent(AS_UNPRIVILEGED).format(
        path=[path for path in sys.path if path], groups=groups, number=UNPRIVILEGED,
        pins=str(pins), port=port,
    )  # fmt: skip
    if cgroup is not None:
        enter = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write('0')\n"
        program = enter + program
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=2 * PATIENCE,
    )
    return done.stdout.split()


def test_a_group_may_use_the_option(pins: Path) -> None:
    assert trio_smc.set_up_tcp_option(group="daemon", pins=pins)
    with Wire.open() as wire, reserved_port() as port:
        wire.watch(port)
        results = as_unprivileged(pins, groups=[1], port=port)
        kinds = [e.kinds.get(254) for e in wire.segments(port) if e.flags & SYN]
    assert results == ["None"] * 4
    assert kinds == [OPTION] * 2
    # A user outside of the group may not use the option, and gets the reason.
    with Wire.open() as wire, reserved_port() as port:
        wire.watch(port)
        results = as_unprivileged(pins, groups=[], port=port)
        segments = wire.segments(port)
    assert segments
    assert not any(254 in each.kinds for each in segments)
    assert results == [str(Reason.TCP_OPTION_NOT_PERMITTED)] * 4


def test_only_a_process_in_the_cgroup_sends_the_option(pins: Path) -> None:
    """A process outside of the cgroup can mark its sockets, and gets the reason why this has no
    effect."""
    with cgroup("inside") as inside, cgroup("outside") as outside:
        assert trio_smc.set_up_tcp_option(group="daemon", cgroup=inside, pins=pins)
        assert as_unprivileged(pins, groups=[1], cgroup=inside) == ["None"] * 4
        answers = as_unprivileged(pins, groups=[1], cgroup=outside)
        assert answers == ["None"] * 2 + [str(Reason.TCP_OPTION_UNAVAILABLE)] * 2


def test_setup_may_run_again(pins: Path) -> None:
    assert trio_smc.set_up_tcp_option(pins=pins)
    inode = os.stat(pins / MAP_NAME).st_ino
    assert (os.stat(pins / MAP_NAME).st_mode & 0o777, os.stat(pins / MAP_NAME).st_gid) == (0o600, 0)
    assert not trio_smc.set_up_tcp_option(group="daemon", pins=pins)
    found = os.stat(pins / MAP_NAME)
    assert (found.st_ino, found.st_mode & 0o777, found.st_gid) == (inode, 0o660, 1)
    # Another cgroup needs the program to be loaded again.
    with cgroup("other") as other:
        assert trio_smc.set_up_tcp_option(cgroup=other, pins=pins)
        assert not trio_smc.set_up_tcp_option(cgroup=other, pins=pins)
        assert os.stat(pins / MAP_NAME).st_ino != inode
        assert trio_smc.tear_down_tcp_option(pins=pins)
    assert not trio_smc.tear_down_tcp_option(pins=pins)
    assert not pins.exists()


def test_setup_uses_a_mounted_file_system(pins: Path) -> None:
    assert trio_smc.set_up_tcp_option(pins=pins)
    below = pins / "below"
    assert trio_smc.set_up_tcp_option(pins=below)
    assert trio_smc.tear_down_tcp_option(pins=below)
    assert not below.exists()
    assert not trio_smc.set_up_tcp_option(pins=pins), "the other program is still loaded"


@pytest.mark.parametrize("broken", ["link", "frozen"])
def test_setup_replaces_broken_pins(pins: Path, broken: str) -> None:
    trio_smc.set_up_tcp_option(pins=pins)
    if broken == "link":
        (pins / tcp_option.LINK_NAME).unlink()
    else:
        freeze(pins / MAP_NAME)
    option = TcpOption(pins)
    try:
        # Until the setup runs again, root may load a program of its own.
        with tcp(option, option) as (one, _, _):
            assert option.answer(one) in (None, Reason.TCP_OPTION_UNAVAILABLE)
        assert trio_smc.set_up_tcp_option(pins=pins)
        # A running process finds the new program by itself.
        with tcp(option, option) as (one, other, _):
            assert (option.answer(one), option.answer(other)) == (None, None)
    finally:
        option.close()


def freeze(path: Path) -> None:
    """Freeze a map, as a hostile member of the group could."""
    fd = _bpf.open_pinned(path)
    try:
        _bpf._bpf(22, fd.to_bytes(4, sys.byteorder))
    finally:
        os.close(fd)


def test_a_frozen_map_has_a_reason(pins: Path) -> None:
    trio_smc.set_up_tcp_option(group="daemon", pins=pins)
    freeze(pins / MAP_NAME)
    assert as_unprivileged(pins, groups=[1]) == [str(Reason.TCP_OPTION_UNAVAILABLE)] * 4


def test_a_process_continues_after_teardown(pins: Path) -> None:
    """If the process may load a program, it continues with its own one, otherwise with TCP."""
    trio_smc.set_up_tcp_option(pins=pins)
    option = TcpOption(pins)
    option._may_load = False
    try:
        with tcp(option, option) as (one, _, _):
            assert option.answer(one) is None
        trio_smc.tear_down_tcp_option(pins=pins)
        with socket.socket() as sock:
            assert option.offer(sock) is Reason.TCP_OPTION_UNAVAILABLE
    finally:
        option.close()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"group": "no such group"}, "there is no group 'no such group'"),
        ({"cgroup": "/nowhere"}, "/nowhere is no cgroup"),
        ({"cgroup": "/tmp"}, "/tmp is no cgroup"),
    ],
)
def test_setup_refuses_bad_arguments(pins: Path, wrong: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        trio_smc.set_up_tcp_option(pins=pins, **wrong)
    assert not pins.exists()


def test_setup_needs_the_right_to_load_a_program(
    pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: bytes) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_bpf, "load_sock_ops", refuse)
    with pytest.raises(OSError, match=r"loading the BPF program failed: .* takes root") as caught:
        trio_smc.set_up_tcp_option(pins=pins)
    assert caught.value.errno == errno.EPERM
    with pytest.raises(OSError, match="not permitted"):
        load_option(cgroup2())


def test_the_command(pins: Path) -> None:
    def command(*words: str, uid: int | None = None) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "trio_smc.tools", *words, "--pin", str(pins)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            user=uid, timeout=2 * PATIENCE,
        )  # fmt: skip
        return done.returncode, done.stdout.strip()

    assert command("setup", "--group", "daemon") == (
        0, f"TCP option set up in {pins}, for root and the group daemon",
    )  # fmt: skip
    assert command("setup", "--group", "none such") == (
        2, "trio-smc setup: there is no group 'none such'",
    )  # fmt: skip
    assert command("teardown") == (0, f"TCP option removed from {pins}")


@pytest.mark.parametrize("lacks", [1, 3, 4])
def test_a_lack_of_memory_is_tried_again(lacks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Linux 7.0 the kernel does not wait for the memory of a socket's entry in the map."""
    update, left = _bpf.update, [lacks]

    def short_of_memory(table: int, key: int, value: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        update(table, key, value)

    monkeypatch.setattr(_bpf, "update", short_of_memory)
    option = TcpOption(NOWHERE)
    try:
        with socket.socket() as sock:
            trouble = option.offer(sock)
    finally:
        option.close()
    assert trouble is (FallbackReason.TCP_OPTION_UNAVAILABLE if lacks == 4 else None)
