"""The JSON answers to the dashboard's requests about whole runs: overview, steps, flow, system, and the comparison of
runs. A life of a run is the time from one start or resumption of the run to the end of its processes. The fate of a
group is its outcome: trained, dropped or still in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import psutil

from headrace.base.config import leaves
from headrace.base.environ import PROCESS_GONE
from headrace.base.errors import DataError, HeadraceError
from headrace.base.types.observation import StepRecord
from headrace.flow.ledger.base import Conservation
from headrace.flow.ledger.browse import Browser
from headrace.flow.ledger.survivors import survivors
from headrace.run.observe import age_histogram, load_run, summarize_steps
from headrace.run.observe.metrics import REGISTRY, find, flat
from headrace.run.observe.rundata import find_recorded_account, split_into_lives
from headrace.wings.view.run import LIVING, OpenRun

MOST_POINTS = 2000
"""Largest number of points of one series. The series of a longer run is thinned, but has its first and last step."""
MOST_SERIES = 24
"""Largest number of series in one request."""
EVENTS = 60
"""Number of latest events that the overview shows."""
RECENT_STEPS = 200
"""Number of latest steps whose ages and fates the flow page lists."""


ELSEWHERE = ("ledger", "age_histogram", "warnings", "verdict", "account")
"""Keys of a summary that the system page omits, because other pages show them."""


TRAINING_FIGURES = (
    "generated_tok_s",
    "trained_tok_s",
    "engine_idle_frac",
    "learner_idle_frac",
    "commit_gap_ms",
    "max_token_age",
)
"""Figures of a summary that are meaningless if no token was trained."""


def overview(run: OpenRun) -> dict[str, Any]:
    """Return the answer to the overview page: state, verdict, figures, latest events and, while the run is running, the
    estimated remaining time."""
    state = run.state()
    living = state["state"] in LIVING
    live = run.live.tree if living else {}
    return {
        **state,
        "name": run.name,
        "directory": str(run.directory),
        "verdict": _read_verdict(run, living),
        "notes": run.notes(),
        "warnings": _as_texts(live.get("warnings") or run.summary.tree.get("warnings")),
        "figures": _read_figures(run, living),
        "evaluations": run.evaluations,
        "about": run.about,
        "eta_s": live.get("eta_s"),
        "waits": live.get("waits") or [],
        "events": [msgspec.structs.asdict(event) for event in run.events[-EVENTS:]],
        "max_age": run.setting("flow", "max_age"),
    }


def series(run: OpenRun, names: Sequence[str]) -> dict[str, Any]:
    """Return columns over the steps of ``run``: ``step`` (the version that the step made), ``wall_s``, and the metric
    of each of ``names``; ``None`` where a value was not measured. ``first_s`` is the time at which the first step
    began, and ``lives`` has the first version of every life after a resumption. Wall time and generated tokens continue
    from one life to the next. Raises :class:`~headrace.base.errors.DataError` for more than :data:`MOST_SERIES`
    names."""
    if len(names) > MOST_SERIES:
        raise DataError(f"{len(names)} series are requested", remedy=f"request {MOST_SERIES} at most")
    return read_columns(run, names, MOST_POINTS)


def read_columns(run: OpenRun, names: Sequence[str], limit: int) -> dict[str, Any]:
    """Return the same columns of ``run`` as :func:`series`, for any number of ``names``, with at most ``limit`` points
    each."""
    recorded_lives = split_into_lives(run.steps)
    steps = _thin_out([step for life in _join_lives(recorded_lives) for step in life], limit)
    rows = [flat(step) for step in steps]
    return {
        "step": [step.version for step in steps],
        "wall_s": [step.wall_s for step in steps],
        "first_s": _compute_begin_s(steps[0]) if steps else 0.0,
        "lives": [life[0].version for life in recorded_lives[1:]],
        "columns": {name: [row.get(name) for row in rows] for name in names},
    }


def _join_lives(recorded_lives: Sequence[Sequence[StepRecord]]) -> Iterator[list[StepRecord]]:
    """Yield the steps of each life of a run, with wall time and generated tokens that continue where the previous life
    ended. ``recorded_lives`` has the recorded steps of each life, in which both begin at 0."""
    wall_s, tokens = 0.0, 0
    for place, life in enumerate(recorded_lives):
        later_s = wall_s - _compute_begin_s(life[0]) if place else 0.0
        moved = [
            msgspec.structs.replace(step, wall_s=step.wall_s + later_s, generated_tokens=step.generated_tokens + tokens)
            for step in life
        ]
        wall_s, tokens = moved[-1].wall_s, moved[-1].generated_tokens
        yield moved


def _compute_begin_s(step: StepRecord) -> float:
    """Return the time at which the wait for the batch of a step began, in seconds since the start of its life."""
    return step.wall_s - step.seconds - step.wait_s


def metrics(run: OpenRun) -> list[dict[str, Any]]:
    """Return name, unit, description and latest value of every metric of the steps of ``run``. Registered metrics come
    first, in the order of the registry."""
    latest: dict[str, float | None] = {}
    for step in _thin_out(run.steps, 200):
        latest.update({name: value for name, value in flat(step).items() if value is not None})
    rows = {name: found[0] for name in latest if (found := find(name)) is not None}
    order = {row.name: place for place, row in enumerate(REGISTRY)}
    names = sorted(latest, key=lambda name: (order[rows[name].name] if name in rows else len(order), name))
    return [
        {
            "name": name,
            "latest": latest[name],
            "unit": rows[name].unit if name in rows else "",
            "what": rows[name].meaning if name in rows else "",
        }
        for name in names
    ]


def flow(run: OpenRun) -> dict[str, Any]:
    """Return the answer to the flow page of ``run``: the fates of all submitted groups, episodes and tokens, and the
    ages of the trained tokens, in total and by step. If the ledger cannot be read, the fates are taken from the
    summary."""
    steps = run.steps
    before: list[StepRecord | None] = [None, *steps]
    recent = list(zip(before[:-1], steps, strict=True))[-RECENT_STEPS:]
    answer: dict[str, Any] = {
        "max_age": run.setting("flow", "max_age"),
        "ages": {str(age): tokens for age, tokens in age_histogram(step.ages for step in steps).items()},
        "by_step": [_encode_step(earlier, step) for earlier, step in recent],
        "policy": run.config.section("flow").get("policy"),
        "ledger_problem": "",
    }
    try:
        browser = run.browser()
        answer["fates"] = run.cached("fates", lambda: _count_fates(browser.conservation()))
        answer["survivors"] = run.cached("survivors", lambda: _compare_survivors(browser))
        answer["running"] = browser.num_running()
    except HeadraceError as error:
        answer["ledger_problem"] = f"{error.problem}; {error.remedy}"
        answer["fates"] = _read_summary_fates(run.summary.section("ledger"))
    return answer


def system(run: OpenRun) -> dict[str, Any]:
    """Return the answer to the system page: the run's processes, their devices, its settings and, while the run is
    alive on this machine, their use of memory and processors."""
    state, status = run.state(), run.status.tree
    living = state["state"] in LIVING
    parts = [part for part in status.get("components") or [] if isinstance(part, dict)]
    return {
        **state,
        "components": [
            {**part, **(_measure_usage(part.get("pid")) if living and not part.get("node") else {})}
            for part in parts  # a pid is valid on its own machine
        ],
        "parts": run.parts.tree,
        "waits": _as_texts(status.get("waits")),
        "config": run.config.tree,
        "summary": {name: value for name, value in run.summary.tree.items() if name not in ELSEWHERE},
        "machine": {
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "available_bytes": psutil.virtual_memory().available,
        }
        if living
        else None,
    }


def compare_runs(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """Return the answer to the page that compares runs: the state, verdict and figures of each, and the settings in
    which they differ."""
    settings = [leaves(run.config.tree) for run in runs]
    names = sorted({name for tree in settings for name in tree})
    differing = [name for name in names if len({str(tree.get(name)) for tree in settings}) > 1]
    return {
        "runs": [
            {
                **run.state(),
                "name": run.name,
                "directory": str(run.directory),
                "verdict": _read_verdict(run, living=False),
                "figures": _read_figures(run, run.state()["state"] in LIVING),
            }
            for run in runs
        ],
        "settings": [{"name": name, "values": [tree.get(name) for tree in settings]} for name in differing],
    }


def _read_figures(run: OpenRun, living: bool) -> dict[str, Any]:
    """Return the figures of a run by name. If the run has ended, they are taken from its summary. Otherwise
    (``living``, or killed without a summary) they are computed from its steps and its latest account, the record of how
    its time was spent."""
    steps = run.steps
    from_steps = summarize_steps(steps, steps[-1].wall_s if steps else 0.0)
    if run.summary.tree and not living:
        unknown = dict.fromkeys(TRAINING_FIGURES) if run.summary.tree.get("tokens_trained") == 0 else {}
        return {**from_steps, **run.summary.tree, **unknown}
    account = find_recorded_account(run.live.tree)
    return from_steps if account is None else {**from_steps, **account.figures()}


def _read_verdict(run: OpenRun, living: bool) -> str:
    """Return the verdict of a run, a text about what limits its speed. It is the run's latest verdict or, for a run
    that was killed before it wrote a verdict, computed from the run's trace. Return an empty text if there is no
    verdict. ``living`` is true if the run is running."""
    sources = (run.live.tree, run.summary.tree) if living else (run.summary.tree, run.live.tree)
    found = next((str(tree["verdict"]) for tree in sources if tree.get("verdict")), "")
    if found or living or not run.steps:
        return found
    return run.cached(f"verdict after {len(run.steps)}", lambda: load_run(run.directory).verdict)


def _encode_step(earlier: StepRecord | None, step: StepRecord) -> dict[str, Any]:
    """Return the JSON of one step for the flow page: the ages of its tokens, the queue at its end, and the groups that
    were dropped since the previous step, ``earlier`` (``None`` for the first step)."""
    before = {} if earlier is None else earlier.dropped_groups
    dropped = {reason: count - before.get(reason, 0) for reason, count in step.dropped_groups.items()}
    return {
        "step": step.version,
        "ages": {str(age): tokens for age, tokens in sorted(step.ages.items())},
        "queue": msgspec.structs.asdict(step.queue),
        "dropped": {reason: count for reason, count in dropped.items() if count > 0},
        "trained_tokens": step.trained_tokens,
    }


def _compare_survivors(browser: Browser) -> dict[str, Any] | None:
    """Return a comparison of the lengths of trained episodes with the lengths of all decided episodes, and whether the
    trained episodes are a biased selection; ``None`` if nothing has been trained."""
    bias = survivors(browser.lengths())
    return None if bias is None else {**msgspec.structs.asdict(bias), "biased": bias.biased}


def _count_fates(conservation: Conservation) -> dict[str, Any]:
    """Return, for groups, episodes and tokens, the number submitted and the numbers by fate. ``balance`` is the number
    without a fate, which is 0 in a consistent ledger."""
    units = {"groups": conservation.groups, "episodes": conservation.episodes, "tokens": conservation.tokens}
    return {name: {**asdict(fates), "balance": fates.balance} for name, fates in units.items()}


def _read_summary_fates(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the fates in the format of :func:`_count_fates`, from the section ``ledger`` of a summary. ``balance`` is
    ``None`` if a number is missing."""
    fates = {}
    for name, counts in recorded.items():
        if not isinstance(counts, dict):
            continue
        given = counts.get("dropped")
        dropped = given if isinstance(given, dict) else {}
        numbers = [counts.get("submitted"), counts.get("trained"), counts.get("in_flight"), *dropped.values()]
        whole = all(isinstance(each, int) for each in numbers)
        fates[name] = {**counts, "dropped": dropped, "balance": numbers[0] - sum(numbers[1:]) if whole else None}
    return fates


def _measure_usage(pid: object) -> dict[str, Any]:
    """Return the memory, processor time and number of threads of the process ``pid``; empty if the process has ended or
    ``pid`` is not a number."""
    if not isinstance(pid, int):
        return {}
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return {
                "memory_bytes": process.memory_info().rss,
                "cpu_s": times.user + times.system,
                "threads": process.num_threads(),
            }
    except PROCESS_GONE:
        return {}


def _thin_out(steps: Sequence[StepRecord], limit: int = MOST_POINTS) -> list[StepRecord]:
    """Return at most ``limit`` of the steps, evenly spaced, including the first and the last step."""
    if len(steps) <= limit:
        return list(steps)
    places = sorted({round(index * (len(steps) - 1) / (limit - 1)) for index in range(limit)})
    return [steps[place] for place in places]


def _as_texts(value: object) -> list[str]:
    """Return the elements of ``value``, read from a file of a run, as texts; empty if it is not a list."""
    return [str(each) for each in _as_list(value)]


def _as_list(value: object) -> Iterable[Any]:
    """Return ``value`` if it is a list or a tuple, and an empty tuple otherwise."""
    return value if isinstance(value, list | tuple) else ()
