"""What to change about a run, by what holds it up and by the settings that it has."""

from __future__ import annotations

from headrace.base.types.observation import Account, Bound, Cause
from headrace.run.observe.settings import VerdictSettings


def advise(bound: Bound, account: Account, settings: VerdictSettings) -> str:
    """A sentence or two with the names of settings and the values they have; empty where there is nothing to advise."""
    match bound:
        case Bound.GENERATION:
            return _engine(settings)
        case Bound.PREFILL:
            size = f"raise flow.group_size{_now(settings.group_size)}, for a group's prompt is read once"
            return f"Give it less to read: shorten prompts, or {size}. {_engine(settings)}"
        case Bound.STRAGGLERS:
            return _stragglers(settings)
        case Bound.CAPACITY:
            raised = f"Raise flow.capacity{_now(settings.capacity)}, or leave it out"
            return f"{raised}; engine.max_sequences must hold as many sequences."
        case Bound.LEARNER:
            return _learner(settings)
        case Bound.CONTROLLER:
            return _controller(settings)
        case Bound.PROCESSORS:
            return _processors(account, settings)
        case Bound.TURNS:
            return _turns(settings)
        case Bound.NOTHING:
            return _nothing(account)
        case Bound.SCORING:
            return _scoring(account, settings)
        case Bound.ENVIRONMENT:
            return _environment(account, settings)
        case Bound.BALANCED:
            return ""
        case Bound.SYNC:
            return _sync(account, settings)
        case Bound.LEDGER:
            return "Put run.dir on a faster disk."
        case Bound.TEACHERS:
            more = "Give the teachers' engines more to compute with."
            return " ".join(filter(None, [more, _overlap(account, settings)]))


def _now(value: int | None) -> str:
    """A value that a setting has, for behind its name; nothing where it is not known.

    >>> _now(2), _now(None)
    (' (now 2)', '')
    """
    return "" if value is None else f" (now {value})"


def _ahead(settings: VerdictSettings) -> str:
    """How generation can run further ahead of training; empty where it cannot, or where that is not known."""
    age, lead = settings.max_age, settings.lead
    if settings.by_turns or age is None or lead is None:
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


BUSY = 0.7
"""Workers that compute, or weights that travel, this much of the time do so nearly always."""


def _scoring(account: Account, settings: VerdictSettings) -> str:
    """Workers make one call at a time each, whether it computes or waits."""
    count = settings.reward_workers
    more = f"Raise env.reward_workers{_now(count)}, or make the reward faster." if count else "Make the rewards faster."
    return " ".join(filter(None, [more, _overlap(account, settings)]))


def _sync(account: Account, settings: VerdictSettings) -> str:
    """Versions travel one after the other: where one is always on its way, no lead brings them sooner."""
    less = "Send less with each version (sync.codec), or another way (sync.transport)."
    if account.of_time(account.lanes_s.get("sync", 0.0)) < BUSY:
        return " ".join(filter(None, [less, _overlap(account, settings)]))
    size = f"flow.groups_per_step{_now(settings.groups_per_step)}"
    return f"{less} Or make fewer, larger steps ({size}), which changes what is learned."


def _environment(account: Account, settings: VerdictSettings) -> str:
    """A worker runs many episodes at once: more workers help where they compute all the time. Where they wait
    themselves, for a web page or a timer, more episodes at once do."""
    count = settings.env_workers
    if account.observed_s > 0 and count:
        used = account.used_s.get("environment", 0.0) / account.observed_s / count
        if used >= BUSY:
            return f"Raise env.workers{_now(count)}, which compute all the time, or make the environment faster."
    return " ".join(filter(None, ["Make the environment faster.", _overlap(account, settings)]))


def _overlap(account: Account, settings: VerdictSettings) -> str:
    """The same, where it helps: an engine that stands idle could sample more meanwhile."""
    return _ahead(settings) if account.engine_idle > 0.5 else ""


def _stragglers(settings: VerdictSettings) -> str:
    ready = " Set flow.order = 'ready_first'." if settings.order == "strict" else ""
    tail = (
        f"Cut the tail: lower engine.max_new_tokens{_now(settings.max_new_tokens)}, or start more episodes than a "
        "group needs (flow.filters, kind = 'redundancy')."
    )
    return " ".join(filter(None, [_ahead(settings) + ready, tail]))


def _threads(settings: VerdictSettings) -> tuple[int, int, int] | None:
    """Processors of the engine, of the learner, and in all, where both compute on those of one machine."""
    engine, learner, every = settings.engine_threads, settings.learner_threads, settings.processors
    return (engine, learner, every) if settings.on_cpu and engine and learner and every else None


def _engine(settings: VerdictSettings) -> str:
    less = f"sample shorter answers (engine.max_new_tokens{_now(settings.max_new_tokens)})"
    threads = _threads(settings)
    if threads is None:
        return f"Add an engine: raise engine.count{_now(settings.engines)}. Or {less}."
    engine, learner, every = threads
    if every > engine + learner:
        return f"Raise launch.engine_threads (now {engine}): {every - engine - learner} of {every} processors are free."
    if learner > 1:
        return (
            f"Raise launch.engine_threads (now {engine}) and lower launch.learner_threads (now {learner}), or {less}."
        )
    return f"Take a machine with more than {every} processors, or {less}."


def _learner(settings: VerdictSettings) -> str:
    threads = _threads(settings)
    if threads is None:
        return "Spread the learner over more devices (learner.parallel)."
    engine, learner, every = threads
    if every > engine + learner:
        return (
            f"Raise launch.learner_threads (now {learner}): {every - engine - learner} of {every} processors are free."
        )
    if engine > 1:
        return f"Raise launch.learner_threads (now {learner}) and lower launch.engine_threads (now {engine})."
    return f"Take a machine with more than {every} processors, or a smaller model."


def _controller(settings: VerdictSettings) -> str:
    return (
        "The controller is one thread, with work for every episode and turn, however short. A "
        f"faster processor helps, or fewer episodes for a step (flow.groups_per_step{_now(settings.groups_per_step)}, "
        f"flow.group_size{_now(settings.group_size)}): steps come sooner, but train fewer tokens each."
    )


OWN = 0.6
"""A run that waits for processors and uses fewer of them than this waits for other programs."""


def _processors(account: Account, settings: VerdictSettings) -> str:
    if account.processors_s < OWN * account.observed_s:
        return "Other programs use the processors: end them, or take a machine of the run's own."
    threads = _threads(settings)
    if threads is not None and max(threads[:2]) > 1 and sum(threads[:2]) >= threads[2]:
        engine, learner, every = threads
        return (
            f"Engine (launch.engine_threads, now {engine}), learner (launch.learner_threads, now {learner}) and "
            f"controller share {every} processors: lower one of the two, or take a machine with more."
        )
    more = f"more than {settings.processors}" if settings.processors else "more"
    return f"Its own processes use them: take a machine with {more}."


def _turns(settings: VerdictSettings) -> str:
    if settings.by_turns:
        return (
            "They share a device (sync.interrupt = 'sleep'), so that only one of them can work: give each its own "
            "(engine.device, learner.device)."
        )
    return _ahead(settings) or "Let generation run ahead: flow.max_age and flow.lead."


def _nothing(account: Account) -> str:
    parts = {cause: account.learner_waits(cause) for cause in Cause} | {Cause.LEARNER: 1 - account.learner_idle}
    first, second = sorted(parts, key=lambda cause: -parts[cause])[:2]
    return f"No single change will help much: {_NAMED[first]} and {_NAMED[second]} take most of each step."


_NAMED = {
    Cause.ENGINE: "the wait for the engine",
    Cause.LEARNER: "the learner's own work",
    Cause.CONTROLLER: "the wait for the controller",
    Cause.ENVIRONMENT: "the wait for environments",
    Cause.SCORING: "the wait for rewards",
    Cause.TEACHERS: "the wait for teachers",
    Cause.SYNC: "the wait for weights",
    Cause.LEDGER: "the wait for the ledger's disk",
    Cause.NOBODY: "the time in which no part works",
}
