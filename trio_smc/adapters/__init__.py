"""SMC-R under libraries that have stream types of their own; nothing here is imported by default.

Whoever imports a module has its library: `anyio`, `httpcore` or `httpx`.  Libraries that take Trio
streams or listeners as they are (hypercorn, trio-websocket, Trio's TLS) need no adapter.
"""

from __future__ import annotations
