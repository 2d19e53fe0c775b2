"""The diagnosis of a server: which weights, tokenizer and sampling settings it uses. The weights are found by
comparing the server's logprobs with those of candidates.

    the server's logprobs ──▶ gap to the expected weights ──within rounding──▶ right
                                  │ no
                                  └─▶ gap to each candidate ──smallest, if it explains──▶ its name
                                          │ none
                                          └─▶ place of the gap: already after one token of context, or only later

Shape legend: E logprobs (entries) that the server returned, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.base.errors import HeadraceError
from headrace.models.gap import largest_gap
from headrace.models.load import load_tokenizer
from headrace.models.mixtures import is_mixture
from headrace.models.settings import find_context_limit, read_config
from headrace.wings.doctor.candidates import (
    Entries,
    Expected,
    ServedCandidate,
    compute_entry_logprobs,
    list_alternatives,
)
from headrace.wings.doctor.report import DoctorReport, Fault, Grade
from headrace.wings.doctor.server import ServerProbe

LENGTHS = (64, 64, 192)
"""Lengths of the compared sequences in tokens, as far as the context allows."""
CLEARLY = 0.7
"""A candidate explains the server's logprobs only if its gap is at most this fraction of the gap of the expected
weights."""
FAR_BETTER = 0.1
"""A server that should compute in half precision computes in float32 if the gap of the weights in float32 is below this
fraction of the gap in half precision. Two programs in half precision never agree that much better with float32."""
ROUNDINGS = 2.0
"""How many times as far as rounding to half precision moves the logprobs here, a server in half precision may be from
the expected weights in either precision."""
NUM_DRAWS, DRAWS_AT_ONCE = 512, 64
"""Number of tokens that are sampled without sampling settings to find the server's defaults, and number of tokens of
one request."""
CERTAIN = 6.0
"""Number of standard deviations beyond which sampled tokens count as not drawn from a distribution."""
HALF = 0.5
"""The temperature at which the logprobs of sampled tokens are compared."""
NEAR_ONE = 0.02
"""Largest difference between a fitted temperature and 1 at which the temperature counts as 1."""
MESSAGES: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hello there"},),
    (
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"},
    ),
)  # fmt: skip
"""Two conversations for the comparison of the server's chat template with the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A candidate with its gap from the server's logprobs. A small gap means that the candidate explains the
    logprobs."""

    candidate: ServedCandidate
    """The weights, and the precision and rotary embedding of the computation."""
    logits: list[Tensor]
    """The candidate's logits ``[T, V]`` for each sequence."""
    gap: float
    """The mean |Δ logprob| between candidate and server over all entries, in nats."""


def examine_server(probe: ServerProbe, expected: Expected) -> DoctorReport:
    """Compare the server of ``probe`` with the expected weights, and return the findings on its tokenizer, vocabulary,
    weights, temperature and sampling defaults."""
    report = DoctorReport(subject=f"{probe.url} against {expected.adapter or expected.path}")
    names = probe.models()
    report.add("served", Grade.OK, f"{', '.join(names[:8])}; {probe.model} is examined")
    tokenizer, vocab = load_tokenizer(expected.path), _get_vocabulary_size(expected)
    _check_tokens(report, probe, tokenizer)
    size = _find_served_size(probe, vocab)
    if size < vocab:
        report.add(
            "vocabulary", Grade.FAIL, f"tokens from {size} on are refused, of {vocab} that the model has",
            "start the server with the whole embedding and head of the model", Fault.TRUNCATED_VOCABULARY,
        )  # fmt: skip
    sequences = _draw_sequences(expected, min(size, vocab))
    entries = probe.prompt_entries(sequences)
    source = "of prompts"
    if entries is None:
        entries, source = probe.sampled_entries([each[:16] for each in sequences], 32), "of sampled tokens"
    if entries is None:
        report.add(
            "logprobs", Grade.NOTE, "cannot be told: the server tells logprobs neither of prompts nor of sampled "
            "tokens by their ids", "let it serve logprobs (vLLM: --max-logprobs 20)",
        )  # fmt: skip
        return report
    explanation = _check_weights(report, expected, entries, source, None if size == vocab else size)
    if explanation is not None:
        _check_temperature(report, probe, explanation, size)
        _check_sampling_defaults(report, probe, explanation, size)
    return report


def _get_vocabulary_size(expected: Expected) -> int:
    """Return the number of token ids that the expected model has."""
    return int(read_config(expected.path).vocab_size)


def _find_served_size(probe: ServerProbe, vocab: int) -> int:
    """Return the smallest token id that the server refuses, found by bisection; ``vocab`` if the server accepts
    all ids of the model."""
    if not probe.refuses_token(vocab - 1):
        return vocab
    accepted, refused = -1, vocab - 1
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        accepted, refused = (accepted, middle) if probe.refuses_token(middle) else (middle, refused)
    return refused


def _draw_sequences(expected: Expected, size: int) -> list[list[int]]:
    """Return sequences of random token ids below ``size``, with the lengths :data:`LENGTHS`, limited by the model's
    context. Every call with equal arguments returns equal sequences."""
    rng = np.random.default_rng(0)
    room = find_context_limit(expected.path).length - 1
    lowest = min(3, size - 1)
    return [rng.integers(lowest, size, min(length, room)).tolist() for length in LENGTHS]


def _check_tokens(report: DoctorReport, probe: ServerProbe, tokenizer: Any) -> None:
    """Add findings to ``report``: whether the server of ``probe`` converts a text and chats to the same tokens as
    ``tokenizer``."""
    text = "The quick brown fox: 1 + 2 = 3, naïve?"
    served = probe.tokenize(prompt=text)
    own = tokenizer.encode(text)
    if served is not None and served != own:
        report.add(
            "tokenizer", Grade.FAIL, f"{text!r} becomes {len(served)} tokens there and {len(own)} here, first other at "
            f"{_find_first_difference(served, own)}", "serve the tokenizer of the model", Fault.OTHER_TOKENIZER,
        )  # fmt: skip
    elif served is not None:
        report.add("tokenizer", Grade.OK, "the same tokens")
    if tokenizer.chat_template is None:
        report.add("chat template", Grade.NOTE, "the model has none")
        return
    for messages in MESSAGES:
        try:
            rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            own = tokenizer.encode(rendered, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - a template is a program of the model, and may refuse a role
            continue
        served = probe.tokenize(messages=list(messages))
        count = len(served) if served is not None else probe.count_chat(messages)
        if count is None:
            report.add("chat template", Grade.NOTE, "cannot be told: the server refuses chats of this form")
            return
        if count != len(own) or (served is not None and served != own):
            where = "" if served is None else f", first other at {_find_first_difference(served, own)}"
            report.add(
                "chat template", Grade.FAIL, f"{len(messages)} messages become {count} tokens there and {len(own)} "
                f"here{where}", "start the server with the template of the model (vLLM: --chat-template)",
                Fault.OTHER_TEMPLATE,
            )  # fmt: skip
            return
    report.add("chat template", Grade.OK, "chats become the same tokens")


def _find_first_difference(served: Sequence[int], own: Sequence[int]) -> int:
    """Return the index of the first token in which two sequences differ; the shorter length if one sequence is a prefix
    of the other."""
    pairs = zip(served, own, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(served), len(own)))


def _check_weights(
    report: DoctorReport, expected: Expected, entries: Entries, source: str, size: int | None
) -> Explanation | None:
    """Add a finding on the server's weights, which should be ``expected``, to ``report``. ``entries`` are logprobs that
    the server has returned, ``source`` names their tokens (prompts or sampled tokens), and ``size`` is the size of the
    server's vocabulary (``None``: the model's). Return the candidate that explains the logprobs, possibly at another
    temperature; ``None`` if no candidate does."""
    here = expected.adapter or expected.path
    own = _compute_explanation(expected.candidate(f"the weights of {here}"), entries, size)
    detail = f"mean |Δ logprob| {own.gap:.2g} nats over {len(entries)} entries {source}"
    if own.gap <= _estimate_rounding(expected, own.candidate):
        finer = _explain_in_float32(expected, own, entries, size)
        if finer is None:
            report.add("weights", Grade.OK, f"those of {here}, in {expected.precision}: {detail}")
            return own
        report.add(
            "weights", Grade.WARN, f"{finer.candidate.words} (mean |Δ| {finer.gap:.2g}); from {here}: {detail}",
            finer.candidate.remedy, Fault.PRECISION,
        )  # fmt: skip
        return finer
    scaled = _fit_logit_scale(own, entries, size)
    if scaled is not None:
        report.add(
            "weights", Grade.FAIL, f"those of {here}, but logprobs {source} are those of temperature {1 / scaled:.3g}",
            "let the server tell logprobs of the distribution at temperature 1", Fault.WRONG_TEMPERATURE,
        )  # fmt: skip
        return own
    best, untried = _find_best_candidate(expected, entries, size, own)
    if best is not None:
        assert best.candidate.fault is not None
        level = Grade.WARN if best.candidate.fault is Fault.PRECISION else Grade.FAIL
        report.add(
            "weights", level, f"{best.candidate.words} (mean |Δ| {best.gap:.2g}); from {here}: {detail}",
            best.candidate.remedy, best.candidate.fault,
        )  # fmt: skip
        return best
    _report_unexplained(report, own, entries, detail, untried)
    return None


def _explain_in_float32(expected: Expected, own: Explanation, entries: Entries, size: int | None) -> Explanation | None:
    """Return the explanation by the expected weights in float32 if half precision is expected, but float32 has a far
    smaller gap than ``own``, the explanation in half precision; otherwise return ``None``."""
    if expected.precision == "float32":
        return None
    explanation = expected.candidate(
        f"the same weights in float32, not {expected.precision}", Fault.PRECISION,
        f"start the server in {expected.precision} (--dtype), or expect float32 (--dtype float32)", precision="float32",
    )  # fmt: skip
    finer = _compute_explanation(explanation, entries, size)
    return finer if finer.gap < FAR_BETTER * own.gap else None


def _compute_explanation(candidate: ServedCandidate, entries: Entries, size: int | None) -> Explanation:
    """Compute the logits of a candidate, and return the candidate with its gap from the server's logprobs. ``size`` is
    the size of the server's vocabulary; ``None``: the model's."""
    logits = candidate.logits(entries.sequences)
    return Explanation(
        candidate=candidate,
        logits=logits,
        gap=_compute_mean_gap(compute_entry_logprobs(logits, entries, size=size), entries),
    )


def _compute_mean_gap(own_E: np.ndarray[tuple[int], np.dtype[np.float64]], entries: Entries) -> float:
    """Return the mean |Δ logprob| in nats between ``own_E``, the logprobs computed on this machine, and the server's
    logprobs. Logprobs below −50 count as −50, and a difference of NaN as 50."""
    apart_E = np.abs(np.clip(own_E, -50, 0) - np.clip(entries.logprob_E, -50, 0))
    return float(np.where(np.isnan(apart_E), 50.0, apart_E).mean())


def _estimate_rounding(expected: Expected, candidate: ServedCandidate) -> float:
    """Return the largest mean |Δ logprob|, in nats, that rounding in the precision of ``candidate`` can cause. In half
    precision it is larger for a mixture of experts, because rounding may change the choice of experts."""
    format_ = "float32" if candidate.precision == "float32" else "bfloat16"
    return largest_gap(format_, rerouted=is_mixture(read_config(expected.path)))


def _fit_logit_scale(own: Explanation, entries: Entries, size: int | None) -> float | None:
    """Return the factor of the logits (1 / temperature) with which the expected weights (``own``) explain ``entries``;
    ``None`` if no factor does, or if the factor is close to 1. A coarse search on a logarithmic scale is refined on a
    linear scale. ``size`` is the size of the server's vocabulary (``None``: the model's)."""
    scales = np.geomspace(0.1, 10, 41)
    gaps = [
        _compute_mean_gap(compute_entry_logprobs(own.logits, entries, scale=scale, size=size), entries)
        for scale in scales
    ]
    best_index = int(np.argmin(gaps))
    low, high = scales[max(best_index - 1, 0)], scales[min(best_index + 1, len(scales) - 1)]
    fine_scales = np.linspace(low, high, 61)
    fine_gaps = [
        _compute_mean_gap(compute_entry_logprobs(own.logits, entries, scale=scale, size=size), entries)
        for scale in fine_scales
    ]
    scale = float(fine_scales[int(np.argmin(fine_gaps))])
    explains = min(fine_gaps) <= max(0.02, own.gap / 50) and min(fine_gaps) < CLEARLY * own.gap
    return scale if explains and abs(scale - 1) > NEAR_ONE else None


def _find_best_candidate(
    expected: Expected, entries: Entries, size: int | None, own: Explanation
) -> tuple[Explanation | None, list[str]]:
    """Return (best, untried): the alternative candidate with the smallest gap, ``None`` if no alternative explains the
    server's logprobs, and descriptions of the alternatives that could not be computed. ``own`` is the explanation by
    the expected weights. ``entries`` are the server's logprobs, and ``size`` is the size of its vocabulary
    (``None``: the model's)."""
    best: Explanation | None = None
    untried: list[str] = []
    for candidate in list_alternatives(expected):
        try:
            tried = _compute_explanation(candidate, entries, size)
        except (HeadraceError, ValueError, RuntimeError, OSError) as error:
            untried.append(f"{candidate.words}: {str(error).splitlines()[0]}")
            continue
        explains = tried.gap <= _estimate_rounding(expected, candidate) and tried.gap <= CLEARLY * own.gap
        explains |= candidate.fault is Fault.PRECISION and _is_rounding(tried, own, entries, size)
        if explains and (best is None or tried.gap < best.gap):
            best = tried
    return best, untried


def _is_rounding(half: Explanation, own: Explanation, entries: Entries, size: int | None) -> bool:
    """Return whether the server's logprobs are about as far from ``own``, the explanation by the expected weights, and
    from ``half``, the same weights in half precision, as these two are from each other. A server whose kernels round at
    other places than torch agrees with neither. ``entries`` are the server's logprobs, and ``size`` is the size of its
    vocabulary (``None``: the model's)."""
    own_E, half_E = (compute_entry_logprobs(each.logits, entries, size=size) for each in (own, half))
    rounding = float(np.abs(np.clip(own_E, -50, 0) - np.clip(half_E, -50, 0)).mean())
    return max(own.gap, half.gap) <= ROUNDINGS * rounding


def _report_unexplained(
    report: DoctorReport, own: Explanation, entries: Entries, detail: str, untried: list[str]
) -> None:
    """Add a failure to ``report`` for a server whose logprobs no candidate explains. If its logprobs after one token of
    context agree with ``own``, the explanation by the expected weights, the weights are right and the rotary embedding
    is wrong. ``untried`` describes the candidates that could not be computed. ``entries`` are the server's logprobs,
    and ``detail`` describes their gap."""
    first_E = entries.place_E == 1
    own_E = compute_entry_logprobs(own.logits, entries)
    apart_E = np.abs(np.clip(own_E, -50, 0) - np.clip(entries.logprob_E, -50, 0))
    tried = f"; not tried: {'; '.join(untried[:3])}" if untried else ""
    if first_E.any() and apart_E[first_E].mean() <= 0.01 * apart_E[~first_E].mean():
        report.add(
            "weights", Grade.FAIL, f"{detail}: none after one token of context, so the weights are right, and how "
            f"places enter attention is not{tried}",
            "compare rope_theta, rope_scaling and sliding_window of both config.json", Fault.OTHER_ROPE,
        )  # fmt: skip
        return
    report.add(
        "weights", Grade.FAIL, f"{detail}, already after one token of context; which weights these are cannot be "
        f"told: none of the directories here explains them{tried}",
        "name directories that the server may hold: --also DIR (an earlier snapshot, another adapter)",
        Fault.OTHER_WEIGHTS,
    )  # fmt: skip


def _compute_next_logits(explanation: Explanation, ids: list[int], size: int) -> Tensor:
    """Return the candidate's logits ``[V]`` (float64) of the token after ``ids``, for the first ``size`` ids of the
    vocabulary, which are the server's."""
    return explanation.candidate.logits([ids])[0][-1, :size].double()


def _check_temperature(report: DoctorReport, probe: ServerProbe, explanation: Explanation, size: int) -> None:
    """Add a finding to ``report``: whether the logprobs that the server of ``probe`` returns for tokens sampled at
    temperature :data:`HALF` are logprobs at that temperature, as training needs them, or at temperature 1.
    ``explanation`` is the explanation of the server's weights, and ``size`` the size of its vocabulary."""
    prompt = _find_flattest_prompt(explanation)
    choices = probe.sample(prompt, max_tokens=1, n=DRAWS_AT_ONCE, temperature=HALF, top_p=1.0)
    if choices is None:
        report.add("temperature", Grade.NOTE, "cannot be told: the server does not name sampled tokens by their ids")
        return
    logits_V = _compute_next_logits(explanation, prompt, size)
    if _report_unknown_samples(report, "temperature", [each.ids[0] for each in choices], len(logits_V)):
        return
    ids = torch.tensor([each.ids[0] for each in choices])
    served = torch.tensor([each.logprobs[0] for each in choices], dtype=torch.float64)
    apart = {temperature: served - (logits_V / temperature).log_softmax(-1)[ids] for temperature in (HALF, 1.0)}
    gaps = {temperature: float(each.abs().mean()) for temperature, each in apart.items()}
    close = 10 * _estimate_gap(explanation)
    offset = float(apart[HALF].mean())
    if gaps[HALF] <= close:
        report.add("temperature", Grade.OK, f"logprobs of sampled tokens follow it ({gaps[HALF]:.2g} at {HALF})")
    elif gaps[1.0] <= close:
        report.add(
            "temperature", Grade.FAIL, f"tokens are requested at temperature {HALF}, and their logprobs are those of "
            "temperature 1: ratios of training would be wrong",
            "let the server tell logprobs of what it samples from (vLLM: --logprobs-mode processed_logprobs)",
            Fault.WRONG_TEMPERATURE,
        )  # fmt: skip
    elif offset > 0 and float((apart[HALF] - offset).abs().mean()) <= close:
        report.add(
            "temperature", Grade.OK, f"logprobs of sampled tokens follow it, and the server's defaults leave "
            f"{math.exp(-offset):.0%} of the distribution",
        )  # fmt: skip
    else:
        report.add(
            "temperature", Grade.FAIL, f"the logprobs of tokens sampled at temperature {HALF} are those of neither "
            f"{HALF} ({gaps[HALF]:.2g} nats off) nor 1 ({gaps[1.0]:.2g})",
            "ask with temperature alone: does the server add penalties or truncation?", Fault.WRONG_TEMPERATURE,
        )  # fmt: skip


def _estimate_gap(explanation: Explanation) -> float:
    """Return the mean |Δ logprob|, in nats, to expect between the server and ``explanation``, the explanation of its
    weights."""
    return max(explanation.gap, largest_gap("float32"))


def _report_unknown_samples(report: DoctorReport, name: str, ids: list[int], num_known: int) -> bool:
    """Return whether one of the sampled ``ids`` is outside the model's vocabulary of ``num_known`` tokens. If so, add a
    failure of the check ``name`` to ``report``."""
    unknown = next((token for token in ids if token >= num_known), None)
    if unknown is None:
        return False
    report.add(
        name, Grade.FAIL, f"cannot be told: the server samples token {unknown}, and the model has {num_known}",
        "serve the model with its own vocabulary", Fault.OTHER_WEIGHTS,
    )  # fmt: skip
    return True


def _find_flattest_prompt(explanation: Explanation) -> list[int]:
    """Return one of 8 random prompts of 8 tokens: the prompt after which the probability of the likeliest token is
    nearest to 0.3, so that many tokens are possible but not equally likely."""
    rng = np.random.default_rng(1)
    vocab = explanation.logits[0].shape[1]
    prompts = [rng.integers(min(3, vocab - 1), vocab, 8).tolist() for _ in range(8)]
    spread = [float(logits[-1].softmax(-1).max()) for logits in explanation.candidate.logits(prompts)]
    flattest: list[int] = prompts[int(np.argmin([abs(each - 0.3) for each in spread]))]
    return flattest


def _check_sampling_defaults(report: DoctorReport, probe: ServerProbe, explanation: Explanation, size: int) -> None:
    """Add a finding to ``report``: whether tokens that the server of ``probe`` samples without sampling settings follow
    the distribution at temperature 1 of ``explanation``, the explanation of the server's weights. If not, the finding
    names the settings that fit best. ``size`` is the size of the server's vocabulary."""
    prompt, ids = _find_flattest_prompt(explanation), list[int]()
    for seed in range(NUM_DRAWS // DRAWS_AT_ONCE):
        choices = probe.sample(prompt, max_tokens=1, n=DRAWS_AT_ONCE, seed=1000 * seed)
        if choices is None:
            report.add("defaults", Grade.NOTE, "cannot be told: the server does not name sampled tokens by their ids")
            return
        ids += [each.ids[0] for each in choices]
    logits_V = _compute_next_logits(explanation, prompt, size)
    if _report_unknown_samples(report, "defaults", ids, len(logits_V)):
        return
    logs_V = logits_V.log_softmax(-1)
    drawn = torch.tensor(ids)
    entropy = -float((logs_V.exp() * logs_V).nansum())
    # the mean logprob of the draws should be minus the entropy; their distance is measured in standard errors
    spread = float((logs_V.exp() * (logs_V + entropy) ** 2).nansum()) ** 0.5
    deviation = (float(logs_V[drawn].mean()) + entropy) / (spread / len(ids) ** 0.5 + 1e-9)
    if abs(deviation) <= CERTAIN:
        report.add("defaults", Grade.OK, f"{len(ids)} draws without settings follow temperature 1, top_p 1")
        return
    report.add(
        "defaults", Grade.WARN, f"without settings the server does not sample at temperature 1: its {len(ids)} draws "
        f"fit {_find_likeliest_settings(logits_V, drawn)} ({deviation:+.0f} standard deviations)",
        "send temperature, top_p and top_k with every request, or start the server without the model's "
        "generation_config.json (vLLM: --generation-config vllm)", Fault.OTHER_DEFAULTS,
    )  # fmt: skip


def _find_likeliest_settings(logits_V: Tensor, drawn: Tensor) -> str:
    """Return in words the sampling settings with the highest likelihood for the tokens ``drawn``, given the logits
    ``logits_V``: a temperature, a truncation to the likeliest tokens, or both."""
    if len(drawn.unique()) == 1:
        return "temperature 0 (one token alone)"
    rank_V = logits_V.argsort(descending=True).argsort()
    num = int(rank_V[drawn].max()) + 1
    best, words = -np.inf, ""
    for temperature in np.geomspace(0.1, 3, 60).tolist():
        scaled_V = logits_V / temperature
        cut_V = scaled_V.masked_fill(rank_V >= num, -torch.inf)
        warm = f"temperature {temperature:.2g}"
        kept = f"the likeliest {num} tokens"
        cut = kept if abs(temperature - 1) <= NEAR_ONE else f"{warm} and {kept}"
        for each_V, settings in ((scaled_V, warm), (cut_V, cut)):
            # a truncation has one more parameter, and is preferred only if it fits clearly better
            fit = float(each_V.log_softmax(-1)[drawn].sum()) - (3.0 if each_V is cut_V else 0.0)
            best, words = max((best, words), (fit, settings))
    return words
