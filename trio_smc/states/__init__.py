"""Every state machine, declared once with python-statemachine and run by one small engine.

Pure: no trio, no I/O, no clock. ``MACHINES`` names every declared chart; the generated diagrams
and tables (``python -m trio_smc.states``) and the differential test run over all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trio_smc.states.clc_client import ClcClientChart
from trio_smc.states.clc_server import ClcServerChart
from trio_smc.states.connection import ConnectionChart
from trio_smc.states.link import LinkChart
from trio_smc.states.link_group import LinkGroupChart
from trio_smc.states.llc_exchange import LlcExchangeChart

if TYPE_CHECKING:
    from statemachine import StateChart

MACHINES: dict[str, type[StateChart[Any]]] = {
    "connection": ConnectionChart,
    "clc_client": ClcClientChart,
    "clc_server": ClcServerChart,
    "llc_exchange": LlcExchangeChart,
    "link": LinkChart,
    "link_group": LinkGroupChart,
}
"""File-name-like name of each machine ("connection", "link_group") and its chart."""
