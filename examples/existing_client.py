"""A client of examples/existing_app.py: no line of it knows of SMC-R.

    python examples/existing_client.py http://127.0.0.1:8000/

Sends a request every second, over one connection, until it is interrupted. With `trio-smc run --`
in front, that connection uses SMC-R.
"""

from __future__ import annotations

import sys

import httpx
import trio


async def main(url: str) -> None:
    """Request the page, again and again."""
    async with httpx.AsyncClient() as client:
        while True:
            answer = await client.get(url)
            print(answer.text, end="", flush=True)
            await trio.sleep(1)


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(0)
