"""The import rules between rooms, as a contract for import-linter.

pyproject.toml holds the table: for each room the rooms it may import ("rendezvous: states"), or a
single module of a room ("rendezvous: datapath.rmb"). A module directly below the package that is
not a room is public API and may import everything; no room may import it. Nor may one import the
package itself, unless its line says so by "=": that one is built on top of the public API, and
nothing outside of it may import it.
"""

from __future__ import annotations

from grimp import DetailedImport, ImportGraph
from importlinter import Contract, ContractCheck, fields, output

_PACKAGE = "="


class RoomsContract(Contract):
    """Each direct import from a room goes to the room itself or to one that the table allows."""

    type_name = "rooms"

    package = fields.StringField()
    rooms = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return the imports that the table does not allow."""
        output.verbose_print(verbose, "Checking the rooms' imports")
        package = str(self.package)
        table = _table([str(line) for line in self.rooms])  # type: ignore[attr-defined]
        broken: list[DetailedImport] = []
        for importer in sorted(graph.modules):
            room = _room_of(importer, package)
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                ours = imported == package or imported.startswith(package + ".")
                if ours and not _may_import(table, room, imported.removeprefix(package)[1:]):
                    broken += graph.get_import_details(importer=importer, imported=imported)
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line for each import that is not allowed."""
        for found in check.metadata["broken"]:
            output.print_error(
                f"{found['importer']} imports {found['imported']} (line {found['line_number']}): "
                f"{found['line_contents']}"
            )
        output.new_line()


def _table(lines: list[str]) -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for line in lines:
        room, _, allowed = line.partition(":")
        table[room.strip()] = allowed.replace(",", " ").split()
    return table


def _room_of(module: str, package: str) -> str:
    below = module.removeprefix(package).lstrip(".")
    return below.split(".", 1)[0]


def _may_import(table: dict[str, list[str]], room: str, imported: str) -> bool:
    """Whether modules of ``room`` may import a module, named from below the package."""
    if room not in table:
        top = imported.split(".", 1)[0]
        return _PACKAGE not in table.get(top, ())
    if not imported:
        return _PACKAGE in table[room]
    return any(_inside(imported, place) for place in (room, *table[room]))


def _inside(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")
