"""Makes the lab: a kernel for QEMU guests, from Debian packages only.

    python -m tests.lab.setup [KERNEL]

KERNEL is a name in `KERNELS`, or the path of a kernel of your own: a directory with
boot/vmlinuz-RELEASE and lib/modules/RELEASE, as in a package of a kernel (`make_own`).

Everything lies in ``$XDG_CACHE_HOME/trio-smc-lab`` (else ``~/.cache/trio-smc-lab``); nothing is
installed but the packages that `PACKAGES` names.  A second run does nothing.

The kernel is Debian's own binary.  One module is built again: `net/smc`, for soft-RoCE's sake.
`relax` gives it two parameters: ``lab_gids`` makes SMC-R version 1, which takes RoCE v1 GIDs alone,
take soft-RoCE's too, and ``lab_retries`` is how often its queue pairs send again before they fail,
where it asks for 7, which soft-RoCE reads as "for ever".  `switch_loopback` gives it a third one:
``lab_loopback`` creates the loopback device of SMC-D when the module is loaded.  docs/interop.md
says it in words.
SMC-R version 2 is tried with Debian's own module, which is kept beside it (`STOCK`).

`KERNELS` has the kernels by name.  A kernel that this host's Debian does not offer comes from
another release, by an apt directory of its own (`foreign_apt`): neither the sources nor the
packages of this host are changed.  6.17 is not built, so it is tried with its own module, in
version 2.

7.3 is built from Debian's package of its source (`build_kernel`), because Debian's binaries have no
SMC: from 6.18 on it needs CONFIG_DIBS, and without CONFIG_SMC the kernel itself lacks the TCP
option.  `guest-kernel.config` says what is in it.  The compiler is that of Debian's release with
this kernel, unpacked into the cache (`unpack_compiler`).  This takes 3 GB and twenty minutes of
processor time; later runs compile what has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["DEFAULT", "KERNELS", "LabError", "cache_directory", "locked", "make", "relax"]


class KernelSource(NamedTuple):
    """Where a kernel comes from.

    Attributes:
      series: of Debian's packages.
      suites: Debian's releases that have it; none: this host's.
      module_is_built: net/smc is built again, so that it speaks version 1 over soft-RoCE.
      is_built: the whole kernel is built, from Debian's package of its source.
      boot: words for its command line.
    """

    series: str
    suites: tuple[str, ...] = ()
    module_is_built: bool = False
    is_built: bool = False
    boot: str = ""

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of SMC-R that the kernel speaks in the lab."""
        return (1, 2) if self.module_is_built else (2,)


KERNELS: Final = {
    "6.12": KernelSource("6.12", module_is_built=True),
    "6.17": KernelSource("6.17", ("trixie-backports",)),
    # The guests' processor has no cmpxchg16b (`tests.lab.machine`), without which this kernel's
    # BPF programs get memory from caches with debugging only, and the TCP option needs one.
    "7.3": KernelSource(
        "7.3", ("trixie-backports",), module_is_built=True, is_built=True,
        boot="slab_debug=F,kmalloc-*",
    ),
}  # fmt: skip
"""By name.  From 6.18 on Debian's binary kernels have no SMC, because CONFIG_DIBS is not set."""
DEFAULT: Final = "6.12"
COMPILER: Final = "gcc-12"
"""The compiler of Debian's kernel packages of this release, which depend on it."""
PACKAGES: Final = {
    "qemu-system-x86_64": ("qemu-system-x86", "seabios"),
    "/bin/busybox": ("busybox-static",),
    "depmod": ("kmod",),
    "cpio": ("cpio",),
    "make": ("make",),
    COMPILER: (COMPILER, "libc6-dev"),
    "bc": ("bc",),
    "rdma": ("iproute2", "rdma-core", "ibverbs-providers"),
    "/usr/share/doc/libelf-dev": ("libelf-dev",),
    "/usr/lib/python3/dist-packages/pyverbs": ("python3-pyverbs",),
    "tshark": ("tshark",),
}
"""Required files and programs, and the packages that have them."""
COMPILER_RELEASE: Final = "trixie"
"""The release of Debian whose compiler builds a kernel."""
COMPILER_VERSION: Final = "14"
COMPILER_PACKAGES: Final = (
    "base-files", "libc-bin", "bash", "coreutils", "sed", "grep", "gawk", "mawk", "findutils",
    "make", f"gcc-{COMPILER_VERSION}", "libc6-dev", "bc", "kmod", "binutils", "libelf-dev",
    "libssl-dev", "zlib1g-dev", "pahole", "perl", "diffutils", "xz-utils", "gzip", "bzip2", "tar",
    "flex", "bison", "m4", "python3-minimal", "python3", "rsync", "cpio", "patch", "debianutils",
    "util-linux", "file",
)  # fmt: skip
KERNEL_CONFIG: Final = "guest-kernel.config"
BOOT: Final = "boot"
"""A file of a kernel's directory: words for its command line."""
FOR_BOOT: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_net", "virtio_rng")
MODULES: Final = (
    *FOR_BOOT, "crc32_generic", "crc32_pclmul", "crc32c_generic", "rdma_rxe", "ib_uverbs", "smc",
    "smc_diag", "dummy", "macvlan", "8021q", "garp", "mrp", "sch_netem", "bonding", "rdma_ucm",
)  # fmt: skip
BUILT_IN: Final = ("crc32_generic", "crc32_pclmul", "crc32c_generic")
"""Modules that newer kernels do not have as such."""
OWN_MODULES: Final = (*FOR_BOOT, "smc", "smc_diag")
"""Modules that the lab needs of a user's own kernel."""
STOCK: Final = "stock"
"""A directory there: Debian's own modules of SMC, as they are."""
PROGRAMS: Final = {
    "plain_echo.c": (),
    "smc_sockets.c": ("-shared", "-fPIC", "-ldl"),
    "socket_speed.c": ("-ldl",),
}
"""C programs for the guests' side of the kernel, with the compiler's options."""
_HERE = Path(__file__).resolve().parent


class LabError(Exception):
    """The lab cannot be made here; the text says why."""


def cache_directory() -> Path:
    """Where the lab lies."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trio-smc-lab"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the lab's lock: on this host, one process at a time makes kernels or runs guests."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(name: str = DEFAULT) -> Path:
    """Return the directory of a kernel, made now unless it is there.  The caller holds the lock.

    It has vmlinuz, initrd.gz, lib/modules/VERSION, version, `BOOT`, and `PROGRAMS`.

    Raises LabError.
    """
    if os.sep in name:
        return make_own(Path(name).resolve())
    source = KERNELS.get(name)
    if source is None:
        raise LabError(
            f"the lab has no kernel {name}, only {', '.join(KERNELS)}, or the path of a directory"
        )
    cache = cache_directory()
    place = cache / ("kernel" if name == DEFAULT else f"kernel-{name}")
    stamp = place / "made-by"
    inputs = (Path(__file__), *map(_HERE.joinpath, ("early-init.sh", KERNEL_CONFIG, *PROGRAMS)))
    mark = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    install_packages()
    if stamp.exists() and stamp.read_text() == mark:
        return place
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as directory:
        work = Path(directory)
        apt = foreign_apt(cache, source.suites) if source.suites else Apt()
        if source.is_built:
            made = build_kernel(apt, cache, work, source)
        else:
            made = lay_out_kernel(apt, cache, work, source)
        if source.module_is_built and not source.is_built:
            build_smc(apt, cache, work, made, source)
        elif source.is_built:
            rebuild_smc(cache, made, source)
        else:
            keep_stock(made)
        make_initrd(work, made)
        build_programs(made)
        (made / BOOT).write_text(source.boot)
        (made / "made-by").write_text(mark)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    return place


def make_own(root: Path) -> Path:
    """Return the directory of a kernel that the user has built; it is made in each run.

    Args:
      root: has boot/vmlinuz-RELEASE and lib/modules/RELEASE.

    Raises LabError.
    """
    install_packages()
    images = sorted(root.glob("boot/vmlinuz-*"))
    if len(images) != 1:
        raise LabError(f"{root} has {len(images)} files boot/vmlinuz-RELEASE, not one")
    release = images[0].name.removeprefix("vmlinuz-")
    if not (root / "lib" / "modules" / release).exists():
        raise LabError(f"{root} has no lib/modules/{release}")
    cache = cache_directory()
    place = cache / f"kernel-own-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as directory:
        work = Path(directory)
        # depmod writes into the directory, and the user's is not changed.
        image = work / "image"
        modules = Path("lib", "modules", release)
        links = shutil.ignore_patterns("build", "source")
        shutil.copytree(root / modules, image / modules, symlinks=True, ignore=links)
        (image / "boot").mkdir()
        shutil.copy(images[0], image / "boot")
        made = lay_out(image, release, work, required=OWN_MODULES)
        keep_stock(made)
        make_initrd(work, made)
        build_programs(made)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    return place


def as_root(*words: str) -> list[str]:
    """The command, with sudo before it if this process is not root."""
    return [*words] if os.geteuid() == 0 else ["sudo", "-n", *words]


def install_packages() -> None:
    """Have apt install what is missing."""
    missing = [
        package
        for needed, packages in PACKAGES.items()
        if not (Path(needed).exists() if needed[0] == "/" else shutil.which(needed))
        for package in packages
    ]
    if not missing:
        return
    line = as_root("apt-get", "install", "-y", "-q", "--no-install-recommends", *missing)
    log("installing " + " ".join(missing))
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    refresh = [*line[: line.index("install")], "update", "-q"]
    output = ""
    for attempt in (line, refresh, line):
        try:
            done = subprocess.run(attempt, env=environment, capture_output=True, check=False)
        except FileNotFoundError as missing_command:
            raise LabError(f"the lab needs Debian's apt: {missing_command}") from missing_command
        if attempt is line and not done.returncode:
            return
        output = done.stderr.decode(errors="replace")
    raise LabError(f"this failed: {' '.join(line)}\n{output}")


# --- the kernel ---------------------------------------------------------------------------------


def lay_out_kernel(apt: Apt, cache: Path, work: Path, kernel: KernelSource) -> Path:
    """Debian's kernel image and the modules that guests load."""
    release = kernel_release(apt, kernel.series)
    image = work / "image"
    unpack(fetch(apt, cache, f"linux-image-{release}"), image)
    if not (image / "lib" / "modules").exists():  # newer packages have them in /usr/lib alone
        (image / "lib").symlink_to("usr/lib")
    return lay_out(image, release, work, required=set(MODULES) - set(BUILT_IN))


def lay_out(image: Path, release: str, work: Path, required: Collection[str]) -> Path:
    """The kernel in ``image`` and the modules of `MODULES` that it has.

    Raises LabError if it has not all that are ``required``.
    """
    made = work / "made"
    modules = made / "lib" / "modules" / release
    modules.mkdir(parents=True)
    shutil.copy(image / "boot" / f"vmlinuz-{release}", made / "vmlinuz")
    (made / "version").write_text(release)
    run("depmod", "-b", image, release)
    source = image / "lib" / "modules" / release
    for path in closure(image, release, MODULES, required):
        target = modules / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".xz":
            target.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copy(path, target)
    for listing in source.glob("modules.builtin*"):
        shutil.copy(listing, modules)
    shutil.copy(source / "modules.order", modules)
    run("depmod", "-b", made, release)
    return made


def kernel_release(apt: Apt, series: str) -> str:
    """The newest release of the series that apt offers, as in "6.12.117+deb12-amd64".

    If apt's lists have none, they may be older than the series: they are fetched once more.
    """
    release = listed_release(apt, series)
    if release is None:
        log(f"apt's lists have no linux-image-{series}-amd64: fetching them again")
        apt.update()
        release = listed_release(apt, series)
    if release is None:
        raise LabError(f"apt has no linux-image-{series}-amd64")
    return release


def listed_release(apt: Apt, series: str) -> str | None:
    """The newest release of the series in apt's lists; None if there is none."""
    shown = apt.cache("depends", f"linux-image-{series}-amd64", check=False)
    found = re.search(r"Depends: linux-image-(\S+-amd64)$", shown, re.MULTILINE)
    if found is not None:
        return found[1]
    names = apt.cache("pkgnames", f"linux-image-{series}.").split()
    releases = [
        each.removeprefix("linux-image-")
        for each in names
        if re.fullmatch(r"linux-image-[0-9.]+\+deb[0-9]+-amd64", each)
    ]
    if not releases:
        return None
    return max(releases, key=lambda each: [int(number) for number in re.findall(r"\d+", each)])


def build_kernel(apt: Apt, cache: Path, work: Path, kernel: KernelSource) -> Path:
    """Build the kernel from Debian's package of its source; the tree stays in the cache."""
    tree = tree_of(cache, kernel)
    if not (tree / "Makefile").exists():
        name = f"linux-source-{kernel.series}"
        unpack(fetch(apt, cache, name), work / "package")
        new = work / "tree"
        new.mkdir()
        archive = work / "package" / "usr" / "src" / f"{name}.tar.xz"
        run("tar", "xf", archive, "-C", new, "--strip-components=1")
        shutil.rmtree(tree, ignore_errors=True)
        new.rename(tree)
    wanted = (_HERE / KERNEL_CONFIG).read_text()
    (tree / KERNEL_CONFIG).write_text(wanted)
    log(f"building Linux {kernel.series}: twenty minutes of processor time, the first time")
    in_compiler_root(
        cache, tree,
        "make -s ARCH=x86_64 tinyconfig\n"
        f"scripts/kconfig/merge_config.sh -m .config {KERNEL_CONFIG} > /dev/null\n"
        "make -s ARCH=x86_64 olddefconfig\n"
        "make -s ARCH=x86_64 -j$(nproc) bzImage modules\n"
        "rm -rf out\n"
        "make -s ARCH=x86_64 INSTALL_MOD_PATH=/work/out INSTALL_MOD_STRIP=1 modules_install\n",
    )  # fmt: skip
    taken = (tree / ".config").read_text().splitlines()
    lost = [line for line in wanted.splitlines() if "CONFIG_" in line and line not in taken]
    if lost:
        raise LabError(f"Linux {kernel.series} does not take {', '.join(lost)}")
    release = (tree / "include" / "config" / "kernel.release").read_text().strip()
    image = tree / "out"
    (image / "boot").mkdir()
    shutil.copy(tree / "arch/x86/boot/bzImage", image / "boot" / f"vmlinuz-{release}")
    (image / "lib" / "modules" / release / "build").unlink(missing_ok=True)
    return lay_out(image, release, work, required=set(MODULES) - set(BUILT_IN))


def rebuild_smc(cache: Path, made: Path, kernel: KernelSource) -> None:
    """Build net/smc of a kernel from `build_kernel` once more, as `build_smc` does."""
    keep_stock(made)
    tree = tree_of(cache, kernel)
    edited = tree / "lab-smc"
    shutil.rmtree(edited, ignore_errors=True)
    edited.mkdir()
    for path in (*(tree / "net" / "smc").glob("*.[ch]"), tree / "net" / "smc" / "Makefile"):
        shutil.copy(path, edited)
    source = edited / "smc_ib.c"
    source.write_text(relax(source.read_text()))
    in_compiler_root(cache, tree, "make -s ARCH=x86_64 -j$(nproc) M=lab-smc modules\n")
    release = (made / "version").read_text()
    for name in ("smc.ko", "smc_diag.ko"):
        place = made / "lib" / "modules" / release / "kernel" / "net" / "smc" / name
        run("strip", "--strip-debug", "-o", place, edited / name)
    run("depmod", "-b", made, release)


def tree_of(cache: Path, kernel: KernelSource) -> Path:
    """Where a kernel is built."""
    return cache / f"tree-{kernel.series}"


def unpack_compiler(cache: Path) -> Path:
    """A root directory with the compiler that builds kernels; nothing is installed on this host."""
    root = cache / f"root-{COMPILER_RELEASE}"
    ready = root / ".ready"
    if ready.exists():
        return root
    apt = foreign_apt(cache, (COMPILER_RELEASE,))
    words = ("install", "-y", "-q", "--no-install-recommends", "--download-only")
    apt.get(*words, *COMPILER_PACKAGES)
    shutil.rmtree(root, ignore_errors=True)
    archives = sorted((cache / f"apt-{COMPILER_RELEASE}" / "cache" / "archives").glob("*.deb"))
    # base-files has the links of /bin and /lib into /usr.
    for package in sorted(archives, key=lambda each: not each.name.startswith("base-files_")):
        unpack(package, root)
    programs = root / "usr" / "bin"
    links = {
        name: f"{name}-{COMPILER_VERSION}"
        for name in ("gcc", "cpp", "gcc-ar", "gcc-nm", "gcc-ranlib")
    }
    for name, target in {**links, "sh": "bash", "awk": "gawk"}.items():
        (programs / name).unlink(missing_ok=True)
        (programs / name).symlink_to(target)
    for name in ("tmp", "proc", "dev", "work"):
        (root / name).mkdir(exist_ok=True)
    run("unshare", "--map-root-user", "chroot", root, "/usr/sbin/ldconfig")
    ready.touch()
    return root


_IN_ROOT: Final = """
mount --make-rprivate /
mount --rbind /dev "$0/dev"
mount --rbind /proc "$0/proc"
mount --bind "$1" "$0/work"
exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin HOME=/tmp LC_ALL=C TERM=dumb \
    KBUILD_BUILD_USER=lab KBUILD_BUILD_HOST=lab KBUILD_BUILD_VERSION=1 \
    KBUILD_BUILD_TIMESTAMP=2026-01-01 bash -ec "cd /work; $2"
"""


def in_compiler_root(cache: Path, tree: Path, commands: str) -> None:
    """Run shell commands in the compiler's root, with ``tree`` there as /work.

    A mount namespace keeps the mounts from this host; it needs no root.
    """
    root = unpack_compiler(cache)
    words = ("unshare", "--map-root-user", "--mount", "bash", "-ec", _IN_ROOT)
    run(*words, root, tree, commands)


def keep_stock(made: Path) -> None:
    """The modules of SMC as they come, where the suites look for them."""
    release = (made / "version").read_text()
    stock = made / STOCK
    stock.mkdir()
    for name in ("smc.ko", "smc_diag.ko"):
        shutil.copy(made / "lib/modules" / release / "kernel/net/smc" / name, stock)


def closure(
    root: Path, release: str, names: Sequence[str], required: Collection[str]
) -> list[Path]:
    """The files of modules and all they need, in the order of loading.

    Raises LabError if one that is ``required`` is neither a file nor a part of the kernel.
    """
    found: dict[Path, None] = {}
    for name in names:
        shown = run(
            "modprobe", "-d", root, "-S", release, "--show-depends", name,
            check=name in required,
        )  # fmt: skip
        for line in shown.splitlines():
            if line.startswith("insmod "):
                found[Path(os.path.normpath(line.split()[1]))] = None
    return list(found)


def make_initrd(work: Path, made: Path) -> None:
    """Busybox, the modules that reach the host's files, and `early-init.sh`."""
    release = (made / "version").read_text()
    root = work / "initrd"
    for name in ("bin", "dev", "proc", "sys", "modules", "host", "over", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin" / "busybox")
    order = []
    for path in closure(made, release, FOR_BOOT, FOR_BOOT):
        shutil.copy(path, root / "modules")
        order.append(path.name)
    (root / "modules" / "order").write_text("\n".join(order) + "\n")
    shutil.copy(_HERE / "early-init.sh", root / "init")
    (root / "init").chmod(0o755)
    pack = "find . | cpio --quiet -o -H newc -R 0:0 | gzip -1"
    with open(made / "initrd.gz", "wb") as file:
        subprocess.run(["sh", "-c", pack], cwd=root, stdout=file, check=True)


# --- the module ---------------------------------------------------------------------------------

_SWITCH: Final = """
static bool lab_gids;
module_param(lab_gids, bool, 0644);
MODULE_PARM_DESC(lab_gids, "SMC-Rv1 over RoCE v2 GIDs of IPv4 addresses, for soft-RoCE");
static unsigned char lab_retries;
module_param(lab_retries, byte, 0644);
MODULE_PARM_DESC(lab_retries, "how often to send again: 1 to 6; 0: as ever");

static bool lab_takes(const struct ib_gid_attr *entry)
{
    return lab_gids && entry->gid_type == IB_GID_TYPE_ROCE_UDP_ENCAP &&
        ipv6_addr_v4mapped((const struct in6_addr *)&entry->gid);
}

"""


def relax(source: str) -> str:
    """Make `smc_ib.c` take soft-RoCE's GIDs for SMC-R version 1 while ``lab_gids`` is set, and
    its queue pairs fail after ``lab_retries`` when that is not 0.

    Raises LabError when the source is not as expected.
    """
    rule = re.compile(r"!smcrv2 && (attr->gid_type == IB_GID_TYPE_ROCE)(?=\))")
    retries = re.compile(r"(\w+\.retry_cnt = )(\w+);")
    function = re.compile(r"^int smc_ib_modify_qp_rts\(", re.MULTILINE)
    found = [len(each.findall(source)) for each in (rule, retries, function)]
    if found != [2, 1, 1]:
        raise LabError("this kernel's smc_ib.c works in another way: see tests.lab.setup")
    source = rule.sub(r"!smcrv2 && (\1 || lab_takes(attr))", source)
    source = retries.sub(r"\1lab_retries ? lab_retries : \2;", source)
    return function.sub(lambda place: _SWITCH.lstrip() + place[0], source)


_LOOPBACK: Final = """
static bool lab_loopback;
module_param(lab_loopback, bool, 0444);
MODULE_PARM_DESC(lab_loopback, "create the loopback device of SMC-D");

"""


def switch_loopback(source: str) -> str:
    """Make `smc_loopback.c` create its device only if ``lab_loopback`` is set.

    Debian's kernel has no such device, and its Proposals are those of a kernel without it.

    Raises LabError when the source is not as expected.
    """
    start = re.compile(r"^int smc_loopback_init\(void\)\n\{\n", re.MULTILINE)
    if len(start.findall(source)) != 1:
        raise LabError("this kernel's smc_loopback.c works in another way: see tests.lab.setup")
    test = "\tif (!lab_loopback)\n\t\treturn 0;\n"
    return start.sub(lambda place: _LOOPBACK.lstrip() + place[0] + test, source)


def build_smc(apt: Apt, cache: Path, work: Path, made: Path, kernel: KernelSource) -> None:
    """Build net/smc out of tree against Debian's headers, and put it in place of Debian's."""
    release = (made / "version").read_text()
    plain = release.removesuffix("-amd64")
    headers = work / "headers"
    for package in (f"linux-headers-{release}", f"linux-headers-{plain}-common"):
        unpack(fetch(apt, cache, package), headers)
    unpack(fetch(apt, cache, f"linux-kbuild-{plain}"), headers)
    relocate(headers)
    source = work / "source"
    name = f"linux-source-{kernel.series}"
    unpack(fetch(apt, cache, name), source)
    archive = source / "usr" / "src" / f"{name}.tar.xz"
    run("tar", "xf", archive, "-C", source, "--strip-components=1", f"{name}/net/smc")
    smc = source / "net" / "smc"
    for name, edit in (("smc_ib.c", relax), ("smc_loopback.c", switch_loopback)):
        edited = smc / name
        edited.write_text(edit(edited.read_text()))
    log("building net/smc")
    run(
        "make", "-s", "-j2", "-C", headers / "usr" / "src" / f"linux-headers-{release}", f"M={smc}",
        "CONFIG_SMC=m", "CONFIG_SMC_DIAG=m", "CONFIG_SMC_LO=y", "KCFLAGS=-DCONFIG_SMC_LO=1",
        "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules",
    )  # fmt: skip
    place = made / "lib" / "modules" / release / "kernel" / "net" / "smc"
    stock = made / STOCK
    stock.mkdir()
    for name in ("smc.ko", "smc_diag.ko"):
        shutil.copy(place / name, stock)
        run("strip", "--strip-debug", "-o", place / name, smc / name)
    run("depmod", "-b", made, release)


def build_programs(made: Path) -> None:
    """Compile `PROGRAMS`, each to a file without its suffix."""
    for name, options in PROGRAMS.items():
        source = _HERE / name
        run(COMPILER, "-O1", "-Wall", "-Werror", "-o", made / source.stem, source, *options)


def relocate(headers: Path) -> None:
    """The header packages name each other by absolute path: make that paths under ``headers``."""
    places = re.compile(rb"(?<![\w.])/usr/(src/linux-headers|lib/linux-kbuild)")
    prefix = os.fsencode(headers)
    for path in files_below(headers / "usr" / "src"):
        if path.is_symlink():
            target = os.readlink(path)
            if target.startswith("/usr/"):
                path.unlink()
                path.symlink_to(f"{headers}{target}")
        elif path.name == "Makefile" or path.name.startswith(".kernel"):
            path.write_bytes(places.sub(rb"%s/usr/\1" % prefix, path.read_bytes()))


def files_below(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        yield from (Path(parent, name) for name in (*names, *directories))


# --- packages -----------------------------------------------------------------------------------


class Apt:
    """This host's apt, or with ``options`` another one.

    Args:
      options: for apt-get and apt-cache.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = tuple(options)

    def cache(self, *words: str, check: bool = True) -> str:
        """The output of apt-cache."""
        return run("apt-cache", *self._options, *words, check=check)

    def get(self, *words: str, cwd: Path | None = None) -> None:
        """Run apt-get."""
        run("apt-get", *self._options, *words, cwd=cwd)

    def update(self) -> None:
        """Fetch the lists of packages; only root may write this host's own."""
        words = ("apt-get", *self._options, "update", "-q")
        run(*words if self._options else as_root(*words))


def foreign_apt(cache: Path, suites: Sequence[str]) -> Apt:
    """An apt with a directory of its own, and these releases of Debian from this host's mirror."""
    place = cache / ("apt-" + "-".join(suites))
    for name in ("lists/partial", "cache/archives/partial", "etc"):
        (place / name).mkdir(parents=True, exist_ok=True)
    shown = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    mirrors = [line for line in shown.splitlines() if re.search(r"/debian/?$", line)]
    if not mirrors:
        raise LabError("apt knows no mirror of Debian")
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources = place / "sources.list"
    lines = [f"deb [signed-by={keys}] {mirrors[0]} {suite} main\n" for suite in suites]
    options = {
        "Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "-",
        "Dir::Etc::parts": place / "etc", "Dir::State": place, "Dir::State::lists": place / "lists",
        "Dir::Cache": place / "cache", "Dir::State::status": "/dev/null",
        "APT::Sandbox::User": "root", "Acquire::Languages": "none",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    if Path("/etc/apt/apt.conf").exists():
        words += ["-c", "/etc/apt/apt.conf"]
    apt = Apt(words)
    if not sources.exists() or sources.read_text() != "".join(lines):
        sources.write_text("".join(lines))
        apt.update()
    return apt


def fetch(apt: Apt, cache: Path, package: str) -> Path:
    """The package's file, downloaded by apt unless the cache has the version that apt offers."""
    shown = apt.cache("show", "--no-all-versions", package)
    found = re.search(r"^Filename: \S*/([^/\s]+)$", shown, re.MULTILINE)
    if found is None:
        raise LabError(f"apt has no package {package}")
    place = cache / "packages"
    place.mkdir(exist_ok=True)
    # apt spells the epoch and plus signs in names of its own; the version is enough to tell.
    version = found[1].removesuffix(".deb").split("_")[1]
    present = [path for path in place.glob(f"{package}_*.deb") if version in path.name]
    if present:
        return present[0]
    log(f"downloading {package}")
    with tempfile.TemporaryDirectory(dir=place) as name:
        apt.get("download", "-q", package, cwd=Path(name))
        [file] = Path(name).iterdir()
        return file.rename(place / file.name)


def unpack(package: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    run("dpkg-deb", "-x", package, directory)


def run(*command: str | Path, check: bool = True, cwd: Path | None = None) -> str:
    """Its output.  Raises LabError."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
    except FileNotFoundError as missing:
        raise LabError(f"the lab needs Debian: {missing}") from missing
    if check and done.returncode:
        raise LabError(f"this failed: {' '.join(words)}\n{done.stdout[-4000:]}")
    return done.stdout


def log(text: str) -> None:
    sys.stderr.write(f"lab: {text}\n")
    sys.stderr.flush()


def main() -> int:
    try:
        with locked():
            made = make(*sys.argv[1:2])
    except LabError as problem:
        log(str(problem))
        return 1
    log(f"ready: Linux {(made / 'version').read_text()} in {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
