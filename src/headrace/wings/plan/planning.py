"""The functions that make a plan from the settings of a run file and a cluster file: first the context
(:func:`make_site`), then the search (:func:`plan`)."""

from __future__ import annotations

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.run.session.config import RunConfig
from headrace.wings.plan.card import CardRates, apply_rates
from headrace.wings.plan.catalogue import model
from headrace.wings.plan.cluster import ClusterFile
from headrace.wings.plan.search import Search, SearchResult
from headrace.wings.plan.sizing import SizingRequest, fit
from headrace.wings.plan.spread import ConstantSpread, Lognormal
from headrace.wings.plan.system import Measured, PlanContext
from headrace.wings.plan.workload import Workload

MEAN_SHARE = 0.25
"""Mean length of an answer as a fraction of ``engine.max_new_tokens``, if neither the cluster file nor a calibration
gives the lengths."""


def make_sizing_request(config: RunConfig) -> SizingRequest:
    """Return the settings of a run file that a plan needs, with the sizes of its model. Raises
    :class:`~headrace.base.errors.ConfigError` if the model's sizes are not known."""
    learner = config.learner.serving(config.algo.columns)
    return SizingRequest(
        shape=model(config.model.path),
        model=config.model,
        engine=config.engine,
        flow=config.flow,
        sync=config.sync,
        learner=learner,
        passes=len(learner.policies),
    )


def make_usual_workload(request: SizingRequest) -> Workload:
    """Return the workload that a plan for ``request`` assumes if neither the cluster file nor a calibration contains a
    workload: prompts of 256 tokens, and answers of lognormal lengths whose mean is a quarter of
    ``engine.max_new_tokens``."""
    longest = request.engine.max_new_tokens
    return Workload(prompt_tokens=ConstantSpread(value=256), answer_tokens=Lognormal(mean=MEAN_SHARE * longest, cv=1.0))


def longest_sequence(request: SizingRequest) -> float:
    """Return the largest number of tokens of a prompt and its answer together in ``request``: ``engine.max_context``
    or, if that is unset, the longest answer and an assumed prompt of 256 tokens."""
    return request.engine.max_context or request.engine.max_new_tokens + 4 * MEAN_SHARE * 256


def make_site(
    request: SizingRequest, file: ClusterFile, measured: Measured | None = None, *, rates: CardRates | None = None
) -> PlanContext:
    """Return the context of a plan: the settings of the run (``request``), the cluster (``file``), the workload and the
    division of memory. ``measured`` contains costs calibrated by a recorded run, and ``rates`` the rates of a GPU
    measured by ``headrace bench gpu``. Each replaces the catalogue's figures.

    Raises :class:`~headrace.base.errors.ConfigError` if the model does not fit on the cluster, or if the rates were
    measured on another GPU.
    """
    cluster = file.cluster if rates is None else apply_rates(rates, file.cluster)
    recorded = None if measured is None else measured.workload
    workload = file.workload or recorded or make_usual_workload(request)
    return PlanContext(
        request=request,
        cluster=cluster,
        workload=workload,
        fit=fit(request, cluster, longest_sequence(request)),
        measured=measured,
        rates=rates,
    )


def plan(site: PlanContext, clock: Clock, *, seed: int = 0, generation: int | None = None) -> SearchResult:
    """Search for the best settings in the context ``site`` by simulation, and return the result, whose duration
    ``clock`` measures. Every simulated run uses ``seed``. ``generation`` fixes the number of generating accelerators;
    ``None``: the search chooses it.

    Raises :class:`~headrace.base.errors.ConfigError` if ``generation`` is not a whole number of engines, or leaves too
    few accelerators for the learner.
    """
    fit, largest = site.fit, site.cluster.count - site.fit.least_learner
    if generation and not fit.beside:
        raise ConfigError(
            f"--generation {generation} is not possible on {site.cluster}: {fit}", remedy="leave --generation out"
        )
    if generation and (generation % fit.ways or generation > largest):
        raise ConfigError(
            f"--generation {generation} is not possible on {site.cluster}: {fit}",
            remedy=f"give a multiple of {fit.ways}, at most {largest // fit.ways * fit.ways}",
        )
    return Search(site=site, clock=clock, seed=seed, fixed=generation).run()
