"""The command ``headrace check model``: it checks that this library computes the same log-probabilities as
transformers, from loading to export.

    directory ─┬─▶ transformers alone ──▶ log p of random tokens, each sequence by itself
               └─▶ policy: learner packed │ engine scores │ engine decodes ──▶ the same, compared with it
                     └─▶ one step ─▶ publish ─▶ save, export ─▶ transformers reads it: the same as the engine

A *gap* is the difference |Δ logprob| between two computations of one token's log-probability. Shape legend: T tokens of
a sequence, N tokens of a pass, V vocabulary.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedModel

from headrace.base.errors import HeadraceError, ModelError
from headrace.base.types.tokens import FloatColumn, Tokens
from headrace.models import LoraConfig, ModelConfig, load_model, load_tokenizer
from headrace.models.attention import PackedPlan, forward
from headrace.models.gap import Gap, largest_gap
from headrace.models.mixtures import is_mixture, routes
from headrace.models.rope import rope_types
from headrace.models.settings import BUILDING, find_context_limit, get_layer_values, read_config, read_whole_config
from headrace.models.text_part import causal_class
from headrace.models.weights import count_vocabulary
from headrace.policy.policy import Policy
from headrace.run.session.exporting import export

LENGTHS = (1, 5, 300, 1500)
"""Lengths of the compared sequences, in tokens, limited by the model's context. A length beyond each attention window
and beyond the original context is added (:func:`compared_lengths`)."""
LONGEST = 2048
"""Default length limit of the compared sequences, in tokens."""
MOST_IN_FLOAT64 = 10**8
"""A float32 model with at most this many parameters is also computed in float64 by transformers."""
WORST = 10.0
"""The largest gap of a single token that rounding explains, as a multiple of the largest mean gap that rounding
explains."""
REROUTED_SHARE = 0.01
"""For a mixture of experts, the largest fraction of tokens with a larger gap: if the scores of two experts are almost
equal, rounding decides which is chosen."""


class ModelFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one part of the check."""

    part: str
    """The checked part: ``load``, ``gap learner``, ``gap engine``, ``pack``, ``decode``, ``train``, ``publish`` or
    ``export``."""
    ok: bool
    """Whether the check of this part passed."""
    detail: str
    """The result in words; for a failure, where it occurred."""
    gap: float | None = None
    """Largest |Δ logprob| in nats; ``None`` if this part compares no log-probabilities."""


class ModelReport(msgspec.Struct, kw_only=True):
    """The result of the check of one model."""

    path: str
    kind: str = ""
    """The model's ``model_type``; for a multimodal checkpoint, the ``model_type`` of its text part."""
    verdict: str = ""
    """``works``; ``refused``, if the model was rejected before anything was compared; or ``fails``."""
    reason: str = ""
    """Why the model is refused or fails."""
    remedy: str = ""
    """The remedy for a refusal; empty if no remedy is known."""
    facts: dict[str, str] = {}
    """The names of the implementations with which the engine computes the model, by kind."""
    findings: list[ModelFinding] = []

    @property
    def ok(self) -> bool:
        """Whether the model works."""
        return self.verdict == "works"

    def __str__(self) -> str:
        """Return the report as lines of text for the user."""
        lines = [f"{self.path}: {self.kind} {self.verdict}" + (f": {self.reason}" if self.reason else "")]
        lines += [f"  remedy: {self.remedy}"] if self.remedy else []
        lines += [f"  {'ok  ' if each.ok else 'FAIL'} {each.part}: {each.detail}" for each in self.findings]
        lines += [f"  {name} = {value}" for name, value in self.facts.items()]
        return "\n".join(lines)


def check_model(
    path: str, *, dtype: str = "float32", lora: bool = False, longest: int = LONGEST, whole: bool = True
) -> ModelReport:
    """Check the model in the directory ``path`` in the number format ``dtype``, and return the report. Errors of the
    model are recorded in the report and not raised.

    ``lora`` trains an adapter instead of the weights. ``longest`` is the length limit of the compared sequences, in
    tokens. ``whole=False`` skips training, publication and export.
    """
    report = ModelReport(path=path)
    try:
        report.kind = read_config(path).model_type
        config = ModelConfig(path=path, dtype=dtype, lora=LoraConfig(rank=4) if lora else None)
        _Check(config, report, longest).run(whole=whole)
    except HeadraceError as error:
        has_compared = any(each.part != "load" for each in report.findings)
        report.verdict = "fails" if has_compared else "refused"
        report.reason, report.remedy = error.problem.removeprefix(f"model.path={path!r} "), error.remedy
    except Exception as error:  # noqa: BLE001 - a foreign architecture may raise anything
        last_part = report.findings[-1].part if report.findings else "the start"
        report.verdict, report.reason = "fails", f"after {last_part}: {type(error).__name__}: {error}"
    failed = next((each for each in report.findings if not each.ok), None)
    if failed is not None:
        report.verdict, report.reason, report.remedy = "fails", failed.detail, ""
    report.verdict = report.verdict or "works"
    return report


class _Check:
    """One check of one model. ``config`` are the settings with which the model is loaded, ``report`` receives the
    findings, and ``longest`` is the length limit of the compared sequences, in tokens."""

    def __init__(self, config: ModelConfig, report: ModelReport, longest: int) -> None:
        """Load the model, choose the lengths of the compared sequences, and draw their tokens at random."""
        self._model: PreTrainedModel | None = load_model(config.model_copy(update={"lora": None}))
        """The loaded model until :meth:`run` uses it; ``None`` afterwards, so that its memory can be freed."""
        self._config = config
        self._report = report
        text_config = read_config(config.path)
        self._largest = largest_gap(config.dtype, rerouted=is_mixture(text_config))
        """The largest mean gap that rounding explains."""
        self._max_far_share = REROUTED_SHARE if is_mixture(text_config) else 0.0
        """The largest fraction of tokens that may have a larger gap than rounding explains."""
        self._lengths = compared_lengths(text_config, find_context_limit(config.path).length, longest)
        rng = np.random.default_rng(0)
        # only ids that both tokenizer and model have
        num_text_ids = load_tokenizer(config.path).vocab_size
        self._vocab = vocab = min(num_text_ids, count_vocabulary(self._model))
        """The number of token ids to draw from."""
        self._sequences = [rng.integers(3 % vocab, vocab, length).astype(np.int32) for length in self._lengths]
        """The token ids of the compared sequences."""

    def run(self, *, whole: bool) -> None:
        """Run all checks of the model in order; training, publication and export only with ``whole``."""
        model, self._model = self._model, None
        assert model is not None
        self._add_finding(
            "load", f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} weights"
        )
        with open_plain_model(self._config) as reference:
            expected = [reference.logprobs(ids_T) for ids_T in self._sequences]
            self._check_learner(model, expected)
            del model
            asyncio.run(self._check_policy(reference, expected, whole=whole))

    def _check_learner(self, model: PreTrainedModel, expected: list[Span]) -> None:
        """Check the learner's forward pass. Compare the logprobs of each sequence in a pass of its own with
        ``expected``, the logprobs of transformers; then compare the logprobs of all sequences packed into one pass with
        the logprobs of the separate passes."""
        alone = [self._packed_logprobs(model, [ids_T])[0] for ids_T in self._sequences]
        packed = self._packed_logprobs(model, self._sequences)
        self._compare("gap learner", alone, expected)
        self._compare("pack", packed, [(each, each) for each in alone])

    def _packed_logprobs(self, model: PreTrainedModel, sequences: list[Any]) -> list[FloatColumn]:
        """Return the learner's logprobs of all tokens except the first of each sequence, computed in one packed pass.
        ``sequences`` are arrays of token ids; the result has one column for each sequence."""
        lengths = [len(ids_T) for ids_T in sequences]
        with torch.no_grad():
            logits_NV = forward(model, torch.from_numpy(np.concatenate(sequences)).long(), PackedPlan(lengths))
        return [
            _next_logprobs(part_TV, ids_T) for part_TV, ids_T in zip(logits_NV.split(lengths), sequences, strict=True)
        ]

    async def _check_policy(self, reference: PlainModel, expected: list[Span], *, whole: bool) -> None:
        """Open a policy with the model, and compare the engine's logprobs with transformers: the logprobs of the
        compared sequences with ``expected``, and the logprobs that the engine records while it decodes with the
        computation of ``reference``. With ``whole``, also check training, publication and export."""
        longest = max(self._lengths)
        max_context = min(longest + 32, find_context_limit(self._config.path).length)
        policy = Policy.load(
            self._config.path,
            lr=1e-3,
            loss="grpo",
            model=self._config.model_dump(exclude={"path"}),
            engine={"max_context": max_context, "max_sequences": 8},
            learner={"keep_routing": _can_replay_routing(read_config(self._config.path))},
        )
        async with policy:
            self._report.facts = {name: value for name, value in policy.facts.items() if isinstance(value, str)}
            scored = await policy.score([Tokens.observed(ids_T) for ids_T in self._sequences], temperature=1.0)
            self._compare("gap engine", [column_T[1:] for column_T in scored], expected)
            await self._check_decoding(policy, reference)
            if whole:
                await self._check_training(policy)

    async def _check_decoding(self, policy: Policy, reference: PlainModel) -> None:
        """Let the engine sample answers to two prompts, and compare the logprobs that it recorded with the logprobs
        that transformers computes for the same tokens."""
        max_context = policy.config.engine.max_context or find_context_limit(self._config.path).length
        prompts = [Tokens.observed(ids_T[: max_context - 16]) for ids_T in self._sequences[-2:]]
        groups = await policy.sample(prompts, n=2, max_new_tokens=12, temperature=1.0)
        samples = [sample for group in groups for sample in group]
        actual, expected = [], []
        for sample in samples:
            begin, ids_T = len(sample.prompt), sample.full.ids_T
            # an id of an image, say, has another meaning in the whole model
            unknown = np.flatnonzero(ids_T[begin:] >= self._vocab)
            end = begin + int(unknown[0]) + 1 if len(unknown) else len(ids_T)
            actual.append(sample.full.logprobs_T[begin:end])
            low_T, high_T = reference.logprobs(ids_T[:end])
            expected.append((low_T[begin - 1 :], high_T[begin - 1 :]))
        self._compare("decode", actual, expected)

    async def _check_training(self, policy: Policy) -> None:
        """Make one optimizer step, publish the new weights to the engine, save and export the policy, and compare the
        engine's logprobs with the logprobs that transformers computes with the exported weights."""
        prompt = Tokens.observed(self._sequences[1])
        groups = await policy.sample([prompt, prompt], n=2, max_new_tokens=8)
        gradient = policy.forward_backward(groups, [[1.0, -0.5], [0.5, -1.0]])
        update = policy.optim_step()
        has_gradient = update.grad_norm > 0
        self._add_finding(
            "train", f"loss {gradient.metrics['loss']:.3g}, gradient norm {update.grad_norm:.3g}", has_gradient
        )
        swap = await policy.publish()
        self._add_finding("publish", f"version {swap.version}", swap.version == 1)
        scored = await policy.score([Tokens.observed(ids_T) for ids_T in self._sequences], temperature=1.0)
        directory = Path(tempfile.mkdtemp(prefix="headrace-check-"))
        try:
            policy.save(directory / "saved")
            export(directory / "saved", directory / "exported")
            with open_plain_model(
                self._config.model_copy(update={"path": str(directory / "exported")})
            ) as exported_model:
                expected = [exported_model.logprobs(ids_T) for ids_T in self._sequences]
            self._compare("export", [column_T[1:] for column_T in scored], expected)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _compare(self, part: str, actual: list[FloatColumn], expected: list[Span]) -> None:
        """Add the finding ``part`` to the report: by how much the logprobs ``actual`` of each sequence are outside the
        intervals ``expected`` of transformers, and at which token most. The part fails if this is more than rounding
        explains."""
        # clipping to the interval leaves a gap of 0 inside of it, and otherwise the distance to its nearer end
        pairs = [(column, np.clip(column, *span)) for column, span in zip(actual, expected, strict=True) if len(column)]
        if not pairs:
            return
        gap, length = max(
            ((Gap.between(column, nearest), len(column)) for column, nearest in pairs), key=lambda pair: pair[0].worst
        )
        ok = all(is_rounding(*pair, self._largest, max_far_share=self._max_far_share) for pair in pairs)
        position = f"at token {gap.worst_index + 1} of {length}"
        detail = f"largest |Δ logprob| {gap.worst:.2g} {position}, mean {gap.mean_abs:.2g}"
        if not ok:
            detail = f"{part}: {detail}; rounding explains a mean of {self._largest:g}"
        self._add_finding(part, detail, ok, gap.worst)

    def _add_finding(self, part: str, detail: str, ok: bool = True, gap: float | None = None) -> None:
        """Add a finding to the report. The arguments are the fields of :class:`ModelFinding`."""
        self._report.findings.append(ModelFinding(part=part, ok=ok, detail=detail, gap=gap))


def is_rounding(actual: FloatColumn, expected: FloatColumn, largest: float, *, max_far_share: float) -> bool:
    """Return whether rounding explains the differences between the logprobs ``actual`` and ``expected`` of the same
    tokens: their mean is at most ``largest``, and the fraction of tokens whose gap exceeds :data:`WORST` times
    ``largest`` is at most ``max_far_share``.

    >>> column, moved = np.zeros(200), np.array([0.05] + [0.0] * 199)
    >>> is_rounding(moved, column, 1e-3, max_far_share=0.0), is_rounding(moved, column, 1e-3, max_far_share=0.01)
    (False, True)
    """
    far_N = ~(np.abs(actual - expected) <= WORST * largest)  # not "> ...", so that NaN counts as far
    return Gap.between(actual, expected).within(largest) and float(far_N.mean()) <= max_far_share


def _can_replay_routing(config: Any) -> bool:
    """Return whether routing can be recorded and replayed for the model with this configuration: false for an
    unsupported mixture of experts, true for a dense model."""
    try:
        routes(config)
    except ModelError:
        return False
    return True


def compared_lengths(config: Any, limit: int, longest: int) -> list[int]:
    """Return the lengths of the compared sequences: :data:`LENGTHS`, and a length beyond each attention window and
    original context of the model with the configuration ``config``. All lengths are limited by ``longest`` and by
    ``limit``, the model's context."""
    beyond = [
        each
        for name in ("sliding_window", "attention_chunk_size", "index_topk")
        for each in get_layer_values(config, name)
    ]
    beyond += [parameters.get("original_max_position_embeddings") for _, parameters in rope_types(config)]
    lengths = {*LENGTHS, *(each + 40 for each in beyond if isinstance(each, int))}
    max_length = min(limit, longest)
    return sorted({min(length, max_length) for length in lengths})


Span = tuple[FloatColumn, FloatColumn]
"""The lower and the upper of the log-probabilities that transformers computes for each token in float32 and in float64.
They are equal if it computes in one format only. A value between them differs from either by no more than the rounding
of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainModel:
    """A model that transformers computes without this library: the reference of the check."""

    model: PreTrainedModel
    exact: PreTrainedModel | None
    """The model in float64. ``None`` for a large model, for a model in another number format than float32, and for a
    model with a part that cannot compute in float64."""

    @torch.no_grad()
    def logprobs(self, ids_T: Any) -> Span:
        """Return the lower and the upper logprob of all tokens of ``ids_T`` except the first, from one forward pass
        over this sequence in each number format."""
        ids = torch.from_numpy(np.asarray(ids_T)).long()[None]
        models = [self.model] if self.exact is None else [self.model, self.exact]
        columns = [_next_logprobs(model(input_ids=ids, use_cache=False).logits[0], ids_T) for model in models]
        return np.minimum(columns[0], columns[-1]), np.maximum(columns[0], columns[-1])


@contextmanager
def open_plain_model(config: ModelConfig) -> Iterator[PlainModel]:
    """Load the model that ``config`` names with transformers and its eager attention, and yield it. For a multimodal
    checkpoint, this is the whole model. Raises :class:`~headrace.base.errors.ModelError` for a model that is not a
    causal language model."""
    whole_config, text_config = read_whole_config(config.path), read_config(config.path)
    multimodal = type(whole_config) is not type(text_config)
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(whole_config)] if multimodal else causal_class(text_config)
    if kind is None:
        raise ModelError(f"model.path={config.path!r} is not a causal language model", remedy="name another model")
    with BUILDING:
        model = kind.from_pretrained(config.path, dtype=getattr(torch, config.dtype), attn_implementation="eager")
    model.eval()
    yield PlainModel(model=model, exact=_in_float64(model))


@torch.no_grad()
def _in_float64(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a copy of the model in float64; ``None`` if the model is too large, is not in float32, or cannot compute
    in float64."""
    if model.dtype != torch.float32 or model.num_parameters() > MOST_IN_FLOAT64:
        return None
    exact = copy.deepcopy(model).double()
    try:
        exact(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except RuntimeError:  # a part of the model requires another format
        return None
    return exact


def _next_logprobs(logits_TV: torch.Tensor, ids_T: Any) -> FloatColumn:
    """Return the logprob of each token of ``ids_T`` except the first, computed from the logits at the token before
    it."""
    following = torch.from_numpy(np.asarray(ids_T)).long()[1:, None]
    precise_TV = logits_TV[:-1] if logits_TV.dtype == torch.float64 else logits_TV[:-1].float()
    column: FloatColumn = precise_TV.log_softmax(-1).gather(1, following)[:, 0].float().numpy()
    return column
