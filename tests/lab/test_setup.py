"""The lab changes the kernel's module in the places it knows, or not at all."""

from __future__ import annotations

import pytest

from tests.lab.setup import LabError, relax

# The least that has those places.
SOURCE = """
int smc_ib_modify_qp_rts(struct link *link)
{
    some.retry_cnt = SEVEN;
}
static int smc_ib_determine_gid_rcu(void)
{
    if (!smcrv2 && attr->gid_type == IB_GID_TYPE_ROCE) one();
    if ((!smcrv2 && attr->gid_type == IB_GID_TYPE_ROCE) || two()) three();
}
"""


def test_both_parameters_are_put_in() -> None:
    changed = relax(SOURCE)
    assert changed.count("module_param(") == 2
    assert changed.index("static unsigned char lab_retries;") < changed.index(
        "smc_ib_modify_qp_rts"
    )
    assert "some.retry_cnt = lab_retries ? lab_retries : SEVEN;" in changed
    assert changed.count("IB_GID_TYPE_ROCE || lab_takes(attr))") == 2
    for line in SOURCE.splitlines():
        assert line in changed or "retry_cnt" in line or "gid_type" in line, line


@pytest.mark.parametrize("place", ["retry_cnt", "!smcrv2", "smc_ib_modify_qp_rts"])
def test_a_kernel_that_works_in_another_way_is_left_alone(place: str) -> None:
    with pytest.raises(LabError, match="another way"):
        relax(SOURCE.replace(place, "other", 1))
