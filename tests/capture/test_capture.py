"""Captures that a stack writes: their contents, reading them, and disks that are slow or full."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import trio

import trio_smc
from scripts import ladders
from tests.peers import echo
from tests.streams.stream_pairs import HOST, smc_config
from tests.timing import PATIENCE
from tests.wire import tshark_reader as tshark
from trio_smc import Stack
from trio_smc.capture import frames, pcapng, sinks
from trio_smc.capture.dissection import Seen, Unreadable, Write, dissect
from trio_smc.wire import clc, llc
from trio_smc.wire.cdc import CdcMessage

GOLDEN = Path(__file__).parents[1] / "golden" / "kernel-two-links.pcap"
GOLDEN_V2 = GOLDEN.with_name("kernel-v2-two-links.pcapng")
SECRET = b"only the two peers read this"


def packets_of(path: Path) -> list[pcapng.Packet]:
    with path.open("rb") as file:
        return list(pcapng.read(file))


def seen_in(path: Path) -> list[Seen]:
    return list(dissect(packets_of(path)))


class Record(trio_smc.BaseObserver):
    """An observer that keeps all messages, and the address, RKey and length of each write."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.writes: list[tuple[int, int, int]] = []

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self.messages.append(message)

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        self.messages.append(message)

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        self.messages.append(message)

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        self.writes.append((address, rkey, len(data)))


@asynccontextmanager
async def echo_port() -> AsyncIterator[int]:
    """The port of an echo server in a separate stack."""
    async with trio_smc.open_stack(smc_config()) as server, trio.open_nursery() as nursery:
        [listener] = await server.open_listeners(0, host=HOST)
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def talk(stack: Stack, port: int, data: bytes) -> None:
    """Send data to the echo server and receive it back."""
    with trio.fail_after(PATIENCE):
        async with await stack.open_stream(HOST, port) as stream, trio.open_nursery() as nursery:
            assert stream.mode is trio_smc.Mode.SMC_R
            nursery.start_soon(stream.send_all, data)
            left = len(data)
            while left:
                left -= len(await stream.receive_some(left))


async def captured(path: Path, *, payload: int = 0, data: bytes = SECRET, times: int = 2) -> Record:
    """Write a capture of a client's stack; returns the record of a second observer."""
    record = Record()
    async with echo_port() as port:
        config = smc_config(capture=path, capture_payload=payload)
        async with trio_smc.open_stack(config) as stack:
            stack.add_observer(record)
            for _ in range(times):
                await talk(stack, port, data)
    return record


# --- frames ------------------------------------------------------------------------------------


def test_invariant_crc_is_a_kernels() -> None:
    checked = 0
    for packet in packets_of(GOLDEN):
        if packet.data[23] == 17:  # UDP
            assert frames.invariant_crc(packet.data[14:-4]) == packet.data[-4:]
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("size", range(8))
@pytest.mark.parametrize("version", [4, 6])
def test_a_write_with_data_of_any_size_is_read_again(size: int, version: int) -> None:
    source, target = (bytes([n]) * (4 if version == 4 else 16) for n in (1, 2))
    frame = frames.roce_frame(
        source_mac=bytes(6), target_mac=bytes(6), source=source, target=target,
        opcode=frames.RDMA_WRITE_ONLY, target_qp=0xABCDEF, psn=7,
        payload=frames.reth(1 << 63, 0xFFFFFFFF, 77) + bytes(size),
    )  # fmt: skip
    [seen] = dissect([pcapng.Packet(5, pcapng.ETHERNET, frame, len(frame))])
    assert seen.event == Write(1 << 63, 0xFFFFFFFF, 77)
    assert (seen.time, seen.target.number, seen.source.address) == (5, 0xABCDEF, source)


# --- LLC messages of version 2 -----------------------------------------------------------------


@pytest.mark.v2("v2.13/2")
def test_two_kernels_of_version_2() -> None:
    """Two links, one lost; an asymmetric link; REQUEST ADD LINK; some truncated data."""
    packets = packets_of(GOLDEN_V2)
    counts: Counter[str] = Counter()
    for packet in packets:
        [seen] = dissect([packet])
        event = seen.event
        counts[type(event).__name__] += 1
        if isinstance(event, clc.Proposal | clc.Accept | clc.Confirm):
            assert event.v2 is not None
            raw = event.encode()
        elif isinstance(event, CdcMessage):
            raw = event.encode()
        elif isinstance(event, Write):
            raw = frames.reth(*event)
        else:
            assert not isinstance(event, Unreadable | clc.Decline)
            raw = llc.V2.encode(event)
        assert packet.data.count(raw) == 1
    # The counts of an independent decoder.
    assert counts == {
        "Proposal": 3, "Accept": 3, "Confirm": 3, "ConfirmLink": 8, "AddLink": 6, "TestLink": 38,
        "ConfirmRkey": 8, "DeleteLink": 4, "RequestAddLink": 1, "DeleteRkey": 12, "CdcMessage": 16,
        "Write": 16,
    }  # fmt: skip


def _sent(opcode: int, payload: bytes, qp: int = 5) -> pcapng.Packet:
    frame = frames.roce_frame(
        source_mac=bytes(6), target_mac=bytes(6), source=bytes(4), target=bytes([1]) * 4,
        opcode=opcode, target_qp=qp, psn=7, payload=payload,
    )  # fmt: skip
    return pcapng.Packet(5, pcapng.ETHERNET, frame, len(frame))


ADD_LINK = llc.AddLink(
    mac=bytes(6),
    gid=bytes(16),
    extension=llc.AddLinkExtension(
        direct=True,
        target_gid=bytes(16),
        pairs=tuple(
            llc.RTokenPair(reference_rkey=n, new_rkey=n, new_address=n) for n in range(255)
        ),
    ),
)
FIRST, MIDDLE, LAST, ONLY, LAST_INVALIDATING = 0, 1, 2, 4, 0x16


def _pieces(data: bytes, mtu: int) -> list[bytes]:
    return [data[at : at + mtu] for at in range(0, len(data), mtu)]


@pytest.mark.v2("v2.13/2")
@pytest.mark.parametrize("mtu", [256, 1024, 4096])
@pytest.mark.parametrize("last", [LAST, LAST_INVALIDATING])
def test_an_add_link_of_several_packets(mtu: int, last: int) -> None:
    first, *middles, end = _pieces(llc.V2.encode(ADD_LINK), mtu)
    other = llc.RequestAddLink(gids=(bytes(16),) * 2)
    packets = [
        _sent(FIRST, first),
        _sent(ONLY, llc.V2.encode(other), qp=6),
        *(_sent(MIDDLE, piece) for piece in middles),
        _sent(last, end),
        _sent(last, end),
    ]
    assert [seen.event for seen in dissect(packets)] == [other, ADD_LINK]


def test_incomplete_messages_of_several_packets_are_ignored() -> None:
    pieces = _pieces(llc.V2.encode(ADD_LINK), 1024)
    whole = [(FIRST, pieces[0]), *((MIDDLE, piece) for piece in pieces[1:-1]), (LAST, pieces[-1])]
    for missing in range(len(whole)):
        rest = whole[:missing] + whole[missing + 1 :]
        assert list(dissect(_sent(*each) for each in rest)) == []
    # Another protocol's message that never ends.
    endless = [(FIRST, pieces[0])] + [(MIDDLE, bytes(4096))] * 50 + [(LAST, b"")]
    assert list(dissect(_sent(*each) for each in endless)) == []


@pytest.mark.parametrize("size", [0, 1, 3, 43, 45, 60, 100])
def test_packets_of_other_protocols_are_ignored(size: int) -> None:
    for start in (b"", b"\x21", b"\x22\x2c\0", b"\x01\x2c", b"\xfe\x2c"):
        assert list(dissect([_sent(ONLY, start[:size].ljust(size, b"\0"))])) == []


def test_a_message_of_version_2_that_breaks_the_rules() -> None:
    data = bytearray(llc.V2.encode(llc.RequestAddLink(gids=(bytes(16),))))
    data[24] = 9
    [seen] = dissect([_sent(ONLY, bytes(data))])
    assert seen.event == Unreadable("9 gids in a message that holds 1")


# --- files -------------------------------------------------------------------------------------


def test_pcapng_round_trip() -> None:
    packets = [
        pcapng.Packet(1_700_000_000_123_456_789 + n, pcapng.ETHERNET, bytes([n]) * n, n + 3)
        for n in range(9)
    ]
    parts = [pcapng.packet(each.time, each.data, each.length) for each in packets]
    file = pcapng.header("a test", "none") + b"".join(parts) + pcapng.statistics(5, 77)
    assert list(pcapng.read(io.BytesIO(file))) == packets


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("magic", "unit"), [(0xA1B2C3D4, 1000), (0xA1B23C4D, 1)])
def test_pcap_of_either_byte_order_and_clock(order: str, magic: int, unit: int) -> None:
    head = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 65535, 1)
    body = struct.pack(order + "IIII", 12, 34, 3, 9) + b"abc"
    [packet] = pcapng.read(io.BytesIO(head + body))
    assert packet == pcapng.Packet(12_000_000_000 + 34 * unit, 1, b"abc", 9)


def test_a_truncated_file_raises_after_its_whole_packets() -> None:
    begin, part = pcapng.header("a", "b"), pcapng.packet(5, b"some bytes", 10)
    file = begin + part + part
    [section] = struct.unpack_from("<I", begin, 4)
    whole = {section: 0, len(begin): 0, len(begin) + len(part): 1, len(file): 2}
    for size in range(len(file) + 1):
        count, damage = _read_until_damage(file[:size])
        assert (damage == "") is (size in whole), size
        assert count == max([0, *(n for end, n in whole.items() if end <= size)])
        assert "\n" not in damage


def _read_until_damage(data: bytes) -> tuple[int, str]:
    """The number of packets before the first error, and the text of the error."""
    count = 0
    try:
        for _ in pcapng.read(io.BytesIO(data)):
            count += 1
    except pcapng.DamagedCapture as damage:
        return count, str(damage)
    return count, ""


def test_whole_blocks() -> None:
    parts = [pcapng.header("a", "b"), pcapng.packet(5, b"abc", 3), pcapng.statistics(1, 2)]
    file = b"".join(parts)
    [section] = struct.unpack_from("<I", file, 4)
    ends = [0, section, len(parts[0]), len(parts[0] + parts[1]), len(file)]
    for size in range(len(file) + 1):
        assert pcapng.whole_blocks_untrusted(file[:size]) == max(e for e in ends if e <= size)
    for length in (0, 8, 13, 1 << 31):
        with pytest.raises(trio_smc.ProtocolError, match=str(length)):
            pcapng.whole_blocks_untrusted(file + struct.pack("<II", 6, length))


def test_damaged_files_raise_damaged_capture_only(rng: random.Random) -> None:
    whole = GOLDEN.read_bytes()
    pieces = [pcapng.packet(p.time, p.data, p.length) for p in packets_of(GOLDEN)]
    modern = pcapng.header("a", "b") + b"".join(pieces)
    outcomes: Counter[str] = Counter()
    for _ in range(300):
        damaged = bytearray(rng.choice((whole, modern)))
        for _ in range(rng.choice((1, 10, 1000))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            outcomes["read"] += bool(list(dissect(pcapng.read(io.BytesIO(damaged)))))
        except pcapng.DamagedCapture:
            outcomes["damaged"] += 1
    assert outcomes["read"] > 10
    assert outcomes["damaged"] > 10


# --- captures of a stack -----------------------------------------------------------------------


async def test_the_file_has_all_that_an_observer_receives(tmp_path: Path) -> None:
    path = tmp_path / "capture.pcapng"
    record = await captured(path, data=bytes(40_000))
    events = [each.event for each in seen_in(path)]
    messages = [each.encode() for each in events if isinstance(each, _MESSAGES)]
    assert messages == record.messages
    assert [tuple(each) for each in events if isinstance(each, Write)] == record.writes
    assert sum(length for _, _, length in record.writes) == 80_000
    assert path.stat().st_mode & 0o777 == 0o600


_MESSAGES = (
    clc.Proposal, clc.Accept, clc.Confirm, clc.Decline, llc.ConfirmLink, llc.AddLink,
    llc.AddLinkContinuation, llc.DeleteLink, llc.ConfirmRkey, llc.ConfirmRkeyContinuation,
    llc.DeleteRkey, llc.TestLink, CdcMessage,
)  # fmt: skip


async def test_a_stack_connected_to_itself_is_captured_once(tmp_path: Path) -> None:
    path = tmp_path / "capture.pcapng"
    async with (
        trio_smc.open_stack(smc_config(capture=path)) as stack,
        trio.open_nursery() as nursery,
    ):
        [listener] = await stack.open_listeners(0, host=HOST)
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        await talk(stack, listener.socket.getsockname()[1], SECRET)
        nursery.cancel_scope.cancel()
    count = Counter(type(each.event).__name__ for each in seen_in(path))
    assert (count["Proposal"], count["Accept"], count["Confirm"]) == (1, 1, 1)
    assert (count["ConfirmLink"], count["Write"]) == (2, 2)


@pytest.mark.parametrize("payload", [0, 4, 4096])
async def test_data_is_kept_only_up_to_the_configured_length(tmp_path: Path, payload: int) -> None:
    path = tmp_path / "capture.pcapng"
    await captured(path, payload=payload, times=1)
    begin = SECRET[:4]
    kept = [packet.data for packet in packets_of(path) if begin in packet.data]
    # The frame's checksum follows the data; its four bytes may equal dropped ones by chance.
    assert {data[data.index(begin) : -4] for data in kept} == ({SECRET[:payload]} - {b""})
    assert path.read_bytes().count(begin) == len(kept) == (payload > 0)


@pytest.mark.tshark
async def test_wireshark_finds_nothing_wrong(tmp_path: Path) -> None:
    tshark.require_tshark()
    path = tmp_path / "capture.pcapng"
    record = await captured(path, payload=16, data=bytes(40_000))
    assert len(await read_by_wireshark(path)) == len(record.messages)


@pytest.mark.tshark
async def test_wireshark_finds_nothing_wrong_with_a_failover(tmp_path: Path) -> None:
    tshark.require_tshark()
    path = tmp_path / "capture.pcapng"
    path.write_bytes((await ladders.converse(tmp_path / "private"))[0])
    read = await read_by_wireshark(path)
    assert len(read) == sum(isinstance(each.event, _MESSAGES) for each in seen_in(path))
    assert Counter(read).keys() >= {"1", "2", "3", "4", "254"}


async def read_by_wireshark(path: Path) -> list[str]:
    """The type of each message.  Fails if tshark reports any error except a known one."""
    checks = [f"{name}.check_checksum:TRUE" for name in ("ip", "tcp", "udp")]
    options = [part for check in checks for part in ("-o", check)]
    run = await trio.run_process(
        ["tshark", "--disable-protocol", "rpcordma", *options, "-r", path, "-T", "pdml"],
        capture_stdout=True,
        capture_stderr=True,
        stdin=b"",
    )
    found: list[str] = []
    for packet in ET.fromstring(run.stdout).iter("packet"):
        protocols = {proto.get("name"): proto for proto in packet.findall("proto")}
        wrong = [
            field.get("show", "")
            for field in packet.iter("field")
            if field.get("name") == "_ws.expert.message"
        ]
        assert "tcp" in protocols or "infiniband" in protocols
        if "smc" not in protocols:
            assert not wrong
            continue
        kind, value = next(
            (name, field.get("show", ""))
            for field in protocols["smc"].iter("field")
            if (name := field.get("name", "")) in ("smc.clc_msg", "smc.llc_msg")
        )
        found.append(str(int(value, 0)))
        # Known error of tshark: it reads each Proposal as if it had a growth area.
        proposal = (kind, found[-1]) == ("smc.clc_msg", "1")
        assert wrong == (["Malformed Packet (Exception occurred)"] if proposal else [])
    return found


# --- bad disks ---------------------------------------------------------------------------------


async def test_a_full_disk_costs_the_capture_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "capture.pcapng"
    room = 4001  # within a block
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") != str(path):
            return write(fd, data)
        left = room - path.stat().st_size
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:left])

    monkeypatch.setattr(os, "write", full)
    async with echo_port() as port, trio_smc.open_stack(smc_config(capture=path)) as stack:
        with trio.fail_after(PATIENCE):
            while "trio_smc capture" in {each.name for each in threading.enumerate()}:
                await talk(stack, port, SECRET)
        await talk(stack, port, SECRET)
    logged = [each for each in caplog.records if each.name == "trio_smc.capture"]
    assert [each.levelno for each in logged] == [logging.ERROR]
    assert str(path) in logged[0].getMessage()
    assert packets_of(path)
    assert room - 300 < path.stat().st_size < room


async def test_a_disk_that_stops_costs_memory_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    path = tmp_path / "capture.pcapng"
    original = sinks.FileCapture.write_blocks

    def slow(self: sinks.FileCapture, blocks: list[bytes]) -> None:
        gate.wait(20)
        original(self, blocks)

    monkeypatch.setattr(sinks.FileCapture, "write_blocks", slow)
    monkeypatch.setattr(sinks, "MAX_QUEUED", 3000)
    async with echo_port() as port, trio_smc.open_stack(smc_config()) as stack:
        capture = sinks.FileCapture(stack, path)
        try:
            for _ in range(5):
                await talk(stack, port, SECRET)
        finally:
            gate.set()
            capture.end()
            capture.join(20)
    assert capture.dropped > 0
    assert path.stat().st_size < 10_000
    [at] = [n for n in range(0, path.stat().st_size, 4)
            if path.read_bytes()[n : n + 8] == struct.pack("<II", 5, 40)]  # fmt: skip
    assert struct.unpack_from("<Q", path.read_bytes(), at + 24) == (capture.dropped,)
    assert packets_of(path)


async def test_a_disk_that_hangs_delays_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(sinks.FileCapture, "write_blocks", lambda self, blocks: gate.wait(20))
    path = tmp_path / "capture.pcapng"
    try:
        with trio.fail_after(PATIENCE):
            async with echo_port() as port:
                config = smc_config(capture=path, shutdown_timeout=0.1)
                async with trio_smc.open_stack(config) as stack:
                    await talk(stack, port, SECRET)
        assert "its disk does not respond" in caplog.text
    finally:
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "trio_smc capture":
                await trio.to_thread.run_sync(thread.join, 20)


def test_captured_packets_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "capture.pcapng"
    program = f"""
        import trio, trio_smc
        from tests.capture.test_capture import echo_port, smc_config, talk
        async def main():
            async with echo_port() as port:
                async with trio_smc.open_stack(smc_config(capture={str(path)!r})) as stack:
                    while True:
                        await talk(stack, port, b"x" * 1000)
        trio.run(main)
    """
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(private)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment
    ) as process:
        try:
            _wait_for_size(path, 20_000)
        finally:
            process.send_signal(signal.SIGKILL)
    shutil.rmtree(private)  # sockets of the killed process
    count = Counter(type(each.event).__name__ for each in seen_in(path))
    assert count["Write"] > 10
    assert count["Accept"] > 1


def _wait_for_size(path: Path, size: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_size >= size:
            return
        time.sleep(0.02)
    raise AssertionError("nothing was captured")


async def test_paths_that_are_refused(tmp_path: Path) -> None:
    async def refusal(path: Path) -> int | None:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
            async with trio_smc.open_stack(smc_config(capture=path)):
                raise AssertionError("the stack has opened")
        return caught.value.errno

    os.mkfifo(tmp_path / "fifo")
    assert await refusal(tmp_path / "missing" / "file") == errno.ENOENT
    assert await refusal(tmp_path) == errno.EISDIR
    assert await refusal(tmp_path / "fifo") == errno.EINVAL
    os.unlink(tmp_path / "fifo")
    assert await refusal(Path("/dev/null")) == errno.EINVAL
    path = tmp_path / "capture.pcapng"
    async with trio_smc.open_stack(smc_config(capture=path)):
        assert await refusal(path) == errno.EBUSY
    async with trio_smc.open_stack(smc_config(capture=path)):
        pass
    assert packets_of(path) == []
