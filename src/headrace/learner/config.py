"""The settings of the learner (``[learner]`` in a run file)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.learner.alignment import AlignmentConfig
from headrace.learner.auxiliary.config import (
    CriticConfig,
    Frozen,
    OldConfig,
    OwnEngine,
    PolicyConfig,
    ServedTeacher,
    TeacherConfig,
)
from headrace.learner.damping import DampingConfig
from headrace.learner.parallel.config import MemoryConfig, OptimizerConfig, ParallelConfig
from headrace.models.config import AttentionName
from headrace.models.devices import AUTO, DeviceName

COLUMNS = frozenset({"log_old", "log_mu", "versions", "entropy", "selected", "pairs"})
"""The optional columns of an objective that every learner can compute, without an auxiliary model."""

SETTINGS = {
    "log_ref": "learner.reference",
    "baseline": "learner.reference",
    "log_old of kept weights": "learner.old",
    "log_old of each token's version": "learner.old (kind 'sampled')",
    "top_k": "learner.teachers",
    "log_nu": "learner.teachers",
}
"""The optional columns of an objective that an auxiliary model computes, with the setting of this model."""

Rate = Annotated[float, Field(ge=0, lt=1)]


class MixtureConfig(Section):
    """The settings for a balanced use of the experts of a mixture: auxiliary losses, which are added to the loss of
    every step, or a bias of the routers."""

    balance_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss; ``router_aux_loss_coef`` in transformers, 0.001 to 0.02. Costs one pass
    without gradient more per step."""
    z_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the router's z-loss, mean log² Σ exp(logits), which keeps router logits small; 0.001 is usual."""
    bias_rate: float = Field(default=0.0, ge=0)
    """For routers that choose by a correction bias (DeepSeek-V3): how far each update moves the bias of an expert, up
    if it was selected less than the mean of its layer, down if more; 0.001 is usual. 0 leaves the biases as they
    are."""

    @property
    def has_losses(self) -> bool:
        """Return whether an auxiliary loss of the experts is added to the loss of every step."""
        return self.balance_coef > 0 or self.z_coef > 0

    @property
    def has_effect(self) -> bool:
        """Return whether any of these settings has an effect: a loss is added, or a bias is updated."""
        return self.has_losses or self.bias_rate > 0


class LearnerConfig(Section):
    """The settings of the optimizer, its schedule, the micro-batches, and the ranks that compute them."""

    device: DeviceName = AUTO
    """Device of the learner: ``cpu``, ``cuda`` or ``cuda:N``; several ranks use one GPU each, from the first on.
    ``auto``: GPUs if torch finds any, otherwise the CPU."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate. 0 changes no weight, which is useful as a control."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; ``linear`` and ``cosine`` decay to ``min_lr_frac`` of the peak."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of a decaying schedule, as a fraction of ``lr``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises linearly from 0 to ``lr``."""
    damping: DampingConfig | None = None
    """The damping of the learning rate of single steps: ``{ kind = "ess" }`` by the effective sample size of the batch,
    which old tokens make smaller; ``{ kind = "age" }`` by the mean age of its tokens. Unset: no damping."""
    alignment: AlignmentConfig | None = None
    """The control of the cosine between the gradients of consecutive updates, which training on old tokens makes too
    large. Needs the memory of one more gradient. Unset: gradients are not compared."""
    betas: tuple[Rate, Rate] = (0.9, 0.99)
    """The decay rates β of AdamW, each below 1."""
    eps: float = Field(default=1e-8, gt=0)
    """The ε of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The decoupled weight decay of AdamW, applied to matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to it."""
    keep_sampling_mask: bool = True
    """Whether log π is normalised over the kept-set of each token when sampling was truncated (``engine.top_p`` and
    similar), as log μ was. Without it the ratio π/μ is wrong for every truncated token."""
    keep_routing: bool = True
    """Whether tokens of a mixture of experts use the experts that computed them in the engine."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Greatest number of token positions in one forward and backward pass. The result does not depend on it."""
    share_prefixes: bool | Literal["auto"] = "auto"
    """Whether first tokens that several samples of a batch have in common are computed once, as a tree of any depth: in
    answers to one prompt, turns and forks of an episode, or by accident. The gradient is the same up to rounding.
    ``auto``: in batches in which sharing saves a tenth of the computation."""
    attention: AttentionName = "auto"
    """How attention is computed. ``flex``: by torch's flex attention, which stores no scores and needs no padding on a
    GPU; on a CPU it writes all scores out. ``padded``: in rows of samples of similar length; sinks, soft caps and, on a
    GPU, windows and shared tokens write the scores out. ``auto``: flex attention on a GPU if a trial before the run
    compiles and is correct there, otherwise padded rows."""
    parallel: ParallelConfig = ParallelConfig()
    """Number of processes over which the learner is spread; one by default."""
    memory: MemoryConfig = MemoryConfig()
    """Which tensors are kept, on which device, and in which number format."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The kind of optimizer."""
    mixture: MixtureConfig = MixtureConfig()
    """Losses for the balance of a mixture of experts; none by default."""
    reference: PolicyConfig | None = None
    """The policy to which KL penalties (``kl_coef`` of a loss) are computed. The metric ``kl_ref`` measures the
    distance to it, with a penalty or without. Unset: the initial weights of the run if the loss has a penalty,
    otherwise none."""
    old: OldConfig | None = None
    """The policy that is π_old if ``algo.old = "kept"``, or the copies for ``algo.old = "sampled"``. Unset: there is
    none."""
    teachers: tuple[TeacherConfig, ...] = ()
    """The teachers of distillation, for ``algo.loss = "distill"`` or ``algo.advantage = "reverse_kl"``, one table
    ``[[learner.teachers]]`` each: either one that the learner computes, or any number with separate engines."""
    teacher_column: str = "teacher"
    """Column of a row that names its teacher, if there are several."""
    top_k: int = Field(default=64, ge=1)
    """Number of the teacher's likeliest entries that are compared at each token; the remaining probability counts as
    one more entry. A smaller vocabulary is compared as a whole."""
    critic: CriticConfig = CriticConfig()
    """The critic of ``algo.advantage = "gae"``; it has no effect with another advantage."""

    @property
    def policies(self) -> dict[str, PolicyConfig | OldConfig | TeacherConfig]:
        """The settings of the policies that the learner computes beside the trained policy, by the names of the
        settings."""
        named = {"reference": self.reference, "old": self.old, "teachers[0]": self.own_teacher}
        return {name: config for name, config in named.items() if config is not None}

    @property
    def own_teacher(self) -> TeacherConfig | None:
        """The settings of the teacher that the learner computes itself; ``None`` if there is no teacher, or each
        teacher has an engine."""
        return next((each for each in self.teachers if get_teacher_engine(each) is None), None)

    @property
    def served_teachers(self) -> dict[str, tuple[ServedTeacher, OwnEngine]]:
        """The teachers with separate engines, by name: the settings of each teacher, and of its engine."""
        found = [(each, get_teacher_engine(each)) for each in self.teachers]
        return {engine.name: (each, engine) for each, engine in found if isinstance(each, ServedTeacher) and engine}

    def serving(self, columns: Iterable[str]) -> LearnerConfig:
        """Return these settings, completed for an objective that reads ``columns``: if the objective reads ``log_ref``
        and no reference is set, the initial weights of the run become the reference."""
        if self.reference is not None or "log_ref" not in columns:
            return self
        return self.model_copy(update={"reference": Frozen()})

    @model_validator(mode="after")
    def _refuse_top_k_without_teacher(self) -> LearnerConfig:
        """Refuse a value of ``top_k``, which counts entries of a teacher, if there is no teacher."""
        if not self.teachers and self.top_k != type(self).model_fields["top_k"].default:
            raise ConfigError(
                f"learner.top_k={self.top_k} has no effect without learner.teachers",
                remedy="add a table [[learner.teachers]], or leave learner.top_k out",
            )
        return self

    @model_validator(mode="after")
    def _refuse_unnamed_teachers(self) -> LearnerConfig:
        """Refuse several teachers without distinct names, by which rows choose one, and a column of names for a single
        teacher."""
        several = len(self.teachers) > 1
        if several and self.own_teacher is not None:
            raise ConfigError(
                f"learner.teachers has {len(self.teachers)}, and the one of kind {self.own_teacher.kind!r} has no "
                "engine: beside the learner there is one teacher alone",
                remedy="give each of them an engine: engine = { name = '...' }, of kind 'model' or 'frozen'",
            )
        if several and (len(self.served_teachers) < len(self.teachers) or "" in self.served_teachers):
            raise ConfigError(
                f"learner.teachers has {len(self.teachers)}, and rows could not tell them apart by the names "
                f"{sorted(self.served_teachers)}",
                remedy="give each of them a name of its own: engine = { name = '...' }",
            )
        if not several and self.teacher_column != type(self).model_fields["teacher_column"].default:
            raise ConfigError(
                f"learner.teacher_column={self.teacher_column!r} has no effect: there are not several teachers",
                remedy="leave learner.teacher_column out",
            )
        return self

    @model_validator(mode="after")
    def _refuse_floor_without_decay(self) -> LearnerConfig:
        """Refuse ``min_lr_frac``, the end of a decay of the learning rate, for a schedule that does not decay."""
        if self.min_lr_frac and self.schedule == "constant":
            raise ConfigError(
                f"learner.min_lr_frac={self.min_lr_frac} has no effect with learner.schedule='constant'",
                remedy="set learner.schedule = 'linear' or 'cosine', or leave learner.min_lr_frac out",
            )
        return self

    @model_validator(mode="after")
    def _refuse_sharded_low_bit(self) -> LearnerConfig:
        """Refuse moments of 8 bits on several ranks: the ranks would divide their blocks, and the result would depend
        on the number of ranks."""
        if self.optimizer.kind == "adamw8bit" and self.parallel.world > 1:
            raise ConfigError(
                f"learner.optimizer.kind='adamw8bit' with learner.parallel of {self.parallel.world} ranks: moments are "
                "rounded in blocks of whole weights, and a rank holds parts",
                remedy="set learner.optimizer.kind = 'adamw', whose moments the ranks share, or leave "
                "learner.parallel out",
            )
        return self

    @model_validator(mode="after")
    def _refuse_whole_gradients(self) -> LearnerConfig:
        """Refuse whole gradients for a single process, where there is nothing to sum, and with tensor parallelism,
        which sums some gradients after every micro-batch: the sums of earlier micro-batches would be summed again."""
        parallel = self.parallel
        if not self.memory.whole_gradients or (parallel.num_averaged > 1 and parallel.tensor == 1):
            return self
        summed = f"learner.parallel.tensor={parallel.tensor} sums gradients after every micro-batch"
        raise ConfigError(
            "learner.memory.whole_gradients=true: "
            + (summed if parallel.tensor > 1 else "one process has no gradients to sum"),
            remedy="leave learner.memory.whole_gradients out, or set learner.parallel.data above 1 and tensor to 1",
        )

    @model_validator(mode="after")
    def _refuse_prefixes_with_context(self) -> LearnerConfig:
        """Refuse shared prefixes together with context parallelism."""
        if self.share_prefixes is True and self.parallel.context > 1:
            raise ConfigError(
                f"learner.share_prefixes=true with learner.parallel.context={self.parallel.context}: tokens that "
                "several samples share cannot be parted over ranks",
                remedy="set learner.share_prefixes = false, or learner.parallel.context = 1",
            )
        return self


def get_teacher_engine(teacher: TeacherConfig) -> OwnEngine | None:
    """Return the engine settings of a teacher; ``None`` if the learner computes it."""
    return teacher.engine if isinstance(teacher, ServedTeacher) else None
