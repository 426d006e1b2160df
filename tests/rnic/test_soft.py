"""The software RNIC alone: port faults, a second process, limits, and its cleanup."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers import open_pair
from tests.rnic.contract import (
    MEMORY,
    PACKETS,
    End,
    assert_no_completions,
    connect,
    got,
    make_end,
    until,
)
from tests.rnic.soft_peer import BURST, Peer, pause
from tests.timing import PATIENCE
from trio_smc.rnic.memory import NOT_SHOWN, PROGRESS_WORDS
from trio_smc.rnic.soft import device
from trio_smc.rnic.soft import messages as _fabric
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.regions import MAX_REGIONS
from trio_smc.rnic.verbs import AWAKE, QpState, QueuePair, RnicError, RnicEvent, WcStatus
from trio_smc.rnic.words import Words


@pytest.fixture
def directory(runtime_directory: Path) -> Path:
    return runtime_directory / "smc"


@pytest.fixture(params=PACKETS, ids=lambda packets: "packets" if packets else "rings")
def rnic(directory: Path, request: pytest.FixtureRequest) -> Iterator[SoftRnic]:
    rnic = SoftRnic("soft0")
    rnic.sends_packets = request.param
    rnic.open(directory)
    yield rnic
    rnic.close()


@pytest.fixture
def other(directory: Path) -> Iterator[SoftRnic]:
    rnic = SoftRnic("soft1")
    rnic.open(directory)
    yield rnic
    rnic.close()


@pytest.fixture
def pair(rnic: SoftRnic, other: SoftRnic) -> Iterator[tuple[End, End]]:
    with open_pair("link", rnic, other) as ends:
        yield ends


def state(qp: QueuePair) -> QpState:
    return qp.state


def remove_dead_sockets(directory: Path) -> None:
    """Open an RNIC, which removes the sockets of dead processes."""
    rnic = SoftRnic("cleaner")
    rnic.open(directory)
    rnic.close()


class TestRegions:
    def test_slots_of_the_key_page_are_used_again(self, rnic: SoftRnic) -> None:
        pd, memory = rnic.alloc_pd(), rnic.alloc_memory(MEMORY)
        regions = [pd.register(memory) for _ in range(MAX_REGIONS)]
        with pytest.raises(RnicError):
            pd.register(memory)
        assert sorted(region.slot for region in regions) == list(range(MAX_REGIONS))
        gone = [regions.pop(place) for place in (200, 100, 0)]
        for region in gone:
            region.close()
        regions += [pd.register(memory) for _ in gone]
        assert sorted(region.slot for region in regions) == list(range(MAX_REGIONS))
        for region in regions:
            region.close()
        pd.close()
        memory.close()

    def test_addresses_are_aligned_and_unique(self, rnic: SoftRnic) -> None:
        pd, memory = rnic.alloc_pd(), rnic.alloc_memory(MEMORY)
        regions = [pd.register(memory) for _ in range(10)]
        addresses = {region.address for region in regions}
        assert len(addresses) == len({region.rkey for region in regions}) == 10
        assert all(address and not address % 4096 for address in addresses)
        for region in regions:
            region.close()
        pd.close()
        memory.close()

    @pytest.mark.parametrize("offset", [4997, 5000, 8190, 8191, 8192, 12_284, 12_288])
    def test_no_write_reaches_memory_behind_a_region(
        self, pair: tuple[End, End], offset: int
    ) -> None:
        """A peer can write neither to the rest of the last page nor to the progress words."""
        a, b = pair
        memory = b.rnic.alloc_memory(5000)
        region = b.pd.register(memory)
        a.qp.post_write(
            1, memoryview(b"word"), None, address=region.address + offset, rkey=region.rkey
        )
        until(lambda: bool(a.sent), a, b)
        assert a.sent == [(1, WcStatus.REM_ACCESS_ERR)]
        assert os.pread(memory.fd, memory.mapped, 0) == bytes(memory.mapped)
        region.close()
        memory.close()

    def test_each_element_has_two_progress_words(self, pair: tuple[End, End]) -> None:
        a, b = pair
        memory = b.rnic.alloc_memory(3 * 5000)
        region = b.pd.register(memory)
        until(lambda: a.qp.can_reach(region.rkey), a, b)
        words: Words = memoryview(bytearray(8)).cast("Q")
        place = 0
        for index in range(3):
            found = a.qp.progress_words(region.address + index * 5000, region.rkey, 5000)
            assert found is not None
            memory.clear_progress(index)
            assert (memory.written(index), memory.taken(index)) == (0, NOT_SHOWN)
            words, place = found
            words[place] = 100 + index
            words[PROGRESS_WORDS + place] = 200 + index
        assert [memory.written(index) for index in range(3)] == [100, 101, 102]
        assert [memory.taken(index) for index in range(3)] == [200, 201, 202]
        assert memory.view == bytes(3 * 5000)
        for beyond in (-1, PROGRESS_WORDS):
            address = region.address + beyond * 5000
            assert a.qp.progress_words(address, region.rkey, 5000) is None
        assert a.qp.progress_words(region.address, region.rkey ^ 1, 5000) is None
        a.qp.to_err()
        with pytest.raises(ValueError, match="released"):
            words[place] = 1
        region.close()
        memory.close()

    def test_a_peer_sees_that_the_other_sleeps(self, pair: tuple[End, End]) -> None:
        a, b = pair
        until(lambda: a.qp.peer_asleep() is not AWAKE, a, b)
        word = a.qp.peer_asleep()
        assert b.rnic.arm()
        states = [word[0]]
        a.qp.post_send(1, b"wake up")
        assert [*states, word[0]] == [1, 0]
        b.rnic.disarm()
        a.qp.to_err()
        with pytest.raises(ValueError, match="released"):
            word[0]

    def test_a_closed_domain_refuses_regions_and_queue_pairs(self, rnic: SoftRnic) -> None:
        pd, memory = rnic.alloc_pd(), rnic.alloc_memory(MEMORY)
        pd.close()
        with pytest.raises(RnicError, match="closed"):
            pd.register(memory)
        with pytest.raises(RnicError):
            rnic.create_qp(pd)
        memory.close()


class TestPort:
    def test_a_port_goes_down_and_up_again(self, pair: tuple[End, End]) -> None:
        a, b = pair
        events: list[RnicEvent] = []
        a.rnic.on_event = events.append
        assert isinstance(a.rnic, SoftRnic)
        a.rnic.fail()
        a.rnic.fail()
        assert not a.rnic.port_active
        assert events == []
        sleeper = select.poll()
        sleeper.register(a.rnic.wait_fd(), select.POLLIN)
        assert sleeper.poll(PATIENCE * 1000)
        a.rnic.service()
        assert events == [RnicEvent.PORT_DOWN]
        assert_no_completions(a, b)
        assert state(a.qp) is state(b.qp) is QpState.RTS
        a.rnic.restore()
        a.rnic.service()
        assert events == [RnicEvent.PORT_DOWN, RnicEvent.PORT_UP]
        a.qp.post_send(1, b"there")
        b.qp.post_send(1, b"and back")
        until(lambda: a.received == [b"and back"] and b.received == [b"there"], a, b)

    def test_own_posts_are_flushed_and_the_peer_is_not_notified(
        self, pair: tuple[End, End]
    ) -> None:
        a, b = pair
        assert isinstance(a.rnic, SoftRnic)
        b.qp.post_send(1, b"before")
        a.rnic.fail()
        a.qp.post_send(1, b"lost", signaled=False)
        until(lambda: len(a.sent) == 1 and bool(a.flushed), a)
        assert a.sent == [(1, WcStatus.WR_FLUSH_ERR)]
        assert a.received == [b"before"]
        assert state(a.qp) is QpState.ERR
        until(lambda: b.sent == [(1, 0)], b)
        assert_no_completions(a, b)
        assert state(b.qp) is QpState.RTS
        a.qp.close()
        assert_no_completions(b)
        assert state(b.qp) is QpState.RTS
        b.qp.post_send(2, b"lost too")
        until(lambda: len(b.sent) == 2, b)
        assert b.sent[1] == (2, WcStatus.RETRY_EXC_ERR)
        assert state(b.qp) is QpState.ERR

    def test_writes_of_the_peer_fail_too(self, pair: tuple[End, End]) -> None:
        a, b = pair
        assert isinstance(a.rnic, SoftRnic)
        a.rnic.fail()
        b.write(1, a, 0, b"lost", signaled=False)
        until(lambda: b.sent == [(1, WcStatus.RETRY_EXC_ERR)], b)
        assert bytes(a.memory.view[:4]) == bytes(4)

    def test_a_stalled_send_fails_when_a_port_goes_down(
        self, rnic: SoftRnic, other: SoftRnic
    ) -> None:
        for failing in (rnic, other):
            a, b = make_end(rnic), make_end(other)
            connect(a, b, receives=0)
            a.qp.post_send(1, b"waits")
            assert_no_completions(a, b)
            failing.fail()
            until(lambda a=a: bool(a.sent), a, b)  # type: ignore[misc]
            own = failing is rnic
            assert a.sent == [(1, WcStatus.WR_FLUSH_ERR if own else WcStatus.RETRY_EXC_ERR)]
            failing.restore()
            a.close()
            b.close()

    def test_a_queue_pair_that_ended_meanwhile_is_reported_when_the_port_is_up(
        self, pair: tuple[End, End]
    ) -> None:
        a, b = pair
        assert isinstance(a.rnic, SoftRnic)
        a.rnic.fail()
        a.qp.close()
        a.rnic.restore()
        until(lambda: bool(b.flushed), b)
        assert state(b.qp) is QpState.ERR

    def test_connecting_over_a_port_that_is_down(self, rnic: SoftRnic, other: SoftRnic) -> None:
        a, b = make_end(rnic), make_end(other)
        rnic.fail()
        connect(a, b)
        a.qp.post_send(1, b"x")
        b.qp.post_send(1, b"x")
        until(lambda: bool(a.sent) and bool(b.sent), a, b)
        assert a.sent == [(1, WcStatus.WR_FLUSH_ERR)]
        assert b.sent[0][1] in (WcStatus.WR_FLUSH_ERR, WcStatus.RETRY_EXC_ERR)
        a.close()
        b.close()


@pytest.mark.processes
class TestSecondProcess:
    def test_no_wakeup_is_lost(self, rnic: SoftRnic, directory: Path, seed: int) -> None:
        """Thousands of round trips; each side sleeps in between, after pauses of random length."""
        rng = random.Random(seed)
        end = make_end(rnic)
        with Peer("echo", directory, seed & 0xFFFF) as peer:
            peer.connect(end)
            for index in range(3000):
                end.qp.post_receive(1)
                end.qp.post_send(1, b"%d" % index, signaled=False)
                pause(rng)
                until(got(end, index + 1), end)
            assert end.received == [b"%d" % index for index in range(3000)]
        end.close()

    def test_a_killed_process_loses_nothing_that_it_sent(
        self, rnic: SoftRnic, directory: Path
    ) -> None:
        end = make_end(rnic)
        with Peer("burst", directory) as peer:
            found = peer.connect(end)
            assert peer.line() == "sent"
            os.kill(peer.process.pid, signal.SIGKILL)
            peer.process.wait()
            until(lambda: bool(end.flushed), end)
        assert end.received == [b"message %4d" % index for index in range(BURST)]
        assert end.flushed == [WcStatus.WR_FLUSH_ERR]
        for index in range(BURST):
            assert end.memory.view[index * 16 :][:12] == b"written %4d" % index
        assert state(end.qp) is QpState.ERR
        end.qp.post_write(1, memoryview(b"x"), None, address=found["address"], rkey=found["rkey"])
        until(lambda: end.sent == [(1, WcStatus.WR_FLUSH_ERR)], end)
        end.close()
        remove_dead_sockets(directory)

    def test_a_forked_child_does_not_hide_its_parents_end(
        self, rnic: SoftRnic, directory: Path
    ) -> None:
        end = make_end(rnic)
        with Peer("fork", directory) as peer:
            peer.connect(end)
            assert peer.line() == "forked"
            assert_no_completions(end)
            os.kill(peer.process.pid, signal.SIGKILL)
            peer.process.wait()
            until(lambda: bool(end.flushed), end)
        end.close()
        remove_dead_sockets(directory)

    def test_posting_to_a_killed_process(self, rnic: SoftRnic, directory: Path) -> None:
        """A post to a killed process succeeds or is flushed, and never raises."""
        end = make_end(rnic)
        with Peer("silent", directory) as peer:
            peer.connect(end)
            os.kill(peer.process.pid, signal.SIGKILL)
            peer.process.wait()
            for index in range(1, 20):
                end.qp.post_send(index, b"x")
            until(lambda: len(end.sent) == 19 and bool(end.flushed), end)
        assert {status for _, status in end.sent} <= {0, WcStatus.WR_FLUSH_ERR}
        end.close()
        remove_dead_sockets(directory)

    def test_the_next_rnic_removes_the_socket_of_a_killed_process(
        self, rnic: SoftRnic, directory: Path
    ) -> None:
        end = make_end(rnic)
        with Peer("silent", directory) as peer:
            peer.connect(end)
            assert len(list(directory.iterdir())) == 2
            os.kill(peer.process.pid, signal.SIGKILL)
        assert len(list(directory.iterdir())) == 2
        third = SoftRnic("soft2")
        third.open(directory)
        assert {path.name for path in directory.iterdir()} == {
            f"rnic-{rnic.gid.hex()}",
            f"rnic-{third.gid.hex()}",
        }
        third.close()
        end.close()

    def test_announcements_that_a_silent_peer_does_not_read(
        self, rnic: SoftRnic, directory: Path
    ) -> None:
        """Announcements wait in this process, and later messages wait behind them."""
        end = make_end(rnic)
        with Peer("silent", directory) as peer:
            peer.connect(end)
            for _ in range(500):
                end.pd.register(end.memory).close()
            end.qp.post_send(1, b"after all of them")
            assert_no_completions(end)
            assert end.sent == []
        until(lambda: bool(end.flushed), end)
        assert end.sent == [(1, WcStatus.WR_FLUSH_ERR)]
        end.close()

    def test_announcements_reach_a_slow_peer_in_order(
        self, rnic: SoftRnic, other: SoftRnic
    ) -> None:
        a, b = make_end(rnic), make_end(other)
        connect(a, b)
        for _ in range(500):
            a.pd.register(a.memory).close()
        regions = [a.pd.register(a.memory) for _ in range(250)]
        a.qp.post_send(1, b"registered")
        assert a.rnic.poll() == []
        until(got(b, 1), a, b)
        last = regions[-1]
        b.qp.post_write(1, memoryview(b"yes"), None, address=last.address, rkey=last.rkey)
        b.qp.post_send(2, b"written")
        until(got(a, 1), a, b)
        assert bytes(a.memory.view[:3]) == b"yes"
        for region in regions:
            region.close()
        a.close()
        b.close()


class TestDevice:
    def test_an_rnic_has_its_own_gid_and_mac_address(self, rnic: SoftRnic, other: SoftRnic) -> None:
        assert rnic.gid[:6] == bytes.fromhex("fd534d435200")
        assert rnic.gid != other.gid
        assert rnic.mac[0] & 3 == 2
        assert rnic.port_active

    def test_opening_and_closing(self, directory: Path) -> None:
        rnic = SoftRnic()
        for verb in (rnic.alloc_pd, rnic.wait_fd, rnic.fail, rnic.restore):
            with pytest.raises(RnicError):
                verb()
        rnic.close()
        gids = set()
        for _ in range(3):
            rnic.open(directory)
            with pytest.raises(RnicError):
                rnic.open(directory)
            gids.add(rnic.gid)
            rnic.close()
            rnic.close()
            assert list(directory.iterdir()) == []
        assert len(gids) == 3

    def test_closing_an_rnic_ends_its_queue_pairs(self, rnic: SoftRnic, other: SoftRnic) -> None:
        a, b = make_end(rnic), make_end(other)
        connect(a, b)
        rnic.close()
        until(lambda: bool(b.flushed), b)
        a.memory.close()
        b.close()

    def test_closed_memory_cannot_be_registered(self, rnic: SoftRnic) -> None:
        pd = rnic.alloc_pd()
        memory = rnic.alloc_memory(100)
        memory.close()
        with pytest.raises(RnicError):
            pd.register(memory)

    def test_a_domain_holds_at_most_255_regions(self, rnic: SoftRnic) -> None:
        end = make_end(rnic)
        regions = [end.pd.register(end.memory) for _ in range(255)]
        with pytest.raises(RnicError):
            end.pd.register(end.memory)
        regions.pop().close()
        regions.append(end.pd.register(end.memory))
        assert len({region.rkey for region in regions}) == len(regions)
        for region in regions:
            region.close()
        end.close()

    def test_a_gid_without_an_rnic_is_unreachable(self, rnic: SoftRnic) -> None:
        end = make_end(rnic)
        with pytest.raises(RnicError, match="cannot reach"):
            end.qp.to_rtr(gid=bytes(16), qp_num=5, psn=1, mtu=5)
        end.close()

    def test_a_python_without_its_gil_is_refused(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        with pytest.raises(RnicError, match="GIL") as refused:
            SoftRnic().open(directory)
        assert refused.value.errno == errno.ENOTSUP
        assert not directory.exists()

    def test_a_queue_pair_refuses_a_process_of_another_user(
        self, rnic: SoftRnic, other: SoftRnic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_fabric, "is_admitted", lambda _, group: False)
        end = make_end(rnic)
        with pytest.raises(RnicError, match="another user"):
            end.qp.to_rtr(gid=other.gid, qp_num=5, psn=1, mtu=5)
        end.close()

    def test_a_process_of_another_user_is_disconnected(
        self, directory: Path, rnic: SoftRnic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there = _fabric.Directory(directory)
        for same, admitted in ((True, True), (False, False)):
            monkeypatch.setattr(device, "is_admitted", lambda *_, same=same: same)
            sock = there.dial(f"rnic-{rnic.gid.hex()}")
            rnic.service()
            sock.settimeout(0)
            if admitted:
                with pytest.raises(BlockingIOError):
                    sock.recv(1)  # the RNIC waits for the first message
            else:
                assert sock.recv(1) == b""
            sock.close()
        there.close()


class TestDirectory:
    def test_a_new_directory_is_private(self, directory: Path) -> None:
        directory.mkdir()
        rnic = SoftRnic()
        rnic.open(directory / "below")
        assert stat.S_IMODE((directory / "below").stat().st_mode) == 0o700
        rnic.close()

    def test_a_long_path_is_accepted(self, directory: Path) -> None:
        deep = directory / ("x" * 100) / ("y" * 100)
        deep.parent.mkdir(parents=True)
        first, second = SoftRnic(), SoftRnic()
        first.open(deep)
        second.open(deep)
        a, b = make_end(first), make_end(second)
        connect(a, b)
        a.close()
        b.close()
        first.close()
        second.close()

    def test_a_directory_that_others_can_read_is_refused(self, directory: Path) -> None:
        directory.mkdir()
        directory.chmod(0o755)
        with pytest.raises(RnicError, match="mode 755 where only 700"):
            SoftRnic().open(directory)

    def test_a_directory_of_another_user_is_refused(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory.mkdir(mode=0o700)
        real = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: real + 1)
        with pytest.raises(RnicError, match="belongs to user"):
            SoftRnic().open(directory)

    def test_a_symbolic_link_is_refused(self, directory: Path) -> None:
        target = directory.with_name("elsewhere")
        target.mkdir(mode=0o700)
        directory.symlink_to(target)
        with pytest.raises(RnicError):
            SoftRnic().open(directory)
        directory.unlink()

    def test_a_file_is_refused(self, directory: Path) -> None:
        directory.touch()
        with pytest.raises(RnicError):
            SoftRnic().open(directory)
        directory.unlink()

    def test_only_old_unfinished_names_are_removed(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        old, new = directory / ".rnic-old", directory / ".rnic-new"
        for path in (old, new):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.bind(str(path))
        os.utime(old, (0, 0))
        rnic = SoftRnic()
        rnic.open(directory)
        assert not old.exists()
        assert new.exists()
        rnic.close()
        new.unlink()


def test_closed_queue_pairs_leave_no_descriptors(rnic: SoftRnic, other: SoftRnic) -> None:
    """A fixture checks each test for leaks; this test checks for growth within one RNIC."""
    levels = []
    for _ in range(4):
        for _ in range(50):
            a, b = make_end(rnic), make_end(other)
            connect(a, b)
            a.write(1, b, MEMORY - 1, b"x")
            a.close()
            b.close()
        rnic.poll()
        other.poll()
        levels.append(len(os.listdir("/proc/self/fd")))
    assert len(set(levels)) == 1
