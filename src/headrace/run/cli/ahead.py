"""What a program may begin before it needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.environ import num_cores
from headrace.base.errors import HeadraceError
from headrace.engine.config import EngineConfig
from headrace.launch.config import threads
from headrace.models.config import ModelConfig
from headrace.models.devices import AUTO, CPU

if TYPE_CHECKING:
    from headrace.run.session.prepare import Prepared

MOST_PROMPTS = 4096
"""That are looked at for a plan."""


def compile_ahead(model: ModelConfig, engine: EngineConfig) -> None:
    """Begin to compile the kernels that this engine would use, if it would use some and they are not there yet."""
    if (
        engine.kind == "native"
        and model.dtype == "float32"
        and engine.kernels == "auto"
        and engine.device in (AUTO, CPU)
    ):
        from headrace.models.kernels.build import build_ahead

        build_ahead()


def plan_line(prepared: Prepared) -> str:
    """What a run on this machine would be like, by the catalogue; why nobody can tell, where nobody can."""
    from headrace.base.clock import RealClock
    from headrace.run.cli.plan import asked_of, bound
    from headrace.wings.plan import Cluster, ClusterFile, make_site
    from headrace.wings.plan.planning import usual_workload
    from headrace.wings.plan.search import Search
    from headrace.wings.plan.spread import RecordedSpread
    from headrace.wings.plan.words import verdict_line

    config, devices = prepared.config, prepared.devices
    if config.launch.kind != "local":
        return "No plan of a cluster: headrace plan RUN.toml --cluster CLUSTER.toml has one."
    engines, learners = len(set(devices.engines)), len(devices.learner)
    try:
        if CPU in devices.engines:
            cores = max(2, num_cores())
            engines = min(threads(config.launch.engine_threads, cores), cores - 1)
            cluster = Cluster(accelerator="CPU-core", count=cores, per_node=cores)
        else:
            cluster = Cluster(accelerator=known_gpu(), count=engines + learners)
        asked = asked_of(config)
        prompts = tuple(float(len(task.prompt_ids_T)) for task in prepared.tasks[:MOST_PROMPTS])
        workload = usual_workload(asked).model_copy(update={"prompt_tokens": RecordedSpread(values=prompts)})
        site = make_site(asked, ClusterFile(cluster=cluster, workload=workload))
        return verdict_line(Search(site=site, clock=RealClock(), seed=0, fixed=engines).glance(), bound)
    except HeadraceError as error:
        return f"No plan: {error.problem}; {error.remedy}."


def known_gpu() -> str:
    """The name in the catalogue of the GPU that torch sees first; what torch calls it where it is not there."""
    import torch

    from headrace.wings.plan.catalogue import accelerators

    name = torch.cuda.get_device_name(0)
    words = name.replace("-", " ").split()
    return next((known for known in accelerators() if known.split("-")[0] in words), name)
