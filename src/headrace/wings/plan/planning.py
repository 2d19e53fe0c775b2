"""From a run file's settings and a cluster to a plan."""

from __future__ import annotations

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.wings.plan.cluster import ClusterFile
from headrace.wings.plan.search import Search, SearchResult
from headrace.wings.plan.sizing import SizingRequest, fit
from headrace.wings.plan.spread import ConstantSpread, Lognormal
from headrace.wings.plan.system import Measured, PlanContext
from headrace.wings.plan.workload import Workload

MEAN_SHARE = 0.25
"""Of the longest answer, the mean one, where nobody says."""


def usual_workload(asked: SizingRequest) -> Workload:
    """What is assumed where the cluster file does not say."""
    longest = asked.engine.max_new_tokens
    return Workload(prompt_tokens=ConstantSpread(value=256), answer_tokens=Lognormal(mean=MEAN_SHARE * longest, cv=1.0))


def make_site(asked: SizingRequest, file: ClusterFile, measured: Measured | None = None) -> PlanContext:
    """What is planned for. :class:`~headrace.base.errors.ConfigError` where the model does not fit."""
    seen = None if measured is None else measured.workload
    workload = file.workload or seen or usual_workload(asked)
    longest = asked.engine.max_context or asked.engine.max_new_tokens + 4 * MEAN_SHARE * 256
    return PlanContext(
        asked=asked,
        cluster=file.cluster,
        workload=workload,
        fit=fit(asked, file.cluster, longest),
        measured=measured,
    )


def plan(site: PlanContext, clock: Clock, *, seed: int = 0, generation: int | None = None) -> SearchResult:
    """Search; ``generation`` fixes how many accelerators generate.

    Raises :class:`~headrace.base.errors.ConfigError` where they are no whole engines, or leave the learner too few.
    """
    fit, most = site.fit, site.cluster.count - site.fit.least_learner
    if generation and not fit.beside:
        raise ConfigError(
            f"--generation {generation} does not do on {site.cluster}: {fit}", remedy="leave --generation out"
        )
    if generation and (generation % fit.ways or generation > most):
        raise ConfigError(
            f"--generation {generation} does not do on {site.cluster}: {fit}",
            remedy=f"give a multiple of {fit.ways}, at most {most // fit.ways * fit.ways}",
        )
    return Search(site=site, clock=clock, seed=seed, fixed=generation).run()
