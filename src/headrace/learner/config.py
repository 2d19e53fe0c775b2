"""Settings of the learner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.learner.companions.config import Frozen, KeptConfig, OwnEngine, PolicyConfig, ServedTeacher, TeacherConfig
from headrace.learner.companions.critic_config import CriticConfig
from headrace.learner.parallel.config import MemoryConfig, OptimizerConfig, ParallelConfig
from headrace.models.devices import AUTO, DeviceName

COLUMNS = frozenset({"log_old", "log_mu", "versions", "entropy", "selected"})
"""What an objective may ask of any learner, beyond what is always there."""

SETTINGS = {
    "log_ref": "learner.reference",
    "log_old of kept weights": "learner.old",
    "top_k": "learner.teachers",
    "log_nu": "learner.teachers",
}
"""What else it may ask, and the setting that says of whom."""

Rate = Annotated[float, Field(ge=0, lt=1)]


class LearnerConfig(Section):
    """The optimizer, its schedule, how a batch is cut into micro-batches, and the ranks that compute them."""

    device: DeviceName = AUTO
    """Where it computes: ``cpu``, ``cuda`` or ``cuda:N``; several ranks take one GPU each, from the first. ``auto``:
    GPUs where torch sees some, else the processor."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate; 0 trains nothing and is allowed, as a control."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine end at ``min_lr_frac`` of the peak."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Where a decaying schedule ends, as a fraction of ``lr``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise from 0 to ``lr``."""
    betas: tuple[Rate, Rate] = (0.9, 0.99)
    """AdamW's decay rates, each below 1."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's ε."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    keep_sampling_mask: bool = True
    """With truncated sampling (``engine.top_p`` and its like), log π is taken over the tokens that could be drawn, as
    log μ was. Without it the ratio π/μ is wrong for every truncated token."""
    keep_routing: bool = True
    """In a mixture of experts, tokens go to the experts that computed them in the engine."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Token positions of one forward and backward pass; the result does not depend on it."""
    share_prefixes: bool | Literal["auto"] = "auto"
    """Whether samples of one group compute the tokens they begin with once, all but attention. Same gradient, up to
    rounding. ``auto``: in batches of which that saves a tenth of the tokens."""
    parallel: ParallelConfig = ParallelConfig()
    """Over how many processes it is spread; one by default."""
    memory: MemoryConfig = MemoryConfig()
    """What is kept, where, in which number format."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW, or another."""
    reference: PolicyConfig | None = None
    """The policy that KL penalties (``kl_coef`` of a loss) are taken to; the metric ``kl_ref`` says how far away it
    is, with a penalty or without. Unset: the weights that the run begins with, if the loss has a penalty; else none."""
    old: KeptConfig | None = None
    """Whose π_old is, where ``algo.old = "kept"``."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Who is distilled, by ``algo.loss = "distill"`` or by ``algo.advantage = "reverse_kl"``, a table
    ``[[learner.teachers]]`` for each: one beside the learner, or any number with engines of their own."""
    teacher_column: str = "teacher"
    """The column of a row that names its teacher, where there are several."""
    top_k: int = Field(default=64, ge=1)
    """How many of the teacher's likeliest entries are compared at each token; what remains is one more entry.
    All entries of a vocabulary that has fewer."""
    critic: CriticConfig = CriticConfig()
    """The critic that ``algo.advantage = "gae"`` needs; without that there is none."""

    @property
    def policies(self) -> dict[str, PolicyConfig | TeacherConfig]:
        """Those that the learner asks for log-probabilities, by the names of their settings."""
        named = {"reference": self.reference, "old": self.old, "teachers[0]": self.own_teacher}
        return {name: config for name, config in named.items() if config is not None}

    @property
    def own_teacher(self) -> TeacherConfig | None:
        """The one that the learner computes."""
        return next((each for each in self.teachers if engine_of(each) is None), None)

    @property
    def served_teachers(self) -> dict[str, tuple[ServedTeacher, OwnEngine]]:
        """Those with engines of their own, by name."""
        found = [(each, engine_of(each)) for each in self.teachers]
        return {engine.name: (each, engine) for each, engine in found if isinstance(each, ServedTeacher) and engine}

    def serving(self, columns: Iterable[str]) -> LearnerConfig:
        """The same, with the reference that a loss with a penalty has by default, if ``columns`` ask for one."""
        if self.reference is not None or "log_ref" not in columns:
            return self
        return self.model_copy(update={"reference": Frozen()})

    @model_validator(mode="after")
    def _top_k_has_a_teacher(self) -> LearnerConfig:
        if not self.teachers and self.top_k != type(self).model_fields["top_k"].default:
            raise ConfigError(
                f"learner.top_k={self.top_k} has no effect without learner.teachers",
                remedy="add a table [[learner.teachers]], or leave learner.top_k out",
            )
        return self

    @model_validator(mode="after")
    def _rows_can_name_their_teachers(self) -> LearnerConfig:
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
    def _floor_has_a_decay(self) -> LearnerConfig:
        if self.min_lr_frac and self.schedule == "constant":
            raise ConfigError(
                f"learner.min_lr_frac={self.min_lr_frac} has no effect with learner.schedule='constant'",
                remedy="set learner.schedule = 'linear' or 'cosine', or leave learner.min_lr_frac out",
            )
        return self

    @model_validator(mode="after")
    def _context_ranks_share_no_prefixes(self) -> LearnerConfig:
        if self.share_prefixes is True and self.parallel.context > 1:
            raise ConfigError(
                f"learner.share_prefixes=true with learner.parallel.context={self.parallel.context}: tokens that "
                "several samples share cannot be parted over ranks",
                remedy="set learner.share_prefixes = false, or learner.parallel.context = 1",
            )
        return self


def engine_of(teacher: TeacherConfig) -> OwnEngine | None:
    """The engine that a teacher has; ``None``: the learner computes it."""
    return teacher.engine if isinstance(teacher, ServedTeacher) else None
