"""Errors for a batch or a setting that a learner cannot train with."""

from __future__ import annotations

from headrace.base.errors import ConfigError, RunError


def nothing_to_learn(step: int, loss_tokens: int) -> RunError:
    """Return the error for a batch in which no token can carry loss."""
    return RunError(
        f"no token of the batch of step {step} can carry loss: {loss_tokens} are in its mask, "
        "none of those has a finite engine logprob",
        remedy="check the engine's logits for NaN (weights, dtype, temperature)",
    )


def refuse_settings(temperature: float) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a sampling temperature at which nothing can be learned."""
    if temperature <= 0:
        raise ConfigError(
            f"sampling temperature {temperature} leaves no distribution to learn",
            remedy="sample training episodes at a temperature > 0 (1 is usual)",
        )
