"""A report as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from html import escape

from smc_conform.reports.document import Document, counts

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .3rem .6rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid #8884; }
td:first-child { white-space: nowrap; font-family: ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; background: #8881; }
.verdict { font-weight: 600; white-space: nowrap; }
.pass { color: #2a8a3e; } .fail { color: #c62f2f; } .differs { color: #2868b8; }
.inconclusive { color: #b07300; } .not { color: #888; }
summary { cursor: pointer; }
"""


def page(run: Document) -> str:
    """The report as HTML."""
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
        text = f"<p>{escape(each['requirement'])}</p>"
        if each["detail"]:
            text += f"<p>{escape(each['detail'])}</p>"
        if each["ladder"]:
            ladder = escape("\n".join(each["ladder"]))
            text += f"<details><summary>ladder</summary><pre>{ladder}</pre></details>"
        rows.append(
            f'<tr id="{escape(each["id"])}"><td>{escape(name)}</td>'
            f'<td class="verdict {verdict.split()[0]}">{escape(verdict)}</td><td>{text}</td></tr>'
        )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n'
        f"<h1>{escape(title)}</h1><p>{escape(facts)}</p>\n<table>\n"
        + "\n".join(rows)
        + "\n</table></html>\n"
    )
