"""Samples (a prompt with one answer), and the batch that a learner makes of them. The functions here check what the
user of a policy gives to ``forward_backward``, and raise errors that name the sample.

Shape legend: P tokens of a prompt, T tokens of an answer, F = P + T tokens of both, N tokens of all samples one after
the other.
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

_FRESH = "sample again with this policy, or load the policy that sampled them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and one answer to it, token for token as they were sampled.

    All tokens of the answer carry loss, and so do tokens of the prompt that a policy sampled: the next prompt of a
    conversation is ``sample.full + Tokens.observed(ids)``, and its sample trains every turn. Tokens that must not be
    trained (again) are given as ids.

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
    """Number of its prompt: samples of one group share a baseline."""
    sampling: Sampling | None = None
    """Settings with which it was sampled; ``None`` if it was not."""
    request_id: int = -1
    """Number of its request in the engine, for a fork; −1 if it was not sampled."""
    engine: str = ""
    """Name of the engine that sampled it; empty if it was not sampled."""

    @classmethod
    def of(cls, full: Tokens, *, group: int = 0) -> Sample:
        """Return the sample of ``full``, a whole recorded conversation, up to its last sampled token: the last run of
        sampled tokens is the answer, and everything before it the prompt. Raises
        :class:`~headrace.base.errors.DataError` if no token was sampled.

        >>> held = Tokens.observed([5, 6]) + Tokens(ids_T=[7], logprobs_T=[-0.5], versions_T=[3]) + Tokens.observed([8])
        >>> sample = Sample.of(held)
        >>> sample.prompt.ids_T.tolist(), sample.tokens.ids_T.tolist()
        ([5, 6], [7])
        """
        (places,) = np.nonzero(full.sampled_T)
        if not len(places):
            raise DataError("no token of the conversation was sampled", remedy="leave it out")
        end = int(places[-1]) + 1
        gaps = np.flatnonzero(~full.sampled_T[:end])
        start = int(gaps[-1]) + 1 if len(gaps) else 0
        return cls(prompt=full[:start], tokens=full[start:end], group=group)

    @property
    def full(self) -> Tokens:
        """The tokens of prompt and answer, one after the other."""
        return self.prompt + self.tokens

    @property
    def mask_F(self) -> npt.NDArray[np.bool_]:
        """Whether each token of prompt and answer carries loss, ``[F]``: those that a policy sampled, and the whole
        answer."""
        return np.concatenate([self.prompt.sampled_T, np.ones(len(self.tokens), bool)])


Samples = Sequence[Sample] | Sequence[Sequence[Sample]]
"""Samples in one list, or in one list for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequirements:
    """The properties of a policy's learner that samples must match to be trained on."""

    step: int
    """Version of the learner's weights."""
    temperature: float
    """Temperature by which the learner divides logits."""
    vocab_size: int
    """Size of the vocabulary; ids are smaller than it."""


def make_batch(samples: Samples, advantages: Any, required: SampleRequirements) -> Batch:
    """Return the batch of ``samples``. ``advantages`` are nested as the samples are: a number for each sample, or one
    for each token of its answer; ``None`` for 0.

    Raises :class:`~headrace.base.errors.DataError` for samples and advantages that do not match, and
    :class:`~headrace.base.errors.RunError` for samples that this learner's policy cannot have sampled.
    """
    flat = _flat_samples(samples)
    fulls = [sample.full for sample in flat]
    for place, (sample, full) in enumerate(zip(flat, fulls, strict=True)):
        _refuse_foreign(f"sample {place}", sample, full, required)
    credit = [0.0] * len(flat) if advantages is None else _flat_advantages(samples, advantages)
    columns = [_credit(place, *pair) for place, pair in enumerate(zip(flat, credit, strict=True))]
    laid_out = [
        TrainSample(key=EpisodeKey(sample.group, place), tokens=full, mask_T=sample.mask_F, advantage=0.0)
        for place, (sample, full) in enumerate(zip(flat, fulls, strict=True))
    ]
    return msgspec.structs.replace(Batch.collate(required.step, laid_out), advantages_N=np.concatenate(columns))


def _flat_samples(samples: Samples) -> list[Sample]:
    """Return ``samples``, in one list or one list for each prompt, as one list. Raises
    :class:`~headrace.base.errors.DataError` for an empty list and for anything that is not a sample."""
    flat: list[Any] = []
    for one in samples:
        flat += one if isinstance(one, Sequence) else [one]
    if not flat:
        raise DataError("there are no samples", remedy="give at least one")
    for place, sample in enumerate(flat):
        if not isinstance(sample, Sample):
            raise DataError(
                f"sample {place} is a {type(sample).__name__}", remedy="give samples, or a list of samples per prompt"
            )
    return flat


def _flat_advantages(samples: Sequence[Any], advantages: Any) -> list[Any]:
    """Return ``advantages``, which are nested as ``samples`` are, as one list in the order of the samples. Raises
    :class:`~headrace.base.errors.DataError` if their nesting or number differs."""
    rows = _listed(advantages, "advantages")
    _refuse_length("samples" if isinstance(samples[0], Sample) else "groups", len(samples), len(rows))
    flat: list[Any] = []
    for place, (one, credit) in enumerate(zip(samples, rows, strict=True)):
        if isinstance(one, Sample):
            flat.append(credit)
            continue
        own = _listed(credit, f"advantages[{place}]")
        _refuse_length(f"samples in group {place}", len(one), len(own))
        flat += own
    return flat


def _listed(values: Any, name: str) -> list[Any]:
    """Return ``values`` as a list. Raises :class:`~headrace.base.errors.DataError`, with ``name``, if they are a single
    value."""
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


def _credit(place: int, sample: Sample, advantage: Any) -> FloatColumn:
    """Return the advantage of every token of prompt and answer, ``[F]``, from the number for the whole ``sample`` or
    one number for each token of its answer. ``place`` is the index of the sample, for errors. Raises
    :class:`~headrace.base.errors.DataError` for advantages of another shape or that are not finite."""
    try:
        given = np.asarray(advantage, np.float32)
    except (TypeError, ValueError):
        raise DataError(f"the advantage of sample {place} is {advantage!r}", remedy="give a number") from None
    if given.ndim and given.shape != (len(sample.tokens),):
        raise DataError(
            f"sample {place} has {len(sample.tokens)} tokens in its answer and advantages of shape {given.shape}",
            remedy="give one number, or one for each token of the answer",
        )
    if not np.isfinite(given).all():
        raise DataError(
            f"an advantage of sample {place} is not finite",
            remedy="give finite advantages; leave a sample that does not count out, or give it 0",
        )
    if not given.ndim:
        return np.full(len(sample.prompt) + len(sample.tokens), given, np.float32)
    if sample.prompt.sampled_T.any():
        raise DataError(
            f"sample {place} has advantages per token, and its prompt holds sampled tokens, which have none",
            remedy="give one number, or a prompt of Tokens.observed(ids)",
        )
    return np.concatenate([np.zeros(len(sample.prompt), np.float32), given])


def _refuse_foreign(name: str, sample: Sample, full: Tokens, required: SampleRequirements) -> None:
    """Refuse a sample that the policy cannot have sampled: with ids outside its vocabulary, of a newer version than the
    learner's, or of another temperature. ``name`` says in the error which sample it is; ``full`` are its prompt and
    answer."""
    outside = np.flatnonzero((full.ids_T < 0) | (full.ids_T >= required.vocab_size))
    if len(outside):
        raise DataError(
            f"{name} holds token {full.ids_T[outside[0]]}, outside this model's vocabulary of "
            f"{required.vocab_size}: it is another model's",
            remedy=_FRESH,
        )
    newest = int(oldest(full.versions_T).max(initial=-1))
    if newest > required.step:
        raise RunError(
            f"{name} was sampled by version {newest}, and the learner has version {required.step}: it is another "
            "policy's, or one from before this one was loaded",
            remedy=_FRESH,
        )
    if sample.sampling is not None and sample.sampling.temperature != required.temperature:
        raise RunError(
            f"{name} was sampled at temperature {sample.sampling.temperature:g}, and the learner divides "
            f"logits by engine.temperature={required.temperature:g}",
            remedy="train on samples of the policy's own temperature; load the policy with "
            "engine={'temperature': ...} for another",
        )
