"""Settings of the auxiliary models: the policies of references, teachers and kept π_old, and the critic."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.filling import template_fields
from headrace.base.errors import ConfigError

MOST_VERSIONS = 256
"""The most versions of which copies can be kept."""


class KeptSection(Section):
    """The settings of a kept copy of the trained weights, with which the model computes a pass without gradient."""

    device: Literal["model", "cpu"] = "model"
    """Where the copy is kept: on the device of the model (``model``), or in the memory of the host (``cpu``), from
    which it is copied for every batch."""

    @property
    def num_copies(self) -> int:
        """Return the most copies of the trained weights that exist at a time, for an estimate of memory."""
        return 1

    def num_bytes(self, trained: int, itemsize: int) -> int:
        """Return the number of bytes of all copies together, for ``trained`` parameters of ``itemsize`` bytes each."""
        return self.num_copies * trained * itemsize

    def get_version(self, version: int) -> int | None:
        """Return the newest version in the copy while the policy has ``version``; ``None`` if the copy is not a version
        of this run."""
        return version


class Frozen(KeptSection):
    """The settings of kept weights that never change."""

    kind: Literal["frozen"] = "frozen"
    """Selects these weights."""
    path: str | None = Field(default=None, min_length=1)
    """Directory of a model of the same architecture, or of an adapter if an adapter is trained. Unset: the initial
    weights of the run."""

    def get_version(self, version: int) -> int | None:
        """Return 0 for every ``version``; ``None`` if the weights come from a directory and are not a version of this
        run."""
        return 0 if self.path is None else None

    def __str__(self) -> str:
        return "the weights that the run begins with" if self.path is None else f"the weights in {self.path}"


class Ema(KeptSection):
    """The settings of an exponential moving average (EMA) of the weights in float32: after every update w̄ ← decay · w̄
    + (1 − decay) · w, starting from the initial weights of the run."""

    kind: Literal["ema"] = "ema"
    """Selects these weights."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """The factor by which an update multiplies the average, which covers about the last 1 / (1 − decay) updates."""

    def num_bytes(self, trained: int, itemsize: int) -> int:
        """Return the number of bytes of the copy, which is always in float32. ``trained`` is the number of trained
        parameters; ``itemsize`` is not used."""
        return trained * 4

    def __str__(self) -> str:
        return f"the average of the weights over about {1 / (1 - self.decay):.0f} updates"


class Refreshed(KeptSection):
    """The settings of a copy that is refreshed at every version that is a multiple of ``every``."""

    kind: Literal["refreshed"] = "refreshed"
    """Selects these weights."""
    every: int = Field(ge=1)
    """Number of updates between two copies."""

    def get_version(self, version: int) -> int | None:
        """Return the largest multiple of ``every`` that is not above ``version``: the version of the copy.

        >>> Refreshed(every=4).get_version(11)
        8
        """
        return version // self.every * self.every

    def __str__(self) -> str:
        return f"the weights of the last version that {self.every} divides"


class Lagged(KeptSection):
    """The settings of a copy of the weights ``versions`` updates ago, or of version 0 in the first updates."""

    kind: Literal["lagged"] = "lagged"
    """Selects these weights."""
    versions: int = Field(default=1, ge=1)
    """Number of versions by which the copy is behind; as many copies are kept."""

    @property
    def num_copies(self) -> int:
        """Return the number of copies, one for each version."""
        return self.versions

    def get_version(self, version: int) -> int | None:
        """Return the version of ``versions`` updates ago, or 0.

        >>> Lagged(versions=2).get_version(1), Lagged(versions=2).get_version(5)
        (0, 3)
        """
        return max(0, version - self.versions)

    def __str__(self) -> str:
        return f"the weights of {self.versions} version{'s' * (self.versions > 1)} before"


class SampledVersions(KeptSection):
    """The settings of copies of the last ``versions`` versions. Each copy computes π_old of the tokens that its version
    sampled."""

    kind: Literal["sampled"] = "sampled"
    """Selects these weights."""
    versions: int = Field(ge=1, le=MOST_VERSIONS)
    """Number of versions of which a copy is kept: the largest age of a token. A run takes it from ``flow.max_age``."""

    @property
    def num_copies(self) -> int:
        """Return the number of copies, one for each version."""
        return self.versions

    def __str__(self) -> str:
        return "the weights of the version that sampled each token"


class OtherModel(Section):
    """The settings of a separate frozen model with the same vocabulary, of any architecture and size, which is loaded
    beside the trained model."""

    kind: Literal["model"] = "model"
    """Selects another model."""
    path: str = Field(min_length=1)
    """Directory of the model."""

    def get_version(self, version: int) -> int | None:
        """Return ``None``, because the weights are not a version of this run."""
        return None

    def __str__(self) -> str:
        return f"another model, {self.path}"


class OwnEngine(Section):
    """The settings of a separate engine with the frozen weights of a teacher. It scores every answer while rewards are
    computed, and its log-probabilities are sent with the episode. The learner neither loads this model nor waits for
    it."""

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
    def _refuse_invalid_prompt(self) -> Self:
        """Refuse a prompt whose placeholders in braces are not plain names, with
        :class:`~headrace.base.errors.ConfigError`."""
        template_fields(self.prompt, "learner.teachers: engine.prompt", "{prompt}")
        return self


class FrozenTeacher(Frozen):
    """The settings of a teacher with frozen weights of the trained model, computed by the learner or by a separate
    engine."""

    engine: OwnEngine | None = None
    """Settings of a separate engine that computes the teacher (``{}``: the default settings). Unset: the learner
    computes it, with a copy of the weights."""

    def __str__(self) -> str:
        return super().__str__() + (_IN_ENGINE if self.engine else "")


class ModelTeacher(OtherModel):
    """The settings of a teacher that is another model, computed by the learner or by a separate engine."""

    engine: OwnEngine | None = None
    """Settings of a separate engine that computes the teacher (``{}``: the default settings). Unset: the learner
    computes it, in its own memory."""

    def __str__(self) -> str:
        return super().__str__() + (_IN_ENGINE if self.engine else "")


_IN_ENGINE = ", in an engine of its own"

KeptConfig = Annotated[Frozen | Ema | Refreshed | Lagged, Field(discriminator="kind")]
"""The settings of any kind of kept weights of the trained model."""

OldConfig = Annotated[Frozen | Ema | Refreshed | Lagged | SampledVersions, Field(discriminator="kind")]
"""The settings of any weights of the trained model that can be π_old."""

PolicyConfig = Annotated[Frozen | Ema | Refreshed | Lagged | OtherModel, Field(discriminator="kind")]
"""The settings of any policy that can compute log-probabilities of a batch."""

ServedTeacher = FrozenTeacher | ModelTeacher
"""The settings of a teacher that can have a separate engine, because its weights never change."""

TeacherConfig = Annotated[FrozenTeacher | Ema | Refreshed | Lagged | ModelTeacher, Field(discriminator="kind")]
"""The settings of any policy that can be a teacher."""


class CriticConfig(Section):
    """The settings of the critic of ``algo.advantage = "gae"``, a second model, of which all weights are trained. For
    all other settings (betas, decay, gradient clipping, memory, micro-batches) the critic uses the policy's."""

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
    def _refuse_clip_of_one_update(self) -> CriticConfig:
        """Refuse a clip range of the values if each batch has a single update, since the clip applies to later updates
        only."""
        if self.clip is not None and self.updates == 1:
            raise ConfigError(
                f"learner.critic.clip={self.clip} bounds how far several updates of one batch may go, and updates=1",
                remedy="set learner.critic.updates > 1, or leave clip out",
            )
        return self
