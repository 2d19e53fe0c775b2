"""What the pages about a whole run show: overview, steps, flow, system, and several runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import psutil

from headrace.base.errors import DataError, HeadraceError
from headrace.base.types.observation import StepRecord
from headrace.flow.ledger.base import Conservation, Fates
from headrace.flow.ledger.browse import Browser
from headrace.flow.ledger.survivors import survivors
from headrace.run.observe import age_histogram, evaluations, figures_of, observed
from headrace.run.observe.metrics import REGISTRY, find, flat
from headrace.run.observe.rundata import told_account
from headrace.wings.view.run import LIVING, OpenRun

MOST_POINTS = 2000
"""Steps of one series that travel to a page; a longer run is thinned, its first and last step kept."""
MOST_SERIES = 24
EVENTS = 60
RECENT_STEPS = 200
"""Of which the flow page shows the ages and fates one by one."""


def overview(run: OpenRun) -> dict[str, Any]:
    """How the run stands: state, verdict, figures, what was worth a line."""
    state = run.state()
    living = state["state"] in LIVING
    live = run.live.tree if living else {}
    return {
        **state,
        "name": run.name,
        "directory": str(run.directory),
        "verdict": _verdict(run, living),
        "notes": run.notes(),
        "warnings": _texts(live.get("warnings") or run.summary.tree.get("warnings")),
        "figures": _figures(run, living),
        "evaluations": evaluations(run.steps, {} if living else run.summary.tree),
        "about": run.about,
        "eta_s": live.get("eta_s"),
        "waits": live.get("waits") or [],
        "events": [msgspec.structs.asdict(event) for event in run.events[-EVENTS:]],
        "max_age": run.setting("flow", "max_age"),
    }


def series(run: OpenRun, names: Sequence[str]) -> dict[str, Any]:
    """Columns over the steps: ``step``, ``wall_s``, and every one of ``names`` by its registered name; ``None`` where
    it was not measured. ``first_s`` is when the first step began."""
    if len(names) > MOST_SERIES:
        raise DataError(f"{len(names)} series are asked for", remedy=f"ask for {MOST_SERIES} at most")
    steps = _thinned(run.steps)
    rows = [flat(step) for step in steps]
    return {
        "step": [step.version for step in steps],
        "wall_s": [step.wall_s for step in steps],
        "first_s": steps[0].wall_s - steps[0].seconds - steps[0].wait_s if steps else 0.0,
        "columns": {name: [row.get(name) for row in rows] for name in names},
    }


def metrics(run: OpenRun) -> list[dict[str, Any]]:
    """Every number that its steps have: name, unit, what it says, and its latest value. Registered ones in the order
    of the registry, others behind them."""
    latest: dict[str, float | None] = {}
    for step in _thinned(run.steps, 200):
        latest.update({name: value for name, value in flat(step).items() if value is not None})
    rows = {name: found[0] for name in latest if (found := find(name)) is not None}
    order = {row.name: place for place, row in enumerate(REGISTRY)}
    names = sorted(latest, key=lambda name: (order[rows[name].name] if name in rows else len(order), name))
    return [
        {
            "name": name,
            "latest": latest[name],
            "unit": rows[name].unit if name in rows else "",
            "what": rows[name].what if name in rows else "",
        }
        for name in names
    ]


def flow(run: OpenRun) -> dict[str, Any]:
    """What became of everything that was submitted, and how old it was when it was trained."""
    steps = run.steps
    before: list[StepRecord | None] = [None, *steps]
    recent = list(zip(before[:-1], steps, strict=True))[-RECENT_STEPS:]
    answer: dict[str, Any] = {
        "max_age": run.setting("flow", "max_age"),
        "ages": {str(age): tokens for age, tokens in age_histogram(step.ages for step in steps).items()},
        "by_step": [_of_step(earlier, step) for earlier, step in recent],
        "policy": run.config.section("flow").get("policy"),
        "ledger_problem": "",
    }
    try:
        browser = run.browser()
        answer["fates"] = run.remembered("fates", lambda: _fates(browser.conservation()))
        answer["survivors"] = run.remembered("survivors", lambda: _survivors(browser))
        answer["running"] = browser.num_running()
    except HeadraceError as error:
        answer["ledger_problem"] = f"{error.problem}; {error.remedy}"
        told = run.summary.tree.get("ledger")
        answer["fates"] = told if isinstance(told, dict) else {}
    return answer


def system(run: OpenRun) -> dict[str, Any]:
    """The run's processes, what they compute with, and, while it lives on this machine, what they use."""
    state, status = run.state(), run.status.tree
    living = state["state"] in LIVING
    parts = [part for part in status.get("components") or [] if isinstance(part, dict)]
    return {
        **state,
        "components": [{**part, **(_usage(part.get("pid")) if living and _is_here(part) else {})} for part in parts],
        "parts": run.parts.tree,
        "waits": _texts(status.get("waits")),
        "config": run.config.tree,
        "machine": {
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "available_bytes": psutil.virtual_memory().available,
        }
        if living
        else None,
    }


def _is_here(part: dict[str, Any]) -> bool:
    """Whether it runs on the machine of its controller, and its number means something here."""
    return not part.get("node")


def compared(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """The runs side by side: their figures, and the settings in which they differ."""
    settings = [_leaves(run.config.tree) for run in runs]
    names = sorted({name for tree in settings for name in tree})
    differing = [name for name in names if len({str(tree.get(name)) for tree in settings}) > 1]
    return {
        "runs": [
            {
                **run.state(),
                "name": run.name,
                "directory": str(run.directory),
                "verdict": _verdict(run, living=False),
                "figures": _figures(run, run.state()["state"] in LIVING),
            }
            for run in runs
        ],
        "settings": [{"name": name, "values": [tree.get(name) for tree in settings]} for name in differing],
    }


def _figures(run: OpenRun, living: bool) -> dict[str, Any]:
    """The summary; of a run that goes on, or was killed, what its steps and its last account say."""
    steps = run.steps
    told = observed(steps, steps[-1].wall_s if steps else 0.0)
    if run.summary.tree and not living:
        return {**told, **run.summary.tree}
    account = told_account(run.live.tree)
    return told if account is None else {**told, **figures_of(account)}


def _verdict(run: OpenRun, living: bool) -> str:
    """As the run itself has worked it out, the latest."""
    told = (run.live.tree, run.summary.tree) if living else (run.summary.tree, run.live.tree)
    return next((str(tree["verdict"]) for tree in told if tree.get("verdict")), "")


def _of_step(earlier: StepRecord | None, step: StepRecord) -> dict[str, Any]:
    """Ages of its tokens, the queue at its end, and groups that were dropped since the step before."""
    before = {} if earlier is None else earlier.dropped_groups
    dropped = {reason: count - before.get(reason, 0) for reason, count in step.dropped_groups.items()}
    return {
        "step": step.version,
        "ages": {str(age): tokens for age, tokens in sorted(step.ages.items())},
        "queue": msgspec.structs.asdict(step.queue),
        "dropped": {reason: count for reason, count in dropped.items() if count > 0},
        "trained_tokens": step.trained_tokens,
    }


def _survivors(browser: Browser) -> dict[str, Any] | None:
    bias = survivors(browser.lengths())
    return None if bias is None else {**msgspec.structs.asdict(bias), "biased": bias.biased}


def _fates(found: Conservation) -> dict[str, Any]:
    units: dict[str, Fates] = {"groups": found.groups, "episodes": found.episodes, "tokens": found.tokens}
    return {
        name: {
            "submitted": fates.submitted,
            "trained": fates.trained,
            "dropped": fates.dropped,
            "in_flight": fates.in_flight,
            "balance": fates.balance,
        }
        for name, fates in units.items()
    }


def _usage(pid: object) -> dict[str, Any]:
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
    except psutil.Error:
        return {}


def _thinned(steps: Sequence[StepRecord], most: int = MOST_POINTS) -> list[StepRecord]:
    if len(steps) <= most:
        return list(steps)
    places = sorted({round(index * (len(steps) - 1) / (most - 1)) for index in range(most)})
    return [steps[place] for place in places]


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update(_leaves(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def _texts(value: object) -> list[str]:
    return [str(each) for each in _listed(value)]


def _listed(value: object) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else ()
