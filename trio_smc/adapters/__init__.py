"""Adapters for libraries with stream types of their own; none is imported by default.

Each module needs its library: `anyio`, `httpcore` or `httpx`.  Libraries that accept Trio streams
or listeners (hypercorn, trio-websocket, Trio's TLS) need no adapter.
"""

from __future__ import annotations
