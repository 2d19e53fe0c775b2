"""The advice of a verdict: sentences that tell the user which settings to change.

The *bound* is the bottleneck of a run, which the verdict names. An *account* is the record of where the time of the
run went. :func:`advise` chooses the function for a bound; each function returns a sentence or two for the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.types.observation import Account, Bound, Cause
from headrace.base.types.weights import Interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSettings:
    """The present values of the settings that advice tells the user to raise or lower. ``None`` means that the value is
    unknown, or that the run chooses it itself."""

    max_age: int | None = None
    """``flow.max_age``, in versions."""
    lead: int | None = None
    """The number of batches that generation runs ahead: ``flow.lead``, or ``flow.max_age`` if that is unset."""
    capacity: int | None = None
    """``flow.capacity``, in groups."""
    group_size: int | None = None
    """``flow.group_size``: the number of episodes in a group."""
    groups_per_step: int | None = None
    """``flow.groups_per_step``: the number of groups in the batch of one step."""
    max_new_tokens: int | None = None
    """``engine.max_new_tokens``: the longest completion, in tokens."""
    reward_workers: int | None = None
    """``env.reward_workers``, the number of processes that compute rewards; ``None`` also if no reward is a function of
    the user."""
    env_workers: int | None = None
    """``env.workers``, the number of processes that run environments."""
    engines: int | None = None
    """``engine.count``: the number of engines."""
    engine_threads: int | None = None
    """``launch.engine_threads``, the processors of the engine; if the run file leaves it unset, half of all."""
    learner_threads: int | None = None
    """``launch.learner_threads``, the processors of the learner; if the run file leaves it unset, half of all."""
    processors: int | None = None
    """The number of processors that the run's processes may use."""
    on_cpu: bool = False
    """Whether an engine or the learner computes on the processors."""
    alternating: bool = False
    """Whether ``sync.interrupt`` is ``sleep``: engine and learner share a device, and only one of them computes at a
    time."""
    order: str = ""
    """``flow.order``; empty if it is not known."""


UNKNOWN = VerdictSettings()
"""The record for a run whose settings are not known."""


def make_verdict_settings(
    config: Mapping[str, Any], *, processors: int | None = None, on_cpu: bool = False
) -> VerdictSettings:
    """Return the settings for a verdict's advice from ``config``, the resolved settings of a run as a tree of sections.
    A setting that the tree lacks is ``None``.

    ``processors`` is the number of processors that the run's processes may use, ``None`` if it is not known, and
    ``on_cpu`` is true if an engine or the learner computes on them.

    >>> settings = make_verdict_settings({"flow": {"max_age": 2, "lead": None}})
    >>> settings.max_age, settings.lead, settings.engine_threads
    (2, 2, None)
    """
    flow, launch, engine, env = (_get_section(config, name) for name in ("flow", "launch", "engine", "env"))
    max_age = _get_integer(flow.get("max_age"))
    lead = _get_integer(flow.get("lead"))
    local = launch.get("kind", "local") == "local" and processors is not None
    half = max(1, processors // 2) if processors is not None and local else None
    return VerdictSettings(
        max_age=max_age,
        lead=max_age if lead is None else lead,
        capacity=_get_integer(flow.get("capacity")),
        group_size=_get_integer(flow.get("group_size")),
        groups_per_step=_get_integer(flow.get("groups_per_step")),
        max_new_tokens=_get_integer(engine.get("max_new_tokens")),
        reward_workers=_get_integer(env.get("reward_workers")) if env.get("reward") else None,
        env_workers=_get_integer(env.get("workers")),
        engines=_get_integer(engine.get("count")),
        engine_threads=_get_integer(launch.get("engine_threads")) or half,
        learner_threads=_get_integer(launch.get("learner_threads")) or half,
        processors=processors,
        on_cpu=on_cpu,
        alternating=_get_section(config, "sync").get("interrupt") == Interrupt.SLEEP.value,
        order=str(flow.get("order") or ""),
    )


def _get_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the section ``name`` of the settings ``config``; empty if it is missing or is no section."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _get_integer(value: object) -> int | None:
    """Return ``value``, the value of a setting, if it is an integer; ``None`` for any other type, ``bool`` included."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def advise(bound: Bound, account: Account, settings: VerdictSettings) -> str:
    """Return advice against the bottleneck ``bound``: a sentence or two with the names and the present values of the
    settings to change; an empty string if there is no advice. ``account`` has the times of the run's parts."""
    match bound:
        case Bound.GENERATION:
            return _advise_engine(settings)
        case Bound.PREFILL:
            size = f"raise flow.group_size{_format_now(settings.group_size)}, for a group's prompt is read once"
            return f"Give it less to read: shorten prompts, or {size}. {_advise_engine(settings)}"
        case Bound.STRAGGLERS:
            return _advise_stragglers(settings)
        case Bound.CAPACITY:
            raised = f"Raise flow.capacity{_format_now(settings.capacity)}, or leave it out"
            return f"{raised}; engine.max_sequences must hold as many sequences."
        case Bound.LEARNER:
            return _advise_learner(settings)
        case Bound.CONTROLLER:
            return _advise_controller(settings)
        case Bound.PROCESSORS:
            return _advise_processors(account, settings)
        case Bound.TURNS:
            return _advise_alternating(settings)
        case Bound.NOTHING:
            return _advise_nothing(account)
        case Bound.SCORING:
            return _advise_scoring(account, settings)
        case Bound.ENVIRONMENT:
            return _advise_environment(account, settings)
        case Bound.BALANCED:
            return ""
        case Bound.SYNC:
            return _advise_sync(account, settings)
        case Bound.LEDGER:
            return "Put run.dir on a faster disk."
        case Bound.STOPPED:
            return "Find out what stops it (Ctrl-Z, a debugger, kill -STOP): the run's events name it."
        case Bound.TEACHERS:
            more = "Give the teachers' engines more to compute with."
            return " ".join(filter(None, [more, _advise_running_ahead_if_idle(account, settings)]))


def _format_now(value: int | None) -> str:
    """Return the present value of a setting, to be put after its name; empty if it is not known.

    >>> _format_now(2), _format_now(None)
    (' (now 2)', '')
    """
    return "" if value is None else f" (now {value})"


def _advise_running_ahead(settings: VerdictSettings) -> str:
    """Return the advice to let generation run further ahead of training, by ``flow.max_age`` or ``flow.lead``; an empty
    string if engine and learner share a device, or if these settings are not known."""
    age, lead = settings.max_age, settings.lead
    if settings.alternating or age is None or lead is None:
        return ""
    if age == 0:
        return (
            "With flow.max_age = 0 nothing is sampled while the learner works: flow.max_age = 1 lets the next batch be "
            "sampled meanwhile, by weights that are one step old."
        )
    if lead < age:
        return f"Let generation run further ahead: raise flow.lead from {lead} to {age}, which flow.max_age allows."
    return (
        f"Let generation run further ahead: raise flow.max_age (now {age}), where tokens that much older do not hurt "
        "what is learned."
    )


BUSY_SHARE = 0.7
"""The share of the time from which on workers that compute, or a sync that sends weights, count as always busy."""


def _advise_scoring(account: Account, settings: VerdictSettings) -> str:
    """Return the advice for a run that waits for rewards: more scoring workers, since each makes one call at a time, or
    faster rewards."""
    count = settings.reward_workers
    more = (
        f"Raise env.reward_workers{_format_now(count)}, or make the reward faster."
        if count
        else "Make the rewards faster."
    )
    return " ".join(filter(None, [more, _advise_running_ahead_if_idle(account, settings)]))


def _advise_sync(account: Account, settings: VerdictSettings) -> str:
    """Return the advice for a run that waits for the weight sync. Versions are sent sequentially: if the sync is nearly
    always busy, letting generation run further ahead does not help, so fewer steps are advised. ``account`` has the
    time in which the sync was busy."""
    less = "Send less with each version (sync.codec), or another way (sync.transport)."
    if account.to_fraction(account.lanes_s.get("sync", 0.0)) < BUSY_SHARE:
        return " ".join(filter(None, [less, _advise_running_ahead_if_idle(account, settings)]))
    size = f"flow.groups_per_step{_format_now(settings.groups_per_step)}"
    return f"{less} Or make fewer, larger steps ({size}), which changes what is learned."


def _advise_environment(account: Account, settings: VerdictSettings) -> str:
    """Return the advice for a run that waits for its environments, whose processor time ``account`` has.

    A worker runs many episodes at once. More workers help if they compute all the time; if the episodes wait for a web
    page or a timer, more episodes at once help.
    """
    count = settings.env_workers
    if account.observed_s > 0 and count:
        used = account.used_s.get("environment", 0.0) / account.observed_s / count
        if used >= BUSY_SHARE:
            return f"Raise env.workers{_format_now(count)}, which compute all the time, or make the environment faster."
    return " ".join(filter(None, ["Make the environment faster.", _advise_running_ahead_if_idle(account, settings)]))


def _advise_running_ahead_if_idle(account: Account, settings: VerdictSettings) -> str:
    """Return the advice to let generation run further ahead if the engine is idle for more than half of the time, else
    an empty string."""
    return _advise_running_ahead(settings) if account.engine_idle > 0.5 else ""


def _advise_stragglers(settings: VerdictSettings) -> str:
    """Return the advice for a run that waits for the last, longest episodes of each batch: run further ahead, train
    groups in the order in which they are ready, or shorten the tail."""
    ready = " Set flow.order = 'ready_first'." if settings.order == "strict" else ""
    tail = (
        f"Cut the tail: lower engine.max_new_tokens{_format_now(settings.max_new_tokens)}, or start more episodes "
        "than a group needs (flow.filters, kind = 'redundancy')."
    )
    return " ".join(filter(None, [_advise_running_ahead(settings) + ready, tail]))


def _get_threads(settings: VerdictSettings) -> tuple[int, int, int] | None:
    """Return the numbers of processors of the engine, of the learner, and of all that the run may use; ``None`` if no
    part computes on processors, or if a number is not known. Advice then names devices instead."""
    engine, learner, total = settings.engine_threads, settings.learner_threads, settings.processors
    return (engine, learner, total) if settings.on_cpu and engine and learner and total else None


def _advise_engine(settings: VerdictSettings) -> str:
    """Return the advice for a run that waits for tokens of the engine: more processors or engines, or shorter
    answers."""
    less = f"sample shorter answers (engine.max_new_tokens{_format_now(settings.max_new_tokens)})"
    threads = _get_threads(settings)
    if threads is None:
        return f"Add an engine: headrace engines RUN add, or engine.count{_format_now(settings.engines)}. Or {less}."
    engine, learner, total = threads
    if total > engine + learner:
        return f"Raise launch.engine_threads (now {engine}): {total - engine - learner} of {total} processors are free."
    if learner > 1:
        return (
            f"Raise launch.engine_threads (now {engine}) and lower launch.learner_threads (now {learner}), or {less}."
        )
    return f"Take a machine with more than {total} processors, or {less}."


def _advise_learner(settings: VerdictSettings) -> str:
    """Return the advice for a run whose learner works nearly all the time: more devices or processors for it."""
    threads = _get_threads(settings)
    if threads is None:
        return "Spread the learner over more devices (learner.parallel)."
    engine, learner, total = threads
    if total > engine + learner:
        return (
            f"Raise launch.learner_threads (now {learner}): {total - engine - learner} of {total} processors are free."
        )
    if engine > 1:
        return f"Raise launch.learner_threads (now {learner}) and lower launch.engine_threads (now {engine})."
    return f"Take a machine with more than {total} processors, or a smaller model."


def _advise_controller(settings: VerdictSettings) -> str:
    """Return the advice for a run whose controller, which starts episodes and assembles batches, is the bottleneck."""
    sizes = (
        f"flow.groups_per_step{_format_now(settings.groups_per_step)}, "
        f"flow.group_size{_format_now(settings.group_size)}"
    )
    return (
        "The controller is one thread, with work for every episode and turn, however short. A faster processor helps, "
        f"or fewer episodes for a step ({sizes}): steps come sooner, but train fewer tokens each."
    )


OWN_SHARE = 0.6
"""The share of the processors used by the run below which other programs count as the cause of waiting for
processors."""
WHOLE_SHARE = 0.8
"""The share of the processors used by the run from which on the run alone counts as the cause."""


def _advise_processors(account: Account, settings: VerdictSettings) -> str:
    """Return the advice for a run whose processes wait for processors (CPUs). The advice depends on the share of the
    processors that the run itself uses: if this share is small, other programs are the cause."""
    if account.processors_s < OWN_SHARE * account.observed_s:
        return "Other programs use the processors: end them, or take a machine of the run's own."
    if account.processors_s < WHOLE_SHARE * account.observed_s:
        return "Its own processes and other programs share them: end those, or take a machine of the run's own."
    threads = _get_threads(settings)
    if threads is not None and max(threads[:2]) > 1 and sum(threads[:2]) >= threads[2]:
        engine, learner, total = threads
        return (
            f"Engine (launch.engine_threads, now {engine}), learner (launch.learner_threads, now {learner}) and "
            f"controller share {total} processors: lower one of the two, or take a machine with more."
        )
    size = f"more than {settings.processors}" if settings.processors else "more"
    return f"Its own processes use them: take a machine with {size}."


def _advise_alternating(settings: VerdictSettings) -> str:
    """Return the advice for a run whose engine and learner work in turn, each waiting for the other: separate devices
    if they share one, else letting generation run further ahead."""
    if settings.alternating:
        return (
            "They share a device (sync.interrupt = 'sleep'), so that only one of them can work: give each its own "
            "(engine.device, learner.device)."
        )
    return _advise_running_ahead(settings) or "Let generation run ahead: flow.max_age and flow.lead."


def _advise_nothing(account: Account) -> str:
    """Return a sentence for a run without a single bottleneck, which names the two parts that take most of the
    learner's time."""
    parts = {cause: account.learner_waits(cause) for cause in Cause} | {Cause.LEARNER: 1 - account.learner_idle}
    first, second = sorted(parts, key=lambda cause: -parts[cause])[:2]
    return f"No single change will help much: {_PART_WORDS[first]} and {_PART_WORDS[second]} take most of each step."


_PART_WORDS = {
    Cause.ENGINE: "the wait for the engine",
    Cause.LEARNER: "the learner's own work",
    Cause.CONTROLLER: "the wait for the controller",
    Cause.ENVIRONMENT: "the wait for environments",
    Cause.SCORING: "the wait for rewards",
    Cause.TEACHERS: "the wait for teachers",
    Cause.SYNC: "the wait for weights",
    Cause.LEDGER: "the wait for the ledger's disk",
    Cause.STOPPED: "the time in which a process is stopped",
    Cause.NOBODY: "the time in which no part works",
}
"""The words for each part of a step, by the cause of the learner's wait."""
