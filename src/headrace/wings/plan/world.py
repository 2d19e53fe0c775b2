"""The inputs of a simulated run: the settings of the flow, the cost models of its parts, and the workload."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.flow import FlowConfig
from headrace.wings.plan.costs import EngineCost, FailureCost, LearnerCost, SyncCost
from headrace.wings.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that determines a simulated run, except the seed: the settings of the flow, the costs of all parts,
    and the workload."""

    flow: FlowConfig
    """Settings of the flow, with the policies, filters and limits of a real run."""
    steps: int
    """Number of training steps that are simulated."""
    endless: bool = False
    """Whether the run is simulated as the beginning of a longer run: groups are started until its end, so that the
    queues do not run empty in the last steps."""
    engine: EngineCost
    """Cost model of one engine."""
    num_engines: int = 1
    """Number of engines."""
    max_sequences: int = 256
    """Largest number of sequences in the batch of one engine."""
    cache_tokens: float = float("inf")
    """Capacity of one engine's key-value cache in tokens."""
    max_new_tokens: float = float("inf")
    """Largest number of tokens of one answer."""
    learner: LearnerCost
    """Cost model of the whole learner."""
    sync: SyncCost = field(default_factory=SyncCost)
    """Costs of the weight sync."""
    failures: FailureCost = field(default_factory=FailureCost)
    """Rates and costs of failures."""
    workload: Workload = field(default_factory=Workload)
    """Lengths of prompts and answers, and times of environments and rewards."""
    episode_s: float = 0.0
    """Processor time of the controller per episode, in seconds; the controller handles one episode at a time."""
