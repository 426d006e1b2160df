"""What a connection needs of others: the link that carries its bytes, and the host it lives in.

The connection core does no I/O and knows no clock. It calls these two, and they call it back:
`Connection.on_cdc_untrusted`, `on_cdc_complete`, `on_room`, `on_timer`. All of it happens
on the Trio thread, and none of these methods may block or call back from within a call.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

__all__ = ["AnyConnection", "Channel", "Host"]

AnyConnection: TypeAlias = Any
"""A `trio_smc.datapath.connection.Connection`, which calls out from its base classes too."""


class Channel(Protocol):
    """One link, as a connection sees it. What is posted arrives in the order of posting.

    No method raises because the link has failed: that is told by `Connection.move` (another link
    carries on) or `Connection.links_lost`.
    """

    @property
    def number(self) -> int:
        """The link number within its link group."""

    def capacity(self) -> int:
        """Bytes that can be written now.

        0: nothing can be posted; call `wait_for_room`. More: the send queue has room for two
        RDMA writes of that many bytes together and a CDC message.
        """

    def wait_for_room(self, connection: AnyConnection) -> None:
        """Call ``connection.on_room()`` once, later, when `capacity` is no longer 0."""

    def post_write(
        self, connection: AnyConnection, data: memoryview, address: int, rkey: int
    ) -> None:
        """RDMA-write ``data`` to ``address`` of the peer's memory, unsignaled.

        ``data`` does not change until the next CDC message of this connection is complete.
        """

    def post_cdc(self, connection: AnyConnection, message: bytes) -> None:
        """Send a CDC message; its completion calls ``connection.on_cdc_complete(sequence)``.

        Completions are reported in order, each once.
        """

    def try_post(self, message: bytes, data: memoryview | None, address: int, rkey: int) -> bool:
        """RDMA-write ``data``, if any, and send a CDC message, if both can be done at once.

        Returns:
          True: both are in the peer's memory, and all that was posted on the link before is; no
          completion follows. False: nothing has happened, and the same can be posted with
          `post_write` and `post_cdc` when there is `capacity`.

        Raises:
          DeliveryUnknown: the link fails just now; they may be there or not, as what was posted
            and did not complete.
        """

    def hand_over(self, connection: AnyConnection, heir: AnyConnection | None) -> None:
        """Report completions of what ``connection`` has posted to ``heir``; None: to nobody.

        A call of ``on_room`` that ``connection`` waits for is not made.
        """


class Host(Protocol):
    """Who owns the connection: link group and stream."""

    def connection_closed(self, connection: AnyConnection) -> None:
        """The connection is CLOSED and owes nothing: its RMBE and its alert token are free.

        ``connection.used`` says how much of the RMBE has to be zeroed.
        """

    def set_timer(self, connection: AnyConnection, seconds: float | None) -> None:
        """(Re)start the connection's one timer: ``connection.on_timer()`` then; None stops it."""

    def reset_tcp(self, connection: AnyConnection) -> None:
        """End the TCP connection by RST."""

    def close_tcp(self, connection: AnyConnection) -> None:
        """End the TCP connection by FIN."""

    def state_changed(self, connection: AnyConnection, old: str, new: str, event: str) -> None:
        """For observers: the connection's state machine has moved."""
