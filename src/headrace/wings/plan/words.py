"""The description of a plan in sentences, which ``headrace plan`` prints."""

from __future__ import annotations

from headrace.base.types.weights import Interrupt
from headrace.run.observe.verdict import find_bound
from headrace.run.observe.words import plural
from headrace.wings.plan.planning import longest_sequence
from headrace.wings.plan.search import EQUAL_WITHIN, Candidate, SearchResult
from headrace.wings.plan.sizing import describe_memory, spread_sizes, usable_bytes
from headrace.wings.plan.spread import ConstantSpread
from headrace.wings.plan.system import PlanContext

BOTTLENECK = 0.9
"""Fraction of the time above which a busy controller counts as a bottleneck."""


def describe(result: SearchResult) -> list[str]:
    """Return the sentences of the plan ``result``, each a line: the source of the costs, the memory, the results of the
    run file's settings and of the best settings, the effect of asynchronous training, proposed changes of settings, and
    the load of the controller."""
    site = result.site
    return [
        f"{site.request.shape.name} on {site.cluster}. View: {site.view}. {_workload_source(site)}",
        f"Memory: {site.fit}.",
        *_describe_learner_memory(result),
        f"{'As asked' if site.fit.beside else 'In turn'}: {_describe_candidate(site, result.requested)}",
        f"Best of {len(result.tried)} simulated runs ({result.seconds:.0f} s): "
        f"{_describe_candidate(site, result.best)}",
        _compare_with_synchronous(result),
        *_propose_changes(result),
        *_describe_controller_load(result),
    ]


def _describe_learner_memory(result: SearchResult) -> list[str]:
    """Return a list with the sentence on the memory of a rank of the learner under the run file's settings, where every
    accelerator that trains is a rank. The list is empty if engines and learner take turns."""
    site = result.site
    if result.requested.choice.shared:
        return []
    sizes = spread_sizes(site.request, longest_sequence(site.request), site.trainers(result.requested.choice))
    return [f"{describe_memory(sizes, usable_bytes(site.cluster))}."]


def describe_verdict(result: SearchResult) -> str:
    """Return one line of the plan ``result`` for a dry run: the predicted speed of the run file's settings, and the
    effect of asynchronous training."""
    requested = result.requested.outcome
    return (
        f"Plan ({result.site.cluster}; {result.site.view}): about {_format_rate(requested.tok_s)} trained tokens/s, "
        f"a step every {format_time(requested.step_s)}, {find_bound(requested.account())}. "
        f"{_compare_with_synchronous(result)} {_workload_source(result.site)}"
    )


def _warn_of_uncounted_times(site: PlanContext) -> str:
    """Return a sentence that warns that the time of environments and rewards is not counted, if both times are 0 in the
    workload; otherwise an empty text."""
    if not site.workload.turn_s == site.workload.reward_s == ConstantSpread(value=0):
        return ""
    return (
        " The time of environments and rewards is not counted, since it is not known: headrace plan takes it from a "
        "run (--calibrate RUN) or from a cluster file (workload.turn_s, workload.reward_s)."
    )


def format_time(seconds: float) -> str:
    """Return a time in ``seconds`` as text with enough digits, so that short times are not rounded to 0.0 s.

    >>> format_time(71.7), format_time(0.0312)
    ('71.7 s', '0.031 s')
    """
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _workload_source(site: PlanContext) -> str:
    """Return a sentence on the source of the workload: measured lengths and latencies, or the assumed distribution of
    answer lengths."""
    if site.measured is not None:
        return "Lengths and latencies: as the run has seen them."
    answers = site.workload.answer_tokens.model_dump(exclude_none=True)
    kind = answers.pop("kind")
    return (
        f"Lengths of answers: {kind} ({', '.join(f'{key} {value:g}' for key, value in answers.items())}), as assumed."
        f"{_warn_of_uncounted_times(site)}"
    )


def _describe_candidate(site: PlanContext, candidate: Candidate) -> str:
    """Return the settings and the simulated results of ``candidate`` in the context ``site`` in words."""
    choice, outcome = candidate.choice, candidate.outcome
    account = outcome.account()
    division = (
        f"all {site.cluster.count} in turn"
        if choice.shared
        else f"{choice.generation} generate ({choice.generation // site.fit.ways} engines), "
        f"{site.trainers(choice)} train"
    )
    return (
        f"{division}; {choice.flow.groups_per_step} groups a step, max_age {choice.flow.largest_age}, lead "
        f"{choice.flow.effective_lead}, {choice.interrupt}, {choice.transport}: {_format_rate(outcome.tok_s)} trained "
        f"tokens/s, a step every {format_time(outcome.step_s)}; engines idle {account.engine_idle:.0%}, learner idle "
        f"{account.learner_idle:.0%}; ages {outcome.mean_age:.2f} on average, {outcome.max_age} at most; the learner "
        f"is blocked by the sync {account.to_fraction(account.exposed_sync_s):.1%} of the time, a version travels "
        f"{site.world(choice, 1).sync.travel_s:,.2f} s. It is {find_bound(account)}."
    )


def _compare_with_synchronous(result: SearchResult) -> str:
    """Return a sentence that compares the speed of asynchronous training with the fastest synchronous run of
    ``result``."""
    if not result.site.fit.beside:
        return "Asynchrony would gain nothing here: both sides would compute on the same accelerators."
    synchronous, other, subject = result.synchronous, result.requested, "Asynchrony"
    if other.choice.flow.largest_age == 0:
        other, subject = result.best, "The best asynchronous run"
        if other.choice.flow.largest_age == 0:
            return "Asynchrony gains nothing here: the fastest run is synchronous."
    ratio = other.tok_s / synchronous.tok_s
    accelerators = (
        "all accelerators in turn"
        if synchronous.choice.shared
        else plural(synchronous.choice.generation // result.site.fit.ways, "engine")
    )
    comparison = f"the fastest synchronous run, with {accelerators}, trains {_format_rate(synchronous.tok_s)} tokens/s"
    if ratio > 1 + EQUAL_WITHIN:
        return f"{subject} gains {ratio - 1:.0%} here: {comparison}, {find_bound(synchronous.outcome.account())}."
    if ratio < 1 - EQUAL_WITHIN:
        return f"{subject} loses {1 - ratio:.0%} here, {find_bound(other.outcome.account())}: {comparison}."
    return f"{subject} changes nothing here, {find_bound(other.outcome.account())}: {comparison}."


def _propose_changes(result: SearchResult) -> list[str]:
    """Return a list with one sentence on the plan ``result``: the settings to change and the gain if other settings are
    faster than the run file's, or that no tried settings are faster."""
    requested, best = result.requested, result.best
    if not result.site.fit.beside:
        return [_describe_alternating(result)]
    gain = best.tok_s / requested.tok_s - 1
    if gain <= EQUAL_WITHIN:
        return ["What was asked is as fast as anything that was tried."]
    assignments = [
        f"{key} = {new!r}"
        for key, old, new in (
            ("flow.groups_per_step", requested.choice.flow.groups_per_step, best.choice.flow.groups_per_step),
            ("flow.max_age", requested.choice.flow.max_age, best.choice.flow.max_age),
            ("flow.lead", requested.choice.flow.effective_lead, best.choice.flow.effective_lead),
            ("sync.interrupt", str(requested.choice.interrupt), str(best.choice.interrupt)),
            ("sync.transport", requested.choice.transport, best.choice.transport),
        )
        if old != new and not best.choice.shared
    ]
    split = "let all accelerators generate and train in turn" if best.choice.shared else (
        f"give {best.choice.generation} of {result.site.cluster.count} accelerators to generation"
    )  # fmt: skip
    batch = "; a step then trains another number of groups, which changes what is learned" if any(
        line.startswith("flow.groups_per_step") for line in assignments
    ) else ""  # fmt: skip
    return [f"{gain:+.0%}: {split}" + (f", set {', '.join(assignments)}" if assignments else "") + batch + "."]


def _describe_alternating(result: SearchResult) -> str:
    """Return a sentence that names the settings with which engine and learner alternate on all devices, and says
    whether another batch size would be faster."""
    request, turns, best = result.site.request, result.requested, result.best
    missing = ["flow.max_age = 0"] if request.flow.largest_age else []
    if request.sync.interrupt is not Interrupt.SLEEP:
        missing.append('sync.interrupt = "sleep"')
    sets = f"To take turns, set {' and '.join(missing)}" if missing else "The run is set to take turns"
    gain, batch = best.tok_s / turns.tok_s - 1, best.choice.flow.groups_per_step
    if gain <= EQUAL_WITHIN:
        return f"{sets}; no other batch that was tried is faster."
    return f"{sets}; {gain:+.0%} with flow.groups_per_step = {batch}, which changes what is learned."


def _describe_controller_load(result: SearchResult) -> list[str]:
    """Return a list with a sentence on the load of the controller; an empty list if no calibration has measured the
    controller's time per episode."""
    outcome, measured = result.requested.outcome, result.site.measured
    if measured is None or not measured.episode_s:
        return []
    busy = min(1.0, outcome.num_episodes * measured.episode_s / outcome.seconds)
    advice = "; it holds the run up: more tokens an episode, or fewer episodes, would not" if busy > BOTTLENECK else ""
    return [f"Controller: {measured.episode_s * 1e3:.2g} ms an episode, busy {busy:.0%} of the time as asked{advice}."]


def _format_rate(tok_s: float) -> str:
    """Return a number of tokens per second as text, with three significant digits below 10."""
    return f"{tok_s:,.0f}" if tok_s >= 10 else f"{tok_s:.3g}"
