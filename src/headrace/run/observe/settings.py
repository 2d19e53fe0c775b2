"""The settings of a run on which advice depends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.types.weights import Interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSettings:
    """As far as a verdict advises to change them; ``None`` where they are not known, or where the run finds the value
    by itself."""

    max_age: int | None = None
    """``flow.max_age``, in versions."""
    lead: int | None = None
    """How far generation runs ahead: ``flow.lead``, or ``flow.max_age`` where that is unset."""
    capacity: int | None = None
    """``flow.capacity``, in groups."""
    group_size: int | None = None
    """``flow.group_size``."""
    groups_per_step: int | None = None
    """``flow.groups_per_step``."""
    max_new_tokens: int | None = None
    """``engine.max_new_tokens``."""
    reward_workers: int | None = None
    """``env.reward_workers``; ``None`` too where the reward is no function of the user's."""
    env_workers: int | None = None
    """``env.workers``."""
    engines: int | None = None
    """``engine.count``."""
    engine_threads: int | None = None
    """``launch.engine_threads``; unset in the run file: half of the processors."""
    learner_threads: int | None = None
    """``launch.learner_threads``; unset in the run file: half of the processors."""
    processors: int | None = None
    """Processors that the run's processes may use."""
    on_cpu: bool = False
    """Engine and learner compute on the processors."""
    by_turns: bool = False
    """``sync.interrupt = "sleep"``: engine and learner share a device, and only one of them computes at a time."""
    order: str = ""
    """``flow.order``; empty where it is not known."""


UNKNOWN = VerdictSettings()


def settings_of(config: Mapping[str, Any], *, processors: int | None = None, on_cpu: bool = False) -> VerdictSettings:
    """Those of a resolved configuration, as a tree. ``processors`` and ``on_cpu``: of the machine that the run is on.

    >>> found = settings_of({"flow": {"max_age": 2, "lead": None}})
    >>> found.max_age, found.lead, found.engine_threads
    (2, 2, None)
    """
    flow, launch, engine, env = (_table(config, name) for name in ("flow", "launch", "engine", "env"))
    max_age = _count(flow.get("max_age"))
    lead = _count(flow.get("lead"))
    local = launch.get("kind", "local") == "local" and processors is not None
    half = max(1, processors // 2) if processors is not None and local else None
    return VerdictSettings(
        max_age=max_age,
        lead=max_age if lead is None else lead,
        capacity=_count(flow.get("capacity")),
        group_size=_count(flow.get("group_size")),
        groups_per_step=_count(flow.get("groups_per_step")),
        max_new_tokens=_count(engine.get("max_new_tokens")),
        reward_workers=_count(env.get("reward_workers")) if env.get("reward") else None,
        env_workers=_count(env.get("workers")),
        engines=_count(engine.get("count")),
        engine_threads=_count(launch.get("engine_threads")) or half,
        learner_threads=_count(launch.get("learner_threads")) or half,
        processors=processors,
        on_cpu=on_cpu,
        by_turns=_table(config, "sync").get("interrupt") == Interrupt.SLEEP.value,
        order=str(flow.get("order") or ""),
    )


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
