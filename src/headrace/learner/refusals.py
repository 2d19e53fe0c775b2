"""What a learner cannot do, in words."""

from __future__ import annotations

from headrace.base.errors import ConfigError, RunError


def nothing_to_learn(step: int, loss_tokens: int) -> RunError:
    """The error for a batch none of whose tokens can carry loss."""
    return RunError(
        f"no token of the batch of step {step} can carry loss: {loss_tokens} are in its mask, "
        "none of those has a finite engine logprob",
        remedy="check the engine's logits for NaN (weights, dtype, temperature)",
    )


def refuse_settings(temperature: float) -> None:
    """Raises :class:`~headrace.base.errors.ConfigError` for a temperature that nothing can be learned at."""
    if temperature <= 0:
        raise ConfigError(
            f"sampling temperature {temperature} leaves no distribution to learn",
            remedy="sample training episodes at a temperature > 0 (1 is usual)",
        )
