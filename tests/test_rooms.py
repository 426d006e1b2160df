"""The contract between rooms finds what it is there to find."""

from __future__ import annotations

import pytest
from grimp import ImportGraph

from scripts.rooms import RoomsContract

TABLE = [
    "_base:",
    "states: _base",
    "rendezvous: _base, states, datapath.rmb",
    "tools: =, _base",
]


@pytest.mark.parametrize(
    ("importer", "imported", "kept"),
    [
        ("states.link", "states.engine", True),
        ("states.link", "_base.errors", True),
        ("rendezvous.clc", "datapath.rmb", True),
        ("stack", "rendezvous.clc", True),
        ("_base.errors", "states.link", False),
        ("states.link", "rendezvous.clc", False),
        ("rendezvous.clc", "datapath.cdc", False),
        ("rendezvous.clc", "stack", False),
        ("states.link", "", False),
        ("tools.cli", "", True),
        ("tools.cli", "_base.errors", True),
        ("tools.cli", "stack", False),
        ("stack", "tools.cli", False),
        ("states.link", "tools.cli", False),
    ],
)
def test_an_import_is_judged_by_the_table(importer: str, imported: str, kept: bool) -> None:
    graph = ImportGraph()
    source = f"house.{importer}"
    target = f"house.{imported}" if imported else "house"
    graph.add_import(importer=source, imported=target, line_number=1, line_contents="import it")
    contract = RoomsContract(
        name="rooms",
        session_options={"root_packages": ["house"]},
        contract_options={"package": "house", "rooms": TABLE},
    )
    assert contract.check(graph, verbose=False).kept is kept
