"""The reasons why a connection uses TCP, with their diagnosis words on the wire and remedies.

RFC 7609 leaves the 4-byte diagnosis of an SMC Decline to the implementation (A.2.4).  The words
used here are those of Linux, so that its tools can explain ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

__all__ = ["Diagnosis", "Fallback", "FallbackReason", "Mode", "Origin"]


class Mode(StrEnum):
    """How a stream's bytes travel."""

    SMC_R = "smc-r"
    TCP = "tcp"


class Origin(StrEnum):
    """The side that decided to stay on TCP."""

    LOCAL = "local"
    PEER = "peer"


class Diagnosis(IntEnum):
    """Diagnosis words of an SMC Decline (RFC 7609, A.2.4)."""

    OUT_OF_MEMORY = 0x01010000
    CONFIRM_LINK_TIMEOUT = 0x02010000
    ADD_LINK_TIMEOUT = 0x02020000
    CONFIGURATION = 0x03000000
    PEER_NOT_CAPABLE = 0x03010000
    NO_DEVICE = 0x03030000
    NO_V2_DEVICE = 0x03030002
    NO_V2_OFFER = 0x03030004
    NO_UEID = 0x03030008
    RELEASE_MISMATCH = 0x03030009
    MAX_CONNECTIONS = 0x0303000A
    MAX_LINKS = 0x0303000B
    MODE_MISMATCH = 0x03040000
    EYE_CATCHER = 0x03050000
    PREFIX_MISMATCH = 0x03070000
    NO_ACTIVE_LINK = 0x030A0000
    LINK_NOT_FOUND = 0x030B0000
    VERSION_MISMATCH = 0x030C0000
    NO_ROUTE = 0x030E0000
    ROUTE_MISMATCH = 0x030F0000
    OUT_OF_SYNC = 0x04000000
    PEER_DECLINED = 0x05000000
    INTERNAL = 0x09990000


class FallbackReason(StrEnum):
    """Why a connection stays on TCP."""

    PEER_NOT_CAPABLE = "peer-not-capable"
    """The peer has not announced SMC-R."""
    NO_RNIC = "no-rnic"
    """No RNIC of this stack serves the route of the connection."""
    RNIC_DOWN = "rnic-down"
    """The port of the RNIC that serves the route is down, or an operator drains the RNIC or the
    link group."""
    PREFIX_MISMATCH = "prefix-mismatch"
    """The two sides are not on one IP subnet (RFC 7609, 3.5.1.2)."""
    OUT_OF_RESOURCES = "out-of-resources"
    """Memory, queue pairs, RMB elements or local ports are exhausted."""
    OUT_OF_SYNC = "out-of-sync"
    """The server named a link group that the client does not know (RFC 7609, 3.5.2.2)."""
    RESERVED_VALUE = "reserved-value"
    """A message contained an enumerated value that RFC 7609 reserves (C.1)."""
    VERSION_MISMATCH = "version-mismatch"
    """No protocol version is common to both sides."""
    MODE_MISMATCH = "mode-mismatch"
    """The peer offers only another kind of SMC: SMC-D, or version 2 to a side without UEIDs."""
    NO_COMMON_UEID = "no-common-ueid"
    """The two sides have no common UEID, which SMC-R version 2 requires.  Linux uses the same word
    for a missing RNIC."""
    NO_ROUTE = "no-route"
    """No route leads from the RNIC to the GID that the peer names (version 2)."""
    ROUTE_MISMATCH = "route-mismatch"
    """The server reports a gateway between the RNICs, and there is none (version 2)."""
    RELEASE_MISMATCH = "release-mismatch"
    """The peer names a release of version 2 that was not agreed on."""
    CONNECTION_LIMIT = "connection-limit"
    """The two sides cannot agree on the number of connections in a link group (version 2)."""
    LINK_LIMIT = "link-limit"
    """The two sides cannot agree on the number of links in a link group (version 2)."""
    EYE_CATCHER = "eye-catcher"
    """The peer does not accept RMB elements with eye catchers (RFC 7609, 4.2)."""
    LINK_FAILED = "link-failed"
    """The RoCE path could not be confirmed before data flowed (RFC 7609, C.2)."""
    HANDSHAKE_LIMIT = "handshake-limit"
    """The listener has `Config.handshake_limit` or more handshakes in progress; or the client is on
    this host, and the listener has nearly as many as it can have."""
    TCP_OPTION_UNAVAILABLE = "tcp-option-unavailable"
    """This system cannot send the TCP option, or no program sends it for this process."""
    TCP_OPTION_NOT_PERMITTED = "tcp-option-not-permitted"
    """This process may not use the TCP option, and an administrator has not set it up for it."""
    DIRECTORY_UNUSABLE = "directory-unusable"
    """The user's private directory is missing, not private or cannot be written."""
    OTHER_USER = "other-user"
    """The process at the other end, or the private directory, belongs to another user."""
    DIRECTORY_FULL = "directory-full"
    """The file system of the private directory has no inodes, room or quota left."""
    PATH_NOT_PROVEN = "path-not-proven"
    """The address does not lead directly to a listener that shares the directory: it is translated,
    on this host, or on the way to another network namespace."""
    NOT_ACCEPTED = "not-accepted"
    """The listener's process has not accepted the connection in time."""
    ENDED_IN_HANDSHAKE = "ended-in-handshake"
    """The peer has ended the TCP connection before the handshake was complete."""
    LOCAL_VERSION_MISMATCH = "local-version-mismatch"
    """The two processes have no common version of same-host discovery."""
    UNSUPPORTED_PLATFORM = "unsupported-platform"
    """trio_smc does not support this operating system, or Python without the GIL; or the system
    refuses a call that SMC-R needs."""
    NOT_PERMITTED = "not-permitted"
    """`Config.allow` or `Config.deny` keeps this connection on TCP."""
    SHORT_CONNECTIONS = "short-connections"
    """Connections with this peer have carried too little to gain (`Config.learn_short`)."""
    ALREADY_CONNECTED = "already-connected"
    """The program passed a connected socket to Trio, so the handshake could not run."""
    ALREADY_SHUT_DOWN = "already-shut-down"
    """The program called shutdown on the socket before it connected, so no handshake can run."""
    MULTIPATH = "multipath"
    """The program uses an MPTCP socket, which can have several TCP connections."""
    DECLINED = "declined"
    """The peer declined with a diagnosis word that this side does not know."""


@dataclass(frozen=True, slots=True)
class _Explanation:
    message: str
    remedy: str
    code: Diagnosis
    at_decider: bool = False
    """True: the side that decided, local or peer, must apply the remedy."""


_EXPLANATIONS: dict[FallbackReason, _Explanation] = {
    FallbackReason.PEER_NOT_CAPABLE: _Explanation(
        "the peer did not announce SMC-R",
        "run trio_smc at both ends; across hosts set up the TCP option or use discovery='assume'",
        Diagnosis.PEER_NOT_CAPABLE,
    ),
    FallbackReason.NO_RNIC: _Explanation(
        "no RNIC serves the route of the connection",
        "install pyverbs, or name a port in Config(rnics=..., pnet=...); containers of one host "
        "can share Config(directory=...)",
        Diagnosis.NO_DEVICE,
        at_decider=True,
    ),
    FallbackReason.RNIC_DOWN: _Explanation(
        "the port of the RNIC that serves the route is down, or an operator drains the RNIC",
        "bring the RNIC's port up again, or end its drain with 'trio-smc undrain'",
        Diagnosis.NO_DEVICE,
        at_decider=True,
    ),
    FallbackReason.PREFIX_MISMATCH: _Explanation(
        "client and server are not on one IP subnet",
        "connect within one subnet or IPv6 prefix; SMC-R version 1 cannot leave it",
        Diagnosis.PREFIX_MISMATCH,
    ),
    FallbackReason.OUT_OF_RESOURCES: _Explanation(
        "memory, queue pairs or RMB elements are exhausted",
        "lower receive_buffer, close idle connections or raise the memory limit",
        Diagnosis.OUT_OF_MEMORY,
        at_decider=True,
    ),
    FallbackReason.OUT_OF_SYNC: _Explanation(
        "the server named a link group that the client does not know",
        "nothing to do: the next connection will create a new link group",
        Diagnosis.OUT_OF_SYNC,
    ),
    FallbackReason.RESERVED_VALUE: _Explanation(
        "the peer used a value that RFC 7609 reserves",
        "check the peer's implementation and version",
        Diagnosis.CONFIGURATION,
    ),
    FallbackReason.VERSION_MISMATCH: _Explanation(
        "no SMC-R version is common to both sides",
        "upgrade the older side",
        Diagnosis.VERSION_MISMATCH,
    ),
    FallbackReason.MODE_MISMATCH: _Explanation(
        "the peer offers only SMC-D or, to a side without a UEID, SMC-R version 2",
        "enable SMC-R at the peer, or name its UEID in Config(ueids=...)",
        Diagnosis.MODE_MISMATCH,
    ),
    FallbackReason.NO_COMMON_UEID: _Explanation(
        "no UEID is common to both sides, or an RNIC for SMC-R version 2 is missing",
        "give both sides the same UEID: Config(ueids=...), or 'smcr ueid add' at a Linux kernel",
        Diagnosis.NO_DEVICE,
    ),
    FallbackReason.NO_ROUTE: _Explanation(
        "no route leads to the peer's RNIC",
        "give both RNICs' interfaces IPv4 addresses, and routes to each other",
        Diagnosis.NO_ROUTE,
    ),
    FallbackReason.ROUTE_MISMATCH: _Explanation(
        "the server reaches the client's RNIC through a gateway, and the client needs none",
        "make the routes between the two RNICs' addresses the same in both directions",
        Diagnosis.ROUTE_MISMATCH,
    ),
    FallbackReason.RELEASE_MISMATCH: _Explanation(
        "the peer names a release of SMC-R version 2 that was not agreed on",
        "upgrade the peer: its Accept or Confirm breaks the rules of version 2",
        Diagnosis.RELEASE_MISMATCH,
    ),
    FallbackReason.CONNECTION_LIMIT: _Explanation(
        "the two sides cannot agree on the number of connections in a link group",
        "allow 16 or more connections: net.smc.smcr_max_conns_per_lgr at a Linux kernel",
        Diagnosis.MAX_CONNECTIONS,
    ),
    FallbackReason.LINK_LIMIT: _Explanation(
        "the two sides cannot agree on the number of links in a link group",
        "allow one or two links: net.smc.smcr_max_links_per_lgr at a Linux kernel",
        Diagnosis.MAX_LINKS,
    ),
    FallbackReason.EYE_CATCHER: _Explanation(
        "the peer does not accept RMB elements with eye catchers",
        "leave Config(rmbe_eye_catcher=...) off for this peer",
        Diagnosis.EYE_CATCHER,
    ),
    FallbackReason.LINK_FAILED: _Explanation(
        "the RDMA path could not be confirmed",
        "check that the two RNICs reach each other",
        Diagnosis.CONFIRM_LINK_TIMEOUT,
    ),
    FallbackReason.HANDSHAKE_LIMIT: _Explanation(
        "the listener has too many handshakes in progress",
        "raise Config(handshake_limit=...), or connect more slowly",
        Diagnosis.OUT_OF_MEMORY,
        at_decider=True,
    ),
    FallbackReason.TCP_OPTION_UNAVAILABLE: _Explanation(
        "the TCP option that announces SMC-R cannot be sent from here",
        "run 'trio-smc setup' as root on Linux 5.15 or newer, or use discovery='assume'",
        Diagnosis.CONFIGURATION,
        at_decider=True,
    ),
    FallbackReason.TCP_OPTION_NOT_PERMITTED: _Explanation(
        "the process may not use the TCP option that announces SMC-R",
        "run 'trio-smc setup --group GROUP' as root, with a group of this user",
        Diagnosis.CONFIGURATION,
        at_decider=True,
    ),
    FallbackReason.DIRECTORY_UNUSABLE: _Explanation(
        "the private directory cannot be used",
        "give it a parent directory, and mode 0700, or 3770 if a group shares it; 'trio-smc check' "
        "and the log name the cause",
        Diagnosis.CONFIGURATION,
        at_decider=True,
    ),
    FallbackReason.OTHER_USER: _Explanation(
        "the process at the other end, or the private directory, belongs to another user",
        "run both processes as one user with one Config(directory=...), or share it in a group",
        Diagnosis.PEER_NOT_CAPABLE,
    ),
    FallbackReason.PATH_NOT_PROVEN: _Explanation(
        "the address does not lead directly to a process that shares the directory: NAT, a proxy, "
        "or another host",
        "connect to the listener's own address, without NAT, proxy or closed ports in between",
        Diagnosis.PEER_NOT_CAPABLE,
    ),
    FallbackReason.DIRECTORY_FULL: _Explanation(
        "the file system of the private directory is full",
        "free inodes or room there (df -i, df), or name another Config(directory=...)",
        Diagnosis.CONFIGURATION,
        at_decider=True,
    ),
    FallbackReason.NOT_ACCEPTED: _Explanation(
        "the listening process has not accepted the connection in time",
        "check that this process runs and accepts: it may be stopped, busy, or have set "
        "TCP_DEFER_ACCEPT",
        Diagnosis.PEER_NOT_CAPABLE,
    ),
    FallbackReason.ENDED_IN_HANDSHAKE: _Explanation(
        "the peer ended the connection during the SMC-R handshake",
        "find out why the peer's process closed the connection, or ended",
        Diagnosis.PEER_NOT_CAPABLE,
    ),
    FallbackReason.LOCAL_VERSION_MISMATCH: _Explanation(
        "the two processes have no common version of same-host discovery",
        "use the same trio_smc release in both processes",
        Diagnosis.VERSION_MISMATCH,
    ),
    FallbackReason.UNSUPPORTED_PLATFORM: _Explanation(
        "SMC-R does not work on this operating system, or with this Python",
        "run both ends on Linux, with a Python that has the GIL, and in a sandbox that allows the "
        "call that the log names",
        Diagnosis.CONFIGURATION,
    ),
    FallbackReason.NOT_PERMITTED: _Explanation(
        "the allow and deny lists exclude this connection from SMC-R",
        "change Config(allow=...) or Config(deny=...) if that was not intended",
        Diagnosis.CONFIGURATION,
        at_decider=True,
    ),
    FallbackReason.SHORT_CONNECTIONS: _Explanation(
        "earlier connections with this peer carried too little data to gain from SMC-R",
        "nothing to do: every few minutes SMC-R is tried again; or set Config(learn_short=False)",
        Diagnosis.CONFIGURATION,
    ),
    FallbackReason.ALREADY_CONNECTED: _Explanation(
        "the socket was connected before it was passed to Trio",
        "connect or accept with Trio's functions, or pass the listening socket to Trio",
        Diagnosis.CONFIGURATION,
    ),
    FallbackReason.ALREADY_SHUT_DOWN: _Explanation(
        "the program called shutdown on the socket before it connected or listened",
        "connect or listen with a new socket",
        Diagnosis.CONFIGURATION,
    ),
    FallbackReason.MULTIPATH: _Explanation(
        "MPTCP sockets cannot use SMC-R",
        "create the socket with the protocol TCP (0 or IPPROTO_TCP)",
        Diagnosis.CONFIGURATION,
    ),
    FallbackReason.DECLINED: _Explanation(
        "the peer declined SMC-R",
        "look up the diagnosis code in the peer's documentation",
        Diagnosis.PEER_DECLINED,
    ),
}

# The reasons for words received in a Decline.  Other words are kept only as a number.
_MEANING: dict[int, FallbackReason] = {
    Diagnosis.OUT_OF_MEMORY: FallbackReason.OUT_OF_RESOURCES,
    Diagnosis.CONFIRM_LINK_TIMEOUT: FallbackReason.LINK_FAILED,
    Diagnosis.ADD_LINK_TIMEOUT: FallbackReason.LINK_FAILED,
    Diagnosis.PEER_NOT_CAPABLE: FallbackReason.PEER_NOT_CAPABLE,
    Diagnosis.NO_DEVICE: FallbackReason.NO_RNIC,
    Diagnosis.NO_V2_DEVICE: FallbackReason.NO_RNIC,
    Diagnosis.NO_V2_OFFER: FallbackReason.VERSION_MISMATCH,
    Diagnosis.NO_UEID: FallbackReason.NO_COMMON_UEID,
    Diagnosis.RELEASE_MISMATCH: FallbackReason.RELEASE_MISMATCH,
    Diagnosis.MAX_CONNECTIONS: FallbackReason.CONNECTION_LIMIT,
    Diagnosis.MAX_LINKS: FallbackReason.LINK_LIMIT,
    Diagnosis.NO_ROUTE: FallbackReason.NO_ROUTE,
    Diagnosis.ROUTE_MISMATCH: FallbackReason.ROUTE_MISMATCH,
    Diagnosis.MODE_MISMATCH: FallbackReason.MODE_MISMATCH,
    Diagnosis.EYE_CATCHER: FallbackReason.EYE_CATCHER,
    Diagnosis.PREFIX_MISMATCH: FallbackReason.PREFIX_MISMATCH,
    Diagnosis.VERSION_MISMATCH: FallbackReason.VERSION_MISMATCH,
    Diagnosis.OUT_OF_SYNC: FallbackReason.OUT_OF_SYNC,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """The reason why one connection uses TCP.

    Attributes:
      reason: the reason.
      origin: the side that decided.
      code: the diagnosis word that this side found or sent, or None.
      peer_code: the diagnosis word of the peer's SMC Decline, or None.
    """

    reason: FallbackReason
    origin: Origin
    code: int | None = None
    peer_code: int | None = None

    @classmethod
    def local(cls, reason: FallbackReason) -> Fallback:
        """A fallback that this side decided."""
        return _LOCAL[reason]

    @classmethod
    def reasons_with(cls, diagnosis: int) -> list[FallbackReason]:
        """The reasons for which this side sends a Decline with this diagnosis word."""
        return [reason for reason, fallback in _LOCAL.items() if fallback.code == diagnosis]

    @classmethod
    def from_peer(cls, diagnosis: int, *, ueids: bool = False) -> Fallback:
        """A fallback that the peer requested by a Decline with this diagnosis word.

        Args:
          diagnosis: the word.
          ueids: this side offered version 2.  If Linux has none of this side's UEIDs, it answers
            with NO_DEVICE.
        """
        reason = _MEANING.get(diagnosis, FallbackReason.DECLINED)
        if ueids and diagnosis == Diagnosis.NO_DEVICE:
            reason = FallbackReason.NO_COMMON_UEID
        return cls(
            reason=reason,
            origin=Origin.PEER,
            code=int(Diagnosis.PEER_DECLINED),
            peer_code=diagnosis,
        )

    def as_dict(self) -> dict[str, str | int | None]:
        """All fields, the message and the remedy as plain values, for JSON."""
        return {
            "reason": self.reason.value,
            "origin": self.origin.value,
            "code": self.code,
            "peer_code": self.peer_code,
            "message": self.message,
            "remedy": self.remedy,
        }

    @property
    def message(self) -> str:
        """One sentence, without a full stop."""
        text = _EXPLANATIONS[self.reason].message
        if self.peer_code is not None:
            return f"{text} (reported by the peer, diagnosis 0x{self.peer_code:08x})"
        return f"{text} (reported by the peer)" if self.origin is Origin.PEER else text

    @property
    def remedy(self) -> str:
        """A remedy for the operator, without a full stop."""
        explanation = _EXPLANATIONS[self.reason]
        elsewhere = explanation.at_decider and self.origin is Origin.PEER
        return f"at the peer: {explanation.remedy}" if elsewhere else explanation.remedy


# Made once, because each connection over TCP has one, and they never change.
_LOCAL: Final = {
    reason: Fallback(reason=reason, origin=Origin.LOCAL, code=int(explanation.code))
    for reason, explanation in _EXPLANATIONS.items()
}
