"""The part of scripts/check_docs.py that needs chromium, so only with --full."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_docs import layout_problems

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]
TEXT = f"<h1>A page</h1><p>{'some words ' * 30}</p>"
STYLE = "<style>body { font-family: sans-serif }</style>"
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90">'
    '<circle cx="45" cy="45" r="40"/></svg>'
)
BAD = {
    "broken.html": ('<img src="damaged.svg">', "damaged.svg does not show"),
    "tiny.html": ('<img src="good.svg" width="4">', "good.svg is too small to see"),
    "network.html": (
        "<script>fetch('http://example.org/x').catch(() => 0)</script>",
        "asks for http://example.org/x",
    ),
    "script.html": ("<script>nothing.at.all()</script>", "Uncaught"),
    "wide.html": ('<div style="width: 4000px">wide</div>', "wider than the window"),
}


async def test_a_good_page_and_bad_ones(tmp_path: Path) -> None:
    (tmp_path / "good.svg").write_text(SVG)
    (tmp_path / "damaged.svg").write_text("<svg")
    (tmp_path / "good.html").write_text(STYLE + TEXT + '<img src="good.svg">')
    (tmp_path / "empty.html").write_text(STYLE + "<p>nothing</p>")
    (tmp_path / "plain.html").write_text(TEXT)
    for name, (text, _) in BAD.items():
        (tmp_path / name).write_text(STYLE + TEXT + text)
    pages = [tmp_path / name for name in ("good.html", "empty.html", "plain.html", *BAD)]
    wrong = await layout_problems(tmp_path, pages, tmp_path / "shots")
    assert not [line for line in wrong if line.startswith("good.html")]
    assert "empty.html: no heading" in wrong
    assert "plain.html: no style sheet" in wrong
    for name, (_, said) in BAD.items():
        assert any(line.startswith(name) and said in line for line in wrong), (name, wrong)
    assert (tmp_path / "shots" / "good.png").read_bytes()[:4] == b"\x89PNG"
