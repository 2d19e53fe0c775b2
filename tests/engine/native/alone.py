"""What a request gets alone: one whole pass of transformers per token, and every rule of its sampling written again, in
float64, one token and one rule after the other. Nothing of the engine has a part in it but the uniforms of its draws.

Shape legend: V vocabulary, T tokens of prompt and answer, L mixture-of-experts layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from headrace.base.types.episode import StopReason
from headrace.base.types.sampling import Sampling
from headrace.engine.native.sampler import splitmix, uniforms

Floats = npt.NDArray[np.float64]


def decode(ids: Sequence[int]) -> str:
    """The text of tokens: a character each."""
    return "".join(chr(60 + token) for token in ids)


def probabilities(logits_V: Floats, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Floats:
    """Of every token after ``prompt`` and ``answer``."""
    adjusted = logits_V.astype(np.float64).copy()
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    for token in {*prompt, *answer}:
        adjusted[token] *= (
            1 / sampling.repetition_penalty if adjusted[token] > 0 else sampling.repetition_penalty
        )  # fmt: skip
    for token in set(answer):
        adjusted[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(answer).count(token)
    if sampling.temperature == 0:
        return np.eye(len(adjusted))[adjusted.argmax()]
    weights = np.exp((adjusted - adjusted.max()) / sampling.temperature)
    order = np.lexsort((np.arange(len(weights)), -weights))
    kept = order[weights[order] >= weights[order[min(sampling.top_k or len(order), len(order)) - 1]]]
    mass = weights[kept].cumsum()
    before = np.concatenate([[0.0], mass[:-1]])
    kept = kept[(before < sampling.top_p * mass[-1]) | (sampling.top_p == 1)]
    kept = kept[weights[kept] >= sampling.min_p * weights.max()]
    chances = np.zeros(len(weights))
    chances[kept] = weights[kept] / weights[kept].sum()
    return chances


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """An answer, with all that is to be recorded of it."""

    ids: list[int]
    logprobs: list[float]
    kept: list[list[int]]
    """Of each token: empty for the whole vocabulary."""
    experts_TLK: npt.NDArray[np.int64]
    """Of all tokens but the last, each token's in rising order; of a dense model without layers."""
    stop_reason: StopReason


@torch.inference_mode()
def sample_alone(model: nn.Module, sampling: Sampling, known_ids: Sequence[int], num_prompt: int) -> Alone:
    """The answer to ``known_ids``: a prompt, and what a fork has kept of its parent's answer."""
    ids: list[int] = []
    logprobs: list[float] = []
    kept: list[list[int]] = []
    experts: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda *call: experts.append(call[2][-1]))
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    reason: StopReason | None = None
    while reason is None:
        experts.clear()
        whole = [*known_ids, *ids]
        logits_V = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, -1].double().numpy()
        chances_V = probabilities(logits_V, sampling, known_ids[:num_prompt], whole[num_prompt:])
        token = _draw(chances_V, sampling, len(whole))
        ids.append(token)
        logprobs.append(float(np.log(chances_V[token])))
        recorded = sampling.temperature == 0 or sampling.truncated
        kept.append(np.flatnonzero(chances_V).tolist() if recorded else [])
        reason = _reason(sampling, decode(whole[num_prompt:]), ids)
    for hook in hooks:
        hook.remove()
    empty = torch.zeros(len(known_ids) + len(ids) - 1, 0, 0)
    experts_TLK = torch.stack(experts, 1).sort(-1).values if experts else empty
    return Alone(ids=ids, logprobs=logprobs, kept=kept, experts_TLK=experts_TLK.numpy(), stop_reason=reason)


def _draw(chances_V: Floats, sampling: Sampling, position: int) -> int:
    if sampling.temperature == 0:
        return int(chances_V.argmax())
    uniform = uniforms(splitmix(np.array([sampling.seed % 2**64], np.uint64)), np.array([position]))[0]
    return min(int(np.searchsorted(chances_V.cumsum(), uniform, side="right")), int(np.flatnonzero(chances_V)[-1]))


def _reason(sampling: Sampling, before: str, ids: list[int]) -> StopReason | None:
    """Why the answer ends here, if it does; ``before`` is its text without the newest token."""
    text = before + decode(ids[-1:])
    if ids[-1] in sampling.stop_ids or any(text.endswith(string) for string in sampling.stop):
        return StopReason.STOP
    return StopReason.LENGTH if len(ids) == sampling.max_new_tokens else None
