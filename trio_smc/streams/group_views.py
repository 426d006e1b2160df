"""What users see of link groups: read-only views.

A view holds one reference to the core it shows and reads everything from it when asked, so it is
always up to date and costs nothing before.  Two views of one thing are equal.
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
    """What users see of one thing inside; equal to any other view of the same."""

    __slots__ = ("_core",)

    def __init__(self, core: _Core) -> None:
        self._core = core

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and other._core is self._core

    def __hash__(self) -> int:
        return hash(self._core)


class LinkView(View[Link]):
    """One link of a group, as it is now."""

    __slots__ = ()

    @property
    def number(self) -> int:
        """The number the server gave it, unique within the group (RFC 7609, 3.5.1.5)."""
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
    def connections(self) -> int:
        """How many connections send on the link, closing ones included."""
        return self._core.load

    def __repr__(self) -> str:
        return f"<link {self.number} {self.state} on {self.rnic.name}>"


class RmbView(View[Rmb]):
    """One RMB of this side, as it is now."""

    __slots__ = ()

    @property
    def element_size(self) -> int:
        """Bytes of each element: 16 KiB << n."""
        return self._core.element_size

    @property
    def elements(self) -> int:
        """How many elements it has, 1 to 255."""
        return len(self._core.elements)

    @property
    def in_use(self) -> int:
        """How many of them serve a connection."""
        return self._core.in_use

    def __repr__(self) -> str:
        return f"<RMB {self.in_use}/{self.elements} elements of {self.element_size} bytes>"


class LinkGroupView(View[LinkGroup]):
    """A link group of a stack (RFC 7609, 2.2): everything shared by its connections to one peer.

    A read-only view, from `Stack.link_groups` or `SmcStream.link_group`; it may outlive the
    group, whose `state` is "GONE" then.
    """

    __slots__ = ("_check",)

    def __init__(self, core: LinkGroup, check: Callable[[], None]) -> None:
        super().__init__(core)
        self._check = check

    @property
    def role(self) -> Literal["client", "server"]:
        """Which side of the first TCP connection this stack was."""
        return "client" if self._core.client else "server"

    @property
    def peer_id(self) -> bytes:
        """The peer's 8-byte peer ID."""
        return self._core.peer_id

    @property
    def version(self) -> int:
        """Of SMC-R: 1, or 2 where both sides have a UEID in common (`Config.ueids`)."""
        return self._core.terms.version

    @property
    def release(self) -> int:
        """Of version 2: 0 or 1; 0 in version 1."""
        return self._core.terms.release

    @property
    def ueid(self) -> str | None:
        """By which the two sides speak version 2; None in version 1."""
        return eid_name(self._core.terms.eid) or None

    @property
    def direct(self) -> bool:
        """Whether the two sides' RNICs reach each other without a gateway, as version 1 has it."""
        return self._core.terms.direct

    @property
    def agreed(self) -> Agreed:
        """These four, as `StackStatistics` and `StackEvent` have them."""
        return self._core.agreed

    @property
    def kind(self) -> LinkGroupKind:
        """Single, asymmetric or symmetric link group."""
        return self._core.kind

    @property
    def state(self) -> str:
        """FORMING, SINGLE, ASYMMETRIC, SYMMETRIC, TERMINATING or GONE.

        See `trio_smc.states.link_group`.
        """
        return self._core.state

    @property
    def links(self) -> tuple[LinkView, ...]:
        """The links that are not down, by number."""
        links = sorted(self._core.links.items())
        return tuple(LinkView(core) for _, core in links if core.state != "DOWN")

    @property
    def rmbs(self) -> tuple[RmbView, ...]:
        """This side's RMBs, oldest first."""
        if self._core.state == "GONE":
            return ()
        return tuple(RmbView(rmb) for rmb in self._core.own_rmbs.pool.rmbs)

    def delete_link(self, number: int) -> None:
        """Delete one link in order; a client asks its server to (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

        The peer gets reason 0x00020000, "operator initiated" (A.3.4): the link works, and the
        caller takes it out of use.

        A group whose last link is deleted ends, and its connections are reset.  Returns at once;
        does nothing while a request of this side to delete a link is under way.

        Args:
          number: of a link in `links`.

        Raises:
          ValueError: the group has no such link.
          RuntimeError: called in a forked child.
        """
        self._check()
        if all(link.number != number for link in self.links):
            raise ValueError(f"the link group has no link {number}")
        self._core.delete_link(number)

    def terminate(self) -> None:
        """End the group in order: its connections are reset, then its links are deleted.

        The peer gets reason 0x00030000, "program initiated" (A.3.4), as for a group that was
        idle or whose stack closes: the program is done with it.

        New connections to the peer form a new group.  Returns at once; idempotent (RFC 7609,
        3.5.4).

        Raises:
          RuntimeError: called in a forked child.
        """
        self._check()
        self._core.terminate()

    def __repr__(self) -> str:
        return f"<LinkGroup {self.kind} {self.state} as {self.role} of {self.peer_id.hex()}>"
