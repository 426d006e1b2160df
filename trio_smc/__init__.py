"""SMC-R (RFC 7609) in user space for Trio: the public names.

The house, from the street down; a room imports only rooms below its own:

- `tools`, `adapters`: the command ``trio-smc``; streams for libraries. They use these names alone.
- `sockets`: those of unmodified programs (`enable`). `_api`, `_stack`, `_events`, `control`: what
  a program calls, a `Stack`'s face, what it tells while it runs.
- `connecting`, `streams`, `stack`: Trio lives here: dialling and accepting, streams, the nursery.
- `failover`, `rendezvous`, `datapath`: the protocol (RFC 7609, 4.6, 3, 4): who moves when a link is
  lost; CLC, LLC, links and link groups; RMBs and cursors. The cores know no Trio.
- `config`, `rnic`, `capture`, `host`: settings; what carries the bytes; pcapng; this machine.
- `wire`, `states`, `_base`: messages byte by byte, every state machine, errors and reasons.

`docs/how-it-works.md` names the file at each step of a handshake and of a byte's way.
"""

from __future__ import annotations

import logging

from trio_smc._api import open_listeners, open_stack, open_stream, serve
from trio_smc._base.errors import ProtocolError, SmcUnavailable
from trio_smc._base.observer import Observer
from trio_smc._base.reasons import Fallback, FallbackReason, Mode, Origin
from trio_smc._base.statistics import Agreed, StackStatistics, StreamStatistics
from trio_smc._events import EventStream, StackEvent, open_events
from trio_smc._stack import Stack, stacks
from trio_smc.config.config import Config
from trio_smc.config.file import load_config
from trio_smc.connecting.listener import SmcListener
from trio_smc.datapath import cursor as _cursor
from trio_smc.rendezvous.discovery.option_setup import set_up_tcp_option, tear_down_tcp_option
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.sockets.enable import disable, enable
from trio_smc.streams.connection_views import ConnectionCursors, ConnectionView
from trio_smc.streams.group_views import LinkGroupKind, LinkView, RmbView
from trio_smc.streams.group_views import LinkGroupView as LinkGroup
from trio_smc.streams.stream import SmcSocket, SmcStream

__all__ = [
    "Agreed",
    "Config",
    "ConnectionCursors",
    "ConnectionView",
    "EventStream",
    "Fallback",
    "FallbackReason",
    "LinkGroup",
    "LinkGroupKind",
    "LinkView",
    "Mode",
    "Observer",
    "Origin",
    "ProtocolError",
    "RmbView",
    "SmcListener",
    "SmcSocket",
    "SmcStream",
    "SmcUnavailable",
    "SoftRnic",
    "Stack",
    "StackEvent",
    "StackStatistics",
    "StreamStatistics",
    "VerbsRnic",
    "disable",
    "enable",
    "load_config",
    "open_events",
    "open_listeners",
    "open_stack",
    "open_stream",
    "serve",
    "set_up_tcp_option",
    "stacks",
    "tear_down_tcp_option",
]

__version__ = "0.2.0"
__compiled__: bool = _cursor.__file__.endswith(".so")
"""Whether this is a build whose hot modules are compiled; see docs/operating.md."""

# A program that did not ask for logs gets none: without a handler warnings go to stderr.
logging.getLogger("trio_smc").addHandler(logging.NullHandler())
