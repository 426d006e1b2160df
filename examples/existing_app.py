"""An ordinary web app: no line of it knows of SMC-R.

    hypercorn --worker-class trio --bind 127.0.0.1:8000 examples.existing_app:app

With `trio-smc run --` in front, its connections use SMC-R if the client does.
"""

from __future__ import annotations

from quart_trio import QuartTrio

app = QuartTrio(__name__)


@app.get("/")
async def hello() -> str:
    """Greet."""
    return "hello from an app that has not changed\n"
