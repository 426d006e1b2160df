"""A short run of the campaign of programs over TCP and SMC-R, and whether it would notice."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.campaigns._defects import DEFECTS
from tests.campaigns._listed_differences import LISTED
from tests.campaigns._programs import EXITS, Program
from tests.campaigns.differential import SLOW_SHARE, Comparison, Transport
from trio_smc.datapath.connection import Connection
from trio_smc.sockets.drop_in import OverSmc
from trio_smc.streams.rdma_stream import RdmaStream

pytestmark = [pytest.mark.calculates, pytest.mark.processes]

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "programs.md"
MOST_PROGRAMS = 500
"""Programs of an attempt to notice a defect."""
ATTEMPTS = 6
"""With other seeds.  About one attempt of twenty does not notice its defect, because its programs
are random."""
Compare = Callable[..., Comparison]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compare]:
    """Make a `Comparison`, whose processes have a directory of their own: they are killed."""
    made: list[Comparison] = []

    def make(transports: tuple[Transport, Transport] = ("TCP", "SMC-R")) -> Comparison:
        made.append(Comparison(transports))
        return made[-1]

    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield make
        for each in made:
            each.close()


def _check(comparison: Comparison) -> None:
    differences = comparison.result.differences
    assert not differences, "\n".join(str(each) for each in differences)


@pytest.mark.parametrize("batch", [0, 4, 9], ids=["connected", "connecting", "processes"])
def test_programs_observe_the_same_over_smc_as_over_tcp(
    batch: int, compare: Compare, seed: int, full: bool
) -> None:
    comparison = compare()
    comparison.batch(batch, seed, 1_000 if full else 60)
    _check(comparison)


@pytest.mark.parametrize("end", [0, 1], ids=["server", "client"])
@pytest.mark.parametrize("shut", [("shut_both",), ("shut_wr", "shut_rd")], ids=" ".join)
def test_a_process_that_ends_resets_a_socket_with_linger_0(
    shut: tuple[str, ...], end: int, compare: Compare
) -> None:
    comparison = compare()
    for how in range(len(EXITS)):
        operations = [[name, 0] for name in (*shut, "linger")]
        steps = [[end, [["send", 1]]], [end, operations], [end, [["exit", how]]]]
        comparison.check(Program.from_data([["socket", "socket"], "usual", steps]))
    assert not comparison.result.rare


@pytest.mark.parametrize("transport", ["TCP", "SMC-R"])
def test_a_program_has_one_outcome_on_each_transport(
    transport: Transport, compare: Compare, seed: int, full: bool
) -> None:
    """The order of events is fixed: a difference is never one of timing."""
    comparison = compare((transport, transport))
    comparison.batch(0, seed, 1_000 if full else 60)
    _check(comparison)


def test_each_listed_difference_is_so_and_has_a_row_in_the_documentation(
    compare: Compare,
) -> None:
    assert compare().check_listed() == []
    document = DOCUMENT.read_text()
    for each in LISTED:
        assert each.name in document


@pytest.mark.full
@pytest.mark.timeout(300)  # some take ten times as long with one seed as with another
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_noticed(
    name: str, compare: Compare, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = DEFECTS[name]
    most = MOST_PROGRAMS * (1 if defect.batch == 0 else SLOW_SHARE)
    comparison = compare()
    with monkeypatch.context() as patch:
        patch.setattr(defect.owner, defect.attribute, defect.replacement)
        for further in range(ATTEMPTS):
            if not comparison.result.differences:
                comparison.batch(defect.batch, seed + further, most, most=1, shrink=False)
    assert comparison.result.differences


_recv = OverSmc.recv


async def _loses_a_byte(self: OverSmc, buflen: int, flags: int) -> bytes:
    return (await _recv(self, buflen, flags))[:999]


def _no_end(self: RdmaStream) -> None:
    """The peer never learns that this side has ended."""


def _aborts(self: Connection) -> None:
    self.abort()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "results"),
    [
        pytest.param(
            OverSmc,
            "recv",
            _loses_a_byte,
            ["read 999", "peeked 999", "received 999", "wrong bytes"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            RdmaStream, "shut_down_writing", _no_end, ["cancelled"], marks=pytest.mark.full
        ),
        pytest.param(Connection, "close", _aborts, ["ECONNRESET"], marks=pytest.mark.pure),
    ],
    ids=["a byte is lost", "no end of the stream", "a reset"],
)
def test_a_defect_is_noticed_shrunk_and_replays(
    owner: type,
    name: str,
    broken: Callable[..., object],
    results: list[str],
    compare: Compare,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared are ends without the defect, which are forked first, and ends with the defect."""
    comparison = compare(("SMC-R", "SMC-R"))
    comparison.tcp.run(Program(("socket", "socket"), "usual", ()))
    monkeypatch.setattr(owner, name, broken)
    comparison.batch(0, seed, 300, most=1)
    [difference] = comparison.result.differences
    short = difference.program
    assert sum(len(step.operations) for step in short.steps) <= 4, str(difference)
    assert any(result in str(difference) for result in results), str(difference)
    again = Program.from_data(short.as_data())
    assert comparison.tcp.run(again) != comparison.smc.run(again)
