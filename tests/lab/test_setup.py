"""The lab changes the kernel's module in the places it knows, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import machine, setup
from tests.lab.setup import Apt, LabError, kernel_release, make_own, relax, switch_loopback

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


LOOPBACK = """
int smc_loopback_init(void)
{
\treturn smc_lo_dev_probe();
}
"""


def test_the_loopback_device_is_created_only_with_its_parameter() -> None:
    changed = switch_loopback(LOOPBACK)
    assert "module_param(lab_loopback, bool" in changed
    assert changed.endswith(
        "int smc_loopback_init(void)\n{\n\tif (!lab_loopback)\n\t\treturn 0;\n"
        "\treturn smc_lo_dev_probe();\n}\n"
    )
    with pytest.raises(LabError, match="another way"):
        switch_loopback(LOOPBACK.replace("smc_loopback_init", "other"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has 0 files boot/vmlinuz-RELEASE"),
        (["boot/vmlinuz-7.3", "boot/vmlinuz-7.4"], "has 2 files boot/vmlinuz-RELEASE"),
        (["boot/vmlinuz-7.3", "lib/modules/7.4/x"], r"has no lib/modules/7\.3$"),
    ],
)
def test_a_directory_that_is_no_kernel_is_an_error(
    files: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "install_packages", lambda: None)
    for each in files:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    with pytest.raises(LabError, match=message):
        make_own(tmp_path)


@pytest.mark.parametrize("command", [setup.main, lambda: machine.run_guest("x", "", seconds=1)])
def test_a_kernel_is_made_under_the_lock(
    command: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may run guests with the kernel that this one replaces."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["setup"])
    monkeypatch.setattr(machine, "ARTEFACTS", tmp_path / "artefacts")
    made = []

    def make(name: str = setup.DEFAULT) -> Path:
        with (
            open(setup.cache_directory() / "lock", "w") as lock,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.append(name)
        raise LabError("no kernel is needed")

    monkeypatch.setattr(setup, "make", make)
    with contextlib.suppress(LabError):
        command()
    assert made == [setup.DEFAULT]


class ListsOfApt(Apt):
    """An apt whose lists have no package, until they are fetched."""

    def __init__(self, *offered: str) -> None:
        super().__init__()
        self._offered = offered
        self._listed: tuple[str, ...] = ()

    def cache(self, *words: str, check: bool = True) -> str:
        """Answer pkgnames from the lists, and know no dependency."""
        return "\n".join(self._listed) if words[0] == "pkgnames" else ""

    def get(self, *words: str, cwd: Path | None = None) -> None:
        raise AssertionError(f"apt-get {words} is not needed")

    def update(self) -> None:
        self._listed = self._offered


def test_a_kernel_newer_than_the_lists_is_found_after_an_update() -> None:
    apt = ListsOfApt(
        "linux-image-6.12.9+deb12-amd64",
        "linux-image-6.12.117+deb12-amd64",
        "linux-image-6.12.117+deb12-cloud-amd64",
    )
    assert kernel_release(apt, "6.12") == "6.12.117+deb12-amd64"


def test_a_kernel_that_apt_lacks_is_an_error() -> None:
    with pytest.raises(LabError, match=r"no linux-image-6\.12-amd64"):
        kernel_release(ListsOfApt(), "6.12")


CONFIG = (Path(setup.__file__).parent / setup.KERNEL_CONFIG).read_text()


@pytest.mark.parametrize("lost", ["", "CONFIG_SMC=m\n", "# CONFIG_DIBS_LO is not set\n"])
def test_a_kernel_without_a_part_of_its_configuration_is_an_error(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = setup.KERNELS["7.3"]
    tree = setup.tree_of(tmp_path, source)
    (tree / "include" / "config").mkdir(parents=True)
    (tree / "include" / "config" / "kernel.release").write_text("7.3.4-lab\n")
    (tree / "Makefile").touch()
    (tree / "arch/x86/boot").mkdir(parents=True)
    (tree / "arch/x86/boot/bzImage").write_text("kernel")

    def build(cache: Path, where: Path, commands: str) -> None:
        assert (cache, where) == (tmp_path, tree)
        assert setup.KERNEL_CONFIG in commands
        assert (tree / setup.KERNEL_CONFIG).read_text() == CONFIG
        (tree / ".config").write_text(CONFIG.replace(lost, "", 1))
        (tree / "out/lib/modules/7.3.4-lab").mkdir(parents=True)

    def lay_out(image: Path, release: str, work: Path, required: object) -> Path:
        assert (image / f"boot/vmlinuz-{release}").read_text() == "kernel"
        return work / release

    monkeypatch.setattr(setup, "in_compiler_root", build)
    monkeypatch.setattr(setup, "lay_out", lay_out)
    expected = pytest.raises(LabError, match=f"does not take {lost.strip()}$")
    with expected if lost else contextlib.nullcontext():
        made = setup.build_kernel(Apt(), tmp_path, tmp_path / "work", source)
        assert made == tmp_path / "work/7.3.4-lab"
