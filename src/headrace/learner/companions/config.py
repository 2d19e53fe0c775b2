"""Settings of kept weights and of other models: which policy a reference, a teacher or a kept π_old is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config import Section


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


KeptConfig = Annotated[Frozen | Ema | Refreshed | Lagged, Field(discriminator="kind")]
"""Weights of this model."""

PolicyConfig = Annotated[Frozen | Ema | Refreshed | Lagged | OtherModel, Field(discriminator="kind")]
"""Any policy that can be asked for log-probabilities."""
