"""Cursors: counts inside, (wrap, offset) pairs on the wire, and range checks of hostile values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted, to_wire

rings = st.tuples(st.integers(1, 1 << 29), st.sampled_from([0, 4]))
counts = st.integers(0, 1 << 50)


@pytest.mark.rfc("4.3/3", "A.4/10")
@pytest.mark.parametrize(
    ("count", "usable", "first", "wire"),
    [
        (0, 9996, 4, (0, 4)),  # figure 16: "They start and wrap at 4, not 0"
        (1000, 9996, 4, (0, 1004)),
        (9995, 9996, 4, (0, 9999)),
        (9996, 9996, 4, (1, 4)),
        (16384, 16384, 0, (1, 0)),
        (16384 * 32768 + 5, 16384, 0, (32768, 5)),
        (16384 * 65535 + 5, 16384, 0, (65535, 5)),
        (16384 * 65536 + 5, 16384, 0, (0, 5)),
    ],
)
def test_a_count_on_the_wire(count: int, usable: int, first: int, wire: tuple[int, int]) -> None:
    assert to_wire(count, usable, first) == wire


@given(ring=rings, count=counts, data=st.data())
def test_an_advance_within_the_limit_comes_back_as_the_count(
    ring: tuple[int, int], count: int, data: st.DataObject
) -> None:
    usable, first = ring
    allowed = data.draw(st.integers(0, 2 * usable))  # a ring back, and the window, at most
    advance = data.draw(st.integers(0, allowed))
    wrap, offset = to_wire(count + advance, usable, first)
    assert first <= offset < first + usable
    got = advance_untrusted(count, wrap, offset, usable=usable, first=first, limit=count + allowed)
    assert got == count + advance


@given(
    ring=rings,
    count=counts,
    wrap=st.integers(0, 0xFFFF),
    offset=st.integers(0, 0xFFFF_FFFF),
    data=st.data(),
)
def test_an_accepted_cursor_is_the_one_sent_and_within_the_limit(
    ring: tuple[int, int], count: int, wrap: int, offset: int, data: st.DataObject
) -> None:
    usable, first = ring
    limit = count + data.draw(st.integers(0, 2 * usable))
    try:
        got = advance_untrusted(count, wrap, offset, usable=usable, first=first, limit=limit)
    except ProtocolError:
        if first <= offset < first + usable:
            # Refused although in the ring: then no count within the limit has this name.
            meant = count - count % (usable << 16) + wrap * usable + offset - first
            if meant < count:
                meant += usable << 16
            assert meant > limit
    else:
        assert count <= got <= limit
        assert to_wire(got, usable, first) == (wrap, offset)


@pytest.mark.parametrize(
    ("wrap", "offset"),
    [
        (0, 3),  # inside the eye catcher
        (0, 10_000),  # behind the element
        (0, 0xFFFF_FFFF),
        (0, 103),  # one back
        (0, 206),  # one beyond the limit
        (1, 104),  # a whole ring
        (0xFFFF, 104),  # a ring back
        (0x8000, 104),  # half way round: all 16 bits count
        (2, 4),
    ],
)
def test_an_impossible_cursor_is_refused(wrap: int, offset: int) -> None:
    with pytest.raises(ProtocolError):
        advance_untrusted(100, wrap, offset, usable=9996, first=4, limit=201)


def test_an_offset_behind_the_ring_is_not_the_next_round() -> None:
    """10,001 of wrap 0 would be the count of 5 of wrap 1."""
    assert advance_untrusted(9990, 1, 5, usable=9996, first=4, limit=10_100) == 9997
    with pytest.raises(ProtocolError):
        advance_untrusted(9990, 0, 10_001, usable=9996, first=4, limit=10_100)


def test_the_limit_itself_is_allowed() -> None:
    assert advance_untrusted(100, 0, 205, usable=9996, first=4, limit=201) == 201
    assert advance_untrusted(100, 0, 104, usable=9996, first=4, limit=100) == 100


@pytest.mark.rfc("4.3/5", "A.4/7")
def test_a_full_ring_differs_by_the_wrap_sequence_number_alone() -> None:
    """Figure 19, row 4: the cursor is the same, the wrap sequence number is one more."""
    count = 9996 + 1000
    assert to_wire(count, 9996, 4) == (1, 1004)
    got = advance_untrusted(count, 2, 1004, usable=9996, first=4, limit=count + 9996)
    assert got == count + 9996
