"""Sphinx's settings: `make docs` builds these pages into build/docs, warnings are errors.

Nothing here needs the network, neither to build nor to read: no intersphinx, no web fonts.
`python -m scripts.check_docs` looks at the result with a browser.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import trio_smc

project = "trio_smc"
author = "trio_smc maintainers"
copyright = author
version = release = trio_smc.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib_trio",
]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"trio_smc {release}"
html_static_path = ["_static"]
html_css_files = ["trio_smc.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def link_images(_app: Sphinx, doctree: nodes.document) -> None:
    """A click on a diagram opens it by itself: Sphinx does so for images with a scale."""
    for image in doctree.findall(nodes.image):
        image.setdefault("scale", 100)


def widen_machines(_app: Sphinx, page: str, source: list[str]) -> None:
    """Generated pages of state machines: room for tables, names that may break, and their places
    below the index, which links to them by a table alone."""
    if not page.startswith("states/"):
        return
    lines = [
        line.replace("_", "_\u200b") if line.startswith("| ") and not {"`", "]"} & {*line} else line
        for line in source[0].split("\n")
    ]
    if page == "states/index":
        lines += ["```{toctree}", ":hidden:", ":glob:", "", "*", "```", ""]
    source[0] = "---\nhide-toc: true\n---\n\n" + "\n".join(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("source-read", widen_machines)
    app.connect("doctree-read", link_images)
    return {"parallel_read_safe": True}
