"""A report as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from smc_conform.reports.document import Document, counts, place, with_verdict
from smc_conform.verdicts import Verdict

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { overflow-wrap: anywhere; line-height: 1.2; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
td, th { padding: .3rem .6rem; text-align: left; vertical-align: top; overflow-wrap: anywhere;
  border-bottom: 1px solid #8884; }
col.id { width: 8rem; } col.verdict { width: 8rem; }
td:first-child { font-family: ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; background: #8881; }
ol { padding-left: 1.4rem; } li { overflow-wrap: anywhere; margin: .4rem 0; }
.verdict { font-weight: 600; }
.pass { color: #2a8a3e; } .fail { color: #c62f2f; } .differs { color: #2868b8; }
.inconclusive { color: #b07300; } .not { color: #888; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  table, tbody, tr, td, th { display: block; } colgroup { display: none; }
  td, th { padding: .1rem 0; border: 0; } tr { border-bottom: 1px solid #8884; padding: .3rem 0; }
}
"""


def page(run: Document, directory: Path = Path()) -> str:
    """The report as HTML.

    directory: the page's own, for links to captures (`document.with_captures`).
    """
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts(run).items() if count)
    title = f"smc-conform: {run['target']} as {run['role']}"
    options = run["options"]
    facts = (
        f"{numbers}; {run['seconds']} s; SMC-R version {options['version']}; "
        f"RNICs {', '.join(options['rnics'])}; seed {options['seed']}; suite {run['suite']} "
        f"on {run['system']}"
    )
    rows, area = [], ""
    for each in run["checks"]:
        found, _, name = each["id"].partition("/")
        if found != area:
            area = found
            rows.append(f'<tr><th colspan="3" id="{escape(area)}">{escape(area)}</th></tr>')
        verdict = each["verdict"]
        text = f"<p>{escape(each['requirement'])} ({escape(place(each['id']))})</p>"
        if each["detail"]:
            text += f"<p>{escape(each['detail'])}</p>"
        if each["ladder"]:
            ladder = escape("\n".join(each["ladder"]))
            text += f"<details><summary>ladder</summary><pre>{ladder}</pre></details>"
        if each["messages"]:
            messages = escape("\n".join(each["messages"]))
            text += f"<details><summary>bytes</summary><pre>{messages}</pre></details>"
        if "file" in each:
            link = quote(os.path.relpath(each["file"], directory))
            text += f'<p><a href="{link}">capture</a></p>'
        rows.append(
            f'<tr id="{escape(each["id"])}"><td>{escape(name)}</td>'
            f'<td class="verdict {verdict.split()[0]}">{escape(verdict)}</td><td>{text}</td></tr>'
        )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style>\n<h1>{escape(title)}</h1><p>{escape(facts)}</p>\n{_links(run)}"
        '<h2>All checks</h2>\n<table><colgroup><col class="id"><col class="verdict"><col>'
        "</colgroup>\n" + "\n".join(rows) + "\n</table></html>\n"
    )


def _links(run: Document) -> str:
    """The early end of the run, and the checks that have not passed, with links to their rows."""
    ended = run.get("ended")
    text = f'<p class="fail">{escape(ended)}</p>\n' if ended else ""
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.DIFFERS):
        found = with_verdict(run, verdict)
        if not found:
            continue
        items = "\n".join(
            f'<li>{escape(place(each["id"]))}: <a href="#{escape(each["id"])}">'
            f"{escape(each['id'])}</a>: {escape(each['requirement'])}</li>"
            for each in found
        )
        opened = " open" if verdict is Verdict.FAIL else ""
        text += (
            f'<details{opened}><summary class="verdict {verdict}">{len(found)} {verdict}</summary>'
            f"\n<ol>{items}</ol></details>\n"
        )
    return text
