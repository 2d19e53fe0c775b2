"""The critic: a second model, whose values are used to compute an advantage for every token from the rewards (GAE).

    batch, with rewards ──▶ for each of the policy's micro-batches:
        trunk ──▶ hidden state before every loss token ──▶ head ──▶ V ──▶ GAE of whole samples ──▶ returns
              ──▶ ½·(V − return)² / loss tokens of the batch ──▶ backward
    ──▶ advantages, normalised over the batch ──▶ the training passes of the policy
    the policy is updated ──▶ the critic's AdamW ──▶ further passes over the batch and updates, if configured

One pass computes values and gradient: micro-batches contain whole samples, so the returns of a sample can be computed
from its values at once. The values are computed with the weights before the update for this batch. A turn at the
beginning of several samples carries loss in one of them, and counts as a step of that sample only.

Shape legend: N tokens of the batch, L loss tokens of the batch, M tokens of a micro-batch, P loss tokens of a
micro-batch, K samples of a micro-batch, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from headrace.algo.advantages import GaeAdvantage, Outcomes
from headrace.algo.advantages.outcomes import Floats
from headrace.algo.advantages.tokens import CriticEstimate
from headrace.algo.base import Metrics, Ratio
from headrace.algo.returns import value_loss
from headrace.base.errors import ConfigError, ModelError, RunError
from headrace.base.types.batch import Batch
from headrace.learner import products
from headrace.learner.attention import choose_attention
from headrace.learner.auxiliary.base import AuxiliaryModel, LearnerParts
from headrace.learner.packing import Index, MicroBatch
from headrace.learner.parallel.config import OptimizerConfig
from headrace.learner.parallel.load import keep_inputs_only
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.parallel.shards import slice_shard
from headrace.learner.parallel.view import make_rank_view
from headrace.learner.work import StepWork
from headrace.models.config import ModelConfig
from headrace.models.load import load_model
from headrace.models.settings import errors_naming
from headrace.models.text_part import trunk_name
from headrace.models.weights import CORRECTION_BIAS, weight_tensors

NAME = "critic"
HEAD = "value_head"
"""The name of the value head among the critic's weights."""

_WEIGHT, _UPDATES = "weight", "updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PastBatch:
    """A batch on which further updates of the critic train; the columns are 0 for tokens without loss."""

    batch: Batch
    values_N: Tensor
    """The values before the first update, without gradient."""
    returns_N: Tensor
    """The returns, the targets of the values; computed once, from ``values_N``."""


class Critic(AuxiliaryModel):
    """The auxiliary model that is trained as a value function, with an optimizer of its own.

    In a new batch, the column of advantages contains the reward of each sample; :meth:`prepare` replaces it by
    advantages.
    """

    name: ClassVar[str] = NAME

    def __init__(self, parts: LearnerParts, advantage: GaeAdvantage) -> None:
        """Load the value model, and create its optimizer. ``parts`` are the parts of the learner of the policy, and
        ``advantage`` computes GAE. Raises :class:`~headrace.base.errors.ConfigError` or
        :class:`~headrace.base.errors.ModelError` if there can be no critic for this policy."""
        assert parts.ranks.config.world == 1  # several ranks are refused when settings are loaded
        self._config = parts.config.critic
        self._advantage = advantage
        self._forward = parts.forward
        """The forward passes of the policy, whose micro-batches and padding the critic uses."""
        self._ranks = parts.ranks
        self._offload = parts.config.memory.offload_activations
        """Whether activations are stored in host memory until the backward pass."""
        self._max_norm = parts.config.max_grad_norm
        """The norm to which the critic's gradients are clipped."""
        self.model = value_model(self._config.path or str(parts.context.model_dir), parts.model)
        self._attention = choose_attention(self.model, parts.config.attention)
        """The attention implementation of the value model."""
        products.install(self.model, parts.config.tokens_per_microbatch)
        self._head = self.model.get_submodule(HEAD)
        """The layer that computes values from hidden states."""
        if parts.config.memory.recompute:
            keep_inputs_only(self.model)
        own = {"lr": self._config.lr, "optimizer": OptimizerConfig()}
        self._optimizer = ShardOptimizer(self.model, parts.config.model_copy(update=own), parts.ranks)
        """The optimizer of the value model."""
        self._past_batches: list[_PastBatch] = []
        """The batches on which :meth:`after_update` trains again, if the critic makes several updates a step."""

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with an advantage for each loss token instead of its sample's reward, and with the critic's
        metrics. Accumulate the gradient of the critic's loss, which :meth:`after_update` uses. Raises
        :class:`~headrace.base.errors.RunError` if that gradient is not finite."""
        batch, mask_N = work.batch, work.batch.mask_N
        values_N, estimate_N = np.zeros(batch.num_tokens), np.zeros((3, batch.num_tokens))
        for micro in self._forward.pack(batch, mask_N):
            values_P = self._values(batch, micro)
            places_P = micro.places_M[mask_N[micro.places_M]]
            values_N[places_P] = values_P.detach().cpu().double().numpy()
            estimate = self._estimate(batch, micro, values_N[places_P])
            estimate_N[:, places_P] = estimate
            self._add_gradient(values_P, values_P.detach(), torch.from_numpy(estimate.returns_N), batch.num_loss_tokens)
        norm = self._optimizer.norm()
        self._refuse_non_finite(norm, batch.step)
        if self._config.updates > 1:
            column_N = torch.from_numpy(values_N), torch.from_numpy(estimate_N[1])
            self._past_batches.append(_PastBatch(batch=batch, values_N=column_N[0], returns_N=column_N[1]))
        estimate_L = CriticEstimate(*estimate_N[:, mask_N])
        advantages_N = np.zeros(batch.num_tokens, np.float32)
        advantages_N[mask_N] = self._advantage.scaled(
            estimate_L.advantages_N, np.ones(len(estimate_L.advantages_N), bool)
        )
        metrics = {**_critic_metrics(values_N[mask_N], estimate_L), "critic_grad_norm": Ratio(norm, 1.0)}
        credited = msgspec.structs.replace(batch, advantages_N=advantages_N)
        return replace(work, batch=credited, metrics={**work.metrics, **metrics})

    def discard_gradient(self) -> None:
        """Discard the critic's gradient and the batches kept for further updates, because the step failed."""
        self._optimizer.zero_grad()
        self._past_batches.clear()

    def allocate(self) -> None:
        """Allocate the memory that the optimizer's update will need."""
        self._optimizer.allocate()

    def after_update(self, version: int) -> None:
        """Update the critic with the accumulated gradient, and then with further passes over the same batches, if
        configured. Raises :class:`~headrace.base.errors.RunError` if the gradient of a further update is not finite."""
        self._step(version)
        for _ in range(self._config.updates - 1):
            for past in self._past_batches:
                self._train_again(past)
            self._step(version)
        self._past_batches.clear()

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights and the optimizer's moments and float32 weights, each labelled ``key|parameter name``, and
        the number of updates."""
        for name, tensor in weight_tensors(self.model).items():
            yield f"{_WEIGHT}|{name}", tensor
        for one in self._optimizer.trained:
            for key, tensor in self._optimizer.state(one).items():
                yield f"{key}|{one.name}", tensor
        yield _UPDATES, torch.tensor(self._optimizer.updates)

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the weights, the optimizer's state and the number of updates from the tensors that :meth:`state`
        yielded."""
        take_weights(self.model, state)
        updates = int(slice_shard(state[_UPDATES], torch.tensor(0)))
        states: dict[str, dict[str, Tensor | SavedTensor]] = {}
        for label, tensor in state.items():
            key, _, name = label.partition("|")
            if key not in (_WEIGHT, _UPDATES):
                states.setdefault(name, {})[key] = tensor
        for one in self._optimizer.trained:
            one.refresh_master()
            self._optimizer.set_state(one, states.get(one.name, {}), updates)

    def _values(self, batch: Batch, micro: MicroBatch) -> Tensor:
        """Return the values V ``[P]`` of the loss tokens of one micro-batch, in float32 or wider, with gradient. The
        value of a token is computed from the hidden state of the previous token."""
        loss_P = np.flatnonzero(batch.mask_N[micro.places_M])
        view = make_rank_view(micro, loss_P, self._ranks, self._attention, self._forward.filled)
        before_P = torch.from_numpy(view.before_P).to(self._ranks.device)
        with save_on_cpu() if self._offload else nullcontext():
            hidden = self.model(**view.inputs(batch.ids_N), use_cache=False).last_hidden_state[0]
            hidden_PD = hidden.index_select(0, before_P)
            values_P: Tensor = self._head(hidden_PD.to(self._head.weight.dtype))[:, 0]
        return values_P

    def _estimate(self, batch: Batch, micro: MicroBatch, values_P: Floats) -> CriticEstimate:
        """Return the GAE advantages and returns of the loss tokens of one micro-batch, from their values ``values_P``.
        The reward of a sample counts at its last loss token."""
        mask_M = batch.mask_N[micro.places_M]
        lengths_K: Index = np.bincount(micro.local_samples_M()[mask_M], minlength=len(micro.lengths_K))
        last_K = micro.places_M[mask_M][np.cumsum(lengths_K) - 1]
        outcomes = Outcomes(
            rewards_E=batch.advantages_N[last_K].astype(np.float64),
            groups_E=np.zeros(len(lengths_K), np.int64),
            lengths_E=lengths_K,
            values_N=values_P,
        )
        return self._advantage.estimate(outcomes)

    def _add_gradient(self, values_P: Tensor, old_P: Tensor, returns_P: Tensor, count: int) -> None:
        """Add the gradient of the value loss of P tokens, divided by ``count``, the number of loss tokens of the batch.
        ``values_P`` are the values with gradient; ``old_P`` the values before the first update, around which values are
        clipped; ``returns_P`` the targets."""
        old_P, returns_P = (column_P.to(values_P) for column_P in (old_P, returns_P))
        (value_loss(values_P, old_P, returns_P, self._config.clip).sum() / count).backward()
        self._optimizer.collect()

    def _train_again(self, past: _PastBatch) -> None:
        """Add the gradient of one more pass over ``past``, a batch of an earlier update, with its original returns."""
        batch = past.batch
        for micro in self._forward.pack(batch, batch.mask_N):
            places_P = micro.places_M[batch.mask_N[micro.places_M]]
            old_P, returns_P = past.values_N[places_P], past.returns_N[places_P]
            self._add_gradient(self._values(batch, micro), old_P, returns_P, batch.num_loss_tokens)

    def _step(self, version: int) -> None:
        """Clip the accumulated gradient of the critic, update the weights, and clear the gradient. ``version`` is the
        present version of the policy; an error names the step before it."""
        self._refuse_non_finite(self._optimizer.clip_norms(self._max_norm)[""], version - 1)
        if self._config.lr > 0:
            self._optimizer.step(self._config.lr)
        self._optimizer.zero_grad()

    def _refuse_non_finite(self, norm: float, step: int) -> None:
        """Discard the gradient and raise :class:`~headrace.base.errors.RunError` if ``norm``, the norm of the critic's
        gradient, is not finite. The error names ``step``."""
        if not math.isfinite(norm):
            self.discard_gradient()
            raise RunError(
                f"step {step}: the gradient norm of the critic is {norm}",
                remedy="lower learner.critic.lr, or set model.dtype='float32'; the run resumes from its last snapshot",
            )


def _critic_metrics(values_L: Floats, estimate_L: CriticEstimate) -> Metrics:
    """Return the critic's metrics for the L loss tokens of a batch, from ``estimate_L``, the estimate before the
    update: the value loss, the mean value, and ``explained_variance``, the fraction of the rewards' variance that the
    values predict, which is missing if all rewards are equal."""
    count = float(len(values_L))
    error_L = values_L - estimate_L.returns_N
    variance = float(estimate_L.outcomes_N.var())
    measured = {
        "value_loss": Ratio(float((error_L**2).sum()) / 2, count),
        "value_mean": Ratio(float(values_L.sum()), count),
    }
    if variance > 0:
        rest = float((estimate_L.outcomes_N - values_L).var())
        measured["explained_variance"] = Ratio(variance - rest, variance)
    return measured


def value_model(path: str, policy: PreTrainedModel) -> PreTrainedModel:
    """Return the critic's model: the trunk of the model in ``path``, on the device and in the dtype of ``policy``, with
    a head of one output. The head is initialised with zeros, or loaded from ``path`` if that is a snapshot with a
    critic.

    Raises :class:`~headrace.base.errors.ModelError` for an unsuitable model, and
    :class:`~headrace.base.errors.ConfigError` for a vocabulary smaller than the policy's.
    """
    dtype: Any = str(policy.dtype).removeprefix("torch.")
    with errors_naming("learner.critic.path"):
        model = load_model(ModelConfig(path=path, dtype=dtype), str(policy.device))
    if trunk_name(model) not in model._modules:
        raise ModelError(
            f"learner.critic.path={path!r} is a {type(model).__name__}, which does not come apart into trunk and head",
            remedy="choose another model for the critic, or another algo.advantage",
        )
    trunk: PreTrainedModel = model.get_submodule(trunk_name(model))
    known, needed = (one.get_input_embeddings().num_embeddings for one in (trunk, policy))
    if known < needed:
        raise ConfigError(
            f"learner.critic.path={path!r} knows {known} tokens, and the policy has {needed}",
            remedy="choose a model with the policy's tokenizer",
        )
    head = nn.utils.skip_init(nn.Linear, int(trunk.config.hidden_size), 1, device=policy.device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    trunk.add_module(HEAD, head)
    earlier = Path(path) / f"{NAME}.safetensors"
    if earlier.is_file():
        try:
            take_weights(trunk, load_file(earlier))
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{earlier} is a critic of another shape than the model beside it: {error}",
                remedy="set learner.critic.path to the model that critic began with",
            ) from None
    return trunk


@torch.no_grad()
def take_weights(model: PreTrainedModel, state: Mapping[str, Tensor | SavedTensor]) -> None:
    """Copy the weights of a critic's ``state``, labelled ``weight|parameter name`` as :meth:`Critic.state` yields them,
    into ``model``. Raises ``KeyError`` or ``ValueError`` for the state of another model."""
    for name, tensor in weight_tensors(model).items():
        if name.endswith(CORRECTION_BIAS) and f"{_WEIGHT}|{name}" not in state:
            continue  # older snapshots have no biases: keep the loaded values
        saved = state[f"{_WEIGHT}|{name}"]
        if saved.shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(saved.shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(slice_shard(saved, tensor))
