"""The files that start a run on a cluster, written from the map of a plan: for Kubernetes, for Ray's cluster launcher,
and for Slurm.

    map ──▶ machines, and what each of them needs ──▶ templates/ ──▶ kuberay.yaml, ray.yaml, slurm.sh, train.sh
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError
from headrace.wings.plan.cluster import DeploySettings
from headrace.wings.plan.sizing import GB

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig
    from headrace.wings.plan.cluster_map import ClusterMap
    from headrace.wings.plan.system import PlanContext

FILES = ("kuberay.yaml", "ray.yaml", "slurm.sh", "train.sh")
"""The files of a deployment, each of which has a template of that name."""
RAY_VERSION = "2.60.0"
"""The version of Ray in the image, which KubeRay has to know."""
SPARE_CORES = 4
"""Number of cores of each machine beside those of its parts: for Ray, the controller, and workers."""
PROCESS_BYTES = 8e9
"""Bytes of host memory of each part beside its versions of the weights: libraries, and their buffers."""
SHARED_MEMORY_BYTES = 16e9
"""Smallest size of a machine's shared memory in bytes."""
STEP_GIB = 8
"""The memory of a machine is rounded up to a multiple of this, in GiB."""


def deploy_overrides(config: RunConfig) -> list[str]:
    """Return the settings that every run on a cluster needs, as arguments of ``--set``: the launcher, and the
    accelerators of each part."""
    width = config.engine.width
    return ["launch.kind=ray", f"launch.ray.engine.gpus={width}", "launch.ray.learner.gpus=1", "observe.view=plain"]


def deployment(
    overrides: list[str], site: PlanContext, run_map: ClusterMap, deploy: DeploySettings, folder: str
) -> dict[str, str]:
    """Return the text of each file of a deployment by its name. ``overrides`` are the settings that the run needs
    beside its run file, and ``folder`` is the path under which the files will lie, as the user gave it.

    Raises :class:`~headrace.base.errors.ConfigError` for a part that its accelerators cannot hold, for too little host
    memory, and for too few addresses.
    """
    if run_map.misfits:
        raise ConfigError(
            f"a deployment of this run would fail: {run_map.misfits[0]}",
            remedy="change the run file as that sentence says",
        )
    if not deploy.run_dir.startswith(f"{deploy.shared.rstrip('/')}/"):
        raise ConfigError(
            f"deploy.run_dir={deploy.run_dir!r} does not lie in deploy.shared={deploy.shared!r}, and all machines "
            "write to it",
            remedy=f"set deploy.run_dir = {deploy.shared.rstrip('/') + '/runs/first'!r}",
        )
    values = _values(overrides, site, run_map, deploy, folder)
    names = [name for name in FILES if name != "ray.yaml" or deploy.addresses]
    return {name: _filled(name, values) for name in names}


def write_deployment(made: Mapping[str, str], directory: Path) -> None:
    """Write the files of a deployment into ``directory``, which is created. Raises
    :class:`~headrace.base.errors.ConfigError` if a file of that name is there and has another content."""
    for name, text in made.items():
        file = directory / name
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"--deploy {directory}: {name} is there, and it is not what would be written",
                remedy="remove it, or give another folder",
            )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (directory / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (directory / name).chmod(0o755)


def _values(
    overrides: list[str], site: PlanContext, run_map: ClusterMap, deploy: DeploySettings, folder: str
) -> dict[str, str]:
    """Return the text of each placeholder of the templates by its name."""
    counts = Counter[int]()
    for part in run_map.parts:
        counts[part.machine or 0] += len(part.gpus)
    shm_gib, memory_gib = host_memory(site, run_map)
    machines = run_map.machines
    if deploy.addresses and len(deploy.addresses) < machines:
        raise ConfigError(
            f"deploy.addresses has {len(deploy.addresses)} machines, and the run needs {machines}",
            remedy=f"name {machines} machines, or none",
        )
    head, *workers = deploy.addresses[:machines] or ("",)
    return {
        "NAME": deploy.name,
        "IMAGE": deploy.image,
        "CLAIM": deploy.claim,
        "SHARED": deploy.shared,
        "RUN_DIR": deploy.run_dir,
        "TIME": deploy.time_limit,
        "USER": deploy.user,
        "HEAD_CPUS": str(deploy.head_cpus),
        "HEAD_MEMORY": str(deploy.head_memory_gb),
        "HEAD": head,
        "WORKERS": ", ".join(f'"{address}"' for address in workers),
        "NUM_WORKERS": str(len(workers)),
        "RAY": RAY_VERSION,
        "MACHINES": str(machines),
        "GPUS": str(max(counts.values())),
        "CPUS": str(cores_of_machine(run_map)),
        "SHM": str(shm_gib),
        "MEMORY": str(memory_gib),
        "SETTINGS": " ".join(f"--set {shlex.quote(setting)}" for setting in overrides),
        "FOLDER": shlex.quote(folder),
        "MAP": "\n".join(f"# {line}".rstrip() for line in run_map.lines()),
    }


def cores_of_machine(run_map: ClusterMap) -> int:
    """Return the number of cores that every machine of the run has to offer: those of its parts, its share of those of
    the workers, and :data:`SPARE_CORES`."""
    cpus = Counter[int]()
    for part in run_map.parts:
        cpus[part.machine or 0] += math.ceil(part.cpus)
    return max(cpus.values()) + math.ceil(run_map.worker_cpus / run_map.machines) + SPARE_CORES


def host_memory(site: PlanContext, run_map: ClusterMap) -> tuple[int, int]:
    """Return the shared memory and the whole memory, in GiB, that every machine of the run needs: for each rank two
    slots with its part of a version, for each engine two images, and the files of two versions, in shared memory, if
    it is a server.

    Raises :class:`~headrace.base.errors.ConfigError` if machines have less.
    """
    version, served = site.request.version_bytes, not site.request.engine.can.embedded
    ranks = sum(part.rank is not None for part in run_map.parts)
    engines, held = Counter[int](), Counter[int]()
    for part in run_map.parts:
        engines[part.machine or 0] += part.rank is None
        held[part.machine or 0] += int(PROCESS_BYTES + 2 * (version if part.rank is None else version / ranks))
    shared = SHARED_MEMORY_BYTES + 2 * version * max(engines.values()) * served
    shm_gib, memory_gib = _rounded(shared), _rounded(max(held.values()) + shared)
    there = site.cluster.machine.memory_gb
    if there is not None and memory_gib * 2**30 > there * GB:
        raise ConfigError(
            f"a machine needs {memory_gib} GiB of memory for its parts and their versions of the weights "
            f"({version / GB:,.1f} GB each), and has {there:,.0f} GB (cluster.host.memory_gb)",
            remedy="put fewer engines on a machine (engine.tensor), or take machines with more memory",
        )
    return shm_gib, memory_gib


def _rounded(num_bytes: float) -> int:
    """Return a number of bytes in GiB, rounded up to a multiple of :data:`STEP_GIB`."""
    return STEP_GIB * math.ceil(num_bytes / 2**30 / STEP_GIB)


def _filled(name: str, values: Mapping[str, str]) -> str:
    """Return the template ``name`` with the value of each placeholder, which is a name between two ``@``."""
    text = (files("headrace.wings.plan") / "templates" / name).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], text)
