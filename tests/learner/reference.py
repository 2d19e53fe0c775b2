"""The objective written a second time: float64, one sample at a time, the architecture's own attention, all logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headrace.base.types.batch import Batch
from headrace.models import ModelConfig, load_model

TIS_CAP = 2.0


def double(model_dir: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir)
    if config.get_text_config() is not config:  # the text part, which is held against the whole elsewhere
        text = load_model(ModelConfig(path=str(model_dir))).double()
        text.set_attn_implementation("eager")
        return text
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager").eval()


def samples(batch: Batch) -> list[slice]:
    ends = batch.lengths_S.cumsum()
    return [slice(int(end - length), int(end)) for end, length in zip(ends, batch.lengths_S, strict=True)]


def log_softmax(model: PreTrainedModel, batch: Batch, part: slice, temperature: float) -> Tensor:
    """(T - 1, V): row t is the distribution that token t + 1 came from."""
    ids = torch.tensor(batch.ids_N[part], dtype=torch.int64)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1)


def logprobs(model: PreTrainedModel, batch: Batch, temperature: float) -> Tensor:
    """log π of the tokens of the mask, in order."""
    parts = []
    for part in samples(batch):
        ids = torch.tensor(batch.ids_N[part], dtype=torch.int64)[1:]
        every = log_softmax(model, batch, part, temperature).gather(1, ids[:, None])[:, 0]
        parts.append(every[torch.tensor(batch.mask_N[part])[1:]])
    return torch.cat(parts)


def ruled_out(batch: Batch, part: slice, vocab_size: int) -> Tensor:
    """(T - 1, V): the entries that the kept-set of token t + 1 leaves out."""
    spans = batch.kept[part].spans()[1:]
    return torch.tensor([[len(span) > 0 and entry not in span for entry in range(vocab_size)] for span in spans])


def grpo_loss(model: PreTrainedModel, batch: Batch, temperature: float, entropy_coef: float = 0.0) -> Tensor:
    """−(1/S) Σ_samples (1/T) Σ_tokens min(π_old/μ, 2) · r · A (+ entropy bonus), where r = π/π_old is 1 in value."""
    total = torch.zeros((), dtype=torch.float64)
    for part in samples(batch):
        every = log_softmax(model, batch, part, temperature)
        rows = torch.tensor(batch.mask_N[part])[1:]
        ids = torch.tensor(batch.ids_N[part], dtype=torch.int64)[1:][rows]
        drawn = every if batch.kept is None else every.masked_fill(ruled_out(batch, part, every.shape[1]), -torch.inf)
        log_pi = drawn.log_softmax(-1)[rows].gather(1, ids[:, None])[:, 0]
        log_mu = torch.tensor(batch.logprobs_N[part], dtype=torch.float64)[1:][rows]
        weight = (log_pi.detach() - log_mu).exp().clamp(max=TIS_CAP)
        ratio = (log_pi - log_pi.detach()).exp()
        advantage = torch.tensor(batch.advantages_N[part], dtype=torch.float64)[1:][rows]
        entropy = -(every[rows].exp() * every[rows]).sum(-1)
        total = total + (-weight * ratio * advantage - entropy_coef * entropy).mean()
    return total / len(batch.lengths_S)
