"""Views of link groups for users, read-only.

A view has one reference to its core, which is the internal object, and reads every value on access.
So a view is always up to date, and costs nothing while it is not used.  Two views of the same core
are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from trio_smc._base.statistics import Agreed
from trio_smc.datapath.rmb import Rmb
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.links.link import Link
from trio_smc.rendezvous.links.link_set import LinkGroupKind
from trio_smc.wire.fields import eid_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.rnic.verbs import Rnic

__all__ = ["LinkGroupKind", "LinkGroupView", "LinkView", "RmbView", "View"]

_Core = TypeVar("_Core")


class View(Generic[_Core]):
    """A read-only view of a core; equal to every other view of the same core."""

    __slots__ = ("_core",)

    def __init__(self, core: _Core) -> None:
        self._core = core

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and other._core is self._core

    def __hash__(self) -> int:
        return hash(self._core)


class LinkView(View[Link]):
    """The current state of one link of a group."""

    __slots__ = ()

    @property
    def number(self) -> int:
        """The number, unique within the group; the server assigns it (RFC 7609, 3.5.1.5)."""
        return self._core.number

    @property
    def state(self) -> str:
        """INIT, CONFIRMING, ACTIVE, TESTING, LEAVING or DOWN; see `trio_smc.states.link`."""
        return self._core.state

    @property
    def rnic(self) -> Rnic:
        """The RNIC of this side."""
        return self._core.rnic

    @property
    def user_id(self) -> int:
        """This side's link user ID, 32 bits; for display only (A.3.1)."""
        return self._core.user_id

    @property
    def peer_user_id(self) -> int:
        """The peer's link user ID; 0 before the link is confirmed."""
        return self._core.peer_user_id

    @property
    def peer_gid(self) -> bytes | None:
        """The GID of the peer's end, 16 bytes; None while it is unknown."""
        peer = self._core.peer
        return None if peer is None else peer.gid

    @property
    def connections(self) -> int:
        """Number of connections that send on the link, including those that are closing."""
        return self._core.load

    def __repr__(self) -> str:
        return f"<link {self.number} {self.state} on {self.rnic.name}>"


class RmbView(View[Rmb]):
    """The current state of one RMB of this side."""

    __slots__ = ()

    @property
    def element_size(self) -> int:
        """Bytes of each element: 16 KiB << n."""
        return self._core.element_size

    @property
    def elements(self) -> int:
        """Number of elements, 1 to 255."""
        return len(self._core.elements)

    @property
    def in_use(self) -> int:
        """Number of elements that belong to a connection."""
        return self._core.in_use

    def __repr__(self) -> str:
        return f"<RMB {self.in_use}/{self.elements} elements of {self.element_size} bytes>"


class LinkGroupView(View[LinkGroup]):
    """A link group (RFC 7609, 2.2): the links and RMBs that connections to one peer share.

    A read-only view, from `Stack.link_groups` or `SmcStream.link_group`.  The view may outlive the
    group; its `state` is then "GONE".
    """

    __slots__ = ("_check",)

    def __init__(self, core: LinkGroup, check: Callable[[], None]) -> None:
        super().__init__(core)
        self._check = check

    @property
    def role(self) -> Literal["client", "server"]:
        """The role of this stack in the first TCP connection of the group."""
        return "client" if self._core.client else "server"

    @property
    def peer_id(self) -> bytes:
        """The peer's 8-byte peer ID."""
        return self._core.peer_id

    @property
    def version(self) -> int:
        """The version of SMC-R: 2 if the sides have a common UEID (`Config.ueids`), otherwise 1."""
        return self._core.terms.version

    @property
    def release(self) -> int:
        """The release of version 2: 0 or 1; always 0 in version 1."""
        return self._core.terms.release

    @property
    def ueid(self) -> str | None:
        """The common UEID of the two sides in version 2; None in version 1."""
        return eid_name(self._core.terms.eid) or None

    @property
    def direct(self) -> bool:
        """True if the RNICs of both sides reach each other without a gateway, as in version 1."""
        return self._core.terms.direct

    @property
    def agreed(self) -> Agreed:
        """Version, release, UEID and `direct`, as in `StackStatistics` and `StackEvent`."""
        return self._core.agreed

    @property
    def kind(self) -> LinkGroupKind:
        """Single, asymmetric or symmetric."""
        return self._core.kind

    @property
    def state(self) -> str:
        """FORMING, SINGLE, ASYMMETRIC, SYMMETRIC, TERMINATING or GONE.

        See `trio_smc.states.link_group`.
        """
        return self._core.state

    @property
    def drained(self) -> bool:
        """True if `Stack.drain_link_group` takes the group out of service."""
        return self._core.drained

    @property
    def links(self) -> tuple[LinkView, ...]:
        """The links that are not DOWN, ordered by number."""
        links = sorted(self._core.links.items())
        return tuple(LinkView(core) for _, core in links if core.state != "DOWN")

    @property
    def rmbs(self) -> tuple[RmbView, ...]:
        """This side's RMBs, oldest first."""
        if self._core.state == "GONE":
            return ()
        return tuple(RmbView(rmb) for rmb in self._core.own_rmbs.pool.rmbs)

    def delete_link(self, number: int) -> None:
        """Delete one link; connections leave it first (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

        A client requests the deletion from its server.

        The message to the peer has reason 0x00020000, "operator initiated" (A.3.4), because the
        link works, and the caller takes it out of service.

        If this is the last link, the group ends, and its connections are reset.  The method returns
        at once.  It has no effect if a client's request to delete this link is pending.

        Args:
          number: number of a link in `links`.

        Raises:
          ValueError: the group has no such link.
          RuntimeError: the caller is a forked child process.
        """
        self._check()
        if all(link.number != number for link in self.links):
            raise ValueError(f"the link group has no link {number}")
        self._core.delete_link(number)

    def terminate(self) -> None:
        """End the group: reset its connections, then delete its links (RFC 7609, 3.5.4).

        The message to the peer has reason 0x00030000, "program initiated" (A.3.4), like that for an
        idle group or at the close of a stack.  New connections to the peer form a new group.  The
        method returns at once, and is idempotent.

        Raises:
          RuntimeError: the caller is a forked child process.
        """
        self._check()
        self._core.terminate()

    def __repr__(self) -> str:
        return f"<LinkGroup {self.kind} {self.state} as {self.role} of {self.peer_id.hex()}>"
