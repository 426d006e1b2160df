"""SMC-R (RFC 7609) in user space for Trio.

The public names.  Rooms below: `states` (every state machine), `rendezvous` (how two peers find
and agree with each other), `datapath` (how bytes travel), `rnic` (what carries them).
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
from trio_smc.streams.group_views import LinkGroup, LinkGroupKind, LinkView, RmbView
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
