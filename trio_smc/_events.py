"""Events of a stack: `open_events` for Trio programs, and the log of events.

Theory of operation
-------------------
`EventObserver` is an observer of the stack. It makes a `StackEvent` for each decision about a mode,
and for each new state of a connection, a link or a link group. It passes them to a function:
`open_events` puts them into a memory channel, `log_event` writes them to the log. Observers must
not block, so events that do not fit into the channel are dropped and counted.

`Config(log_events=True)` turns the log on: records of the logger "trio_smc.events", with fields
that a log collector can read without parsing a sentence. The level is INFO for decisions about a
mode and for links and link groups, WARNING for refused and aborted connections. docs/monitoring.md
describes the fields; their names begin with "smc_".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import trio

from trio_smc._base.observer import BaseObserver
from trio_smc._base.reasons import Fallback
from trio_smc._base.statistics import Agreed
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.links.link import Link, LinkOwner
from trio_smc.streams.connection_views import socket_name
from trio_smc.streams.rdma_stream import RdmaStream
from trio_smc.streams.stream import SmcStream

if TYPE_CHECKING:
    from trio_smc._stack import Stack
    from trio_smc.stack.connection_host import Endpoint
    from trio_smc.streams.stream import SmcSocket

__all__ = ["EventObserver", "EventStream", "StackEvent", "log_event", "open_events"]

LOGGER: Final = logging.getLogger("trio_smc.events")

_ABORTS: Final = frozenset({"abort", "peer_abort", "links_lost", "rmbe_conflict", "close_timeout"})
_ABORTED: Final = frozenset({"PEERABORTWAIT", "PROCESSABORT", "CLOSED"})
_LIMIT: Final = 1000
"""Events that wait for a reader of `open_events`; later ones are dropped.  Chosen."""
_Names: TypeAlias = tuple[tuple[str, int] | None, tuple[str, int] | None]
_UNKNOWN: Final[_Names] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackEvent:
    """One event of a stack.

    Attributes:
      subject: "mode": a connection became SMC-R, stays on TCP, or was refused; "connection",
        "link", "link_group": one of these has a new state.
      new: for "mode" one of "smc-r", "tcp" and "refused" (by ``require_smc``); otherwise the name
        of the new state.
      old: the state before; None for "mode".
      cause: the event of the state machine, as in docs/states; None for "mode".
      time: seconds of Trio's clock.
      fallback: the reason for TCP.
      local_address, peer_address: of the connection, while its TCP connection is known.
      role: "client" or "server", of the link group.
      peer_id: the link group's peer, 8 bytes.
      link: the number of the link.
      rnic: the name of the link's RNIC.
      agreed: the agreement of the two sides of the link group: version of SMC-R, UEID, ...
    """

    subject: Literal["mode", "connection", "link", "link_group"]
    new: str
    old: str | None = None
    cause: str | None = None
    time: float
    fallback: Fallback | None = None
    local_address: tuple[str, int] | None = None
    peer_address: tuple[str, int] | None = None
    role: Literal["client", "server"] | None = None
    peer_id: bytes | None = None
    link: int | None = None
    rnic: str | None = None
    agreed: Agreed | None = None

    @property
    def aborted(self) -> bool:
        """True if a connection was just aborted, not closed by both sides (RFC 7609, 4.8.2)."""
        return (
            self.subject == "connection"
            and self.cause in _ABORTS
            and self.new in _ABORTED
            and self.old not in _ABORTED
        )


class EventStream:
    """The events of a stack, in order; made by `open_events`.

    An async iterable, which ends when the block of `open_events` is left.

    Attributes:
      dropped: the number of events that were dropped because the program was too slow.
    """

    def __init__(self, channel: trio.MemoryReceiveChannel[StackEvent]) -> None:
        self.dropped = 0
        self._channel = channel

    async def receive(self) -> StackEvent:
        """Wait for the next event.

        Raises:
          trio.EndOfChannel: the block of `open_events` was left.
          trio.ClosedResourceError: the same, and all events were received.
        """
        return await self._channel.receive()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> StackEvent:
        try:
            return await self._channel.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise StopAsyncIteration from None


@contextmanager
def open_events(stack: Stack, *, limit: int = _LIMIT) -> Iterator[EventStream]:
    """Watch a stack for the block: ``with open_events(stack) as events: async for e in events``.

    During the block the stack has an observer (`Stack.add_observer`), which costs some tenths of a
    microsecond for each CDC message and RDMA write.

    Args:
      stack: the stack to watch.
      limit: events that are kept until the program receives them; further ones are dropped.

    Raises:
      ValueError: ``limit`` is not at least 1.
    """
    if limit < 1:
        raise ValueError("limit: at least one event")
    sender, receiver = trio.open_memory_channel[StackEvent](limit)
    events = EventStream(receiver)

    def put(event: StackEvent) -> None:
        try:
            sender.send_nowait(event)
        except trio.WouldBlock:
            events.dropped += 1

    observer = EventObserver(stack.runtime.groups.endpoint_of, put)
    stack.add_observer(observer)
    try:
        with sender:
            yield events
    finally:
        stack.remove_observer(observer)


class EventObserver(BaseObserver):
    """Passes the events of a stack to ``put``.

    Args:
      endpoint_of: returns the endpoint of a connection, or None if it is CLOSED.
      put: called with each event.
    """

    def __init__(
        self,
        endpoint_of: Callable[[object], Endpoint | None],
        put: Callable[[StackEvent], None],
    ) -> None:
        self._endpoint_of = endpoint_of
        self._put = put
        # The addresses of open connections. An aborted one has no TCP connection any more.
        self._names: dict[Connection, _Names] = {}

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """Report that a connection became SMC-R, stays on TCP, or was refused."""
        new, names, agreed = "refused", _UNKNOWN, None
        if isinstance(connection, SmcStream):
            new = connection.mode.value
            names = _names_of(connection.socket)
            group = connection.link_group
            agreed = None if group is None else group.agreed
        if isinstance(connection, RdmaStream):
            self._names[connection._core] = names
        self._put(
            StackEvent(
                subject="mode", new=new, time=trio.current_time(), fallback=fallback,
                local_address=names[0], peer_address=names[1], agreed=agreed,
            )
        )  # fmt: skip

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """Report a new state of a state machine."""
        now = trio.current_time()
        if isinstance(subject, Connection):
            names = self._names_of(subject, closed=new == "CLOSED")
            self._put(
                StackEvent(
                    subject="connection", old=old, new=new, cause=event, time=now,
                    local_address=names[0], peer_address=names[1],
                )
            )  # fmt: skip
        elif isinstance(subject, Link):
            group = subject.group
            self._put(
                StackEvent(
                    subject="link", old=old, new=new, cause=event, time=now, role=_role(group),
                    peer_id=group.peer_id, link=subject.number, rnic=subject.rnic.name,
                    agreed=group.terms.agreed,
                )
            )  # fmt: skip
        elif isinstance(subject, LinkGroup):
            self._put(
                StackEvent(
                    subject="link_group", old=old, new=new, cause=event, time=now,
                    role=_role(subject), peer_id=subject.peer_id, agreed=subject.agreed,
                )
            )  # fmt: skip

    def _names_of(self, connection: Connection, *, closed: bool) -> _Names:
        known = self._names.pop(connection, None) if closed else self._names.get(connection)
        if known is not None:
            return known
        endpoint = self._endpoint_of(connection)
        return _UNKNOWN if endpoint is None or endpoint.sock is None else _names_of(endpoint.sock)


def _names_of(sock: trio.socket.SocketType | SmcSocket) -> _Names:
    return socket_name(sock, "getsockname"), socket_name(sock, "getpeername")


def _role(group: LinkGroup | LinkOwner) -> Literal["client", "server"]:
    return "client" if group.client else "server"


def log_event(event: StackEvent) -> None:
    """Write one event to the log. Of the states of connections only aborts are written."""
    if event.subject == "connection" and not event.aborted:
        return
    bad = event.subject == "connection" or event.new == "refused"
    level = logging.WARNING if bad else logging.INFO
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", _sentence(event), extra=_fields(event))


def _sentence(event: StackEvent) -> str:
    match event.subject:
        case "mode":
            text = f"connection {_names(event)} is {event.new}{_version(event)}"
            if event.fallback is not None:
                text += f": {event.fallback.message}"
        case "connection":
            text = f"connection {_names(event)} was aborted ({event.cause})"
        case "link":
            text = f"link {event.link} on {event.rnic} {_group(event)}: {event.old} to {event.new}"
        case _:
            text = f"link group {_group(event)}{_version(event)}: {event.old} to {event.new}"
    return text


def _names(event: StackEvent) -> str:
    return f"{_address(event.local_address)} to {_address(event.peer_address)}"


def _group(event: StackEvent) -> str:
    peer = event.peer_id.hex() if event.peer_id is not None else "?"
    return f"as {event.role} of {peer}"


def _version(event: StackEvent) -> str:
    """The agreement in words; empty for version 1."""
    agreed = event.agreed
    if agreed is None or agreed.version == 1:
        return ""
    route = "direct" if agreed.direct else "through a gateway"
    return f" (version 2.{agreed.release}, UEID {agreed.ueid}, {route})"


def _address(name: tuple[str, int] | None) -> str:
    return "?" if name is None else f"{name[0]} port {name[1]}"


def _fields(event: StackEvent) -> dict[str, Any]:
    fallback = event.fallback
    values = {
        "event": "abort" if event.subject == "connection" else event.subject,
        "new": event.new,
        "old": event.old,
        "cause": event.cause,
        "local": event.local_address,
        "peer": event.peer_address,
        "reason": fallback and fallback.reason.value,
        "origin": fallback and fallback.origin.value,
        "code": fallback and fallback.code,
        "peer_code": fallback and fallback.peer_code,
        "role": event.role,
        "peer_id": event.peer_id.hex() if event.peer_id is not None else None,
        "link": event.link,
        "rnic": event.rnic,
        **(dict.fromkeys(Agreed._fields) if event.agreed is None else event.agreed._asdict()),
    }
    return {f"smc_{name}": value for name, value in values.items()}
