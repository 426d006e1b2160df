"""Check the built pages: `python -m scripts.check_docs DIRECTORY`.

The first part needs no browser: on every page links and anchors have a target, pictures exist, and
nothing is loaded from the network.  The second part opens each page in Debian's chromium: it
renders, no script fails, every picture shows, nothing is wider than the window, and no request goes
anywhere but to the directory.  Finally the search must find something.

    --screenshots DIR   also write a PNG of each page to DIR
    --no-browser        the first part only

Prints one line for each problem.  The exit code is 1 if there is a problem, 2 if there are no pages
or no browser.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import trio

from scripts.browser import open_page

# Elements that a browser loads by itself; it follows `a` only after a click.
_LOADED: Final = {"img": "src", "script": "src", "link": "href", "iframe": "src", "object": "data"}
_SHORTEST: Final = 150
"""Least number of characters of a page with content."""
_MADE: Final = ("search", "genindex", "py-modindex")
"""Pages that Sphinx generates without a source of this project."""
_MEASURE_LAYOUT: Final = """(() => {
  const pictures = [...document.images, ...document.querySelectorAll("object")];
  const room = document.documentElement;
  return {
    title: document.querySelector("h1")?.innerText ?? "",
    text: (document.querySelector("article") ?? document.body).innerText.length,
    styled: getComputedStyle(document.body).fontFamily.includes("sans-serif"),
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    tiny: pictures.filter(i => i.getBoundingClientRect().width < 40 && i.offsetParent)
                  .map(i => i.src ?? i.data),
    over: room.scrollWidth - room.clientWidth,
  };
})()"""
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
    wrong = []
    async with open_page() as page:
        for path in pages:
            name = path.relative_to(directory)
            await page.open(path.as_uri())
            wrong += [f"{name}: {text}" for text in page.complaints]
            wrong += [
                f"{name}: asks for {address}"
                for address in page.requests
                if urlsplit(address).scheme not in ("file", "data", "blob")
            ]
            seen = await page.evaluate(_MEASURE_LAYOUT)
            wrong += [f"{name}: {address} does not show" for address in seen["broken"]]
            wrong += [f"{name}: {address} is too small to see" for address in seen["tiny"]]
            if not seen["title"] and name.stem not in _MADE:
                wrong.append(f"{name}: no heading")
            if seen["text"] < _SHORTEST and name.stem not in _MADE:
                wrong.append(f"{name}: only {seen['text']} characters of text")
            if not seen["styled"]:
                wrong.append(f"{name}: no style sheet")
            if seen["over"] > 0:
                wrong.append(f"{name}: {seen['over']} pixels wider than the window")
            if screenshots is not None:
                await page.photograph(screenshots / name.with_suffix(".png"))
        search = directory / "search.html"
        if search in pages:
            await page.open(f"{search.as_uri()}?q=fallback")
            if not await page.evaluate(_FOUND):
                wrong.append("search.html: the search finds nothing")
    return wrong


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
