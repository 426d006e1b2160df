"""SMC-R (RFC 7609) in user space for Trio.

The public names.  Rooms below: `states` (every state machine), `rendezvous` (how two peers find
and agree with each other), `datapath` (how bytes travel), `rnic` (what carries them).
"""

from __future__ import annotations

from trio_smc._base.config import Config
from trio_smc._base.errors import ProtocolError, SmcUnavailable
from trio_smc._base.observer import Observer
from trio_smc._base.reasons import Fallback, FallbackReason, Mode, Origin
from trio_smc._base.statistics import StackStatistics, StreamStatistics
from trio_smc._config_file import load_config
from trio_smc._connections import ConnectionCursors, ConnectionView
from trio_smc._enable import disable, enable
from trio_smc._events import EventStream, StackEvent, open_events
from trio_smc._listener import SmcListener
from trio_smc._open import open_listeners, open_stack, open_stream, serve
from trio_smc._option_setup import set_up_tcp_option, tear_down_tcp_option
from trio_smc._stack import Stack, stacks
from trio_smc._stream import SmcStream
from trio_smc._tcp_names import SmcSocket
from trio_smc._views import LinkGroup, LinkGroupKind, LinkView, RmbView
from trio_smc.rnic.roce import VerbsRnic
from trio_smc.rnic.software import SoftRnic

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
