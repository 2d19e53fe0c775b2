"""The context of a plan, and the choices that its search tries. :class:`PlanContext` builds the cost models and the
simulated :class:`World` for a :class:`Choice` of split and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.base.config import validate
from headrace.base.types.weights import Interrupt
from headrace.flow import FlowConfig
from headrace.sync.config import TRANSPORTS
from headrace.wings.plan.card import CardRates
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
from headrace.wings.plan.placement import assign_machines
from headrace.wings.plan.publication import EngineUptake, PublicationEstimate, PublicationRequest, estimate_publication
from headrace.wings.plan.sizing import GB, Fit, SizingRequest, compute_rank_step, update_bytes
from headrace.wings.plan.workload import Workload
from headrace.wings.plan.world import World

CODECS = {"full": 1.0, "cast_bf16": 0.5, "cast_fp8": 0.25, "delta": 0.03, "adapter": 1.0}
"""The bytes that each codec sends, as a fraction of the bytes of float32 weights. For 16-bit weights the fraction is
twice as large, but at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One combination of a split of the accelerators and settings of the run, which the search tries."""

    generation: int
    """Number of generating accelerators; the number of all accelerators if generation alternates with training."""
    flow: FlowConfig
    """Settings of the flow: batch size, staleness bound, lead and order."""
    interrupt: Interrupt
    """What becomes of running sequences at a commit."""
    transport: str
    """Name of the transport that sends new weights to the engines."""
    shared: bool = False
    """Whether all accelerators alternate between generation and training."""

    def with_flow(self, **changes: Any) -> Choice:
        """Return a copy of the choice with ``changes`` to the settings of the flow, validated."""
        tree = {**self.flow.model_dump(exclude_unset=True, mode="json"), **changes}
        return replace(self, flow=validate(FlowConfig, tree))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The costs that a calibration has fitted to recorded runs."""

    engine: EngineCost
    """Cost model of one engine with the accelerators that it had in the run."""
    train_tok_s: float
    """Tokens per second of the run's whole learner, prompts included and the fixed time of a step excluded."""
    train_fixed_s: float
    """Fixed seconds of every step."""
    sync: SyncCost
    workload: Workload
    """Lengths of prompts and answers and times of rewards in the run."""
    engines: int = 1
    """Number of engines of the run."""
    episode_s: float = 0.0
    """Processor time of the controller per episode, in seconds; 0 if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The inputs of a plan that are the same for all choices."""

    request: SizingRequest
    cluster: Cluster
    workload: Workload
    fit: Fit
    """The division of memory: how many accelerators an engine and the learner need."""
    measured: Measured | None = None
    """Costs calibrated by a recorded run; ``None`` without such a calibration."""
    rates: CardRates | None = None
    """Rates that ``headrace bench gpu`` has measured; ``cluster`` already contains them. ``None`` without its file."""

    @property
    def view(self) -> str:
        """Return a phrase that names the source of the costs: a calibration, constant rates, or a roofline."""
        if self.measured is not None:
            return "measured: calibrated by a run"
        if self.cluster.constant:
            return "constant rates: as given, whatever the batch"
        if self.rates is not None:
            return (
                f"roofline of {self.rates.card} as headrace bench gpu measured it: {self.cluster.decode_share:.0%} of "
                f"it by an engine, {self.cluster.train_share:.0%} of its products by the learner"
            )
        return (
            f"roofline: {self.cluster.decode_share:.0%} of what memory and arithmetic allow an engine, "
            f"{self.cluster.train_share:.0%} of the learner's peak"
        )

    def trainers(self, choice: Choice) -> int:
        """Return the number of accelerators that train in a choice: as many of those that do not generate as the
        learner's context, tensor, expert and replicate ranks divide."""
        free = self.cluster.count if choice.shared else self.cluster.count - choice.generation
        step = compute_rank_step(self.request)
        return max(free // step, 1) * step

    def world(self, choice: Choice, steps: int) -> World:
        """Return the inputs of a simulated run of ``steps`` steps for a choice."""
        trainers = self.trainers(choice)
        generators = self.cluster.count if choice.shared else choice.generation
        return World(
            flow=choice.flow,
            steps=steps,
            engine=self.engine_cost(),
            num_engines=max(1, generators // self.fit.ways),
            max_sequences=self.request.engine.max_sequences,
            cache_tokens=self.fit.shared_tokens if choice.shared else self.fit.cache_tokens,
            max_new_tokens=float(self.request.engine.max_new_tokens),
            learner=self.learner_cost(trainers),
            sync=self._sync_cost(choice, trainers),
            failures=self._failure_cost(trainers),
            workload=self.workload,
            episode_s=0.0 if self.measured is None else self.measured.episode_s,
        )

    def engine_cost(self) -> EngineCost:
        """Return the cost model of one engine: the measured one, the constant rate of the cluster file, or the
        roofline."""
        cluster, shape, ways = self.cluster, self.request.shape, self.fit.ways
        if self.measured is not None:
            return self.measured.engine
        if cluster.constant:
            assert cluster.generation_tok_s is not None
            return ConstantRate(tok_s=cluster.generation_tok_s * ways)
        device, size = cluster.device, self.request.bytes_per_number
        return Roofline(
            weight_bytes=float((shape.params - shape.expert_params) * size),
            expert_bytes=float(shape.expert_params * size),
            expert_share=shape.expert_share,
            kv_bytes=float(shape.kv_numbers * size),
            flop_per_token=2.0 * shape.active,
            bandwidth=device.bandwidth_gb_s * GB * ways * cluster.decode_share,
            flops=device.peak_tflops * 1e12 * ways * cluster.decode_share,
            overhead_s=self._overhead_s(),
        )

    def _overhead_s(self) -> float:
        """Return the fixed seconds of an engine step, without reading memory and computing: the measured value, or the
        catalogue's."""
        measured = None if self.rates is None else self.rates.overhead_s
        return self.cluster.device.overhead_ms / 1e3 if measured is None else measured

    def learner_cost(self, trainers: int) -> LearnerCost:
        """Return the cost model of training on ``trainers`` accelerators: the measured model, the constant rate of the
        cluster file, or a model from the number of operations and the memory bandwidth."""
        cluster, request = self.cluster, self.request
        if self.measured is not None:
            # the recorded run is assumed to have had as many accelerators; its rate scales with the number of trainers
            measured_trainers = max(1, cluster.count - self.measured.engines * self.fit.ways)
            return TrainingRate(
                tok_s=self.measured.train_tok_s * trainers / measured_trainers, fixed_s=self.measured.train_fixed_s
            )  # fmt: skip
        if cluster.constant:
            assert cluster.training_tok_s is not None
            return TrainingRate(tok_s=cluster.training_tok_s * trainers)
        device = cluster.device
        # 2 operations forward and 4 backward; with adapters the gradients of the base's weights (2) are not computed
        flop_per_param = 6.0 if request.model.lora is None else 4.0
        recompute_flop = 2.0 if request.learner.memory.recompute else 0.0
        return TrainingFlops(
            flop_per_token=(flop_per_param + recompute_flop + 2.0 * request.passes) * request.shape.active,
            flop_per_square=request.shape.flop_per_square,
            flops=device.peak_tflops * 1e12 * trainers * cluster.train_share,
            fixed_s=2.0 * update_bytes(request) / (device.bandwidth_gb_s * GB * trainers),
        )

    def _sync_cost(self, choice: Choice, trainers: int) -> SyncCost:
        """Return the cost of the weight sync for a choice, with ``trainers`` ranks of the learner."""
        engines = max(1, (self.cluster.count if choice.shared else choice.generation) // self.fit.ways)
        placed = assign_machines(engines, self.fit.ways, trainers, self.cluster, shared=choice.shared)
        return self.sync_cost(choice.transport, choice.interrupt, placed, self.fit.ways)

    def sync_cost(
        self, transport: str, interrupt: Interrupt, placed: tuple[Sequence[int], Sequence[int]], width: int
    ) -> SyncCost:
        """Return the cost of the weight sync by ``transport`` to engines of ``width`` accelerators: the measured cost,
        or a cost computed from the bytes of a version and the rates of copies, network and memory. ``placed`` is the
        machine number of each engine, and the machine number of each rank of the learner. ``interrupt`` decides what
        becomes of running sequences at a commit."""
        if self.measured is not None:
            return replace(self.measured.sync, interrupt=interrupt)
        estimate = self.publication(transport, placed, width)
        return SyncCost(
            snapshot_s=estimate.copy.seconds,
            travel_s=estimate.travel_s,
            gap_s=estimate.commit.seconds,
            interrupt=interrupt,
            rolling=self.request.sync.rolling,
        )

    def publication(
        self, transport: str, placed: tuple[Sequence[int], Sequence[int]], width: int
    ) -> PublicationEstimate:
        """Return the predicted publication by ``transport`` to engines of ``width`` accelerators. ``placed`` is the
        machine number of each engine, and the machine number of each rank of the learner."""
        transport_type, (engines, ranks) = TRANSPORTS.load(transport), placed
        # without an outbox for each rank, rank 0 sends the whole version
        sends_whole = transport_type.open_rank_outbox is None
        gb_s = transport_type.cost.gb_s
        if transport_type.one_machine and self.rates is not None:
            gb_s = self.rates.sync_gb_s or gb_s
        embedded = self.request.engine.can.embedded
        on_host = EngineUptake.POINTERS if self.cluster.of_cores else EngineUptake.UPLOAD
        return estimate_publication(
            PublicationRequest(
                image_bytes=self.request.version_bytes,
                sent_bytes=min(self.sent_bytes(), self.request.version_bytes),
                ranks=ranks[:1] if sends_whole else ranks,
                engines=engines,
                width=width,
                uptake=on_host if embedded else EngineUptake.FILES,
                fixed_s=transport_type.cost.fixed_s,
                rate_gb_s=(gb_s or self.cluster.network_gb_s) if sends_whole else None,
                on_accelerator=not self.cluster.of_cores,
            ),
            self.cluster.machine,
        )

    def sent_bytes(self) -> float:
        """Return the number of bytes that the codec sends for one version."""
        request = self.request
        if request.model.lora is not None:
            return request.version_bytes
        return request.weight_bytes * min(1.0, CODECS[request.sync.codec] * 4 / request.bytes_per_number)

    def update(self, trainers: int) -> tuple[float, float]:
        """Return the seconds of one update of the weights on ``trainers`` accelerators, and the number of tokens in its
        batch, prompts included, for episodes of the workload's mean length."""
        flow = self.request.flow
        episodes = flow.groups_per_step * flow.group_size
        mean, square = self.workload.episode_tokens(float(self.request.engine.max_new_tokens))
        return self.learner_cost(trainers).step_s(episodes * mean, episodes * square), episodes * mean

    def _failure_cost(self, trainers: int) -> FailureCost:
        """Return the mean times between failures of an engine and of a learner of ``trainers`` accelerators, and the
        times of their restarts; without ``cluster.mtbf_h``, nothing fails."""
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
