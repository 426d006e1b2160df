"""Sphinx's settings: `make docs` builds these pages into build/docs, warnings are errors.

Nothing here needs the network, neither to build nor to read: no intersphinx, no web fonts.
`python -m scripts.check_docs` looks at the result with a browser.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.images import get_image_size

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

default_role = "py:obj"  # what docstrings have in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

# A public class names the public module.  Autodoc orders members as in the source, so it needs the
# module that defines the class.
for _module in [each for name, each in sys.modules.items() if name.startswith("trio_smc.")]:
    for _name in getattr(_module, "__all__", ()):
        _thing = getattr(_module, _name)
        if isinstance(_thing, type) and _thing.__module__ == "trio_smc":
            _thing.__module__ = _module.__name__

html_theme = "furo"
html_title = f"trio_smc {release}"
html_static_path = ["_static"]
html_css_files = ["trio_smc.css"]
html_copy_source = False
html_show_sphinx = False
_BREAK = re.compile(r"(?<=_)|(?<=[A-Z])(?=WAIT|ABORT)")

html_theme_options = {"navigation_with_keys": True}


# Pixels. In windows of 390 and 1280 pixels the column of text has 358 and 838: a picture that is
# wider than these numbers is shown there at less than three quarters of its size.
_NARROW, _WIDE = 477, 1117


def link_images(app: Sphinx, doctree: nodes.document) -> None:
    """A click on a diagram opens it by itself: Sphinx does so for images with a scale.

    trio_smc.css adds a hint to those with a class, which are shown much smaller than drawn.
    """
    for image in doctree.findall(nodes.image):
        image.setdefault("scale", 100)
        width, _ = get_image_size(str(Path(app.srcdir, image["uri"]))) or (0, 0)
        if width > _WIDE:
            image["classes"].append("wide")
        elif width > _NARROW:
            image["classes"].append("half-wide")


def name_links(_app: Sphinx, _page: str, source: list[str]) -> None:
    """A link whose text is the file that it leads to gets the title of that page instead."""
    source[0] = re.sub(r"\[([\w/-]+\.md)\]\(\1\)", r"[](\1)", source[0])


def widen_tables(_app: Sphinx, page: str, source: list[str]) -> None:
    """Generated pages with wide tables get the room of the local contents; names of states may
    break; and the pages of the machines are below their index, which links to them by a table."""
    if page not in ("compliance", "compliance-v2") and not page.startswith("states/"):
        return
    lines = source[0].split("\n")
    if page == "states/index":
        lines += ["```{toctree}", ":hidden:", ":glob:", "", "*", "```", ""]
    else:
        lines = [
            _BREAK.sub("\u200b", line) if line.startswith("| ") and "`" not in line else line
            for line in lines
        ]
    source[0] = "---\nhide-toc: true\n---\n\n" + "\n".join(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("source-read", name_links)
    app.connect("source-read", widen_tables)
    app.connect("doctree-read", link_images)
    return {"parallel_read_safe": True}
