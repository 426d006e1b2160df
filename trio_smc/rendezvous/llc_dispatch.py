"""Where the LLC messages of a link group go, and which are out of turn (RFC 7609, A.3, C.7.1)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup

__all__ = ["dispatch_untrusted"]

LOGGER = logging.getLogger("trio_smc.link_group")


def dispatch_untrusted(group: LinkGroup, link: Link, data: bytes) -> None:
    """Give one LLC message from the peer to whom it concerns.

    Raises:
      ProtocolError: it breaks the rules; the link has to go (C.7.1).
    """
    message = llc.decode_untrusted(data)
    if link.state == "CONFIRMING" and not _may_come_first(message):
        raise ProtocolError(f"{type(message).__name__} before CONFIRM LINK")
    if _comes_too_late(group, link, message):
        LOGGER.debug("%r: %s is not listened to any more", link, type(message).__name__)
        return
    match message:
        case llc.ConfirmLink():
            group.setup.on_confirm_link_untrusted(link, message)
        case llc.TestLink(reply=True):
            link.on_test_reply_untrusted(message)
        case llc.TestLink():
            link.on_test_request(message)
        case llc.AddLink():
            group.adding.on_add_link_untrusted(link, message)
        case llc.AddLinkContinuation():
            group.adding.telling.on_continuation_untrusted(link, message)
        case llc.DeleteLink():
            group.deletion.on_delete_link_untrusted(link, message)
        case llc.ConfirmRkey() | llc.ConfirmRkeyContinuation() | llc.DeleteRkey():
            if message.reply:
                group.exchanges.on_reply_untrusted(link, message)
            else:
                group.rkeys.on_request_untrusted(link, message)
        case llc.OptionalMessage():
            pass  # A.3: silently discarded


def _may_come_first(message: llc.Message) -> bool:
    """Whether a message may come on a link that is not confirmed (3.5.1.5, 3.5.5.3.1, A.3)."""
    return isinstance(message, (llc.ConfirmLink, llc.OptionalMessage)) or _ends_group(message)


def _comes_too_late(group: LinkGroup, link: Link, message: llc.Message) -> bool:
    """Whether it was sent over a link that is failing here, so that nothing can be exchanged
    there, or offers a link over one that this client wants deleted (C.7.1)."""
    if group.state == "GONE" or (link.failing and not _ends_group(message)):
        return True
    return group.client and link.state == "LEAVING" and isinstance(message, llc.AddLink)


def _ends_group(message: llc.Message) -> bool:
    return isinstance(message, llc.DeleteLink) and message.all_links and not message.reply
