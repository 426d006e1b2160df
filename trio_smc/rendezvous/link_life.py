"""The life of one SMC-R link: its queue pair's states, TEST LINK, its failure.

LinkLife is the model of `states.link`; `link.Link` adds what travels over the queue pair.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.rnic.verbs import Rnic
from trio_smc.states.engine import Machine
from trio_smc.states.link import LINK

if TYPE_CHECKING:
    from trio_smc.rendezvous.group_host import GroupConnection
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["LinkLife", "PeerPort", "PeerQueuePair"]

_LOOKS: Final = 4
"""How often in a test interval a link looks whether anything was heard."""

LOGGER = logging.getLogger("trio_smc.link")


class PeerPort(NamedTuple):
    """An RNIC port of the peer."""

    gid: bytes
    mac: bytes


class PeerQueuePair:
    """The peer's end of a link: what SMC Accept, SMC Confirm or ADD LINK say of it."""

    __slots__ = ("gid", "mac", "mtu", "psn", "qp_number")

    def __init__(self, *, gid: bytes, mac: bytes, qp_number: int, mtu: int, psn: int) -> None:
        self.gid = gid
        self.mac = mac
        self.qp_number = qp_number
        self.mtu = mtu
        self.psn = psn

    @property
    def port(self) -> PeerPort:
        """The peer's RNIC port."""
        return PeerPort(self.gid, self.mac)


class LinkLife:
    """One link of a link group, without what travels over it.

    Attributes:
      number: assigned by the server, unique within the group (RFC 7609, 3.5.1.5).
      user_id, peer_user_id: 4-byte link user IDs, for display only.
      peer: the peer's queue pair, once known.
      users: the connections that send on this link.
      empty_since: when the last of them went.
      reason: why it fails, as the peer is told (A.3.4).
      failing: whether it is failing or has failed, be its state DOWN yet or not.
      heard: whether anything came since the idle timer was started last.
    """

    __slots__ = (
        "_echo", "_quiet_looks", "_test_data", "_timer", "empty_since", "failing", "group", "heard",
        "machine", "number", "pd", "peer", "peer_user_id", "psn", "qp", "reason", "rnic", "user_id",
        "users",
    )  # fmt: skip

    def __init__(self, group: LinkGroup, number: int, rnic: Rnic) -> None:
        """Make the queue pair and take it to INIT.  Raises RnicError."""
        self.group = group
        self.number = number
        self.rnic = rnic
        self.pd = rnic.alloc_pd()
        try:
            self.qp = rnic.create_qp(self.pd)
            try:
                self.qp.to_init()
            except BaseException:
                self.qp.close()
                raise
        except BaseException:
            self.pd.close()
            raise
        self.psn = secrets.randbits(24)
        self.user_id = secrets.randbits(32)
        self.peer_user_id = 0
        self.peer: PeerQueuePair | None = None
        self.heard = False
        self._quiet_looks = 0
        self.failing = False
        self.reason = llc.DeleteLinkReason.LOST_PATH
        self.users: dict[GroupConnection, None] = {}
        self.empty_since = group.timers.now()
        self.machine = Machine(LINK, self)
        self._timer: Timer | None = None
        self._test_data = b""
        self._echo = b""

    def __repr__(self) -> str:
        return f"<Link {self.number} {self.state} on {self.rnic.name}>"

    @property
    def state(self) -> str:
        """The link's state (`trio_smc.states.link`)."""
        return self.machine.state

    @property
    def usable(self) -> bool:
        """Whether more connections may send on it."""
        return self.machine.state in ("ACTIVE", "TESTING") and not self.failing

    @property
    def confirmed(self) -> bool:
        """Whether LLC messages may be sent on it."""
        return self.machine.state in ("ACTIVE", "TESTING", "LEAVING") and not self.failing

    @property
    def load(self) -> int:
        """How many connections send on it."""
        return len(self.users)

    def send_llc(self, message: llc.Message, on_sent: Callable[[], None] | None = None) -> None:
        """Send an LLC message; ``on_sent`` is called when it reached the peer."""
        raise NotImplementedError

    # --- actions and guards of states.link ------------------------------------------------

    def connect_queue_pair(self) -> None:
        """To RTR with receives posted (RFC 7609, 3.5.1.3); the server's also to RTS."""
        peer = self.peer
        if peer is None:
            raise RuntimeError("connect needs the peer's queue pair")
        self.qp.to_rtr(
            gid=peer.gid, qp_num=peer.qp_number, psn=peer.psn, mtu=min(peer.mtu, self.rnic.mtu)
        )
        self.qp.post_receive(self.rnic.receive_depth)
        if not self.group.client:
            self.ready_to_send()

    def ready_to_send(self) -> None:
        """To RTS (RFC 7609, 3.5.1.4, 3.5.1.5)."""
        self.qp.to_rts(psn=self.psn)

    @property
    def idle(self) -> bool:
        """Whether nothing was heard for a whole test interval."""
        return not self.heard and self._quiet_looks + 1 >= _LOOKS

    def start_idle_timer(self) -> None:
        """Look a few times in each test interval whether anything was heard.

        Looking once would notice a link that falls silent after up to two intervals.
        """
        self._quiet_looks = -1
        self.look_again()

    def look_again(self) -> None:
        """The link is not idle yet."""
        self._quiet_looks = 0 if self.heard else self._quiet_looks + 1
        self.heard = False
        self._restart_timer(self.group.test_interval / _LOOKS, "idle_timer")

    def test_interval_shortened(self) -> None:
        """Do not wait out an interval that is longer than what is wanted now."""
        if self.machine.state == "ACTIVE":
            self._restart_timer(self.group.test_interval / _LOOKS, "idle_timer")

    def send_test_link(self) -> None:
        """Probe an idle link (RFC 7609, 4.5.3)."""
        self._test_data = os.urandom(16)
        self._restart_timer(self.group.config.test_link_timeout, "test_timeout")
        self.send_llc(llc.TestLink(user_data=self._test_data))

    def on_test_reply_untrusted(self, message: llc.TestLink) -> None:
        """Check the echoed data; raises ProtocolError when it differs (C.7.1)."""
        if self.machine.state == "TESTING" and message.user_data != self._test_data:
            raise ProtocolError("TEST LINK reply with other data")
        self.machine.send("test_reply")

    def answer_test(self) -> None:
        """See `on_test_request`."""
        self.send_llc(llc.TestLink(reply=True, user_data=self._echo))

    def on_test_request(self, message: llc.TestLink) -> None:
        """The peer's TEST LINK is answered at once (RFC 7609, 4.5.3)."""
        self._echo = message.user_data
        self.machine.send("test_request")

    def close_queue_pair(self) -> None:
        """Free what the link has; connections are told by the group."""
        self.failing = True
        self.stop_timer()
        self.group.host.unregister(self.rnic, self.qp)
        self.qp.close()

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers."""
        observer = self.group.host.observer
        if observer is not None:
            observer.state(self, old, new, event)

    def connect(self, peer: PeerQueuePair) -> None:
        """Connect to the peer's queue pair.  Raises RnicError; the link is unusable then."""
        self.peer = peer
        self.machine.send("connect")

    def close(self) -> None:
        """End the link without asking anybody.  Idempotent; regions must be closed first."""
        self.machine.send("delete")
        self.pd.close()

    def _restart_timer(self, seconds: float, event: str) -> None:
        self.stop_timer()
        self._timer = self.group.timers.call_later(seconds, lambda: self._timer_due(event))

    def _timer_due(self, event: str) -> None:
        if event == "test_timeout":
            LOGGER.info("%r: TEST LINK was not answered", self)
        self.machine.send(event)

    def stop_timer(self) -> None:
        """No test is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
