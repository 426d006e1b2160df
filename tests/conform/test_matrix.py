"""The matrix keeps the results of earlier runs; a share of checks replaces no whole area."""

from __future__ import annotations

from scripts.conform_findings import findings
from scripts.conform_matrix import Area, Column, Reports, checked, linux_page, matrix, merged


def column(
    name: str = "Linux 6.12", version: int = 1, role: str = "server", **areas: Area
) -> Column:
    return Column(name, version, role, areas)


def test_reports_are_counted_by_area() -> None:
    checks = {
        "clc/A-1": {"verdict": "pass", "detail": ""},
        "clc/A-2": {"verdict": "fail", "detail": "no answer"},
        "llc/A-1": {"verdict": "differs", "detail": "goes on"},
    }
    found = Reports("Linux 6.12", 1, "server", checks).column()
    assert found.areas == {
        "clc": Area(1, 2, {"clc/A-2": ("fail", "no answer")}),
        "llc": Area(0, 1, {"llc/A-1": ("differs", "goes on")}),
    }
    assert found.others("fail") == {"clc/A-2": "no answer"}


def test_a_report_replaces_an_area_unless_it_has_fewer_checks() -> None:
    whole, better, share = Area(8, 9, {"clc/A-1": ("fail", "x")}), Area(9, 9, {}), Area(3, 3, {})
    kept = [column(clc=whole, llc=whole)]
    assert merged(kept, [column(clc=better)]) == [column(clc=better, llc=whole)]
    assert merged(kept, [column(clc=share)]) == kept
    assert merged(kept, [column(data=share)]) == [column(clc=whole, data=share, llc=whole)]


def test_the_newest_kernel_comes_after_trio_smc() -> None:
    rows = [
        column("Linux 6.12"), column("Linux 7.3", role="client"), column("Linux 7.3"),
        column("Linux 7.3", 2), column("Linux 6.17"), column("trio_smc, soft-RoCE"),
        column("trio_smc, software RNIC", 2),
    ]  # fmt: skip
    assert [each.words for each in merged([], rows)] == [
        "trio_smc, software RNIC, version 2, server",
        "trio_smc, soft-RoCE, version 1, server",
        "Linux 7.3, version 1, server",
        "Linux 7.3, version 1, client",
        "Linux 7.3, version 2, server",
        "Linux 6.17, version 1, server",
        "Linux 6.12, version 1, server",
    ]


def test_a_failure_of_linux_leads_to_its_page() -> None:
    found = [
        column(clc=Area(8, 9, {"clc/C.6-4": ("fail", "TCP stays")})),
        column("Linux 7.3", llc=Area(0, 1, {"llc/X-1": ("differs", "goes on")})),
    ]
    page = matrix(found, findings())
    assert "| Linux 6.12 | 1 | server | 8/9 |  |" in page
    assert "](linux/clc-C.6-4.md) |" in page
    assert "| `llc/X-1` | Linux 7.3, version 1, server | differs | `goes on` |" in page


def test_a_page_names_its_run_and_the_command_that_repeats_it() -> None:
    failed = Area(8, 9, {"version2/v2.10-10": ("fail", "confirms")})
    found = [
        column(version=2, version2=failed),
        column("Linux 7.3", 2, version2=failed),
        column("Linux 7.3", 2, "client", version2=failed),
    ]
    reason = findings()["version2/v2.10-10"]
    ladder = "1.0 ms {} TCP      SMC Proposal version 2 (164 bytes)"
    report = {"ladder": [ladder.format("->")], "messages": []}
    page = linux_page(reason, found, report, "Linux 7.3, version 2, server", "")
    assert "\nLadder, messages and capture are of Linux 7.3, version 2, server.\n" in page
    assert "runner --kernel 6.12 conform kernel server 2 failover\n" in page
    # Without a report the page keeps the name of the run, and its bytes.
    assert linux_page(reason, found, None, "", page) == page
    of_a_client = page.replace("are of Linux 7.3, version 2, server.", "").replace(
        ladder.format("->"), ladder.format("<-")
    )
    nameless = of_a_client.replace("Ladder, messages and capture ", "")
    assert "are of Linux 7.3, version 2, client.\n" in linux_page(reason, found, None, "", nameless)
    nameless = nameless.replace("<-", "->")
    both = "are of one of these: Linux 6.12, version 2, server; Linux 7.3, version 2, server.\n"
    assert both in linux_page(reason, found, None, "", nameless)


def test_the_pages_have_the_results() -> None:
    assert checked(findings()) == []
