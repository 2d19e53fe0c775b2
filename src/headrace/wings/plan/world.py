"""What is simulated: a flow, the costs of its parts, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.flow import FlowConfig
from headrace.wings.plan.costs import EngineCost, FailureCost, LearnerCost, SyncCost
from headrace.wings.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that decides how a simulated run goes, but for the seed."""

    flow: FlowConfig
    """The settings of a run: the policies, filters and limits are those that a run has."""
    steps: int
    """Optimizer steps."""
    endless: bool = False
    """Whether more steps would follow: groups start until the last moment, so that the end looks like the middle."""
    engine: EngineCost
    """Of one engine."""
    num_engines: int = 1
    max_sequences: int = 256
    """In the batch of one engine."""
    cache_tokens: float = float("inf")
    """Tokens whose keys and values one engine can keep."""
    max_new_tokens: float = float("inf")
    """Of one answer."""
    learner: LearnerCost
    sync: SyncCost = field(default_factory=SyncCost)
    failures: FailureCost = field(default_factory=FailureCost)
    workload: Workload = field(default_factory=Workload)
    episode_s: float = 0.0
    """Of the controller for every episode: it comes to them one after the other."""
