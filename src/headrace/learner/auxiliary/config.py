"""Settings of the auxiliary models: the policy that a reference, a teacher or a kept π_old is, and the critic."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.filling import template_fields
from headrace.base.errors import ConfigError

MOST_VERSIONS = 256
"""Greatest number of versions of which copies are kept."""


class KeptSection(Section):
    """The settings of a copy of the trained weights, with which the model computes one pass without gradient."""

    device: Literal["model", "cpu"] = "model"
    """Where the copy is kept: on the device of the model (``model``), or in the memory of the host (``cpu``), from
    which it is copied for every batch."""

    @property
    def num_copies(self) -> int:
        """Return the greatest number of copies of the trained weights that exist at once, for an estimate of memory."""
        return 1

    def num_bytes(self, trained: int, itemsize: int) -> int:
        """Return the number of bytes of all copies together, for ``trained`` parameters of ``itemsize`` bytes each."""
        return self.num_copies * trained * itemsize

    def version_at(self, version: int) -> int | None:
        """Return the newest version that the copy contains while the policy is at ``version``; ``None`` if it contains
        no version of this run."""
        return version


class Frozen(KeptSection):
    """The settings of weights that never change."""

    kind: Literal["frozen"] = "frozen"
    """Selects these weights."""
    path: str | None = Field(default=None, min_length=1)
    """Directory of a model of the same architecture, or of an adapter if an adapter is trained. Unset: the initial
    weights of the run."""

    def version_at(self, version: int) -> int | None:
        """Return 0, whatever ``version`` the policy is at; ``None`` if the weights come from a directory, and so from
        no version of this run."""
        return 0 if self.path is None else None

    def __str__(self) -> str:
        return "the weights that the run begins with" if self.path is None else f"the weights in {self.path}"


class Ema(KeptSection):
    """The settings of an exponential moving average of the weights in float32: after every update w̄ ← decay · w̄ + (1
    − decay) · w, starting from the initial weights of the run."""

    kind: Literal["ema"] = "ema"
    """Selects these weights."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """The factor by which an update multiplies the average, which covers about the last 1 / (1 − decay) updates."""

    def num_bytes(self, trained: int, itemsize: int) -> int:
        """Return the number of bytes of the copy, which is in float32 whatever ``itemsize``, the bytes of one trained
        parameter, is. ``trained`` is the number of trained parameters."""
        return trained * 4

    def __str__(self) -> str:
        return f"the average of the weights over about {1 / (1 - self.decay):.0f} updates"


class Refreshed(KeptSection):
    """The settings of weights that are copied at every version that is a multiple of ``every``."""

    kind: Literal["refreshed"] = "refreshed"
    """Selects these weights."""
    every: int = Field(ge=1)
    """Number of updates between two copies."""

    def version_at(self, version: int) -> int | None:
        """Return the last multiple of ``every`` up to ``version``, at which the weights were copied.

        >>> Refreshed(every=4).version_at(11)
        8
        """
        return version // self.every * self.every

    def __str__(self) -> str:
        return f"the weights of the last version that {self.every} divides"


class Lagged(KeptSection):
    """The settings of the weights of ``versions`` updates ago, or of the first version while there are not so many."""

    kind: Literal["lagged"] = "lagged"
    """Selects these weights."""
    versions: int = Field(default=1, ge=1)
    """Number of versions by which the copy is behind; as many copies are kept."""

    @property
    def num_copies(self) -> int:
        """Return the number of copies, one for each version."""
        return self.versions

    def version_at(self, version: int) -> int | None:
        """Return the version of ``versions`` updates ago, or 0.

        >>> Lagged(versions=2).version_at(1), Lagged(versions=2).version_at(5)
        (0, 3)
        """
        return max(0, version - self.versions)

    def __str__(self) -> str:
        return f"the weights of {self.versions} version{'s' * (self.versions > 1)} before"


class SampledVersions(KeptSection):
    """The settings of the weights of the last ``versions`` updates, each for the tokens that its version sampled."""

    kind: Literal["sampled"] = "sampled"
    """Selects these weights."""
    versions: int = Field(ge=1, le=MOST_VERSIONS)
    """Number of versions of which a copy is kept: the greatest age of a token. A run takes it from ``flow.max_age``."""

    @property
    def num_copies(self) -> int:
        """Return the number of copies, one for each version."""
        return self.versions

    def __str__(self) -> str:
        return "the weights of the version that sampled each token"


class OtherModel(Section):
    """The settings of another model with the same vocabulary, of any architecture and size, which is loaded beside the
    trained model and is frozen."""

    kind: Literal["model"] = "model"
    """Selects another model."""
    path: str = Field(min_length=1)
    """Directory of the model."""

    def version_at(self, version: int) -> int | None:
        """Return ``None``, because the weights belong to no version of this run."""
        return None

    def __str__(self) -> str:
        return f"another model, {self.path}"


class OwnEngine(Section):
    """The settings of a separate engine with frozen weights. It computes every answer while rewards are computed, and
    its log-probabilities travel with the episode. The learner does not load the model, and does not wait for it."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$", max_length=32)
    """Name of the teacher, needed if there are several: it computes the rows whose column ``learner.teacher_column``
    contains this name."""
    prompt: str = ""
    """Prompt that the teacher reads instead of the row's prompt, to give it more information than the policy has.
    ``{prompt}`` and the columns of the row are filled in, for example ``"{prompt}\\nHint: {hint}"``; literal braces are
    doubled. In a chat it replaces the last message. Empty: the teacher reads the same prompt as the policy."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a call that has started counts as failed."""
    retries: int = Field(default=2, ge=0)
    """How often a failed call is repeated, after 0.5 s, 1 s, 2 s, ...; then its episode fails."""

    @model_validator(mode="after")
    def _prompt_can_be_filled_in(self) -> Self:
        """Refuse a prompt whose placeholders in braces are not plain names, with
        :class:`~headrace.base.errors.ConfigError`."""
        template_fields(self.prompt, "learner.teachers: engine.prompt", "{prompt}")
        return self


class FrozenTeacher(Frozen):
    """The settings of a teacher with frozen weights, beside the learner or in an engine."""

    engine: OwnEngine | None = None
    """Settings of a separate engine that computes the teacher (``{}``: the default settings). Unset: the learner
    computes it, with a copy of the weights."""

    def __str__(self) -> str:
        return super().__str__() + (_IN_ENGINE if self.engine else "")


class ModelTeacher(OtherModel):
    """The settings of a teacher that is another model, beside the learner or in an engine."""

    engine: OwnEngine | None = None
    """Settings of a separate engine that computes the teacher (``{}``: the default settings). Unset: the learner
    computes it, in its own memory."""

    def __str__(self) -> str:
        return super().__str__() + (_IN_ENGINE if self.engine else "")


_IN_ENGINE = ", in an engine of its own"

KeptConfig = Annotated[Frozen | Ema | Refreshed | Lagged, Field(discriminator="kind")]
"""Any kind of kept weights of the trained model."""

OldConfig = Annotated[Frozen | Ema | Refreshed | Lagged | SampledVersions, Field(discriminator="kind")]
"""Any weights of the trained model that can be π_old."""

PolicyConfig = Annotated[Frozen | Ema | Refreshed | Lagged | OtherModel, Field(discriminator="kind")]
"""Any policy that can compute log-probabilities of a batch."""

ServedTeacher = FrozenTeacher | ModelTeacher
"""A teacher that can have a separate engine, because its weights never change."""

TeacherConfig = Annotated[FrozenTeacher | Ema | Refreshed | Lagged | ModelTeacher, Field(discriminator="kind")]
"""Any policy that can be a teacher."""


class CriticConfig(Section):
    """The settings of the critic of ``algo.advantage = "gae"``, a second model of which all weights are trained.
    Settings that are not listed here (betas, decay, gradient clipping, memory, micro-batches) are those of the
    policy."""

    path: str = ""
    """Directory of the causal language model whose weights initialise the critic, or of a snapshot of a run with a
    critic of that shape. Empty: the initial model of the run."""
    lr: float = Field(default=1e-5, ge=0)
    """Constant learning rate of the critic's AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps of the run in which only the critic is trained: the policy does not change, and its
    schedule begins after them."""
    updates: int = Field(default=1, ge=1)
    """Number of updates of the critic for each batch; the advantages come from the values before the first one."""
    clip: float | None = Field(default=None, gt=0)
    """The clip range ε: how far the later ``updates`` may move a value away from its value before the first. Unset: no
    clipping."""

    @model_validator(mode="after")
    def _clip_has_something_to_bound(self) -> CriticConfig:
        """Refuse a clip range of the values if each batch has one update: then there is no later update to limit."""
        if self.clip is not None and self.updates == 1:
            raise ConfigError(
                f"learner.critic.clip={self.clip} bounds how far several updates of one batch may go, and updates=1",
                remedy="set learner.critic.updates > 1, or leave clip out",
            )
        return self
