"""Hatchling's hook for the parts of the metadata that name the place of the repository.

``[tool.trio-smc.publishing]`` in ``pyproject.toml`` has the address of the repository and the one
for reports of vulnerabilities. The publisher sets them, and nothing else in the project has them.
From this table come the project's links and, in the long description, the links of README.md: a
package index does not resolve links that are relative to the repository.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

README: Final = "README.md"
_LINK: Final = re.compile(r"(\[[^\]\n]*\]\()([^)\s:#]+)(#[^)\s]*)?(\))")


class PublishedMetadata(MetadataHookInterface):
    """Adds the fields that pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the links of the project, and README.md with absolute links."""
        root = Path(self.root)
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        place = project["tool"]["trio-smc"]["publishing"]
        version = metadata["version"]
        metadata["urls"] = urls(place, version)
        text = (root / README).read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, place, version),
        }


def urls(place: Mapping[str, str], version: str) -> dict[str, str]:
    """The links that a package index shows beside the description."""
    return {
        "Repository": place["repository"],
        "Documentation": _file(place, version, "docs/index.md"),
        "Changelog": _file(place, version, "CHANGELOG.md"),
        "Security": _file(place, version, "SECURITY.md"),
        "Report a vulnerability": place["vulnerability"].format(repository=place["repository"]),
    }


def with_absolute_links(text: str, place: Mapping[str, str], version: str) -> str:
    """Replace each link to a file of the repository; blocks of code stay as they are."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        parts[index] = _LINK.sub(
            lambda found: f"{found[1]}{_file(place, version, found[2])}{found[3] or ''}{found[4]}",
            parts[index],
        )
    return "".join(parts)


def _file(place: Mapping[str, str], version: str, path: str) -> str:
    return place["file"].format(repository=place["repository"], version=version, path=path)
