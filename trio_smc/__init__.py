"""SMC-R (RFC 7609) in user space for Trio.

The public names.  Rooms below: `states` (every state machine), `rendezvous` (how two peers find
and agree with each other), `datapath` (how bytes travel), `rnic` (what carries them).
"""

from __future__ import annotations

from trio_smc._base.config import Config as Config
from trio_smc._base.errors import ProtocolError as ProtocolError
from trio_smc._base.errors import SmcUnavailable as SmcUnavailable
from trio_smc._base.observer import Observer as Observer
from trio_smc._base.reasons import Fallback as Fallback
from trio_smc._base.reasons import FallbackReason as FallbackReason
from trio_smc._base.reasons import Mode as Mode
from trio_smc._base.reasons import Origin as Origin
from trio_smc._base.statistics import StackStatistics as StackStatistics
from trio_smc._base.statistics import StreamStatistics as StreamStatistics
from trio_smc._listener import SmcListener as SmcListener
from trio_smc._open import open_listeners as open_listeners
from trio_smc._open import open_stack as open_stack
from trio_smc._open import open_stream as open_stream
from trio_smc._open import serve as serve
from trio_smc._stack import Stack as Stack
from trio_smc._stream import SmcStream as SmcStream
from trio_smc._tcp_names import SmcSocket as SmcSocket
from trio_smc._views import LinkGroup as LinkGroup
from trio_smc._views import LinkGroupKind as LinkGroupKind
from trio_smc._views import LinkView as LinkView
from trio_smc._views import RmbView as RmbView
from trio_smc.rnic.roce import VerbsRnic as VerbsRnic
from trio_smc.rnic.software import SoftRnic as SoftRnic

__version__ = "0.1.0"
