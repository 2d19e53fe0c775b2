"""From settings, accelerators and a choice how to divide them to the world that is simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.base.config import validate
from headrace.base.types.weights import Interrupt
from headrace.flow import FlowConfig
from headrace.wings.plan.cluster import Cluster
from headrace.wings.plan.costs import (
    ConstantRate,
    EngineCost,
    FailureCost,
    LearnerCost,
    Roofline,
    SyncCost,
    TrainingFlops,
    TrainingRate,
)
from headrace.wings.plan.sizing import GB, Fit, SizingRequest, learner_bytes
from headrace.wings.plan.workload import Workload
from headrace.wings.plan.world import World

ROUTES = {"shm": (10.0, 0.005), "collective": (0.0, 0.05), "files": (2.0, 0.5), "http": (1.0, 0.05)}
"""Of each transport: 10⁹ bytes a second (0: those of the network), and seconds that every version takes besides."""
CODECS = {"full": 1.0, "cast_bf16": 0.5, "cast_fp8": 0.25, "delta": 0.03, "adapter": 1.0}
"""Of the bytes of float32 weights, those that travel; of weights of 16 bits twice as large a share, at most all."""
COPY_GB_S = 20.0
"""From an accelerator to the packed buffer."""
SWAP_S = 0.005
"""Of every commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run it."""

    generation: int
    """Accelerators that generate; where they are shared, all do both in turn."""
    flow: FlowConfig
    interrupt: Interrupt
    transport: str
    shared: bool = False
    """Whether all accelerators generate and then train, in turn."""

    def but(self, **changes: Any) -> Choice:
        """The same with other settings of the flow."""
        tree = {**self.flow.model_dump(exclude_unset=True, mode="json"), **changes}
        return replace(self, flow=validate(FlowConfig, tree))

    def __str__(self) -> str:
        flow = self.flow
        return (
            f"{'shared' if self.shared else self.generation}, groups_per_step {flow.groups_per_step}, "
            f"max_age {flow.max_age}, lead {flow.effective_lead}, {self.interrupt}, {self.transport}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a calibration says of engine and learner."""

    engine: EngineCost
    """Of one engine, as the run had it."""
    train_tok_s: float
    """Prompts included, of the whole learner as the run had it."""
    train_fixed_s: float
    """Of every step, besides."""
    sync: SyncCost
    workload: Workload
    engines: int = 1
    """That the run had."""
    episode_s: float = 0.0
    """Processor time of the controller for an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What does not change from one choice to the next."""

    asked: SizingRequest
    cluster: Cluster
    workload: Workload
    fit: Fit
    measured: Measured | None = None
    """``None`` without a calibration."""

    @property
    def view(self) -> str:
        """By what the costs are known, for people."""
        if self.measured is not None:
            return "measured: calibrated by a run"
        if self.cluster.constant:
            return "constant rates: as given, whatever the batch"
        return (
            f"roofline: {self.cluster.decode_share:.0%} of what memory and arithmetic allow an engine, "
            f"{self.cluster.train_share:.0%} of the learner's peak"
        )

    def trainers(self, choice: Choice) -> int:
        """Accelerators of the learner."""
        return self.cluster.count if choice.shared else self.cluster.count - choice.generation

    def world(self, choice: Choice, steps: int) -> World:
        """What a choice means."""
        trainers = self.trainers(choice)
        makers = self.cluster.count if choice.shared else choice.generation
        return World(
            flow=choice.flow,
            steps=steps,
            engine=self.engine_cost(),
            num_engines=max(1, makers // self.fit.ways),
            max_sequences=self.asked.engine.max_sequences,
            cache_tokens=self.fit.shared_tokens if choice.shared else self.fit.cache_tokens,
            max_new_tokens=float(self.asked.engine.max_new_tokens),
            learner=self._learner_cost(trainers),
            sync=self._sync_cost(choice, trainers),
            failures=self._failure_cost(trainers),
            workload=self.workload,
            episode_s=0.0 if self.measured is None else self.measured.episode_s,
        )

    def engine_cost(self) -> EngineCost:
        """Of one engine."""
        cluster, shape, ways = self.cluster, self.asked.shape, self.fit.ways
        if self.measured is not None:
            return self.measured.engine
        if cluster.constant:
            assert cluster.generation_tok_s is not None
            return ConstantRate(tok_s=cluster.generation_tok_s * ways)
        device, size = cluster.device, self.asked.number_bytes
        return Roofline(
            weight_bytes=float((shape.params - shape.expert_params) * size),
            expert_bytes=float(shape.expert_params * size),
            expert_share=shape.expert_share,
            kv_bytes=float(shape.kv_numbers * size),
            flop_per_token=2.0 * shape.active,
            bandwidth=device.bandwidth_gb_s * GB * ways * cluster.decode_share,
            flops=device.peak_tflops * 1e12 * ways * cluster.decode_share,
            overhead_s=device.overhead_ms / 1e3,
        )

    def _learner_cost(self, trainers: int) -> LearnerCost:
        cluster, asked = self.cluster, self.asked
        if self.measured is not None:
            had = max(1, cluster.count - self.measured.engines * self.fit.ways)
            return TrainingRate(
                tok_s=self.measured.train_tok_s * trainers / had, fixed_s=self.measured.train_fixed_s
            )  # fmt: skip
        if cluster.constant:
            assert cluster.training_tok_s is not None
            return TrainingRate(tok_s=cluster.training_tok_s * trainers)
        device = cluster.device
        whole = 6.0 if asked.model.lora is None else 4.0
        again = 2.0 if asked.learner.memory.recompute else 0.0
        return TrainingFlops(
            flop_per_token=(whole + again + 2.0 * asked.passes) * asked.shape.active,
            flop_per_square=asked.shape.flop_per_square,
            flops=device.peak_tflops * 1e12 * trainers * cluster.train_share,
            fixed_s=2.0 * learner_bytes(asked) / (device.bandwidth_gb_s * GB * trainers),
        )

    def _sync_cost(self, choice: Choice, trainers: int) -> SyncCost:
        if self.measured is not None:
            return replace(self.measured.sync, interrupt=choice.interrupt)
        rate, fixed_s = ROUTES[choice.transport]
        device, sent = self.cluster.device, self.sent_bytes()
        return SyncCost(
            snapshot_s=sent / (COPY_GB_S * GB * trainers),
            travel_s=sent / ((rate or self.cluster.network_gb_s) * GB) + fixed_s,
            gap_s=SWAP_S + 2.0 * sent / (device.bandwidth_gb_s * GB * self.fit.ways),
            interrupt=choice.interrupt,
            rolling=self.asked.sync.rolling,
        )

    def sent_bytes(self) -> float:
        """Of one version, on its way."""
        asked = self.asked
        if asked.model.lora is not None:
            return asked.adapter_params * 4
        return asked.weight_bytes * min(1.0, CODECS[asked.sync.codec] * 4 / asked.number_bytes)

    def _failure_cost(self, trainers: int) -> FailureCost:
        cluster = self.cluster
        if cluster.mtbf_h is None:
            return FailureCost()
        mtbf_s = cluster.mtbf_h * 3600.0
        return FailureCost(
            engine_mtbf_s=mtbf_s / self.fit.ways,
            engine_restart_s=cluster.restart_s,
            learner_mtbf_s=mtbf_s / trainers,
            learner_restart_s=cluster.restart_s,
        )
