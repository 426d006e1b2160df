"""Ladder diagrams as text, in the style of RFC 7609's figures.

Each message has a title, which is written on its arrow, and details, which are lines below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from trio_smc.capture.dissection import Event, Unreadable, Write
from trio_smc.capture.frames import gid_address
from trio_smc.tools.ladder import Ladder, Peer, Row, address_text
from trio_smc.wire import cdc, clc, llc
from trio_smc.wire.fields import eid_name

__all__ = ["KINDS", "details", "draw", "kind", "peer_name", "title"]

KINDS = ("CLC", "LLC", "CDC", "write", "unreadable")
_PRODUCER_FLAGS = (
    (cdc.WRITER_BLOCKED, "B", "writer blocked"),
    (cdc.URGENT_PENDING, "P", "urgent data pending"),
    (cdc.URGENT_PRESENT, "U", "urgent data present"),
    (cdc.UPDATE_REQUESTED, "R", "update requested"),
    (cdc.FAILOVER_VALIDATION, "F", "failover validation"),
)
_CONNECTION_FLAGS = (
    (cdc.SENDING_DONE, "D", "sending done"),
    (cdc.CONNECTION_CLOSED, "C", "connection closed"),
    (cdc.ABNORMAL_CLOSE, "A", "abnormal close"),
)


def kind(event: Event) -> str:
    """The kind of a message, one of `KINDS`."""
    if isinstance(event, Unreadable):
        return "unreadable"
    if isinstance(event, Write):
        return "write"
    if isinstance(event, cdc.CdcMessage):
        return "CDC"
    clc_message = isinstance(event, clc.Proposal | clc.Accept | clc.Confirm | clc.Decline)
    return "CLC" if clc_message else "LLC"


def peer_name(peer: Peer) -> str:
    """A peer as text: "peer c80f02faed98512d", or "peer unknown"."""
    if peer.peer_id is not None:
        return f"peer {peer.peer_id.hex()}"
    return "peer unknown"


def title(row: Row) -> str:
    """The title of a message: "Accept, first contact", "CDC 7, prod 0:96, cons 0:0"."""
    event = row.event
    match event:
        case Unreadable():
            return "unreadable"
        case Write():
            where = "" if row.offset is None else f" at {row.offset}"
            return f"RDMA write, {event.length} bytes{where}"
        case cdc.CdcMessage():
            return _cdc_title(event)
        case clc.Accept(first_contact=True):
            return "Accept, first contact"
        case clc.Proposal() | clc.Accept() | clc.Confirm() | clc.Decline():
            return type(event).__name__
        case llc.OptionalMessage():
            return f"optional message {event.data[0]:#04x}"
        case _:
            return _llc_title(event)


def _cdc_title(m: cdc.CdcMessage) -> str:
    text = f"CDC {m.sequence}"
    if m.producer_flags & cdc.FAILOVER_VALIDATION:
        # The receiver ignores all other fields (RFC 7609, 4.6.1).
        return f"{text}, failover validation [F]"
    text += f", prod {_cursor(m.producer_wrap, m.producer_cursor)}"
    text += f", cons {_cursor(m.consumer_wrap, m.consumer_cursor)}"
    letters = _flags_set(_PRODUCER_FLAGS, m.producer_flags) + _flags_set(
        _CONNECTION_FLAGS, m.connection_flags
    )
    return f"{text} [{' '.join(letter for letter, _ in letters)}]" if letters else text


def _llc_title(m: llc.Message) -> str:
    words = "".join(f" {c}" if c.isupper() else c for c in type(m).__name__).strip().upper()
    link = getattr(m, "link_number", None)
    if isinstance(m, llc.DeleteLink):
        link = None if m.all_links else link
        words += " (all links)" if m.all_links else ""
    if link is not None and not isinstance(m, llc.ConfirmLink):
        words += f" {link}"
    if getattr(m, "reply", False):
        refused = getattr(m, "negative", False) or getattr(m, "rejected", False)
        words += ", rejected" if refused else ", reply"
    return words


def details(row: Row) -> list[str]:
    """The details of a message, as lines below the title."""
    event = row.event
    match event:
        case Unreadable():
            return [event.reason]
        case clc.Proposal():
            return _proposal(event)
        case clc.Accept() | clc.Confirm():
            return _credentials(event)
        case clc.Decline():
            text = f"diagnosis {event.diagnosis:#010x}"
            return [text + (", out of sync" if event.out_of_sync else "")]
        case cdc.CdcMessage():
            return _cdc(event)
        case Write():
            return [] if row.offset is not None else [f"to {_rtoken(event.rkey, event.address)}"]
        case llc.OptionalMessage():
            return []
        case _:
            return _llc(event)


def _proposal(m: clc.Proposal) -> list[str]:
    lines = [f"GID {address_text(gid_address(m.gid))}"] if any(m.gid) else []
    nets = [f"{address_text(m.ipv4_subnet)}/{m.ipv4_mask_length}"] if m.ipv4_mask_length else []
    nets += [f"{address_text(each.prefix)}/{each.length}" for each in m.ipv6_prefixes]
    lines += [f"subnets {', '.join(nets)}"] if nets else []
    if m.v2 is not None:
        eids = ", ".join(map(eid_name, m.v2.eids)) or "none"
        lines.append(f"version 2, release {m.v2.release}, {_limits(m.v2)}")
        lines.append(f"GID {address_text(gid_address(m.v2.gid))}, EIDs {eids}")
    return lines


def _credentials(m: clc.Accept | clc.Confirm) -> list[str]:
    size = m.buffer_size // 1024
    return [
        f"GID {address_text(gid_address(m.gid))}, QP {m.qp_number:#x}, PSN {m.initial_psn:#x}",
        f"{_rtoken(m.rkey, m.rmb_address)}, RMBE {m.rmbe_index} of {size} KiB",
        f"alert token {m.alert_token:#010x}",
        *([] if m.v2 is None else _agreed(m.v2)),
    ]


def _agreed(v2: clc.V2Answer) -> list[str]:
    lines = [f"version 2, EID {eid_name(v2.eid)}"]
    if v2.first is not None:
        way = "direct" if v2.first.direct else "through a gateway"
        lines.append(f"release {v2.first.release}, {_limits(v2.first)}, {way}")
        lines.append(f"host {v2.first.host_name}")
    if v2.gids:
        lines.append("GIDs " + ", ".join(address_text(gid_address(gid)) for gid in v2.gids))
    return lines


def _limits(v2: clc.V2Offer | clc.FirstContact) -> str:
    return f"at most {v2.max_connections} connections, {v2.max_links} links"


def _cdc(m: cdc.CdcMessage) -> list[str]:
    if m.producer_flags & cdc.FAILOVER_VALIDATION:
        return []
    flags = _flags_set(_PRODUCER_FLAGS, m.producer_flags) + _flags_set(
        _CONNECTION_FLAGS, m.connection_flags
    )
    return [", ".join(words for _, words in flags)] if flags else []


def _llc(m: llc.Message) -> list[str]:
    match m:
        case llc.ConfirmLink():
            most = f"{m.max_links}"
            if m.max_connections:
                most += f" links, {m.max_connections} connections"
            return [
                f"link {m.link_number}, at most {most}, user ID {m.link_user_id:#010x}",
                f"GID {address_text(gid_address(m.gid))}, QP {m.qp_number:#x}",
            ]
        case llc.AddLink():
            if m.rejected:  # in version 2 the rejection has no reason
                return [f"reason {_name(llc.AddLinkReason, m.reason)}"] if m.reason else []
            gid = address_text(gid_address(m.gid))
            lines = [f"GID {gid}, QP {m.qp_number:#x}, PSN {m.initial_psn:#x}"]
            if m.extension is not None:
                lines.append("direct" if m.extension.direct else "through a gateway")
                lines += _pairs(m.extension.pairs)
            return lines
        case llc.AddLinkContinuation():
            return _pairs(m.pairs)
        case llc.RequestAddLink():
            gids = ", ".join(address_text(gid_address(gid)) for gid in m.gids)
            return [f"GIDs {gids}"] if gids else []
        case llc.DeleteLink():
            order = "orderly" if m.orderly else "disorderly"
            return [f"{order}, {_name(llc.DeleteLinkReason, m.reason)}"]
        case llc.ConfirmRkey():
            return [_rtoken(m.rkey, m.address), *_others(m.others)]
        case llc.ConfirmRkeyContinuation():
            return _others(m.others)
        case llc.DeleteRkey():
            return ["RKey " + ", ".join(f"{rkey:#010x}" for rkey in m.rkeys)]
        case _:
            return []


def _pairs(pairs: Iterable[llc.RTokenPair]) -> list[str]:
    return [
        f"RKey {pair.reference_rkey:#010x} is {_rtoken(pair.new_rkey, pair.new_address)}"
        for pair in pairs
    ] or ["no RTokens"]


def _others(tokens: Iterable[llc.LinkRToken]) -> list[str]:
    return [f"link {each.link_number}: {_rtoken(each.rkey, each.address)}" for each in tokens]


def _rtoken(rkey: int, address: int) -> str:
    return f"RToken {rkey:#010x} @ {address:#x}"


def _cursor(wrap: int, offset: int) -> str:
    return f"{wrap}:{offset}"


def _flags_set(table: tuple[tuple[int, str, str], ...], flags: int) -> list[tuple[str, str]]:
    return [(letter, words) for bit, letter, words in table if flags & bit]


def _name(names: type[llc.AddLinkReason | llc.DeleteLinkReason], value: int) -> str:
    try:
        return names(value).name.lower().replace("_", " ")
    except ValueError:
        return f"{value:#x}"


# --- the diagram ------------------------------------------------------------------------------

_MARGIN = 20
"""Columns for time, connection and link."""
_MIN_INSIDE = 60
"""The smallest number of columns between the two vertical lines.  Chosen."""


def draw(ladder: Ladder, *, start: int, limit: int, width: int = 100) -> Iterator[str]:
    """The lines of one ladder.

    Args:
      ladder: the ladder.
      start: the time shown as 0, in nanoseconds since 1970.
      limit: the largest number of messages.
      width: the number of columns, including those for time, connection and link.
    """
    inside = max(_MIN_INSIDE, width - _MARGIN - 4)
    yield from _heading(ladder, inside)
    for row in ladder.rows[:limit]:
        yield from _row(row, start, inside)
    left = len(ladder.rows) - limit
    if left > 0:
        yield " " * (_MARGIN + 1) + f"... {left} more messages (--limit {len(ladder.rows)})"


def _heading(ladder: Ladder, inside: int) -> Iterator[str]:
    blank, half = " " * _MARGIN, inside // 2
    left, right = _names(ladder.client, half), _names(ladder.server, half)
    height = max(len(left), len(right))
    for one, other in zip(left + [""] * height, right + [""] * height, strict=False):
        if one or other:
            yield f"{blank}{one:<{inside + 2 - half}}{other:>{half}}".rstrip()
    yield f"{'seconds':>9} {'conn':>4} {'link':>4} client{'server':>{inside - 4}}"


def _names(peer: Peer, width: int) -> list[str]:
    known = ", ".join(address_text(each) for each in peer.addresses)
    return [peer_name(peer), *textwrap.wrap(known, width)]


def _clipped(words: str, width: int) -> str:
    return words if len(words) <= width else words[: width - 3] + "..."


def _row(row: Row, start: int, inside: int) -> Iterator[str]:
    conn = "" if row.connection is None else str(row.connection.number)
    link = "" if row.link_number is None else str(row.link_number)
    margin = f"{(row.time - start) / 1e9:9.6f} {conn:>4} {link:>4} "
    text = f" {_clipped(title(row), inside - 6)} "
    if row.to_server:
        arrow = text.center(inside - 1, "-") + ">"
    else:
        arrow = "<" + text.center(inside - 1, "-")
    yield f"{margin}|{arrow}|"
    for detail in details(row):
        for line in textwrap.wrap(detail, inside - 4):
            yield f"{' ' * _MARGIN}|{line.center(inside)}|"
