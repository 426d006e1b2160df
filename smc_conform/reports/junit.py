"""A report as JUnit XML, which CI systems read."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from smc_conform.reports.document import Document, counts

__all__ = ["junit"]

_ELEMENTS = {
    "fail": "failure",
    "inconclusive": "error",
    "not applicable": "skipped",
}


def junit(run: Document) -> str:
    """The report as XML.  "differs" counts as passed, with its text in the output."""
    numbers = counts(run)
    suite = ET.Element(
        "testsuite", name=f"smc-conform {run['role']} {run['target']}",
        tests=str(len(run["checks"])), failures=str(numbers["fail"]),
        errors=str(numbers["inconclusive"]), skipped=str(numbers["not applicable"]),
        time=str(run["seconds"]),
    )  # fmt: skip
    for each in run["checks"]:
        area, _, name = each["id"].partition("/")
        case = ET.SubElement(
            suite, "testcase", classname=area, name=f"{name}: {each['requirement']}",
            time=str(each["seconds"]),
        )  # fmt: skip
        kind = _ELEMENTS.get(each["verdict"])
        if kind:
            ET.SubElement(case, kind, message=_clean(each["detail"]))
        if each["ladder"]:
            output = ET.SubElement(case, "system-out")
            output.text = _clean("\n".join([each["detail"], *each["ladder"]]))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    """The text without characters that XML forbids."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
