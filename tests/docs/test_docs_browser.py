"""The part of scripts/check_docs.py that needs chromium, so only with --full."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_docs import layout_problems

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]
TEXT = f"<h1>A page</h1><p>{'some words ' * 30}</p>"
STYLE = """<style>
body { font-family: sans-serif; background: #fff; color: #111 }
img, object { max-width: 100%; height: auto; background: #fff }
.broad { width: 500px }
.long { white-space: nowrap; letter-spacing: 8px }
img.bare { background: none }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } }
</style>"""
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90">'
    '<circle cx="45" cy="45" r="40"/></svg>'
)


def drawing(*texts: str, width: int = 300) -> str:
    """A picture 100 pixels high with these elements."""
    size = f'width="{width}" height="100" viewBox="0 0 {width} 100"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(texts)}</svg>'


PICTURES = {
    "good.svg": SVG,
    "damaged.svg": "<svg",
    "words.svg": drawing('<text x="9" y="50" font-size="12">twelve</text>'),
    "wide.svg": drawing('<text x="9" y="50" font-size="12">wide</text>', width=800),
    "minute.svg": drawing('<text x="9" y="50" font-size="6">minute</text>'),
    "scaled.svg": drawing(
        '<g transform="scale(0.5)"><text x="9" y="50" font-size="16">scaled</text></g>'
    ),
    "pale.svg": drawing(
        '<rect width="300" height="100" fill="#eee"/>',
        '<text x="9" y="50" font-size="12" fill="#999">pale</text>',
    ),
    "far.svg": drawing(
        '<rect x="2800" width="200" height="100" fill="#eee"/>',
        '<text x="2900" y="50" font-size="12" fill="#999">far</text>',
        width=3000,
    ),
    "cut.svg": drawing('<text x="280" y="50" font-size="12">beyond the edge</text>'),
    "overlapping.svg": drawing(
        '<text x="9" y="50" font-size="12">one text</text>',
        '<text x="20" y="54" font-size="12">other text</text>',
    ),
}
LINE = f"this line is {'very ' * 4}wide"
HIDDEN, SCROLLED = "overflow: hidden", "overflow: auto"
NARROW, DARK = "[390 px light, 390 px dark]", "[1280 px dark, 390 px dark]"
FAULTS = {
    "tiny-text": ('<p style="font-size: 8px">tiny</p>', '"tiny" (p) is only 8.0 px high'),
    "tiny-at-390": (
        "<style>@media (max-width: 400px) { b { font-size: 8px } }</style><p><b>tiny</b></p>",
        f'"tiny" (p b) is only 8.0 px high {NARROW}',
    ),
    "tiny-twice": (
        '<p style="font-size: 8px">tiny</p><p style="font-size: 8px">tiny</p>',
        '"tiny" and 1 more (p) is only 8.0 px high',
    ),
    "minute-picture": ('<img src="minute.svg">', '"minute" (minute.svg) is only 6.0 px high'),
    "minute-object": (
        '<object data="minute.svg"></object>', '"minute" (minute.svg) is only 6.0 px high'
    ),
    "minute-inline": (
        f'<div style="background: #fff">{PICTURES["minute.svg"]}</div>',
        '"minute" (svg text) is only 6.0 px high',
    ),
    "scaled-picture": ('<img src="scaled.svg">', '"scaled" (scaled.svg) is only 8.0 px high'),
    "shrunk": ('<img src="wide.svg">', f'"wide" (wide.svg) is only 5.6 px high {NARROW}'),
    "shrunk-by-style": (
        '<img src="words.svg" style="width: 150px">', '"twelve" (words.svg) is only 6.0 px high'
    ),
    "linked-elsewhere": (
        '<a href="good.html"><img src="wide.svg"></a>',
        f'"wide" (wide.svg) is only 5.6 px high {NARROW}',
    ),
    "linked-but-minute": (
        '<a href="minute.svg"><img src="minute.svg"></a>',
        '"minute" (minute.svg, opened) is only 6.0 px high',
    ),
    "grey-text": (
        '<p style="color: #555; background: none">grey</p>',
        f'"grey" (p) has a contrast of only 2.5 {DARK}',
    ),
    "faded": ('<p style="opacity: 0.5">faded</p>',
        '"faded" (p) has a contrast of only 3.5 [1280 px light, 390 px light]'),
    "dark-picture": (
        '<img class="bare" src="words.svg">',
        f'"twelve" (words.svg) has a contrast of only 1.1 {DARK}',
    ),
    "pale-picture": ('<img src="pale.svg">', '"pale" (pale.svg) has a contrast of only 2.5'),
    "pale-beyond-the-window": (
        '<a href="far.svg"><img src="far.svg"></a>', '"far" (far.svg) has a contrast of only 2.5'
    ),
    "wide-at-390": (
        '<div class="broad">wide</div>', f"118 pixels wider than the window {NARROW}"
    ),
    "wide-inside-at-390": (
        f'<style>html {{ {HIDDEN} }} body {{ {SCROLLED} }}</style><div class="broad">wide</div>',
        f"110 pixels wider than the window {NARROW}",
    ),
    "cut-at-390": (
        f'<div style="{HIDDEN}"><p class="long">{LINE}</p></div>',
        f'the window cuts "{LINE}" {NARROW}',
    ),
}  # fmt: skip
"""For each page: its content, and the only problem that the check must report."""
FINE = {
    "linked-picture": '<a href="wide.svg"><img src="wide.svg"></a>',
    "words": '<img src="words.svg">',
    "large-grey": '<p style="font-size: 24px; color: #808080">large grey</p>',
    "scrolled": f'<div style="{SCROLLED}"><p class="long">{LINE}</p></div>',
    "hidden": '<p style="font-size: 2px; visibility: hidden">nothing to see</p>',
}
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
    for name, text in PICTURES.items():
        (tmp_path / name).write_text(text)
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
    for name, (_, expected) in BAD.items():
        assert any(line.startswith(name) and expected in line for line in wrong), (name, wrong)
    for view in ("1280-light", "1280-dark", "390-light", "390-dark"):
        assert (tmp_path / "shots" / f"good.{view}.png").read_bytes()[:4] == b"\x89PNG"


async def test_each_fault_is_the_only_one_of_its_page(tmp_path: Path) -> None:
    for name, text in PICTURES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "good.html").write_text(STYLE + TEXT)
    for name, text in {name: text for name, (text, _) in FAULTS.items()}.items() | FINE.items():
        (tmp_path / f"{name}.html").write_text(STYLE + TEXT + text)
    found: dict[str, list[str]] = {}
    pages = [tmp_path / f"{name}.html" for name in ("good", *FAULTS, *FINE)]
    for line in await layout_problems(tmp_path, pages):
        page, _, problem = line.partition(".html: ")
        found.setdefault(page, []).append(problem)
    assert found == {name: [problem] for name, (_, problem) in FAULTS.items()}


async def test_faults_of_a_picture_itself(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        STYLE + TEXT + '<img src="cut.svg"><img src="overlapping.svg"><img src="words.svg">'
    )
    for name in ("cut.svg", "overlapping.svg", "words.svg"):
        (tmp_path / name).write_text(PICTURES[name])
    assert await layout_problems(tmp_path, [tmp_path / "page.html"]) == [
        'cut.svg: the edge cuts "beyond the edge"',
        'overlapping.svg: "one text" and "other text" overlap',
    ]
