"""Samples (a prompt with one answer), and the construction of a training batch from samples. The functions validate the
arguments of ``forward_backward``, and their errors name the invalid sample.

Shape legend: P tokens of a prompt, T tokens of an answer, F = P + T tokens of both, N tokens of all samples in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import DataError, RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey, StopReason
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import FloatColumn, Tokens
from headrace.base.types.versions import oldest

_SAMPLE_AGAIN = "sample again with this policy, or load the policy that sampled them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and one answer, with exactly the tokens that were sampled.

    All tokens of the answer carry loss, and so do tokens of the prompt that a policy sampled. So the next prompt of a
    conversation is ``sample.full + Tokens.observed(ids)``, and the last sample trains all turns. Tokens of a prompt
    that must not be trained (again) are passed as plain ids, ``Tokens.observed(ids)``.

    >>> sample = Sample(prompt=Tokens.observed([5, 6]), tokens=Tokens(ids_T=[7], logprobs_T=[-0.5], versions_T=[3]))
    >>> sample.full.ids_T.tolist(), sample.mask_F.tolist()
    ([5, 6, 7], [False, False, True])
    """

    prompt: Tokens
    """The tokens before the answer; some of them may have been sampled, in earlier turns."""
    tokens: Tokens
    """The answer, including its stop token."""
    text: str = ""
    """The answer as text, without special tokens."""
    stop_reason: StopReason | None = None
    """Why the answer ended; ``None`` if it was not sampled."""
    group: int = 0
    """The number of the prompt. Samples with the same number are a group, which shares a baseline."""
    sampling: Sampling | None = None
    """The sampling parameters; ``None`` if the answer was not sampled."""
    request_id: int = -1
    """The number of the request in the engine, which a fork needs; −1 if the answer was not sampled."""
    engine: str = ""
    """The name of the engine that sampled the answer; empty if it was not sampled."""

    @classmethod
    def from_tokens(cls, full: Tokens, *, group: int = 0) -> Sample:
        """Return the sample of ``full``, the tokens of a recorded conversation. The last contiguous run of sampled
        tokens becomes the answer, all tokens before it the prompt; tokens after it are dropped. ``group`` is the number
        of the prompt. Raises :class:`~headrace.base.errors.DataError` if no token was sampled.

        >>> sampled = Tokens(ids_T=[7], logprobs_T=[-0.5], versions_T=[3])
        >>> recorded = Tokens.observed([5, 6]) + sampled + Tokens.observed([8])
        >>> sample = Sample.from_tokens(recorded)
        >>> sample.prompt.ids_T.tolist(), sample.tokens.ids_T.tolist()
        ([5, 6], [7])
        """
        (sampled_indices,) = np.nonzero(full.sampled_T)
        if not len(sampled_indices):
            raise DataError("no token of the conversation was sampled", remedy="leave it out")
        end = int(sampled_indices[-1]) + 1
        gaps = np.flatnonzero(~full.sampled_T[:end])
        start = int(gaps[-1]) + 1 if len(gaps) else 0
        return cls(prompt=full[:start], tokens=full[start:end], group=group)

    @property
    def full(self) -> Tokens:
        """The tokens of the prompt, followed by the tokens of the answer."""
        return self.prompt + self.tokens

    @property
    def mask_F(self) -> npt.NDArray[np.bool_]:
        """Whether each token of prompt and answer carries loss, ``[F]``: true for tokens of the prompt that a policy
        sampled, and for all tokens of the answer."""
        return np.concatenate([self.prompt.sampled_T, np.ones(len(self.tokens), bool)])


Samples = Sequence[Sample] | Sequence[Sequence[Sample]]
"""Samples as one list, or as one list for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequirements:
    """The properties of a policy's learner with which samples must agree to be trained."""

    step: int
    """Version of the learner's weights."""
    temperature: float
    """Temperature by which the learner divides logits."""
    vocab_size: int
    """Size of the vocabulary. All token ids must be smaller."""


def make_batch(samples: Samples, advantages: Any, required: SampleRequirements) -> Batch:
    """Return the training batch of ``samples``. ``advantages`` are nested like the samples: a number for each sample,
    or a number for each token of its answer; ``None`` means 0 for all samples. ``required`` are the properties that the
    samples must have.

    Raises :class:`~headrace.base.errors.DataError` for invalid samples and for advantages that do not match them, and
    :class:`~headrace.base.errors.RunError` for samples that this policy cannot have sampled.
    """
    flat = _flat_samples(samples)
    fulls = [sample.full for sample in flat]
    for index, (sample, full) in enumerate(zip(flat, fulls, strict=True)):
        _refuse_foreign(f"sample {index}", sample, full, required)
    credit = [0.0] * len(flat) if advantages is None else _flat_advantages(samples, advantages)
    columns = [_advantage_column(index, *pair) for index, pair in enumerate(zip(flat, credit, strict=True))]
    train_samples = [
        TrainSample(key=EpisodeKey(sample.group, index), spans=(full,), mask_T=sample.mask_F, advantage=0.0)
        for index, (sample, full) in enumerate(zip(flat, fulls, strict=True))
    ]
    return msgspec.structs.replace(Batch.collate(required.step, train_samples), advantages_N=np.concatenate(columns))


def _flat_samples(samples: Samples) -> list[Sample]:
    """Return ``samples``, which are one list or one list for each prompt, as one list. Raises
    :class:`~headrace.base.errors.DataError` for an empty list and for anything that is not a sample."""
    flat: list[Any] = []
    for item in samples:
        flat += item if isinstance(item, Sequence) else [item]
    if not flat:
        raise DataError("there are no samples", remedy="give at least one")
    for index, sample in enumerate(flat):
        if not isinstance(sample, Sample):
            raise DataError(
                f"sample {index} is a {type(sample).__name__}", remedy="give samples, or a list of samples per prompt"
            )
    return flat


def _flat_advantages(samples: Sequence[Any], advantages: Any) -> list[Any]:
    """Return ``advantages``, which must be nested like ``samples``, as one list in the order of the samples. Raises
    :class:`~headrace.base.errors.DataError` if their nesting or number differs."""
    rows = _as_list(advantages, "advantages")
    _refuse_length("samples" if isinstance(samples[0], Sample) else "groups", len(samples), len(rows))
    flat: list[Any] = []
    for index, (item, credit) in enumerate(zip(samples, rows, strict=True)):
        if isinstance(item, Sample):
            flat.append(credit)
            continue
        row = _as_list(credit, f"advantages[{index}]")
        _refuse_length(f"samples in group {index}", len(item), len(row))
        flat += row
    return flat


def _as_list(values: Any, name: str) -> list[Any]:
    """Return ``values`` as a list. Raises :class:`~headrace.base.errors.DataError` if it is a single value; ``name`` is
    the name of the argument for the message."""
    try:
        return list(values)
    except TypeError:
        raise DataError(
            f"{name} is {values!r}, which is not a list", remedy="give advantages nested as the samples are"
        ) from None


def _refuse_length(what: str, expected: int, found: int) -> None:
    """Raise :class:`~headrace.base.errors.DataError` if ``found``, the number of advantages, is not ``expected``, the
    number of ``what`` (``samples`` or ``groups``)."""
    if expected != found:
        raise DataError(
            f"there are {expected} {what} and {found} advantages for them",
            remedy="give advantages nested as the samples are, one for each",
        )


def _advantage_column(index: int, sample: Sample, advantage: Any) -> FloatColumn:
    """Return the advantage of every token of prompt and answer, ``[F]``. ``advantage`` is one number for the whole
    sample, or a number for each token of its answer. ``index`` is the index of ``sample`` for messages. Raises
    :class:`~headrace.base.errors.DataError` for advantages with another shape, and for advantages that are not
    finite."""
    try:
        values = np.asarray(advantage, np.float32)
    except (TypeError, ValueError):
        raise DataError(f"the advantage of sample {index} is {advantage!r}", remedy="give a number") from None
    if values.ndim and values.shape != (len(sample.tokens),):
        raise DataError(
            f"sample {index} has {len(sample.tokens)} tokens in its answer and advantages of shape {values.shape}",
            remedy="give one number, or one for each token of the answer",
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"an advantage of sample {index} is not finite",
            remedy="give finite advantages; leave a sample that does not count out, or give it 0",
        )
    if not values.ndim:
        return np.full(len(sample.prompt) + len(sample.tokens), values, np.float32)
    if sample.prompt.sampled_T.any():
        raise DataError(
            f"sample {index} has advantages per token, and its prompt holds sampled tokens, which have none",
            remedy="give one number, or a prompt of Tokens.observed(ids)",
        )
    return np.concatenate([np.zeros(len(sample.prompt), np.float32), values])


def _refuse_foreign(name: str, sample: Sample, full: Tokens, required: SampleRequirements) -> None:
    """Raise an error for a sample that the policy cannot have sampled: with ids outside of its vocabulary
    (``DataError``), with a newer version than the learner's, or with another temperature (``RunError``). ``name``
    identifies the sample in the message, and ``full`` are the tokens of its prompt and answer. ``required`` are the
    properties that the policy requires of its samples."""
    outside = np.flatnonzero((full.ids_T < 0) | (full.ids_T >= required.vocab_size))
    if len(outside):
        raise DataError(
            f"{name} holds token {full.ids_T[outside[0]]}, outside this model's vocabulary of "
            f"{required.vocab_size}: it is another model's",
            remedy=_SAMPLE_AGAIN,
        )
    newest = int(oldest(full.versions_T).max(initial=-1))
    if newest > required.step:
        raise RunError(
            f"{name} was sampled by version {newest}, and the learner has version {required.step}: it is another "
            "policy's, or one from before this one was loaded",
            remedy=_SAMPLE_AGAIN,
        )
    if sample.sampling is not None and sample.sampling.temperature != required.temperature:
        raise RunError(
            f"{name} was sampled at temperature {sample.sampling.temperature:g}, and the learner divides "
            f"logits by engine.temperature={required.temperature:g}",
            remedy="train on samples of the policy's own temperature; load the policy with "
            "engine={'temperature': ...} for another",
        )
