"""Announcing TCP connections to other processes of this host: the client's half of discovery.

`trio_smc.rendezvous.discovery.same_host` describes the protocol, and why both sides always agree.

Theory of operation
-------------------
An announcement is a datagram socket with a name.  The server that accepts the connection sends one
datagram to this name: ACCEPTED or REFUSED.  The task that connects waits on the socket itself, so
the datagram wakes this task directly.

To withdraw an announcement, the client removes the name, shuts the socket down for receiving, and
then empties its queue.  The kernel checks the shutdown and appends a datagram to the queue under
one lock.  So either the datagram is in the queue, and the client complies with it, or the server's
call of sendto(2) fails, and the server treats the connection as plain TCP.

After ACCEPTED the client keeps the name until the handshake is over.  The server may have sent
ACCEPTED for an earlier connection with the same addresses, which belongs to the process that had
the port before.  The process that accepts the announced connection later needs the name again.

If no answer comes at once, the client checks repeatedly that an answer is still possible: the name
exists, a listener is alive, the TCP connection is open and no data has arrived on it, and the
kernel shows where the server's end is (`trio_smc.host.tcp_diag`).  The client gives up

- at once if the server's end is not on this host under these addresses (a rule translates them);
- soon after a process has accepted the connection, because a listener that speaks SMC-R answers in
  the same pass of its scheduler;
- after `Announcer.patience_for`, at most a second, if the connection waits in a backlog;
- at once if the listener's kernel has no entry for the connection, because the kernel sent a SYN
  cookie and dropped the client's last ACK.  Only data, which repeats that ACK, would open the
  connection then.  So the client connects again, or sends its data over TCP
  (`Announcement.is_lost`);
- a little later if the listener's kernel has dropped the client's last ACK because the backlog was
  full.  The kernel then repeats its SYN-ACK a second after the first one (RFC 6298, 5.7).

A client that *requires* SMC-R waits in a backlog as long as TCP itself tries to connect.  Such a
client announces its connection even if there is no listener that speaks SMC-R.  While the
connection waits in a backlog, such a listener may still start, for example in a new worker that
inherits the listening socket.  The client waits for the first listener until the deadline of its
caller.

After a connection without an answer, the client announces no connection to the same address for a
minute, or until a new listener or an answer appears.  A lost connection has no such effect.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import trio

# Imported early: a program that has dropped its privileges may be unable to read the module.
with contextlib.suppress(ImportError):  # the module exists only on Unix
    import resource

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc._base.waits import notify_closing
from trio_smc.host.addresses import plain_address
from trio_smc.host.descriptors import Closer, datagram_probe
from trio_smc.host.platform import is_supported
from trio_smc.host.private_directory import DirectoryUnusable, is_named, unusable
from trio_smc.host.real_time import move_on_after, now
from trio_smc.host.tcp import has_news, is_open
from trio_smc.host.tcp_diag import FarEnd, far_end, has_local_end, original_destination
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.lookup import AnySocket, Found, Lookups
from trio_smc.rendezvous.discovery.messages import Kind, Message
from trio_smc.rendezvous.discovery.names import Names, announced_name
from trio_smc.rendezvous.discovery.waiting import wait_readable_until
from trio_smc.rnic.soft.messages import VERSION
from trio_smc.rnic.spinner import NEVER, Spinner

__all__ = ["FIRST_CHECK", "MOST_IGNORED", "MOST_OPEN", "Announcement", "Announcer"]

_log = logging.getLogger(__name__)

FIRST_CHECK: Final = 0.02
"""Seconds until the first check that an answer is still possible; each interval is twice as long as
the previous one.  Chosen: the first connection to a plain server takes that much longer
(docs/decisions.md)."""
_LONGEST_CHECK: Final = 1.0
"""Longest interval between two such checks, in seconds.  Chosen; no measurement is recorded."""
_CHECK_TOLERANCE: Final = 0.005
"""Seconds by which the first check may be late.  A later check is postponed once.  Chosen: without
this tolerance, 11 of 100 connections made the check at load 10 on two processors, because this
process itself had not run."""
_LEAST_PATIENCE: Final = 0.2
"""Shortest time limit for a connection in a backlog, in seconds; after it, the connection is TCP.
Chosen."""
_MOST_PATIENCE: Final = 1.0
"""Longest time limit for a connection in a backlog, in seconds; also the limit for an address whose
listeners have not answered yet.  Chosen."""
_PATIENCE_FACTOR: Final = 8
"""Between these two limits, the limit is this multiple of the usual time until an answer.
Chosen."""
_ANSWER_TIME_DECAY: Final = 0.875
"""Factor by which a faster answer reduces the usual time at most, as in RFC 6298, 2."""
_ACCEPTED_PATIENCE: Final = 0.1
"""Seconds for which a process that has accepted a connection may still answer.  Chosen: a process
that is ready to run may wait for a processor for tens of milliseconds."""
_REPEATED_SYN_ACK: Final = 1.25
"""Seconds after which the client must have acknowledged the repeated SYN-ACK.  Linux repeats the
SYN-ACK after one second (TCP_TIMEOUT_INIT)."""
_CONNECT_TIME: Final = 127.0
"""Seconds that TCP tries to connect: 2**7 - 1 for the 6 repetitions of net.ipv4.tcp_syn_retries."""
_LOOPBACK_OF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
MOST_IGNORED: Final = 64
"""Datagrams other than ACCEPTED after which an announcement receives no more.  Chosen."""
_CACHED_ADDRESSES: Final = 256
"""Addresses whose loopback address is cached.  Chosen."""
_MOST_ADDRESSES: Final = 1024
"""Addresses of which an `Announcer` remembers the usual time until an answer, the marks, and the
translation.  Chosen."""
_MARK_INTERVAL: Final = 20.0
"""Seconds after which a mark is renewed.  Chosen: a third of the time for which servers accept a
mark (`names`)."""
_TRANSLATION_HOLDS: Final = 60.0
"""Seconds for which `Announcer.leads_to_listener` remembers its result.  Chosen: a new result takes
about a millisecond."""
MOST_OPEN: Final = 4096
"""Announcements that may be open at a time, each with a descriptor.  Chosen."""
_DESCRIPTOR_SHARE: Final = 4
"""Announcements use at most this fraction (one fourth) of the descriptors that the process may
open.  Chosen, so that most descriptors remain for the program."""


_REASONS_FOR_SILENCE: Final = {
    FarEnd.UNKNOWN: FallbackReason.PEER_NOT_CAPABLE,
    FarEnd.MISSING: FallbackReason.PATH_NOT_PROVEN,
    FarEnd.LOST: FallbackReason.NOT_ACCEPTED,
    FarEnd.OPENING: FallbackReason.NOT_ACCEPTED,
    FarEnd.QUEUED: FallbackReason.NOT_ACCEPTED,
    FarEnd.ACCEPTED: FallbackReason.PEER_NOT_CAPABLE,
}
"""Reason for a missing answer, by the place where the kernel shows the server's end."""


class Announcement:
    """The announcement of one TCP connection, until `accepted` and `close` have settled it.

    As a context manager, it calls `close` at the end.

    Attributes:
      name: the name of the datagram socket.
      found: the listeners that may answer.  Empty if the client requires SMC-R, and waits for the
        first listener.
      is_lost: True if the server's kernel has no entry for the connection (`FarEnd.LOST`).
      source, destination: the local address of the connection; its remote address and port.
    """

    __slots__ = (
        "_acceptance", "_committed", "_has_arrived", "_ignored", "_owner", "_refusal", "_required",
        "_sock", "_tcp", "destination", "found", "is_lost", "name", "source",
    )  # fmt: skip

    def __init__(
        self,
        owner: Announcer,
        sock: socket.socket,
        name: str,
        found: Found,
        source: str,
        destination: tuple[str, int],
        tcp: AnySocket | None,
        required: bool,
    ) -> None:
        self._owner = owner
        self._required = required
        self.is_lost: bool = False
        self._sock = sock
        self._has_arrived = datagram_probe(sock)
        self.name: str = name
        self.found: Found = found
        self.source: str = source
        self.destination: tuple[str, int] = destination
        self._tcp = tcp
        self._acceptance: Message | None = None  # ACCEPTED
        self._refusal: Message | None = None  # REFUSED
        self._committed = False  # the caller knows that the connection was accepted
        self._ignored = 0  # number of datagrams

    @property
    def wanted(self) -> bool:
        """True if the process that accepted the connection requires SMC-R."""
        return self._acceptance is not None and self._acceptance.required

    async def accepted(self, deadline: float) -> FallbackReason | None:
        """Wait until the process that accepted the TCP connection answers.

        deadline: end of the wait, by the clock of the stack's timers.  Without ``required``, the
        wait mostly ends earlier.  With ``required``, it lasts longer if the connection waits in a
        backlog.

        Returns None if the server expects a CLC message: the caller sends one, or ends the TCP
        connection.  Otherwise returns the reason why both sides stay on TCP.
        """
        spinner = self._owner.spinner
        silence, began = None, now(self._owner.timers)
        if not (spinner.until(self._has_arrived, soon=True) and self._receive()):
            spinner.sleeping += 1
            try:
                silence = await self._wait(began, deadline)
            finally:
                spinner.sleeping -= 1
        if self._acceptance is not None or self.withdraw():
            self._committed = True
            self._owner.forget_silence(self)
            return None
        if self._refusal is not None:
            return self._refusal.reason
        if self.is_lost:
            return _REASONS_FOR_SILENCE[FarEnd.LOST]
        if silence is FallbackReason.PEER_NOT_CAPABLE and (
            self.found.reason is FallbackReason.LOCAL_VERSION_MISMATCH
        ):
            silence = self.found.reason  # a process of an older release shares the port
        if silence is not None and not self.found.is_elsewhere:
            # A listener that meanwhile has answered another connection is only busy, and is going
            # to answer the next one.
            if not self._owner.has_answered(self.destination, began):
                self._owner.note_silence(self, silence)
            return silence
        return self.found.disprove(now(self._owner.timers))

    def mismatch(self, kind: str) -> FallbackReason | None:
        """Return why the accepted connection cannot be SMC-R, or None.

        If there is a reason, the caller sends a Decline to the server.

        kind: the kind of the RNIC that serves the connection (`Rnic.kind`).
        """
        accepted = self._acceptance
        if accepted is None or not accepted.is_common:
            return FallbackReason.LOCAL_VERSION_MISMATCH
        if kind == "software" and accepted.rnic_version != VERSION:
            return FallbackReason.VERSION_MISMATCH
        return None

    async def _wait(self, began: float, deadline: float) -> FallbackReason | None:
        """Wait for an answer, until none is possible any more, or another task closes this object.

        began: time at which the connection was open.

        Returns the reason for a missing answer if the reason also holds for other connections to
        the address; otherwise None.
        """
        pause = FIRST_CHECK
        # Place of the server's end at the last check, and the time since when it has been there.
        far, since = FarEnd.UNKNOWN, began
        while self._sock.fileno() >= 0:
            moment = now(self._owner.timers)
            until = min(moment + pause, self._last_moment(far, began, since, deadline))
            readable = await wait_readable_until(self._sock, self._owner.timers, until)
            if readable and self._take_answer(began):
                return None
            moment = now(self._owner.timers)
            # Empty datagrams do not count, and must not prevent the checks.
            if readable and moment < until:
                continue
            if pause == FIRST_CHECK and moment > until + _CHECK_TOLERANCE:
                # This process did not run, so the answer may come very soon.
                pause *= 2
                continue
            if self._cannot_be_answered():
                return None
            if self._tcp is not None and has_news(self._tcp):
                return self._reason_for_news(self._tcp)
            found = self._find_far_end()
            moment = now(self._owner.timers)
            if found is not far:
                far, since = found, moment
            limit = self._last_moment(far, began, since, deadline)
            if far is FarEnd.LOST:
                self.is_lost = True
                return None
            if moment >= limit:
                return _REASONS_FOR_SILENCE[far] if limit != deadline else None
            if far is FarEnd.QUEUED:
                self._owner.wake_listener(self)
            pause = min(2 * pause, _LONGEST_CHECK)
        return None

    def _take_answer(self, began: float) -> bool:
        """Receive the datagrams in the queue.  Returns True if the wait is over.

        began: time at which the connection was open.
        """
        if self._receive():
            self._owner.note_answer(self.destination, now(self._owner.timers) - began)
            return True
        if self._ignored >= MOST_IGNORED:
            _log.info("same-host discovery: too many unexpected datagrams to %s", self.name)
            return True
        return False

    def _cannot_be_answered(self) -> bool:
        """True if no process can answer any more."""
        owner = self._owner
        if self._sock.fileno() < 0 or not owner.has_name(self):
            return True
        return not (owner.has_listener(self) or self._required)

    def _find_far_end(self) -> FarEnd:
        if self._tcp is None or self.found.is_elsewhere:
            return FarEnd.UNKNOWN  # the kernel shows only the sockets of this network namespace
        found = far_end(self._tcp)
        if found is not FarEnd.MISSING:
            return found
        if not is_open(self._tcp):
            return FarEnd.ACCEPTED  # and closed since then
        # Without connection tracking, no rule translates the addresses of the connection.
        is_plain = original_destination(self._tcp) is None
        if is_plain or (
            self._owner.has_answered(self.destination) and not has_local_end(self._tcp)
        ):
            return FarEnd.LOST
        return found

    def _reason_for_news(self, tcp: AnySocket) -> FallbackReason | None:
        """Return the reason for a missing answer, after data or an end arrived over TCP.

        Data shows that the process does not speak SMC-R, because in SMC-R the client sends first.
        An end of the connection shows nothing: None.
        """
        if not is_open(tcp):
            return None
        is_missing = self._find_far_end() is FarEnd.MISSING
        return _REASONS_FOR_SILENCE[FarEnd.MISSING if is_missing else FarEnd.ACCEPTED]

    def _last_moment(self, far: FarEnd, began: float, since: float, deadline: float) -> float:
        """Return the time at which the wait ends.

        far, since: the place of the server's end, and the time since when it has been there.
        began: time at which the connection was open.
        deadline: the deadline of the caller.
        """
        required = self._required
        if far in (FarEnd.MISSING, FarEnd.LOST):
            return since
        if far is FarEnd.ACCEPTED:
            if not required:
                return min(deadline, since + _ACCEPTED_PATIENCE)
            # The connection may have waited in a backlog until after the deadline.
            return since + (_MOST_PATIENCE if self.found else _ACCEPTED_PATIENCE)
        if far is FarEnd.UNKNOWN and required:
            return deadline if self.found else since
        if required:
            return max(deadline, began + _CONNECT_TIME) if self.found else deadline
        if far is FarEnd.OPENING:
            return min(deadline, began + _REPEATED_SYN_ACK)
        patience = self._owner.patience_for(self.destination)
        return min(deadline, max(began + patience, since + _LEAST_PATIENCE))

    def _receive(self, *, final: bool = False) -> bool:
        """Receive the datagrams in the queue.  Returns True if the server has answered.

        final: True if no further datagram can arrive; then all of them are received.
        """
        owner, sock = self._owner, self._sock
        try:
            while self._acceptance is None:
                message, sender = messages.receive(sock, owner.closer)
                if message is not None and owner.is_server(self, sender):
                    if message.kind is Kind.ACCEPTED:
                        self._acceptance = message
                        break
                    if message.kind is Kind.REFUSED:
                        self._refusal = message
                self._ignored += 1
                if self._ignored >= MOST_IGNORED and not final:
                    break
        except BlockingIOError:
            pass
        return self._acceptance is not None or self._refusal is not None

    def is_too_late(self) -> bool:
        """True if a server has accepted a connection before the announced one is open.

        That connection then belongs to another process.
        """
        return self._has_arrived() and self._receive() and self._acceptance is not None

    def withdraw(self) -> bool:
        """Withdraw the announcement, so that the open connection becomes plain TCP.

        The caller calls this before it sends any data over TCP.  Returns True if the server has
        already accepted, and still expects a CLC message.
        """
        sock, owner = self._sock, self._owner
        if sock.fileno() >= 0:
            owner.names.remove(self.name)
            if self._acceptance is None:
                # With credentials an empty datagram differs from an empty queue.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                sock.shutdown(socket.SHUT_RD)
                self._receive(final=True)
            owner.closer.discard_datagrams(sock)
            owner.settled(self)
            self._committed |= self._acceptance is not None
        return self._acceptance is not None

    def close(self) -> None:
        """End the announcement: withdraw it, or after `accepted` or `withdraw` remove its name.

        If this discovers ACCEPTED, a server has accepted another process's connection, and gets
        NOT_MINE.  Idempotent.
        """
        known = self._committed
        if self.withdraw() and not known:
            assert self._acceptance is not None
            self._owner.deny(self._acceptance.token, self.found, self.destination)

    def cancel(self) -> None:
        """Withdraw, and end the wait for an answer."""
        if self._sock.fileno() >= 0:
            notify_closing(self._sock)
        self.close()

    def abandon(self) -> None:
        """Close the descriptor in a forked child.  The announcement belongs to the parent process.

        If the child kept the descriptor and the parent were killed, the name would look alive.
        """
        self._committed = True  # the child must not send NOT_MINE
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Announcer:
    """The announcements of one stack.

    Args:
      private: the user's private directory (`Config.private_directory`).
      timers: the timers of the stack.  None: each wait has a cancel scope.
      spinner: the spinner of the stack.
      ended: called when the announcer finds that listening processes have ended, so that its caller
        can discard what it has learned about them.

    Attributes:
      timers, spinner: as above.
      closer: closes sockets to which other processes may have sent descriptors.
      names: the names of announcements.
      most_open: the limit of open announcements.
    """

    def __init__(
        self,
        private: Path,
        timers: Timers | None = None,
        spinner: Spinner = NEVER,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._private = private
        self._is_named = is_named(private)
        self.timers = timers
        self.spinner = spinner
        self.closer = Closer("announcements")
        self.names: Names = Names(private)
        self._lookups = Lookups(private, self.names, ended, timers)
        self._marked: dict[tuple[str, tuple[str, int]], float] = {}  # time, by both addresses
        # By address: True if it is translated to one of this host, and the expiry time.
        self._translated: dict[tuple[str, int], tuple[bool, float]] = {}
        # By address: seconds until an answer, and the time of the last answer.
        self._answer_times: dict[tuple[str, int], tuple[float, float]] = {}
        self._open: set[Announcement] = set()
        self.most_open: int = _most_open()
        self._waiting_callers = trio.lowlevel.ParkingLot()
        self._warned = False

    # --- announcing --------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if the limit of open announcements is reached (`wait_for_place`)."""
        return len(self._open) >= self.most_open

    async def wait_for_place(self, *, required: bool) -> None:
        """Wait until another announcement is possible, at most a second.

        required: True if the connection requires SMC-R.  Then wait as long as TCP tries to connect.
        """
        with move_on_after(self.timers, _CONNECT_TIME if required else _MOST_PATIENCE):
            while self.is_full:
                await self._waiting_callers.park()

    def announce(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        sock: AnySocket | None = None,
        *,
        required: bool = False,
        elsewhere: Found | None = None,
    ) -> Announcement | FallbackReason | None:
        """Announce a TCP connection before it is opened.

        source: the local address and port of the TCP socket.
        destination: the address and port to connect to.
        sock: the TCP socket, whose network namespace counts.  None: that of this thread.
        required: True if the connection is closed unless it becomes SMC-R.
        elsewhere: the result of `prove`, for an address of another network namespace.

        Returns an announcement.  The caller calls `Announcement.accepted` when the TCP connection
        is open, or `Announcement.close`.

        Returns a reason if the connection is plain TCP: PEER_NOT_CAPABLE if there is no listener
        and the connection is not ``required``, OTHER_USER, or the reason why the private directory
        cannot be used.

        Returns None if another connection with the same addresses is announced.
        """
        if not is_supported():
            return FallbackReason.UNSUPPORTED_PLATFORM
        destination = _without_wildcard(destination)
        try:
            found = elsewhere
            if found is None:
                namespace = self._lookups.namespace(sock)
                found = self._lookups.find(namespace, source[0], destination)
            if not found and not (required and found.reason is FallbackReason.PEER_NOT_CAPABLE):
                return found.reason
            if not required:
                silence = self._lookups.silence(found, source[0], destination)
                if silence is not None:
                    return silence
            if self.is_full:
                return FallbackReason.OUT_OF_RESOURCES
            name = announced_name(found.namespace, messages.four_tuple(source, destination))
            waiting = self.names.listen(name, required=required)
        except (DirectoryUnusable, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return None
            return self.why_not(error)
        made = Announcement(self, waiting, name, found, source[0], destination, sock, required)
        self._open.add(made)
        return made

    async def prove(
        self, source: str, destination: tuple[str, int], sock: AnySocket
    ) -> Found | FallbackReason:
        """Let listeners in other network namespaces of this host prove the path to them: that the
        network leads to them without a change of addresses.

        source: the local address from which the TCP socket is going to connect.
        destination: the address and port to connect to, not of this network namespace.
        sock: the TCP socket.

        Returns the value for the parameter ``elsewhere`` of `announce`.  Otherwise returns a
        reason: PEER_NOT_CAPABLE if there is no listener or if the private directory is not one that
        the configuration names, PATH_NOT_PROVEN if the listeners prove nothing, or another one.
        """
        if not is_supported() or not self._is_named:
            return FallbackReason.PEER_NOT_CAPABLE
        try:
            found = await self._lookups.find_elsewhere(source, destination, sock, self.closer)
        except (DirectoryUnusable, OSError) as error:
            return self.why_not(error)
        return found or found.reason

    def has_ended(
        self, source: str, destination: tuple[str, int], sock: AnySocket | None = None
    ) -> bool:
        """True if the known listeners of an address have ended.

        source, destination: the local address; the listeners' address and port.
        """
        try:
            namespace = self._lookups.namespace(sock)
            return self._lookups.has_ended(namespace, source, _without_wildcard(destination))
        except (DirectoryUnusable, OSError) as error:
            self.why_not(error)
            return False

    def mark_short(self, source: str, destination: tuple[str, int]) -> None:
        """Notify the servers at an address that connections from ``source`` use TCP because they
        are too short for SMC-R."""
        key = source, _without_wildcard(destination)
        moment = now(self.timers)
        if moment < self._marked.get(key, -math.inf) + _MARK_INTERVAL:
            return
        if len(self._marked) >= _MOST_ADDRESSES:
            self._marked.clear()
            self.names.remove_marks()
        self._marked[key] = moment
        with contextlib.suppress(DirectoryUnusable, OSError):
            name = messages.four_tuple((source, 0), key[1])
            self.names.mark(announced_name(self._lookups.namespace(None), name))

    def leads_to_listener(self, sock: AnySocket, destination: tuple[str, int]) -> bool:
        """True if this host translates ``destination`` to an address of its own, and the private
        directory has listeners.

        sock: the socket of an open connection to ``destination`` that was not announced.

        Takes one system call if this host does not track connections.  Otherwise takes about a
        millisecond, once a minute for each address.
        """
        destination = _without_wildcard(destination)
        if original_destination(sock) is None:
            return False
        moment = now(self.timers)
        known = self._translated.get(destination)
        if known is not None and moment < known[1]:
            return known[0]
        found = False
        with contextlib.suppress(DirectoryUnusable, OSError):
            if self._lookups.has_listeners(self._lookups.namespace(sock)):
                found = far_end(sock) is FarEnd.MISSING and has_local_end(sock)
        if len(self._translated) >= _MOST_ADDRESSES:
            self._translated.clear()
        self._translated[destination] = found, moment + _TRANSLATION_HOLDS
        return found

    def why_not(self, error: DirectoryUnusable | OSError) -> FallbackReason:
        """Log an error that prevents discovery.  Returns the reason why the connection is TCP."""
        # One warning is enough: every connection reports its own reason.
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(level, "no SMC-R between processes of this host: %s", error)
        if isinstance(error, DirectoryUnusable):
            return error.reason
        reason = unusable(error, self._private).reason
        if (
            reason is not FallbackReason.DIRECTORY_UNUSABLE
            or isinstance(error, PermissionError | NotADirectoryError)
            or error.errno == errno.EROFS
        ):
            return reason
        # For example no descriptors, or no /proc.  The TCP connection does not fail.
        return FallbackReason.OUT_OF_RESOURCES

    def abandon(self) -> None:
        """Close all descriptors in a forked child.  They belong to the parent process."""
        self.names.close()
        for announcement in self._open:
            announcement.abandon()
        self._open.clear()

    # --- for announcements -------------------------------------------------------------------

    def is_server(self, announcement: Announcement, sender: int | None) -> bool:
        """True if the sender of a datagram is the user of a listener that may answer."""
        if not self.names.are_shared:
            return True
        # A listener of another user may have started since the search.
        return sender is not None and (
            sender in announcement.found.users or sender in self._may_answer(announcement)
        )

    def has_name(self, announcement: Announcement) -> bool:
        """True if the name still exists."""
        return self.names.has(announcement.name)

    def has_listener(self, announcement: Announcement) -> bool:
        """True if a listener that may answer is alive now."""
        return bool(self._may_answer(announcement))

    def _may_answer(self, announcement: Announcement) -> set[int]:
        """The users of the listeners that may answer now."""
        each = announcement
        with contextlib.suppress(OSError, DirectoryUnusable):
            found = self._lookups.may_answer(each.found, each.source, each.destination)
            if found and not each.found:
                each.found = found  # the first listener has started since the search
            return found.users
        return set()

    def patience_for(self, destination: tuple[str, int]) -> float:
        """Time limit for a connection to an address in a backlog, in seconds."""
        known = self._answer_times.get(destination)
        if known is None:
            return _MOST_PATIENCE
        return min(max(_PATIENCE_FACTOR * known[0], _LEAST_PATIENCE), _MOST_PATIENCE)

    def has_answered(self, destination: tuple[str, int], since: float = -math.inf) -> bool:
        """True if a listener of this address has answered after a wait.

        since: count only answers after this time, by the clock of the stack's timers.
        """
        known = self._answer_times.get(destination)
        return known is not None and known[1] > since

    def note_answer(self, destination: tuple[str, int], seconds: float) -> None:
        """Record an answer.

        seconds: time between the opening of the connection and the answer.
        """
        times = self._answer_times
        if len(times) >= _MOST_ADDRESSES:
            times.clear()
        before, _ = times.get(destination, (0.0, 0.0))
        times[destination] = max(seconds, _ANSWER_TIME_DECAY * before), now(self.timers)

    def wake_listener(self, announcement: Announcement) -> None:
        """Called while the connection waits in a backlog.  A subclass that has listeners notifies
        the one that may answer."""

    def note_silence(self, announcement: Announcement, reason: FallbackReason) -> None:
        """Record that no listener has answered: connections to the address are TCP for a minute."""
        self._lookups.note_silence(announcement.found, announcement.destination, reason)

    def forget_silence(self, announcement: Announcement) -> None:
        """Record that a listener has answered."""
        self._lookups.forget_silence(announcement.found, announcement.destination)

    def settled(self, announcement: Announcement) -> None:
        """Called when an announcement was withdrawn: wake the next caller of `wait_for_place`."""
        self._open.discard(announcement)
        if self._waiting_callers:
            self._waiting_callers.unpark()

    def deny(self, token: bytes, found: Found, destination: tuple[str, int]) -> None:
        """Send NOT_MINE to all listeners.  Only the listener that made the token recognises it."""
        if token:
            with contextlib.suppress(OSError, DirectoryUnusable):
                self._lookups.send_to_all(found, destination, messages.not_mine(token))


@functools.lru_cache(_CACHED_ADDRESSES)
def _without_wildcard(destination: tuple[str, int]) -> tuple[str, int]:
    """The address and port that connect(2) reaches: loopback for a wildcard address."""
    host = plain_address(destination[0])
    return _LOOPBACK_OF.get(host, host), destination[1]


def _most_open() -> int:
    """Limit of open announcements, so that enough descriptors remain for the program."""
    if not is_supported():
        return MOST_OPEN
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_OPEN
    return min(MOST_OPEN, max(limit // _DESCRIPTOR_SHARE, 1))
