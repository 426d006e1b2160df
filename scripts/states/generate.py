"""Generates `trio_smc.states.tables` from the declarations.

The charts are the source. The tables are checked in, so that programs run without
python-statemachine, and a test fails if they differ from the charts.
To add a machine, declare it, add it to `MACHINES` and generate its table before importing that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scripts.states.flatten import flatten
from trio_smc.states.acceptance import AcceptanceChart
from trio_smc.states.clc import ClcClientChart, ClcServerChart
from trio_smc.states.connection import ConnectionChart
from trio_smc.states.link import LinkChart
from trio_smc.states.link_group import LinkGroupChart
from trio_smc.states.llc_exchange import LlcExchangeChart
from trio_smc.states.pump import PumpChart

if TYPE_CHECKING:
    from statemachine import StateChart

    from trio_smc.states.engine import Edge, Table

__all__ = ["MACHINES", "TABLES", "source"]

MACHINES: Final[dict[str, type[StateChart[Any]]]] = {
    "connection": ConnectionChart,
    "clc_client": ClcClientChart,
    "clc_server": ClcServerChart,
    "llc_exchange": LlcExchangeChart,
    "link": LinkChart,
    "link_group": LinkGroupChart,
    "pump": PumpChart,
    "acceptance": AcceptanceChart,
}
"""The chart of each machine, by the stem of its files ("connection", "link_group")."""

TABLES: Final = Path(__file__).parents[2] / "trio_smc" / "states" / "tables.py"

_HEAD: Final = '''\
"""The tables of all state machines, as `engine` runs them.

Made by `python -m scripts.states` from the declarations; edit those instead.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from trio_smc.states.engine import Edge, Guard, Table

'''


def source(machines: Mapping[str, type[StateChart[Any]]]) -> str:
    """The source text of `tables`."""
    tables = {name.upper(): flatten(chart) for name, chart in machines.items()}
    lines = [f"__all__ = {_list(sorted(tables))}\n"]
    for name, table in tables.items():
        lines += ["", *_table(name, table)]
    return _HEAD + "\n".join(lines) + "\n"


def _table(name: str, table: Table) -> Iterator[str]:
    yield f"{name} = Table("
    yield f"    name={_text(table.name)},"
    yield f"    initial={_text(table.initial)},"
    yield f"    states={_tuple(map(_text, table.states))},"
    yield f"    stopped={_tuple(map(_text, sorted(table.stopped)))},"
    yield f"    events={_tuple(map(_text, table.events))},"
    pairs = ", ".join(f"{_text(state)}: {value}" for state, value in table.values.items())
    yield f"    values={{{pairs}}},"
    yield "    edges={"
    for (state, event), row in table.edges.items():
        yield f"        ({_text(state)}, {_text(event)}): {_tuple(map(_edge, row))},"
    yield "    },"
    yield ")"


def _edge(edge: Edge) -> str:
    guards = _tuple(f"Guard({_text(each.name)}, {each.negated})" for each in edge.guards)
    actions = _tuple(map(_text, edge.actions))
    return f"Edge({guards}, {_text(edge.target)}, {actions}, {edge.internal}, {_text(edge.source)})"


def _tuple(parts: Iterator[str]) -> str:
    listed = list(parts)
    return f"({listed[0]},)" if len(listed) == 1 else f"({', '.join(listed)})"


def _list(names: list[str]) -> str:
    return f"[{', '.join(map(_text, names))}]"


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
