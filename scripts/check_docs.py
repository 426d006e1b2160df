"""Check the built pages: `python -m scripts.check_docs DIRECTORY`.

The first part needs no browser: on every page links and anchors have a target, pictures exist, and
nothing is loaded from the network.  The second part opens each page in Debian's chromium: it
renders, no script fails, every picture shows, and no request goes anywhere but to the directory.
In windows of 1280 and 390 pixels, in light and dark, it also checks that:

- nothing is wider than the window;
- text is at least 9 pixels high, also in an SVG picture as it is shown.  A picture may have smaller
  text if a click opens its file, and the text is large enough there;
- the contrast of text and what is behind it is that of WCAG 2.2, level AA, also in pictures;
- no text of a picture is cut by its edge or overlaps other text.

Finally the search must find something.

    --screenshots DIR   also write a PNG of each page, width and scheme to DIR
    --no-browser        the first part only

Prints one line for each problem.  The exit code is 1 if there is a problem, 2 if there are no pages
or no browser.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

import trio

from scripts.browser import Page, open_page

# Elements that a browser loads by itself; it follows `a` only after a click.
_LOADED: Final = {"img": "src", "script": "src", "link": "href", "iframe": "src", "object": "data"}
_SHORTEST: Final = 150
"""Least number of characters of a page with content."""
_MADE: Final = ("search", "genindex", "py-modindex")
"""Pages that Sphinx generates without a source of this project."""
_MEASURE: Final = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")
View: TypeAlias = tuple[int, str]
"""How a page is shown: the width of the window in pixels, and the preferred colour scheme."""
_VIEWS: Final[tuple[View, ...]] = (
    (1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"),
)  # fmt: skip
_LIMITS: Final = {"size": 9, "contrast": 4.5, "large": 3, "picture": 40}
"""The least size of text and width of pictures in pixels, and the least contrast of text and of
large text (WCAG 2.2, 1.4.3)."""
_FOUND: Final = """new Promise(resolve => {
  const look = (left) => {
    const found = document.querySelectorAll("#search-results li").length;
    found || !left ? resolve(found) : setTimeout(look, 100, left - 1);
  };
  look(100);
})"""


@dataclass
class Html:
    """The identifiers, links and loads of a page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Html()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.found.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.found.links.append(values["href"])
        elif tag in _LOADED and _LOADED[tag] in values:
            self.found.loads.append(values[_LOADED[tag]])


def read(path: Path) -> Html:
    """Parse the page in a file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.found


def link_problems(directory: Path) -> list[str]:
    """Return the problems with links and loads of all pages, a line each."""
    pages = {path: read(path) for path in sorted(directory.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(directory)
        for address in page.loads:
            parts = urlsplit(address)
            if parts.scheme not in ("", "data") or parts.netloc:
                wrong.append(f"{name}: loads {address} from the network")
        for address in dict.fromkeys([*page.links, *page.loads]):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or not target.is_relative_to(directory):
                wrong.append(f"{name}: {address} leads nowhere")
            elif (
                target in pages
                and parts.fragment
                and unquote(parts.fragment) not in pages[target].ids
            ):
                wrong.append(f"{name}: {address} has no such anchor")
    return wrong


async def layout_problems(
    directory: Path, pages: list[Path], screenshots: Path | None = None
) -> list[str]:
    """Return the problems that a browser finds in the pages of a directory, a line each."""
    wrong: list[str] = []
    async with open_page() as page:
        pictures = await _pictures(page, pages)
        wrong += _picture_problems(directory, pictures)
        for path in pages:
            name = path.relative_to(directory)
            await page.open(path.as_uri())
            found: dict[str, list[View]] = {}
            addresses = {file.as_uri() for file in _drawings(path)}
            for view in _VIEWS:
                await page.show(*view)
                known = {address: pictures[view][address] for address in addresses}
                seen = await page.evaluate(
                    f"{_MEASURE}.page({json.dumps(known)}, {json.dumps(_LIMITS)})"
                )
                for text in _page_problems(seen, made=name.stem in _MADE):
                    found.setdefault(text, []).append(view)
                if screenshots is not None:
                    ending = f".{view[0]}-{view[1]}.png"
                    await page.photograph(screenshots / name.with_suffix(ending))
            wrong += [f"{name}: {text}" for text in page.complaints]
            wrong += [
                f"{name}: asks for {address}"
                for address in page.requests
                if urlsplit(address).scheme not in ("file", "data", "blob")
            ]
            wrong += [f"{name}: {text}{_where(views)}" for text, views in found.items()]
        search = directory / "search.html"
        if search in pages:
            await page.open(f"{search.as_uri()}?q=fallback")
            if not await page.evaluate(_FOUND):
                wrong.append("search.html: the search finds nothing")
    return wrong


async def _pictures(page: Page, pages: list[Path]) -> dict[View, dict[str, Any]]:
    """Open each SVG file of the pages by itself, and return its measures by view and address."""
    found: dict[View, dict[str, Any]] = {view: {} for view in _VIEWS}
    for file in sorted({file for path in pages for file in _drawings(path)}):
        await page.open(file.as_uri())
        for view in _VIEWS:
            await page.show(*view)
            found[view][file.as_uri()] = await page.evaluate(f"{_MEASURE}.picture()")
    return found


def _picture_problems(directory: Path, pictures: dict[View, dict[str, Any]]) -> list[str]:
    """Return what is wrong with the pictures themselves, a line each."""
    wrong = []
    for view in _VIEWS:
        for address, seen in pictures[view].items():
            name = address.removeprefix(f"{directory.as_uri()}/")
            wrong += [f'{name}: the edge cuts "{text}"' for text in seen["cut"]]
            wrong += [f'{name}: "{one}" and "{other}" overlap' for one, other in seen["overlaps"]]
    return list(dict.fromkeys(wrong))


def _drawings(path: Path) -> set[Path]:
    """The SVG files that a page shows."""
    addresses = [address for address in read(path).loads if address.endswith(".svg")]
    files = {(path.parent / unquote(urlsplit(address).path)).resolve() for address in addresses}
    return {file for file in files if file.is_file()}


def _page_problems(seen: dict[str, Any], *, made: bool) -> Iterator[str]:
    """Yield what is wrong with a page, from the facts that measure.js has found.

    Args:
      made: True if Sphinx generates the page without a source.
    """
    yield from (f"{address} does not show" for address in seen["broken"])
    yield from (f"{address} is too small to see" for address in seen["tiny"])
    if not seen["title"] and not made:
        yield "no heading"
    if seen["text"] < _SHORTEST and not made:
        yield f"only {seen['text']} characters of text"
    if not seen["styled"]:
        yield "no style sheet"
    if seen["over"] > 0:
        yield f"{seen['over']} pixels wider than the window"
    yield from (f'the window cuts "{text}"' for text in seen["cut"])
    for each in seen["small"]:
        yield f"{_text(each)} is only {each['size']:.1f} px high"
    for each in seen["faint"]:
        yield f"{_text(each)} has a contrast of only {each['ratio']:.1f}"


def _text(found: dict[str, Any]) -> str:
    more = f" and {found['count'] - 1} more" if found["count"] > 1 else ""
    return f'"{found["text"]}"{more} ({found["where"]})'


def _where(views: list[View]) -> str:
    """The views in which something was found; nothing if it is all of them."""
    if len(views) == len(_VIEWS):
        return ""
    return " [" + ", ".join(f"{width} px {scheme}" for width, scheme in views) + "]"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="look at the built pages as a reader does")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="DIR")
    parser.add_argument("--no-browser", action="store_true")
    options = parser.parse_args(arguments)
    directory = options.directory.resolve()
    pages = sorted(directory.rglob("*.html"))
    if not pages:
        print(f"{options.directory} has no pages: make docs", file=sys.stderr)
        return 2
    wrong = link_problems(directory)
    if not options.no_browser:
        try:
            wrong += trio.run(layout_problems, directory, pages, options.screenshots)
        except (OSError, trio.TooSlowError) as error:
            print(f"the browser cannot be used: {error}", file=sys.stderr)
            return 2
    for line in wrong:
        print(line)
    print(f"{len(pages)} pages, {len(wrong)} things wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
