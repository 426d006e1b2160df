"""SMC-R (RFC 7609) in user space for Trio: the public names.

The house, from the street down; a room imports only rooms below its own:
`sockets` (Trio's own sockets over SMC-R), `_api` (`open_stream` and the like), `control`;
`_stack` (`Stack`, what users see of a peer);
`connecting` (TCP connection, discovery, handshake), `streams` (what users send and receive by);
`stack` (what runs for one peer: its nursery, RNICs, link groups and connections);
`failover` (connections move to another link), `rendezvous` (two peers agree: discovery, CLC, LLC);
`datapath` (bytes travel: RMBs, cursors, CDC), `config`, `rnic` (what carries them: RoCE, software);
`capture`, `wire` (messages), `host` (this machine), `states` (all state machines), `_base`.
`tools` (the command ``trio-smc``) and `adapters` (AnyIO) stand on the public names.
"""

from __future__ import annotations

from trio_smc._api import open_listeners, open_stack, open_stream, serve
from trio_smc._base.errors import ProtocolError, SmcUnavailable
from trio_smc._base.observer import Observer
from trio_smc._base.reasons import Fallback, FallbackReason, Mode, Origin
from trio_smc._base.statistics import StackStatistics, StreamStatistics
from trio_smc._events import EventStream, StackEvent, open_events
from trio_smc._stack import Stack, stacks
from trio_smc.config.config import Config
from trio_smc.config.file import load_config
from trio_smc.connecting.listener import SmcListener
from trio_smc.rendezvous.discovery.option_setup import set_up_tcp_option, tear_down_tcp_option
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.sockets.enable import disable, enable
from trio_smc.streams.connection_views import ConnectionCursors, ConnectionView
from trio_smc.streams.group_views import LinkGroupKind, LinkView, RmbView
from trio_smc.streams.group_views import LinkGroupView as LinkGroup
from trio_smc.streams.smc_socket import SmcSocket
from trio_smc.streams.stream import SmcStream

__all__ = [
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

__version__ = "0.1.0"
