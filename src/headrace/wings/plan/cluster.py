"""The file that says what there is: accelerators, and what is known of the work."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveFloat, model_validator

from headrace.base.config import Section, load_toml, validate
from headrace.base.errors import ConfigError
from headrace.wings.plan.catalogue import Accelerator, accelerator
from headrace.wings.plan.workload import Workload


class Cluster(Section):
    """The table ``[cluster]``: accelerators that are alike, and how far software gets with them."""

    accelerator: str = Field(min_length=1)
    """A name of the catalogue; of another one the three numbers below are needed."""
    count: int = Field(ge=1)
    """How many there are."""
    per_node: int = Field(default=8, ge=1)
    """In one machine: an engine does not reach beyond it."""
    network_gb_s: PositiveFloat = 50.0
    """10⁹ bytes a second between learner and engines: the way of new weights."""
    peak_tflops: PositiveFloat | None = None
    """10¹² operations a second, dense, in the number format of the model; unset: as in the catalogue."""
    bandwidth_gb_s: PositiveFloat | None = None
    """10⁹ bytes a second from its memory; unset: as in the catalogue."""
    memory_gb: PositiveFloat | None = None
    """10⁹ bytes; unset: as in the catalogue."""
    decode_share: float = Field(default=0.6, gt=0, le=1)
    """Of the roofline, what an engine reaches: 1 is physics."""
    train_share: float = Field(default=0.4, gt=0, le=1)
    """Of the peak, what the learner reaches."""
    generation_tok_s: PositiveFloat | None = None
    """Tokens a second of one accelerator that generates, whatever the batch: with ``training_tok_s`` the plan is made
    by constant rates in place of the roofline."""
    training_tok_s: PositiveFloat | None = None
    """Tokens a second of one accelerator that trains."""
    mtbf_h: PositiveFloat | None = None
    """Hours between two failures of one accelerator; unset: none fails."""
    restart_s: PositiveFloat = 300.0
    """Until what has failed works again."""

    @model_validator(mode="after")
    def _both_rates(self) -> Self:
        if (self.generation_tok_s is None) != (self.training_tok_s is None):
            given = "training_tok_s" if self.generation_tok_s is None else "generation_tok_s"
            other = "generation_tok_s" if self.generation_tok_s is None else "training_tok_s"
            raise ConfigError(
                f"cluster.{given}={getattr(self, given)!r} has no effect without cluster.{other}: constant rates are "
                "of both sides",
                remedy=f"set cluster.{other} too, or leave cluster.{given} out",
            )
        return self

    @property
    def device(self) -> Accelerator:
        """What one accelerator can do."""
        given = {
            key: value
            for key in ("peak_tflops", "bandwidth_gb_s", "memory_gb")
            if (value := getattr(self, key)) is not None
        }
        if len(given) == 3:
            return Accelerator(name=self.accelerator, **given)
        known = accelerator(self.accelerator)
        return Accelerator(**{**{key: getattr(known, key) for key in Accelerator.__struct_fields__}, **given})

    @property
    def constant(self) -> bool:
        """Whether the plan is made by constant rates."""
        return self.generation_tok_s is not None and self.training_tok_s is not None

    def __str__(self) -> str:
        return f"{self.count} × {self.accelerator}"


class ClusterFile(Section):
    """A whole cluster file."""

    cluster: Cluster
    """What there is."""
    workload: Workload | None = None
    """Unset: prompts of 256 tokens, and answers whose lengths are lognormal with a mean of a quarter of
    ``engine.max_new_tokens``; with a calibration, what the run has seen."""


def load_cluster(path: Path) -> ClusterFile:
    """The file at ``path``, checked."""
    return validate(ClusterFile, load_toml(path, "cluster file"))
