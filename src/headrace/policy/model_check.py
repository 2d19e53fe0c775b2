"""``headrace check model``: prove that this library computes a model as transformers does, from loading to export.

    directory ─┬─▶ transformers alone ──▶ log p of random tokens, each sequence by itself
               └─▶ policy: learner packed │ engine scores │ engine decodes ──▶ the same, compared with it
                     └─▶ one step ─▶ publish ─▶ save, export ─▶ transformers reads it: the same as the engine

A *gap* is the difference |Δ logprob| of one token, computed in two ways. Shape legend: T tokens of a sequence, N tokens
of a pass, V vocabulary.
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
from headrace.models.settings import BUILDING, by_layer, limit_of, read_config, read_whole_config
from headrace.models.text_part import causal_class
from headrace.models.weights import vocabulary_of
from headrace.policy.policy import Policy
from headrace.run.session.exporting import export

LENGTHS = (1, 5, 300, 1500)
"""Lengths of the compared sequences, in tokens, as far as the model's context allows; one beyond its window and its
original context is added."""
LONGEST = 2048
"""Longest sequence that is compared unless the user asks for more."""
MOST_IN_FLOAT64 = 10**8
"""The largest number of parameters of a float32 model that transformers computes in float64 too."""
WORST = 10.0
"""Factor from the largest mean gap that rounding explains to the largest gap of a single token."""
REROUTED_SHARE = 0.01
"""The largest share of tokens of a mixture with a larger gap: where two experts nearly tie, rounding chooses."""


class ModelFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one part of the check."""

    part: str
    """What was checked: ``load``, ``gap learner``, ``gap engine``, ``pack``, ``decode``, ``train``, ``publish`` or
    ``export``."""
    ok: bool
    """Whether this part is as it should be."""
    detail: str
    """The observation in words; for a failure, where it is."""
    gap: float | None = None
    """Largest |Δ logprob| in nats, where log-probabilities were compared."""


class ModelReport(msgspec.Struct, kw_only=True):
    """The findings about one model."""

    path: str
    kind: str = ""
    """Its ``model_type``; of a multimodal checkpoint, that of the text part."""
    verdict: str = ""
    """``works``; ``refused``, for a model that says why before anything is computed; or ``fails``."""
    reason: str = ""
    """Why it is refused or fails."""
    remedy: str = ""
    """What to do about a refusal; empty where only the reason is known."""
    facts: dict[str, str] = {}
    """The implementations that compute it in the engine, by name."""
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
    """Run the check on the model directory ``path`` in the number format ``dtype``, and return the report. Errors of
    the model become part of the report and are never raised.

    ``lora`` trains an adapter instead of the weights. ``longest`` bounds the compared sequences, in tokens.
    ``whole=False`` leaves training, publication and export out.
    """
    report = ModelReport(path=path)
    try:
        report.kind = read_config(path).model_type
        config = ModelConfig(path=path, dtype=dtype, lora=LoraConfig(rank=4) if lora else None)
        _Check(config, report, longest).run(whole=whole)
    except HeadraceError as error:
        began = any(each.part != "load" for each in report.findings)
        report.verdict = "fails" if began else "refused"
        report.reason, report.remedy = error.problem.removeprefix(f"model.path={path!r} "), error.remedy
    except Exception as error:  # noqa: BLE001 - a foreign architecture may raise anything
        last = report.findings[-1].part if report.findings else "the start"
        report.verdict, report.reason = "fails", f"after {last}: {type(error).__name__}: {error}"
    failed = next((each for each in report.findings if not each.ok), None)
    if failed is not None:
        report.verdict, report.reason, report.remedy = "fails", failed.detail, ""
    report.verdict = report.verdict or "works"
    return report


class _Check:
    """One check of one model. ``config`` says how the model is loaded, ``report`` receives the findings, and
    ``longest`` bounds the compared sequences, in tokens."""

    def __init__(self, config: ModelConfig, report: ModelReport, longest: int) -> None:
        """Load the model, choose how long the compared sequences are, and draw their tokens at random."""
        self._model: PreTrainedModel | None = load_model(config.model_copy(update={"lora": None}))
        self._config = config
        self._report = report
        read = read_config(config.path)
        self._largest = largest_gap(config.dtype, rerouted=is_mixture(read))
        self._most_far = REROUTED_SHARE if is_mixture(read) else 0.0
        self._lengths = compared_lengths(read, limit_of(config.path).length, longest)
        rng = np.random.default_rng(0)
        # ids that stand for text; a tokenizer may have more than its model
        known = load_tokenizer(config.path).vocab_size
        self._vocab = vocab = min(known, vocabulary_of(self._model))
        self._sequences = [rng.integers(3 % vocab, vocab, length).astype(np.int32) for length in self._lengths]

    def run(self, *, whole: bool) -> None:
        """Make all checks of the model, in order; with ``whole``, training, publication and export too."""
        model, self._model = self._model, None
        assert model is not None
        self._note("load", f"{type(model).__name__}, {sum(each.numel() for each in model.parameters()):,} weights")
        with plain(self._config) as reference:
            expected = [reference.logprobs(ids_T) for ids_T in self._sequences]
            self._learner(model, expected)
            del model
            asyncio.run(self._policy(reference, expected, whole=whole))

    def _learner(self, model: PreTrainedModel, expected: list[Span]) -> None:
        """Check the learner's forward pass: compare the logprobs of each sequence alone with those of transformers
        (``expected``), and those of all sequences packed into one pass with those of each alone."""
        alone = [self._packed(model, [ids_T])[0] for ids_T in self._sequences]
        packed = self._packed(model, self._sequences)
        self._compare("gap learner", alone, expected)
        self._compare("pack", packed, [(each, each) for each in alone])

    def _packed(self, model: PreTrainedModel, sequences: list[Any]) -> list[FloatColumn]:
        """Return the logprobs of every token but the first of each of ``sequences`` (token ids), computed in one packed
        pass."""
        lengths = [len(ids_T) for ids_T in sequences]
        with torch.no_grad():
            logits_NV = forward(model, torch.from_numpy(np.concatenate(sequences)).long(), PackedPlan(lengths))
        return [_next(part_TV, ids_T) for part_TV, ids_T in zip(logits_NV.split(lengths), sequences, strict=True)]

    async def _policy(self, reference: PlainModel, expected: list[Span], *, whole: bool) -> None:
        """Open a policy with the model, and compare the logprobs that its engine scores and that it records while it
        decodes with those of transformers (``reference``; ``expected`` are those of the compared sequences). With
        ``whole``, then train, publish and export."""
        longest = max(self._lengths)
        room = min(longest + 32, limit_of(self._config.path).length)
        policy = Policy.load(
            self._config.path,
            lr=1e-3,
            loss="grpo",
            model=self._config.model_dump(exclude={"path"}),
            engine={"max_context": room, "max_sequences": 8},
            learner={"keep_routing": _replays(read_config(self._config.path))},
        )
        async with policy:
            self._report.facts = {name: value for name, value in policy.facts.items() if isinstance(value, str)}
            scored = await policy.score([Tokens.observed(ids_T) for ids_T in self._sequences], temperature=1.0)
            self._compare("gap engine", [column_T[1:] for column_T in scored], expected)
            await self._decoded(policy, reference)
            if whole:
                await self._trained(policy)

    async def _decoded(self, policy: Policy, reference: PlainModel) -> None:
        """Compare the logprobs that the engine recorded while it sampled after two prompts with those that transformers
        computes of the same tokens."""
        room = policy.config.engine.max_context or limit_of(self._config.path).length
        prompts = [Tokens.observed(ids_T[: room - 16]) for ids_T in self._sequences[-2:]]
        groups = await policy.sample(prompts, n=2, max_new_tokens=12, temperature=1.0)
        samples = [sample for group in groups for sample in group]
        found, wanted = [], []
        for sample in samples:
            begin, ids_T = len(sample.prompt), sample.full.ids_T
            others = np.flatnonzero(ids_T[begin:] >= self._vocab)  # an image's id means more to the whole model
            end = begin + int(others[0]) + 1 if len(others) else len(ids_T)
            found.append(sample.full.logprobs_T[begin:end])
            low_T, high_T = reference.logprobs(ids_T[:end])
            wanted.append((low_T[begin - 1 :], high_T[begin - 1 :]))
        self._compare("decode", found, wanted)

    async def _trained(self, policy: Policy) -> None:
        """Make one optimizer step, publish it to the engine, save and export the policy, and compare the logprobs of
        the exported weights in transformers with those of the engine."""
        prompt = Tokens.observed(self._sequences[1])
        groups = await policy.sample([prompt, prompt], n=2, max_new_tokens=8)
        gradient = policy.forward_backward(groups, [[1.0, -0.5], [0.5, -1.0]])
        update = policy.optim_step()
        moved = update.grad_norm > 0
        self._note("train", f"loss {gradient.metrics['loss']:.3g}, gradient norm {update.grad_norm:.3g}", moved)
        swap = await policy.publish()
        self._note("publish", f"version {swap.version}", swap.version == 1)
        scored = await policy.score([Tokens.observed(ids_T) for ids_T in self._sequences], temperature=1.0)
        place = Path(tempfile.mkdtemp(prefix="headrace-check-"))
        try:
            policy.save(place / "saved")
            export(place / "saved", place / "exported")
            with plain(self._config.model_copy(update={"path": str(place / "exported")})) as read:
                wanted = [read.logprobs(ids_T) for ids_T in self._sequences]
            self._compare("export", [column_T[1:] for column_T in scored], wanted)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _compare(self, part: str, found: list[FloatColumn], wanted: list[Span]) -> None:
        """Record the finding ``part``: how far the logprobs ``found`` of each sequence lie outside the spans ``wanted``
        that transformers allows, and at which token most. It fails if rounding does not explain that."""
        pairs = [(one, np.clip(one, *span)) for one, span in zip(found, wanted, strict=True) if len(one)]
        if not pairs:
            return
        gap, length = max(
            ((Gap.between(one, nearest), len(one)) for one, nearest in pairs), key=lambda found: found[0].worst
        )
        ok = all(is_rounding(*pair, self._largest, most_far=self._most_far) for pair in pairs)
        where = f"at token {gap.at + 1} of {length}"
        detail = f"largest |Δ logprob| {gap.worst:.2g} {where}, mean {gap.mean_abs:.2g}"
        if not ok:
            detail = f"{part}: {detail}; rounding explains a mean of {self._largest:g}"
        self._note(part, detail, ok, gap.worst)

    def _note(self, part: str, detail: str, ok: bool = True, gap: float | None = None) -> None:
        """Add a finding to the report; the arguments are its fields (:class:`ModelFinding`)."""
        self._report.findings.append(ModelFinding(part=part, ok=ok, detail=detail, gap=gap))


def is_rounding(found: FloatColumn, wanted: FloatColumn, largest: float, *, most_far: float) -> bool:
    """Return whether rounding explains the difference of the logprobs ``found`` and ``wanted`` of the same tokens: its
    mean is at most ``largest``, and the share of tokens whose gap exceeds :data:`WORST` times ``largest`` is at most
    ``most_far``.

    >>> column, moved = np.zeros(200), np.array([0.05] + [0.0] * 199)
    >>> is_rounding(moved, column, 1e-3, most_far=0.0), is_rounding(moved, column, 1e-3, most_far=0.01)
    (False, True)
    """
    far_N = ~(np.abs(found - wanted) <= WORST * largest)  # NaN is far too
    return Gap.between(found, wanted).within(largest) and float(far_N.mean()) <= most_far


def _replays(config: Any) -> bool:
    """Return whether the model of this configuration has no unsupported mixture of experts, so that routing can be
    recorded and replayed; this is also true of a dense model, which has none."""
    try:
        routes(config)
    except ModelError:
        return False
    return True


def compared_lengths(config: Any, limit: int, longest: int) -> list[int]:
    """Return the lengths of the compared sequences: :data:`LENGTHS`, and one beyond every window and original context
    that ``longest`` and the model's ``limit`` allow."""
    beyond = [
        each for name in ("sliding_window", "attention_chunk_size", "index_topk") for each in by_layer(config, name)
    ]
    beyond += [parameters.get("original_max_position_embeddings") for _, parameters in rope_types(config)]
    wanted = {*LENGTHS, *(each + 40 for each in beyond if isinstance(each, int))}
    most = min(limit, longest)
    return sorted({min(length, most) for length in wanted})


Span = tuple[FloatColumn, FloatColumn]
"""The least and the greatest log-probability that transformers computes of each token, in float32 and in float64; they
are equal where it computes in one format only. A value between them cannot be distinguished from its rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainModel:
    """A model as transformers alone runs it, the reference of the check."""

    model: PreTrainedModel
    exact: PreTrainedModel | None
    """The model in float64. ``None`` for a large model, for a model in another number format than float32, and for one
    with a part that cannot compute in float64."""

    @torch.no_grad()
    def logprobs(self, ids_T: Any) -> Span:
        """Return the least and the greatest logprob of every token but the first, from one plain pass over this
        sequence in each number format."""
        ids = torch.from_numpy(np.asarray(ids_T)).long()[None]
        models = [self.model] if self.exact is None else [self.model, self.exact]
        columns = [_next(model(input_ids=ids, use_cache=False).logits[0], ids_T) for model in models]
        return np.minimum(columns[0], columns[-1]), np.maximum(columns[0], columns[-1])


@contextmanager
def plain(config: ModelConfig) -> Iterator[PlainModel]:
    """Load the model with transformers alone, with its plain attention, and yield it: the whole model, if the
    checkpoint is multimodal. Raises :class:`~headrace.base.errors.ModelError` if it is no causal language model."""
    whole, read = read_whole_config(config.path), read_config(config.path)
    multimodal = type(whole) is not type(read)
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(whole)] if multimodal else causal_class(read)
    if kind is None:
        raise ModelError(f"model.path={config.path!r} is not a causal language model", remedy="name another model")
    with BUILDING:
        model = kind.from_pretrained(config.path, dtype=getattr(torch, config.dtype), attn_implementation="eager")
    model.eval()
    yield PlainModel(model=model, exact=_in_float64(model))


@torch.no_grad()
def _in_float64(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a copy of the model in float64; ``None`` if it is too large, is not in float32, or cannot compute in
    float64."""
    if model.dtype != torch.float32 or model.num_parameters() > MOST_IN_FLOAT64:
        return None
    exact = copy.deepcopy(model).double()
    try:
        exact(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except RuntimeError:  # a part that fixes another format
        return None
    return exact


def _next(logits_TV: torch.Tensor, ids_T: Any) -> FloatColumn:
    """Return the logprob of every token of ``ids_T`` but the first, from the logits at the token before it."""
    following = torch.from_numpy(np.asarray(ids_T)).long()[1:, None]
    exact_TV = logits_TV[:-1] if logits_TV.dtype == torch.float64 else logits_TV[:-1].float()
    column: FloatColumn = exact_TV.log_softmax(-1).gather(1, following)[:, 0].float().numpy()
    return column
