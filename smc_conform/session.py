"""The common parts of all checks of a run: options, RNICs, TCP connections."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import trio

from smc_conform.device import Device, open_rnic
from smc_conform.roles import Role
from smc_conform.verdicts import Inconclusive
from trio_smc.host.private_directory import default_directories
from trio_smc.host.tcp import peer_end, unread_bytes

__all__ = ["Options", "Session", "open_session", "reason"]

_Arrival: TypeAlias = tuple[float, trio.SocketStream]
_WATCH: Final = 0.05
_LAG: Final = 0.05
"""Seconds by which this process runs late, and that count as a stall."""
_STALL: Final = 0.4
"""Seconds of stalls that make a failure doubtful."""
_HOSTS: Final = 254
"""Values of the last byte of an IPv4 address in a network of 256; 0 and 255 are no hosts."""
_STALE: Final = 1.0
"""Seconds after which an accepted connection that no check has taken is closed: the client's timer
for SMC Accept runs (RFC 7609, C.5)."""


_RETRY: Final = 0.2
"""Seconds between attempts to connect with an implementation that may be gone."""
_PATIENCES_TO_RETURN: Final = 12
"""An implementation that does not answer, and does not refuse either, may take so many times the
patience before it counts as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of the user.

    Attributes:
      role: of the implementation under test.
      host, port: its address, or the suite's own if it is a client.
      rnics: names for `open_rnic`; one or two.
      directory: the private directory of software RNICs; None: the user's own.
      version: of SMC-R.
      ueid: for version 2; empty: any that a client offers.
      eye_catcher: elements of the suite have the RFC's eye catcher.
      patience: seconds that the implementation may take for any step.
      timers: seconds of the longest time-out of the implementation.
      jobs: checks at a time.
      seed: of all random choices.
      daytime, discard: the ports of these services; None: there is none.  A client connects to the
        suite's `discard` and only reads.
      max_failures: end the run at this many failures; None: run all checks.
      provides: further keys of `registry.NEEDS` that the implementation and the set-up have.
    """

    role: Role
    host: str
    port: int
    rnics: tuple[str, ...] = ("soft", "soft")
    directory: Path | None = None
    version: int = 1
    ueid: str = ""
    eye_catcher: bool = False
    patience: float = 5.0
    timers: float = 10.0
    jobs: int = 1
    seed: int = 0
    daytime: int | None = None
    discard: int | None = None
    max_failures: int | None = None
    provides: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Session:
    """One run.

    Attributes:
      devices: the RNICs; the second one is for further links.
      port, discard: on which the suite listens, if the implementation is a client; `discard` is for
        its discard service.
      arrived: connections that the suite has accepted on `port`.
      unreached: why the last attempt to connect has failed; empty after a success.
      refused: the last attempt was refused, and not just not answered.
    """

    options: Options
    devices: list[Device]
    nursery: trio.Nursery
    port: int = 0
    discard: int = 0
    arrived: int = 0
    unreached: str = ""
    refused: bool = False
    _arrivals: dict[int, trio.MemoryReceiveChannel[_Arrival]] = field(default_factory=dict)
    _stalls: list[tuple[float, float]] = field(default_factory=list)
    _instances: Iterator[int] = field(
        default_factory=partial(itertools.count, secrets.randbits(16))
    )
    _hosts: Iterator[int] = field(
        default_factory=partial(itertools.count, secrets.randbelow(_HOSTS))
    )
    _claims: dict[bytes, object] = field(default_factory=dict)

    async def watch_itself(self) -> None:
        """Note when this process does not run for a while, because the host is busy."""
        while True:
            before = time.monotonic()
            await trio.sleep(_WATCH)
            lag = time.monotonic() - before - _WATCH
            if lag > _LAG:
                self._stalls.append((before, lag))

    def stood_still(self, since: float) -> float:
        """Seconds, since a time of `time.monotonic`, in which this process did not run.

        0 if there were so few that they have not changed the result of a check.
        """
        lags = sum(lag for when, lag in self._stalls if when + lag >= since)
        return lags if lags > _STALL else 0.0

    def new_instance(self) -> int:
        """An instance number for a peer ID (A.2.1) that this run has not had in 65,536 calls.

        With random numbers two of a thousand link groups often had the same one.
        """
        return next(self._instances) & 0xFFFF

    def new_gid(self) -> bytes:
        """A GID of version 2 that no RNIC of the suite has, and that no other check of the run has.

        It is an address in the network of 256 addresses around the first RNIC, so that the
        implementation has the same route to both.
        """
        taken = {device.rnic.gid for device in self.devices}
        while True:
            gid = self.devices[0].rnic.gid[:-1] + bytes((1 + next(self._hosts) % _HOSTS,))
            if gid not in taken and gid not in self._claims:
                return gid

    def claim(self, identity: bytes, owner: object) -> None:
        """Note that one check has an identity, by which the implementation finds link groups.

        The claim lasts as long as the run, because the implementation may keep a link group after
        the check that has made the group.

        Args:
          identity: the peer ID of the suite, or its GID if it sends no peer ID.
          owner: the check, as the object that all its handshakes share.

        Raises:
          RuntimeError: another check has this identity.
        """
        if self._claims.setdefault(identity, owner) is not owner:
            raise RuntimeError(f"another check of this run has the identity {identity.hex()}")

    @property
    def role(self) -> Role:
        """The role of the implementation under test."""
        return self.options.role

    @property
    def patience(self) -> float:
        """Seconds that the implementation may take for any step."""
        return self.options.patience

    @property
    def eye_catcher(self) -> bool:
        """True if elements of the suite have the RFC's eye catcher."""
        return self.options.eye_catcher

    @property
    def roce(self) -> bool:
        """True if the suite uses RoCE ports."""
        return self.devices[0].rnic.kind == "roce"

    async def tcp(self, port: int = 0) -> trio.SocketStream:
        """The next TCP connection with the implementation.

        Args:
          port: of another service than the echo service; 0: the echo service.

        Raises:
          Inconclusive: there is none.
        """
        options = self.options
        try:
            with trio.fail_after(options.patience):
                if self.role is Role.SERVER:
                    stream = await trio.open_tcp_stream(options.host, port or options.port)
                else:
                    stream = await self._next_arrival(self._arrivals[port or self.port])
        except trio.TooSlowError:
            text = "no TCP connection with the implementation in time"
            if self.role is Role.CLIENT:
                text = f"no client has connected to port {port or self.port} in time"
            if not port:
                self.unreached, self.refused = text, False
            raise Inconclusive(text) from None
        except OSError as error:
            what = "open" if self.role is Role.SERVER else "accept"
            text = f"the suite could not {what} a TCP connection: {reason(error)}"
            if not port:
                self.unreached, self.refused = text, True
            raise Inconclusive(text) from error
        if not port:
            self.unreached = ""
        return stream

    async def listen(self, port: int) -> int:
        """Accept the connections of a client that come to this port; returns the port.

        Args:
          port: 0: a free one.

        Raises:
          OSError: the port cannot be used.
        """
        listeners = await trio.open_tcp_listeners(port, host=self.options.host or None)
        port = listeners[0].socket.getsockname()[1]
        send, self._arrivals[port] = trio.open_memory_channel[_Arrival](1024)
        for listener in listeners:
            self.nursery.start_soon(self._accept, port, listener, send)
        return port

    async def _accept(
        self, port: int, listener: trio.SocketListener, send: trio.MemorySendChannel[_Arrival]
    ) -> None:
        async with listener:
            while True:
                stream = await listener.accept()
                self.arrived += port == self.port
                try:
                    await send.send((trio.current_time(), stream))
                except BaseException:
                    stream.socket.close()
                    raise

    async def _next_arrival(
        self, arrivals: trio.MemoryReceiveChannel[_Arrival]
    ) -> trio.SocketStream:
        while True:
            when, stream = await arrivals.receive()
            if trio.current_time() - when < _STALE:
                return stream
            stream.socket.close()

    def doubt(self, text: str) -> None:
        """Note a sign that the implementation is gone, although connections were not refused."""
        self.unreached, self.refused = self.unreached or text, False

    def close_arrivals(self) -> None:
        """Close the accepted connections that no check has taken."""
        for arrivals in self._arrivals.values():
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    _, stream = arrivals.receive_nowait()
                    stream.socket.close()

    async def gone(self) -> str:
        """Why the implementation cannot be reached any more; empty if it can be.

        A refused connection is tried again until the patience ends, because a program may restart.
        If there is no answer at all, or no client connects, this takes longer.
        """
        begin = trio.current_time()
        longest = self.patience * _PATIENCES_TO_RETURN + self.options.timers
        while self.unreached:
            if trio.current_time() - begin > (self.patience if self.refused else longest):
                return self.unreached
            await trio.sleep(_RETRY)
            if self.unreached:  # no check has connected meanwhile
                text = self.unreached
                with contextlib.suppress(Inconclusive):
                    stream = await self.tcp()
                    if peer_end(stream.socket) != "none" and not unread_bytes(stream.socket):
                        self.doubt(text)  # a client that has gone leaves such connections
                    stream.socket.close()
        return ""


def reason(error: BaseException) -> str:
    """The cause of an error in words: that of each attempt to connect, if there were several."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(reason(each) for each in cause.exceptions))
    if isinstance(cause, OSError):
        return reason(cause)
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number and number > 0 else str(error)


@asynccontextmanager
async def open_session(options: Options) -> AsyncIterator[Session]:
    """Open the RNICs, and a listener if the implementation is a client.

    Raises:
      OSError: an RNIC or the listener cannot be opened.
    """
    directory = options.directory or default_directories()[0]
    with contextlib.ExitStack() as opened:
        devices = []
        for name in options.rnics:
            device = Device(open_rnic(name, directory, options.version))
            opened.callback(device.rnic.close)
            devices.append(device)
        async with trio.open_nursery() as nursery:
            for device in devices:
                nursery.start_soon(device.run)
            session = Session(options, devices, nursery)
            # Only when the nursery has ended: until then a client may connect.
            opened.callback(session.close_arrivals)
            nursery.start_soon(session.watch_itself)
            if options.role is Role.CLIENT:
                session.port = await session.listen(options.port)
                if options.discard is not None:
                    session.discard = await session.listen(options.discard)
            elif options.discard is not None:
                session.discard = options.discard
            yield session
            nursery.cancel_scope.cancel()
