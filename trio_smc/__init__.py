"""SMC-R (RFC 7609) in user space for Trio: the public names.

The rooms of the package, from the top floor down. A room imports only rooms of lower floors:

- `tools`, `adapters`: the command ``trio-smc``; streams for libraries. They use only public names.
- `sockets`: the sockets of unmodified programs (`enable`). `_api`, `_stack`, `_events`, `control`:
  the functions that programs call, `Stack`, its events, and its control socket.
- `connecting`, `streams`, `stack`: the code that uses Trio: dialling and accepting, streams, tasks.
- `failover`, `rendezvous`, `datapath`: the protocol, which does not use Trio (RFC 7609, 4.6, 3, 4):
  connections that move when a link fails; CLC, LLC, links and link groups; RMBs and cursors.
- `config`, `rnic`, `capture`, `host`: settings; RNICs; pcapng; interfaces of this machine.
- `wire`, `states`, `_base`: codecs of messages; every state machine; errors and reasons.

`docs/how-it-works.md` names the file for each step of a handshake and of a byte from sender to
receiver.
"""

from __future__ import annotations

import logging

from trio_smc._api import open_listeners, open_stack, open_stream, serve
from trio_smc._base import release as _release
from trio_smc._base.errors import NoStack, ProtocolError, SmcUnavailable
from trio_smc._base.observer import BaseObserver, Observer
from trio_smc._base.public import publish as _publish
from trio_smc._base.reasons import Fallback, FallbackReason, Mode, Origin
from trio_smc._base.statistics import Agreed, StackStatistics, StreamStatistics
from trio_smc._events import EventStream, StackEvent, open_events
from trio_smc._stack import Stack, stacks
from trio_smc.config.config import Config
from trio_smc.config.file import Settings, load_config, load_settings
from trio_smc.connecting.listener import SmcListener
from trio_smc.datapath import cursor as _cursor
from trio_smc.rendezvous.discovery.option_setup import set_up_tcp_option, tear_down_tcp_option
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import RnicError
from trio_smc.sockets.enable import disable, enable
from trio_smc.streams.connection_views import ConnectionCursors, ConnectionView
from trio_smc.streams.group_views import LinkGroupKind, LinkView, RmbView
from trio_smc.streams.group_views import LinkGroupView as LinkGroup
from trio_smc.streams.stream import SmcSocket, SmcStream

__all__ = [
    "Agreed",
    "BaseObserver",
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
    "NoStack",
    "Observer",
    "Origin",
    "ProtocolError",
    "RmbView",
    "RnicError",
    "Settings",
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
    "load_settings",
    "open_events",
    "open_listeners",
    "open_stack",
    "open_stream",
    "serve",
    "set_up_tcp_option",
    "stacks",
    "tear_down_tcp_option",
]

__version__: str = _release.RELEASE
__compiled__: bool = _cursor.__file__.endswith(".so")
"""True if the hot modules of this build are compiled; see docs/operating.md."""

# Tracebacks, help() and pickles name the public module, as with Trio's names.
_publish(globals(), __all__)

# Without this handler, warnings go to stderr in a program that has not configured logging.
logging.getLogger("trio_smc").addHandler(logging.NullHandler())
