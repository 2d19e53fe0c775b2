"""The examination of this machine by ``headrace doctor``: conditions under which runs are slow or fail. Each check adds
a finding to a report."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from headrace.base.clock import Clock
from headrace.base.environ import cache_root, num_cores, shared_memory_root, visible_gpus
from headrace.models.gpus import VisibleGpus
from headrace.models.kernels.build import COMPILERS, find_compiler
from headrace.wings.doctor.report import DoctorReport, Fault, Grade

GIB = 2**30
FEWEST_FILES = 4096
"""Number of open files that a run with many environments may need; a lower limit is reported."""
LEAST_MEMORY = 4 * GIB
"""Memory in bytes below which only small models can be used."""
LEAST_SHARED = GIB
"""Shared memory in bytes below which the weights of all but small models do not fit."""
CLOCK_SKEW_S = 5.0
"""Difference between the clocks of the machine and of its file system, in seconds, above which a warning is
reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlaces:
    """The folders of the operating system that the examination reads; tests replace them by other folders."""

    root: Path = Path("/")
    """The folder that contains ``proc`` and ``sys``."""
    shared: Path | None = None
    """The folder of shared memory; ``None``: the folder that runs use."""
    cache: Path | None = None
    """The folder of compiled kernels; ``None``: the folder that runs use."""

    def read(self, path: str) -> str:
        """Return the text of the file ``path``, relative to the root, without white space at both ends; empty if the
        file cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""


def examine_machine(clock: Clock, places: MachinePlaces | None = None) -> DoctorReport:
    """Check this machine, and return the findings on its processors, memory, GPUs, compiler, packages and limits.
    ``places`` are the folders to read; ``None``: the system's. ``clock`` gives the time."""
    places = places or MachinePlaces()
    report = DoctorReport(subject="this machine")
    _check_processors(report, places)
    _check_memory(report, places)
    _check_shared_memory(report, places.shared or shared_memory_root())
    _check_gpus(report, places)
    _check_compiler(report)
    _check_versions(report)
    _check_open_files(report)
    _check_cache(report, clock, places.cache or cache_root())
    return report


def _check_processors(report: DoctorReport, places: MachinePlaces) -> None:
    """Add a finding to ``report``: the number of cores that a process may use, and whether its control group (cgroup)
    allows the time of that many cores."""
    allowed, quota = num_cores(), _read_cpu_quota(places)
    total = os.cpu_count() or allowed
    detail = f"{allowed} of {total} cores may be used"
    if quota is not None and quota < allowed:
        report.add(
            "processors", Grade.WARN, f"{detail}, but the control group grants the time of {quota:g}",
            f"raise its limit, or start fewer processes: {allowed} threads would wait for each other",
        )  # fmt: skip
    elif allowed < 2:
        report.add(
            "processors", Grade.WARN, detail, "give it two cores or more: engine, learner and controller share one"
        )
    else:
        report.add("processors", Grade.OK, detail)


def _read_cpu_quota(places: MachinePlaces) -> float | None:
    """Return the number of cores whose time the control group (cgroup) allows to the process, which may be a fraction;
    ``None``: no limit."""
    quota, _, period = places.read("sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:  # version 1
        quota, period = (places.read(f"sys/fs/cgroup/cpu/cpu.cfs_{each}_us") for each in ("quota", "period"))
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _check_memory(report: DoctorReport, places: MachinePlaces) -> None:
    """Add a finding to ``report``: the memory that a process may use, which is the machine's memory or the limit of its
    control group (cgroup)."""
    memory = psutil.virtual_memory()
    limits = [places.read(f"sys/fs/cgroup/{name}") for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limit = min((int(each) for each in limits if each.isdecimal()), default=memory.total)
    most = min(limit, memory.total)
    detail = f"{most / GIB:.1f} GiB, {min(memory.available, most) / GIB:.1f} GiB of them free"
    if limit < memory.total:
        detail += f" (the control group allows less than the machine's {memory.total / GIB:.1f} GiB)"
    few = most < LEAST_MEMORY
    remedy = "a model needs 4 bytes a weight to serve and 16 to train: choose a small one, or train an adapter"
    report.add("memory", Grade.WARN if few else Grade.OK, detail, remedy if few else "")


def _check_shared_memory(report: DoctorReport, folder: Path) -> None:
    """Add a finding to ``report``: whether the folder of shared memory has room for the weights, since each published
    version is stored there."""
    usage = shutil.disk_usage(folder)
    detail = f"{folder} has {usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f} GiB"
    if usage.free < usage.total / 20 and usage.free < LEAST_SHARED:
        report.add(
            "shared memory", Grade.FAIL, f"{detail}: new weights cannot be published there",
            f"remove what ended runs left in {folder} (headrace-*), or mount it larger",
            Fault.FULL_SHARED_MEMORY,
        )  # fmt: skip
    elif usage.free < LEAST_SHARED:
        report.add(
            "shared memory", Grade.WARN, f"{detail}: each version of the weights needs its whole size there, twice",
            "docker run --shm-size=16g, or mount it larger, or set sync.transport = 'files'",
        )  # fmt: skip
    else:
        report.add("shared memory", Grade.OK, detail)


def _check_gpus(report: DoctorReport, places: MachinePlaces) -> None:
    """Add findings to ``report``: the number of GPUs in the driver, the number that a program may use, and whether
    torch can use them. ``places`` are the folders to read."""
    try:
        present = len(list((places.root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        present = 0
    chosen = visible_gpus()
    if not present:
        report.add("GPUs", Grade.OK, "none: engine and learner compute on the processors")
        return
    names = VisibleGpus.read(chosen, present).names
    seen = present if names is None else len(names)
    if seen < present:
        report.add(
            "GPUs", Grade.WARN,
            f"{seen} of {present} may be used: CUDA_VISIBLE_DEVICES={chosen!r} hides {present - seen}",
            "unset CUDA_VISIBLE_DEVICES, or name all of them, unless another program has the others",
            Fault.HIDDEN_GPU,
        )  # fmt: skip
    else:
        report.add("GPUs", Grade.OK, f"all {present} may be used")
    if seen and places.root == Path("/"):
        _check_torch(report, seen)


def _check_torch(report: DoctorReport, seen: int) -> None:
    """Add a failure to ``report`` if torch can use fewer than the ``seen`` GPUs that are visible to a program."""
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable < seen:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        report.add(
            "torch and GPUs", Grade.FAIL, f"torch {torch.__version__}, {built}, can use {usable} of {seen}",
            "install the torch that fits the driver (nvidia-smi): https://pytorch.org/get-started/locally",
        )  # fmt: skip


def _check_compiler(report: DoctorReport) -> None:
    """Add a finding to ``report``: whether there is a C++ compiler, which is needed to compile the CPU kernels."""
    found = find_compiler()
    if found is None:
        report.add(
            "compiler", Grade.WARN, f"none of {', '.join(COMPILERS)} is installed: decoding runs on torch, several "
            "times slower on processors", "install a C++ compiler: apt install g++",
        )  # fmt: skip
    else:
        report.add("compiler", Grade.OK, found)


def _check_versions(report: DoctorReport) -> None:
    """Add findings to ``report``: the versions of Python and of the main packages, each required package that is
    missing or not supported, and which extras are installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    report.add("python", Grade.OK if sys.version_info >= (3, 11) else Grade.FAIL, python)
    requirements = [Requirement(text) for text in metadata.requires("headrace") or ()]
    extras: dict[str, bool] = {}
    for each in requirements:
        extra = _find_extra(each)
        problem = _explain_unmet(each)
        if extra:  # an extra is installed if all its packages are
            extras[extra] = extras.get(extra, True) and not problem
        elif problem and (each.marker is None or each.marker.evaluate()):
            report.add(each.name, Grade.FAIL, problem, f"pip install '{each.name}{each.specifier}'")
    core = {each.name: metadata.version(each.name) for each in requirements if each.name in ("torch", "transformers")}
    report.add("packages", Grade.OK, ", ".join(f"{name} {version}" for name, version in core.items()))
    installed = [name for name, there in sorted(extras.items()) if there]
    absent = [name for name, there in sorted(extras.items()) if not there]
    report.add("extras", Grade.OK, f"installed: {', '.join(installed) or 'none'}; not: {', '.join(absent) or 'none'}")


def _find_extra(requirement: Requirement) -> str:
    """Return the extra of the package ``headrace`` to which a requirement belongs, such as ``gem``; empty for a
    requirement without an extra."""
    marker = str(requirement.marker or "")
    _, found, rest = marker.partition('extra == "')
    return rest.partition('"')[0] if found else ""


def _explain_unmet(requirement: Requirement) -> str:
    """Return in words why the installed packages do not meet a requirement; empty if they meet it."""
    try:
        version = metadata.version(requirement.name)
        if requirement.specifier.contains(version, prereleases=True):
            return ""
    except metadata.PackageNotFoundError:
        return "is not installed"
    except InvalidVersion as error:
        return f"has an unreadable version: {error}"
    return f"{version} is installed, {requirement.specifier} is supported"


def _check_open_files(report: DoctorReport) -> None:
    """Add a finding to ``report``: the number of files that a process may open at the same time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < FEWEST_FILES
    hint = f"ulimit -n {FEWEST_FILES}" if hard >= FEWEST_FILES or hard < 0 else "raise the hard limit of open files"
    report.add("open files", Grade.WARN if few else Grade.OK, f"a process may open {soft}", hint if few else "")


def _check_cache(report: DoctorReport, clock: Clock, folder: Path) -> None:
    """Add findings to ``report``: whether the folder of compiled kernels can be written, and whether the clock of its
    file system agrees with this machine's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            skew_s = abs(Path(file.name).stat().st_mtime - clock.wall())
    except OSError as error:
        report.add(
            "cache", Grade.WARN, f"{folder} cannot be written: {error.strerror}; kernels are compiled at every start",
            "make it writable, or set XDG_CACHE_HOME",
        )  # fmt: skip
        return
    report.add("cache", Grade.OK, f"{folder} can be written")
    late = skew_s > CLOCK_SKEW_S
    report.add(
        "clock", Grade.WARN if late else Grade.OK,
        f"{skew_s:.0f} s between this machine's clock and that of its files",
        "set the clocks by NTP: ages of files and traces of several machines are compared" if late else "",
    )  # fmt: skip
