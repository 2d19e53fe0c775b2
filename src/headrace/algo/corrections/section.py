"""The base class of corrections, and functions that several corrections use. A correction computes a factor for each
token, which multiplies the token's loss. ρ = π_old/μ, where μ is the policy that sampled the token. N tokens, S
samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headrace.algo.base import Column, Factor, LossInputs
from headrace.base.config import Section
from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "geometric"]
"""The ratio of a token: its own, the product over its sequence, or the geometric mean over its sequence."""


class CorrectionSection(Section):
    """The base class of the settings of a correction. Its class attributes, which are those of
    :class:`headrace.algo.base.Correction`, and its columns describe the usual correction, which reads log μ and
    log π_old."""

    weighs: ClassVar[bool] = False
    corrects: ClassVar[bool] = True
    replaces_old: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """Return the columns that the correction reads in addition to those that every batch has."""
        return frozenset({"log_old", "log_mu"})

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the tokens selected from the whole batch. A correction with ``"selected"`` among
        its columns overrides this method. Raises ``NotImplementedError`` otherwise, where it is never called."""
        raise NotImplementedError(f"{type(self).__name__} selects no tokens")


def refuse_crossed(made: Any) -> Any:
    """Return the correction ``made``. Raises :class:`ConfigError` if no value is between its bounds ``low`` and
    ``high``."""
    if made.low >= made.high:
        raise ConfigError(
            f"correction {made.kind!r} has low={made.low} and high={made.high}: it keeps nothing",
            remedy="set low < high",
        )
    return made


def compute_log_rho(level: Level, inputs: LossInputs) -> Tensor:
    """Return log ρ for every token of ``inputs`` at the given level: its own, the sum over its sequence (clamped to
    ±20), or the mean over its sequence."""
    log_rho_N = inputs.log_rho_N()
    match level:
        case "token":
            return log_rho_N
        case "sequence":
            return inputs.sum_S(log_rho_N).clamp(-20.0, 20.0)[inputs.samples_N]
        case "geometric":
            return inputs.mean_S(log_rho_N)[inputs.samples_N]


def keep_sequences(inputs: LossInputs, keep_S: Tensor) -> Factor:
    """Return the factor 1 for every token of the samples of ``inputs`` for which ``keep_S`` is true, and 0 for all
    other tokens."""
    return Factor(tokens_N=keep_S.to(inputs.log_pi_N.dtype)[inputs.samples_N])
