"""Settings of kept weights and of other models: which policy a reference, a teacher or a kept π_old is."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.filling import fields_of


class KeptSection(Section):
    """A copy of the weights that are trained, lent to the model for a pass without gradient."""

    device: Literal["model", "cpu"] = "model"
    """Where the copy is kept: beside the model's weights, or in the host's memory, from which it is fetched for every
    batch."""

    @property
    def num_copies(self) -> int:
        """How many copies of the trained weights it takes at most."""
        return 1

    def num_bytes(self, trained: int, itemsize: int) -> int:
        """What it takes for ``trained`` numbers of ``itemsize`` bytes."""
        return self.num_copies * trained * itemsize

    def version_at(self, version: int) -> int | None:
        """The newest version that is in the copy, while the policy is at ``version``; ``None``: none of this run."""
        return version


class Frozen(KeptSection):
    """Weights that never change."""

    kind: Literal["frozen"] = "frozen"
    """Selects these weights."""
    path: str | None = Field(default=None, min_length=1)
    """Directory of a model of the same architecture; of an adapter, where one is trained. Unset: the weights that
    the run begins with."""

    def version_at(self, version: int) -> int | None:
        """The first, or none."""
        return 0 if self.path is None else None

    def __str__(self) -> str:
        return "the weights that the run begins with" if self.path is None else f"the weights in {self.path}"


class Ema(KeptSection):
    """The exponential moving average of the weights, in float32: after every update
    w̄ ← decay · w̄ + (1 − decay) · w, from the weights that the run begins with."""

    kind: Literal["ema"] = "ema"
    """Selects these weights."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """How much of the average an update leaves; it reaches back over about 1 / (1 − decay) updates."""

    def num_bytes(self, trained: int, itemsize: int) -> int:
        """In float32."""
        return trained * 4

    def __str__(self) -> str:
        return f"the average of the weights over about {1 / (1 - self.decay):.0f} updates"


class Refreshed(KeptSection):
    """The weights of the last version that ``every`` divides."""

    kind: Literal["refreshed"] = "refreshed"
    """Selects these weights."""
    every: int = Field(ge=1)
    """How many updates there are between two copies."""

    def version_at(self, version: int) -> int | None:
        """The last that ``every`` divides.

        >>> Refreshed(every=4).version_at(11)
        8
        """
        return version // self.every * self.every

    def __str__(self) -> str:
        return f"the weights of the last version that {self.every} divides"


class Lagged(KeptSection):
    """The weights of ``versions`` updates ago; of the first version, while there are none so old."""

    kind: Literal["lagged"] = "lagged"
    """Selects these weights."""
    versions: int = Field(default=1, ge=1)
    """How far behind; as many copies are kept."""

    @property
    def num_copies(self) -> int:
        """One per version."""
        return self.versions

    def version_at(self, version: int) -> int | None:
        """So many before.

        >>> Lagged(versions=2).version_at(1), Lagged(versions=2).version_at(5)
        (0, 3)
        """
        return max(0, version - self.versions)

    def __str__(self) -> str:
        return f"the weights of {self.versions} version{'s' * (self.versions > 1)} before"


class OtherModel(Section):
    """Another model with the same vocabulary, of any architecture and size, loaded beside this one and frozen."""

    kind: Literal["model"] = "model"
    """Selects another model."""
    path: str = Field(min_length=1)
    """Its directory."""

    def version_at(self, version: int) -> int | None:
        """None of this run."""
        return None

    def __str__(self) -> str:
        return f"another model, {self.path}"


class OwnEngine(Section):
    """An engine of its own, with weights that stay: it is asked about every answer while rewards are computed, and what
    it says travels with the episode. The learner has no such model, and waits for none."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$", max_length=32)
    """Where there are several teachers: it is asked about the rows whose column ``learner.teacher_column`` says so."""
    prompt: str = ""
    """What it reads in the place of the row's prompt, when it is to know more than the policy: ``{prompt}`` and the
    columns of the row are filled in, such as ``"{prompt}\\nHint: {hint}"``; braces of its own are doubled. Of a
    chat the last message is replaced. Unset: it reads what the policy read."""
    timeout_s: float = Field(default=60.0, gt=0)
    """It has not answered this long after its turn came: the call has failed."""
    retries: int = Field(default=2, ge=0)
    """How often a call that failed is made again, after 0.5 s, 1 s, 2 s, ...; then its episode has failed."""

    @model_validator(mode="after")
    def _prompt_can_be_filled_in(self) -> Self:
        fields_of(self.prompt, "learner.teachers: engine.prompt", "{prompt}")
        return self


class FrozenTeacher(Frozen):
    """Weights that never change, beside the learner or in an engine."""

    engine: OwnEngine | None = None
    """Where it computes: in an engine of its own (``{}``: with the usual settings); unset: beside the learner, which
    keeps a copy."""

    def __str__(self) -> str:
        return super().__str__() + (_IN_ENGINE if self.engine else "")


class ModelTeacher(OtherModel):
    """Another model, beside the learner or in an engine."""

    engine: OwnEngine | None = None
    """Where it computes: in an engine of its own (``{}``: with the usual settings); unset: beside the learner, in its
    memory."""

    def __str__(self) -> str:
        return super().__str__() + (_IN_ENGINE if self.engine else "")


_IN_ENGINE = ", in an engine of its own"

KeptConfig = Annotated[Frozen | Ema | Refreshed | Lagged, Field(discriminator="kind")]
"""Weights of this model."""

PolicyConfig = Annotated[Frozen | Ema | Refreshed | Lagged | OtherModel, Field(discriminator="kind")]
"""Any policy that can be asked for log-probabilities."""

ServedTeacher = FrozenTeacher | ModelTeacher
"""A teacher that can have an engine of its own: its weights stay."""

TeacherConfig = Annotated[FrozenTeacher | Ema | Refreshed | Lagged | ModelTeacher, Field(discriminator="kind")]
"""A policy that is learned from."""
