"""A link as a connection sees it, and a connection as its link sees it.

The connection does no I/O. It posts on a `Channel`, which calls it back as a `Poster`. All of it
happens on the Trio thread, and no method of a channel may block or call back from within a call.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Channel", "Poster"]


class Poster(Protocol):
    """Who posts on a link: a connection, or what moves it to another one (`failover.replay`)."""

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""

    def on_room(self) -> None:
        """The link has room again, as `Channel.wait_for_room` promised."""


class Channel(Protocol):
    """One link, as a connection sees it. What is posted arrives in the order of posting.

    No method raises because the link has failed: that is told by `Connection.switch` (another link
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

    def wait_for_room(self, poster: Poster) -> None:
        """Call ``poster.on_room()`` once, later, when `capacity` is no longer 0."""

    def post_write(self, poster: Poster, data: memoryview, address: int, rkey: int) -> None:
        """RDMA-write ``data`` to ``address`` of the peer's memory, unsignaled.

        ``data`` does not change until the next CDC message of this poster is complete.
        """

    def post_cdc(self, poster: Poster, message: bytes) -> None:
        """Send a CDC message; its completion calls ``poster.on_cdc_complete(sequence)``.

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

    def hand_over(self, poster: Poster, heir: Poster | None) -> None:
        """Report completions of what ``poster`` has posted to ``heir``; None: to nobody.

        A call of ``on_room`` that ``poster`` waits for is not made.
        """
