"""The data of one forward_backward request, and the checks before it is computed. A datum is one sequence of tokens
with the inputs of the loss, by name: ``target_tokens``, ``weights``, ``logprobs``, ``advantages``,
``sequence_ratio_mask``.

Shape legend: N positions of a datum, K target tokens of a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import DataError

Array = npt.NDArray[Any]
TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES, RATIO_MASK = (
    "target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One sequence of tokens to train on, with the inputs of its loss."""

    ids_N: Array
    """The token ids that the model reads."""
    inputs: dict[str, Array]
    """The inputs of the loss by name, each ``[N]`` or ``[N, K]``."""
    input_spans: Sequence[int] = ()
    """The numbers of positions of ``ids_N`` that have the same source, in order, as the client says; empty if the
    client gave none."""
    target_spans: Sequence[int] = ()
    """The numbers of positions of the loss inputs that have the same source, in order, as the client says; empty if the
    client gave none."""
    foreign: str = ""
    """The kind of content other than tokens in the datum, such as ``an image``; empty if there are only tokens."""

    @property
    def targets(self) -> Array:
        """The token ids whose log-probability enters the loss, ``[N]`` or ``[N, K]``: the model predicts each at its
        position."""
        return self.inputs[TARGETS]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRequest:
    """One decoded training request: a forward_backward request, or a forward pass alone."""

    model_id: str
    """The model to train."""
    seq_id: int
    """The number of the request among the requests of the model, from 1."""
    data: list[Datum]
    loss_fn: str
    """The name of the loss, such as ``ppo``."""
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    """The options of the loss by name."""
    forward_only: bool = False
    """Whether no gradient is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLimits:
    """The limits of the base model for every datum."""

    vocab_size: int
    """The number of token ids; every id is below it."""
    max_context: int
    """The largest number of tokens of one datum."""


def check_data(data: Sequence[Datum], needed: Sequence[str], optional: Sequence[str], limits: DataLimits) -> None:
    """Raise :class:`~headrace.base.errors.DataError`, which names the datum, if a datum cannot be trained. It must have
    all the loss inputs ``needed`` and no others except the ``optional`` ones. Its values must have the right shapes, be
    finite, and be within the vocabulary and the context. ``limits`` are the limits of the base model."""
    if not data:
        raise DataError("there are no data", remedy="give at least one datum")
    for place, datum in enumerate(data):
        problem = _find_problem(datum, needed, optional, limits)
        if problem:
            raise DataError(f"data[{place}]: {problem[0]}", remedy=problem[1])


def _find_problem(
    datum: Datum, needed: Sequence[str], optional: Sequence[str], limits: DataLimits
) -> tuple[str, str] | None:
    """Return the reason why a datum cannot be trained, and the remedy; ``None`` if it can be trained. ``needed`` and
    ``optional`` are names of loss inputs, and ``limits`` are the limits of the base model."""
    count = len(datum.ids_N)
    if datum.foreign:
        return f"it holds {datum.foreign}", "give tokens: this server trains language models of text"
    if not 1 <= count <= limits.max_context:
        return f"{count} tokens", f"give 1 to {limits.max_context}, which the model's context holds"
    missing = [name for name in needed if name not in datum.inputs]
    if missing:
        return f"loss_fn_inputs lacks {', '.join(missing)}", f"this loss reads {', '.join(needed)}"
    unknown = sorted(set(datum.inputs) - {*needed, *optional})
    if unknown:
        known = ", ".join([*needed, *optional])
        return f"this loss does not read loss_fn_inputs {', '.join(unknown)}", f"leave it out: it reads {known}"
    for name, values in [("model_input", datum.ids_N), (TARGETS, datum.targets)]:
        outside = values[(values < 0) | (values >= limits.vocab_size)]
        if outside.size:
            vocab = f"the vocabulary of {limits.vocab_size}"
            return f"{name} holds token {int(outside.flat[0])}, outside {vocab}", "encode with the model's tokenizer"
    shape = datum.targets.shape
    if not np.issubdtype(datum.targets.dtype, np.integer) or shape[:1] != (count,) or len(shape) > 2 or 0 in shape:
        found = f"{TARGETS} of {datum.targets.dtype} has shape {list(shape)} for {count} tokens"
        return found, f"give int64 of shape [{count}] or [{count}, K]"
    if len(shape) == 2 and TARGETS in needed and ADVANTAGES in needed:
        return f"{TARGETS} has shape {list(shape)}", "only cross_entropy has several targets at a position"
    return _find_wrong_columns(datum, shape) or _find_wrong_spans(datum, count)


def _find_wrong_columns(datum: Datum, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """Return the problem and the remedy for the first loss input of ``datum`` that does not have the ``shape`` of its
    targets or is not finite; ``None`` if all inputs are valid."""
    for name, values in datum.inputs.items():
        if name == TARGETS:
            continue
        if values.shape != shape:
            return (
                f"{name} has shape {list(values.shape)}, and {TARGETS} {list(shape)}",
                "give one value for each target",
            )
        if not np.isfinite(values).all():
            return f"{name} is not finite", "give finite numbers; leave out, or give weight 0 to, what does not count"
    return None


def _find_wrong_spans(datum: Datum, count: int) -> tuple[str, str] | None:
    """Return the problem and the remedy if provenance spans of ``datum`` do not add up to its ``count`` positions;
    ``None`` if they do or are absent."""
    for name, spans in (("model_input_spans", datum.input_spans), ("loss_fn_input_spans", datum.target_spans)):
        total = sum(spans)
        if spans and total != count:
            return f"{name} cover {total} of {count} positions", "let the spans tile the positions exactly"
    return None
