"""The plan that ``headrace train --dry-run`` prints: a prediction for this machine from the catalogue's figures."""

from __future__ import annotations

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.base.errors import HeadraceError
from headrace.launch.config import threads
from headrace.models.devices import CPU
from headrace.models.gpus import gpu_numbers
from headrace.run.session.prepare import Prepared
from headrace.wings.plan.catalogue import accelerators
from headrace.wings.plan.cluster import Cluster, ClusterFile
from headrace.wings.plan.planning import make_site, make_sizing_request, make_usual_workload
from headrace.wings.plan.search import Search
from headrace.wings.plan.spread import RecordedSpread
from headrace.wings.plan.system import PlanContext
from headrace.wings.plan.words import describe_verdict

MOST_PROMPTS = 4096
"""Largest number of prompts whose lengths are read for a plan."""


def plan_line(prepared: Prepared) -> str:
    """Return one line for a dry run: the predicted speed of the ``prepared`` run on this machine, from the catalogue's
    figures, or the reason why there is no prediction."""
    if prepared.config.launch.remote:
        return "No plan of a cluster: headrace plan RUN.toml --cluster CLUSTER.toml has one."
    try:
        site, engines, _ = make_local_site(prepared)
        return describe_verdict(Search(site=site, clock=RealClock(), seed=0, fixed=engines).run_preview())
    except HeadraceError as error:
        return f"No plan: {error.problem}; {error.remedy}."


def make_local_site(prepared: Prepared) -> tuple[PlanContext, int, int]:
    """Return the context of a plan of the ``prepared`` run on this machine, the number of accelerators (GPUs or cores)
    of its engines, and the number of accelerators of its learner. Raises
    :class:`~headrace.base.errors.ConfigError` if the model does not fit, or if its sizes are not known."""
    config, devices = prepared.config, prepared.devices
    gpus_of_engines = {number for device in devices.engines for number in gpu_numbers(device)}
    engines, learners = len(gpus_of_engines), len(devices.learner)
    if CPU in devices.engines:
        cores = max(2, num_cores())
        engines = min(threads(config.launch.engine_threads, cores), cores - 1)
        learners = threads(config.launch.learner_threads, cores)
        cluster = Cluster(accelerator="CPU-core", count=cores, per_node=cores)
    else:
        cluster = Cluster(accelerator=name_first_gpu(), count=engines + learners)
    request = make_sizing_request(config)
    prompts = tuple(float(len(task.prompt_ids_T)) for task in prepared.tasks[:MOST_PROMPTS])
    workload = make_usual_workload(request).model_copy(update={"prompt_tokens": RecordedSpread(values=prompts)})
    return make_site(request, ClusterFile(cluster=cluster, workload=workload)), engines, learners


def name_first_gpu() -> str:
    """Return the catalogue's name of the first GPU that torch finds; torch's name if the catalogue lacks the GPU."""
    import torch

    name = torch.cuda.get_device_name(0)
    words = name.replace("-", " ").split()
    return next((known for known in accelerators() if known.split("-")[0] in words), name)
