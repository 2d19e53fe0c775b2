"""The files of ``headrace plan --deploy``, which start a run on a cluster with Kubernetes, Ray's cluster launcher or
Slurm. They are templates filled with values from the map of a plan.

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
"""Names of the files of a deployment; each has a template of the same name."""
RAY_VERSION = "2.60.0"
"""The version of Ray in the image, which the KubeRay file must name."""
SPARE_CORES = 4
"""Number of cores of each machine in addition to the cores of its parts: for Ray, the controller, and workers."""
PROCESS_BYTES = 8e9
"""Bytes of host memory of each part in addition to its versions of the weights: libraries and their buffers."""
SHARED_MEMORY_BYTES = 16e9
"""Smallest size of a machine's shared memory in bytes."""
STEP_GIB = 8
"""The memory of a machine is rounded up to a multiple of this, in GiB."""


def deploy_overrides(config: RunConfig) -> list[str]:
    """Return the settings that every deployed run needs besides ``config``, as arguments of ``--set``: the launcher,
    the number of accelerators of each part, and a plain view."""
    width = config.engine.width
    return ["launch.kind=ray", f"launch.ray.engine.gpus={width}", "launch.ray.learner.gpus=1", "observe.view=plain"]


def make_deployment(
    overrides: list[str], site: PlanContext, run_map: ClusterMap, deploy: DeploySettings, folder: str
) -> dict[str, str]:
    """Return the text of each file of a deployment of the map ``run_map`` on the cluster of ``site`` by its name.
    ``deploy`` has the settings of the deployment. ``overrides`` are the settings of the run in addition to its run
    file, and ``folder`` is the directory of the files as the user wrote it.

    Raises :class:`~headrace.base.errors.ConfigError` if a part needs more memory than its accelerators have, if a
    machine has too little host memory, if the run directory is not shared, or if there are too few addresses.
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
    values = _placeholder_values(overrides, site, run_map, deploy, folder)
    names = [name for name in FILES if name != "ray.yaml" or deploy.addresses]
    return {name: _fill_template(name, values) for name in names}


def write_deployment(made: Mapping[str, str], directory: Path) -> None:
    """Write the files ``made`` (text by name) into ``directory``, and create it if needed. Raises
    :class:`~headrace.base.errors.ConfigError` if a file of the same name with another content exists."""
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


def _placeholder_values(
    overrides: list[str], site: PlanContext, run_map: ClusterMap, deploy: DeploySettings, folder: str
) -> dict[str, str]:
    """Return the text that replaces each placeholder of the templates, by the placeholder's name. The parameters are
    those of :func:`make_deployment`. Raises :class:`~headrace.base.errors.ConfigError` for too few addresses."""
    counts = Counter[int]()
    for part in run_map.parts:
        counts[part.machine or 0] += len(part.gpus)
    shm_gib, memory_gib = compute_host_memory(site, run_map)
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
        "CPUS": str(count_machine_cores(run_map)),
        "SHM": str(shm_gib),
        "MEMORY": str(memory_gib),
        "SETTINGS": " ".join(f"--set {shlex.quote(setting)}" for setting in overrides),
        "FOLDER": shlex.quote(folder),
        "MAP": "\n".join(f"# {line}".rstrip() for line in run_map.lines()),
    }


def count_machine_cores(run_map: ClusterMap) -> int:
    """Return the number of cores that each machine of the map ``run_map`` needs: the cores of its parts, its share of
    the workers' cores, and :data:`SPARE_CORES`."""
    cpus = Counter[int]()
    for part in run_map.parts:
        cpus[part.machine or 0] += math.ceil(part.cpus)
    return max(cpus.values()) + math.ceil(run_map.worker_cpus / run_map.machines) + SPARE_CORES


def compute_host_memory(site: PlanContext, run_map: ClusterMap) -> tuple[int, int]:
    """Return the shared memory and the total memory, in GiB, that each machine of the map ``run_map`` needs for the
    model of ``site``. Each rank needs two slots for its part of a version, and each engine two images. An engine that
    is a model server also needs the files of two versions in shared memory.

    Raises :class:`~headrace.base.errors.ConfigError` if the cluster's machines have less memory.
    """
    version, served = site.request.version_bytes, not site.request.engine.can.embedded
    ranks = sum(part.rank is not None for part in run_map.parts)
    engines, part_bytes = Counter[int](), Counter[int]()
    for part in run_map.parts:
        engines[part.machine or 0] += part.rank is None
        part_bytes[part.machine or 0] += int(PROCESS_BYTES + 2 * (version if part.rank is None else version / ranks))
    shared = SHARED_MEMORY_BYTES + 2 * version * max(engines.values()) * served
    shm_gib, memory_gib = _round_up_gib(shared), _round_up_gib(max(part_bytes.values()) + shared)
    available_gb = site.cluster.machine.memory_gb
    if available_gb is not None and memory_gib * 2**30 > available_gb * GB:
        raise ConfigError(
            f"a machine needs {memory_gib} GiB of memory for its parts and their versions of the weights "
            f"({version / GB:,.1f} GB each), and has {available_gb:,.0f} GB (cluster.host.memory_gb)",
            remedy="put fewer engines on a machine (engine.tensor), or take machines with more memory",
        )
    return shm_gib, memory_gib


def _round_up_gib(num_bytes: float) -> int:
    """Return a number of bytes in GiB, rounded up to a multiple of :data:`STEP_GIB`."""
    return STEP_GIB * math.ceil(num_bytes / 2**30 / STEP_GIB)


def _fill_template(name: str, values: Mapping[str, str]) -> str:
    """Return the text of the template ``name``, with every placeholder (a name between two ``@``) replaced by its
    value."""
    text = (files("headrace.wings.plan") / "templates" / name).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], text)
