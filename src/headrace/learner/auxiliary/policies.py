"""The auxiliary models that compute log-probabilities under another policy: the reference, the teacher, a kept π_old.

    learner.reference ──▶ log π_ref of each token                       penalties, and the metric kl_ref
    learner.old       ──▶ log π_old of each token                       ratios and their clips (algo.old = "kept",
                                                                        or "sampled": one π_old for each version)
    learner.teachers  ──▶ K likeliest entries, with log ν               losses that read "top_k"
                      └─▶ log ν of each token: A + β (log ν − log μ)    the advantage "reverse_kl"

For a teacher with a separate engine, both are in the batch already (external_teacher.py).

All log-probabilities are computed in the same way as log π: at the sampling temperature and, for sampled tokens, within
their kept-sets. π_old uses the experts that the engine recorded, like π; the other policies choose their own experts.

Shape legend: N tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.algo.base import Ratio
from headrace.base.errors import CheckpointError, ConfigError, RunError
from headrace.base.types.batch import Batch
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.versions import FROZEN, NOT_SAMPLED
from headrace.learner.auxiliary.base import AuxiliaryModel, LearnerParts
from headrace.learner.auxiliary.config import (
    Frozen,
    KeptConfig,
    OtherModel,
    PolicyConfig,
    SampledVersions,
    TeacherConfig,
)
from headrace.learner.auxiliary.external_teacher import credited
from headrace.learner.auxiliary.kept import Copy, KeptWeights, OneCopy, Ring, keep
from headrace.learner.config import MixtureConfig
from headrace.learner.forward import Forward
from headrace.learner.head import TopRequest
from headrace.learner.parallel.files import Snapshot
from headrace.learner.parallel.load import load_on_ranks
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.work import StepWork
from headrace.models.config import ModelConfig
from headrace.models.load import refuse_other_vocabulary
from headrace.models.settings import errors_naming
from headrace.models.weights import count_vocabulary


class Source(Protocol):
    """The contract of a source: the weights of a policy, and the forward passes with them. Each auxiliary model of this
    file has one, except :class:`SampledPolicies`."""

    kept: KeptWeights | None
    """The kept copies of the trained weights; ``None`` for a separate model."""

    def computing(self) -> Any:
        """Return a context manager that yields the :class:`Forward` of this policy."""
        ...


class KeptWeightsSource:
    """The source of a policy whose weights are kept copies of the trained model's weights. The trained model computes
    with the copies for one pass."""

    def __init__(self, parts: LearnerParts, config: KeptConfig, setting: str) -> None:
        """Create the kept weights that ``config`` describes, for the learner with these ``parts``. ``setting`` is the
        name of its table in the run file, for errors."""
        self._forward = parts.forward
        """The forward passes of the trained model."""
        trained = parts.optimizer.trained
        if isinstance(config, Frozen) and config.path is not None:
            self.kept: KeptWeights | None = OneCopy(_read_copy(parts, config, config.path, setting), has_state=False)
        else:
            self.kept = keep(config, parts.model, trained)

    @contextmanager
    def computing(self) -> Iterator[Forward]:
        """Return a context that yields the forward passes of the trained model, in which they use the kept weights."""
        assert self.kept is not None
        with self.kept.swap_in():
            yield self._forward


class SeparateModelSource:
    """The source of a policy that is a separate, frozen model, loaded beside the trained model."""

    kept: KeptWeights | None = None

    def __init__(self, parts: LearnerParts, config: OtherModel, setting: str) -> None:
        """Load the model in ``config.path``, in the dtype of the trained model of the learner with these ``parts``.
        ``setting`` is the name of its table in the run file, for errors. Raises
        :class:`~headrace.base.errors.ConfigError` for another vocabulary."""
        dtype: Any = str(parts.model.dtype).removeprefix("torch.")
        with errors_naming(f"{setting}.path"):
            refuse_other_vocabulary(config.path, str(parts.context.model_dir), f"{setting}.path")
            model = load_on_ranks(ModelConfig(path=config.path, dtype=dtype), parts.ranks).requires_grad_(False)
        self._forward = Forward(
            model,
            parts.config.model_copy(
                update={"mixture": MixtureConfig()}
            ),  # without balance losses, which only the trained model has
            temperature=parts.context.temperature,
            entropy_gradient=False,
            ranks=parts.ranks,
        )
        """The forward passes of the other model."""

    @contextmanager
    def computing(self) -> Iterator[Forward]:
        """Return a context, without gradients, that yields the forward passes of the other model."""
        with torch.no_grad():
            yield self._forward


def source(parts: LearnerParts, config: PolicyConfig | TeacherConfig, setting: str) -> Source:
    """Return the source of the policy that ``config`` describes. ``setting`` is its name in the run file, for
    errors."""
    if isinstance(config, OtherModel):
        return SeparateModelSource(parts, config, setting)
    return KeptWeightsSource(parts, config, setting)


class QueriedModel(AuxiliaryModel):
    """The base class of auxiliary models that compute log-probabilities of a batch's tokens under another policy."""

    setting: ClassVar[str]
    """The name of the learner's setting that describes the policy."""

    def __init__(self, parts: LearnerParts, config: PolicyConfig | TeacherConfig) -> None:
        """Load or copy the weights of the policy that ``config`` describes, for the learner with these ``parts``."""
        self._objective = parts.objective
        self._source = source(parts, config, f"learner.{self.setting}")
        """The model that computes the policy."""
        self._kept = self._source.kept
        """The kept weights of the policy; ``None`` for a separate model."""

    @property
    def swaps_weights(self) -> bool:
        """Return whether the trained model computes with kept weights during :meth:`prepare`; false for a separate
        model."""
        return self._kept is not None

    @property
    def has_state(self) -> bool:
        """Return whether a snapshot must contain kept weights; false for a separate model, and for weights from a
        directory."""
        return self._kept is not None and self._kept.has_state

    def before_update(self) -> None:
        """Notify the kept weights, if there are any, before an update."""
        if self._kept is not None:
            self._kept.before_update()

    def after_update(self, version: int) -> None:
        """Notify the kept weights, if there are any, that the trained model now has the weights of ``version``."""
        if self._kept is not None:
            self._kept.after_update(version)

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of the kept weights by name; empty for a separate model."""
        return () if self._kept is None else self._kept.state()

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the kept weights from the tensors that :meth:`state` returned."""
        assert self._kept is not None
        self._kept.set_state(state)

    def _logprobs(self, work: StepWork, batch: Batch) -> Tensor:
        """Return this policy's log-probability of each token in the mask of ``work``, ``[N]``; 0 elsewhere. ``batch``
        is the batch of ``work``, or a variant of it with the same tokens."""
        with self._source.computing() as forward:
            forward.refuse(batch)
            return torch.from_numpy(forward.logprobs(batch, work.mask_N))


class Reference(QueriedModel):
    """The reference policy π_ref, to which KL penalties are computed."""

    name = setting = "reference"
    columns = frozenset({"log_ref", "baseline"})

    def __init__(self, parts: LearnerParts, config: PolicyConfig) -> None:
        """Create the reference policy that ``config`` describes, for the learner with these ``parts``."""
        super().__init__(parts, config)
        self._own = parts.forward
        """The forward passes of the trained model under its own weights."""

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with log π_ref of each token and, for objectives that need it (KTO), with the estimate of
        KL(π‖π_ref) over the batch."""
        work = replace(work, log_ref_N=self._logprobs(work, _unrouted(work.batch)))
        return replace(work, baseline=self._baseline(work.batch)) if "baseline" in self._objective.columns else work

    def _baseline(self, batch: Batch) -> float:
        """Return an estimate of KL(π‖π_ref) per sample, at least 0, from the prompts of the batch with the answers of
        other samples.

        Source: Ethayarajh et al. (KTO), arXiv 2402.01306, section 4.1.
        """
        other = exchange_answers(batch)
        with self._source.computing() as forward:
            forward.refuse(other)
            log_ref_N = forward.logprobs(other, other.mask_N)
        log_pi_N = self._own.logprobs(other, other.mask_N)
        gap = float((log_pi_N.astype(np.float64) - log_ref_N).sum())
        return max(0.0, gap / len(other.lengths_S))


class OldPolicy(QueriedModel):
    """The policy π_old of ratios, computed with kept weights."""

    name = setting = "old"

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with log π_old of each token; unchanged if the objective uses another π_old."""
        return replace(work, log_old_N=self._logprobs(work, work.batch)) if work.old == "kept" else work


class TeacherModel(QueriedModel):
    """The teacher policy of distillation, computed by the learner."""

    name = "teacher"
    setting = "teachers[0]"
    columns = frozenset({"top_k"})

    def __init__(self, parts: LearnerParts, config: TeacherConfig) -> None:
        """Create the teacher policy that ``config`` describes, for the learner with these ``parts``."""
        super().__init__(parts, config)
        self._config = config
        vocab_size = count_vocabulary(parts.model)
        self._top_request = TopRequest(num=min(parts.config.top_k, vocab_size), below=vocab_size)
        """The request for the teacher's likeliest entries, among those that the trained model has, too."""

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with the columns of the teacher that the objective reads: the likeliest entries, or the
        log-probabilities and the advantages with their credit."""
        batch, version = _unrouted(work.batch), self._config.get_version(work.batch.step)
        if version is not None:
            count = int(work.mask_N.sum())
            work = replace(work, metrics={**work.metrics, "teacher_version": Ratio(float(version * count), count)})
        if "top_k" in self._objective.columns:
            with self._source.computing() as forward:
                forward.refuse(batch)
                work = replace(work, top=forward.top_entries(batch, work.mask_N, self._top_request))
        if self._objective.teaching is None:
            return work
        log_nu_N = self._logprobs(work, batch).numpy()
        teacher_scores_N = TeacherScores(
            logprobs_T=np.where(work.mask_N, log_nu_N, np.float32(np.nan)),
            versions_T=np.where(work.mask_N, FROZEN if version is None else version, NOT_SAMPLED).astype(np.int32),
            ids_TK=np.zeros((batch.num_tokens, 0), np.int32),
            logs_TK=np.zeros((batch.num_tokens, 0), np.float32),
        )
        return credited(replace(work, teacher_scores_N=teacher_scores_N), self._objective, log_nu_N.astype(np.float64))


def exchange_answers(batch: Batch) -> Batch:
    """Return the batch with the answer of each sample (from its first loss token to the end) replaced by the answer of
    the previous sample; the first sample gets the answer of the last one. The answers are then independent of their
    prompts."""
    ends = np.cumsum(batch.lengths_S.astype(np.int64))
    places = [np.arange(end - length, end) for end, length in zip(ends, batch.lengths_S, strict=True)]
    begins = [int(np.argmax(batch.mask_N[place])) for place in places]
    prompts = [place[:begin] for place, begin in zip(places, begins, strict=True)]
    answers = [place[begin:] for place, begin in zip(places, begins, strict=True)]
    joined = [np.concatenate(pair) for pair in zip(prompts, [answers[-1], *answers[:-1]], strict=True)]
    order = np.concatenate(joined)
    return Batch(
        step=batch.step,
        lengths_S=np.array([len(each) for each in joined], np.int32),
        groups_S=batch.groups_S,
        episodes_S=batch.episodes_S,
        ids_N=batch.ids_N[order],
        mask_N=batch.mask_N[order],
        logprobs_N=batch.logprobs_N[order],
        versions_N=batch.versions_N[order],
        advantages_N=batch.advantages_N[order],
    )


def _unrouted(batch: Batch) -> Batch:
    """Return the batch without its recorded routing, so that a mixture of experts chooses its own experts."""
    return msgspec.structs.replace(batch, routing=None)


def _read_copy(parts: LearnerParts, config: Frozen, path: str, setting: str) -> Copy:
    """Return a copy of the weights in the directory ``path``; the model's weights do not change. ``setting`` is the
    name of the policy's table in the run file, for the :class:`~headrace.base.errors.ConfigError` that is raised if the
    weights do not match the model."""
    copy = Copy(parts.model, parts.optimizer.trained, config.device)
    try:
        Snapshot(parts.model, parts.optimizer, parts.ranks).restore_weights(Path(path))
    except CheckpointError as error:
        raise ConfigError(
            f"{setting}.path={path!r} cannot be kept beside this model: {error.problem}",
            remedy=f"give the directory of a model (or adapter) of the same architecture, or set {setting}.kind = "
            "'model' for another with the same vocabulary",
        ) from error
    copy.swap()
    for one in parts.optimizer.trained:
        one.refresh_master()
    return copy


class SampledPolicies(AuxiliaryModel):
    """The exact π_old of every token: the policy with the weights of the version that sampled the token.

        version of the learner        v − 2    v − 1      v
        tokens of the batch           ▒▒▒▒▒    ▒▒▒▒▒    ▒▒▒▒▒
        log π_old computed by         copy 2   copy 1   the model itself: log π without its gradient

    π/μ is the product of two ratios: π_old/μ differs from 1 only by the mismatch of engine and learner, and π/π_old is
    the change by the updates since the token's version. Each older version with tokens in the batch needs one pass over
    the samples with its tokens. Source: arXiv 2605.12070.
    """

    name = "sampled"

    def __init__(self, parts: LearnerParts, config: SampledVersions) -> None:
        """Allocate copies of the trained weights for the last ``config.versions`` versions, for the learner with these
        ``parts``."""
        self._forward = parts.forward
        """The forward passes of the trained model."""
        trained = parts.optimizer.trained
        self._ring = Ring([Copy(parts.model, trained, config.device) for _ in range(config.versions)])
        """The weights of the last versions."""

    @property
    def swaps_weights(self) -> bool:
        """Return ``True``: the trained model computes with copies of older versions during :meth:`prepare`."""
        return True

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with log π_old of tokens of older versions, computed with the weights that sampled them, and
        NaN for other tokens. Raises :class:`~headrace.base.errors.RunError` if such weights are not kept any more."""
        batch = work.batch
        ages_N = np.where(batch.versions_N < 0, 0, batch.step - batch.versions_N.astype(np.int64))
        log_old_N = np.full(batch.num_tokens, np.nan, np.float32)
        old_N = work.mask_N & (ages_N > 0)
        for age in np.unique(ages_N[old_N]).tolist():
            if age > len(self._ring):
                raise RunError(
                    f"step {batch.step} has tokens of version {batch.step - age}, and the weights of the last "
                    f"{len(self._ring)} versions are kept",
                    remedy="set learner.old.versions to the largest age of a token (flow.max_age)",
                )
            mask_N = old_N & (ages_N == age)
            with self._ring.swap_in_age(age):
                log_old_N[mask_N] = self._forward.logprobs(batch, mask_N)[mask_N]
        return replace(work, log_old_N=torch.from_numpy(log_old_N))

    def before_update(self) -> None:
        """Keep a copy of the weights that the update will replace."""
        self._ring.before_update()

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of all kept versions for a snapshot, labelled ``place|name``; place 0 is the oldest
        version."""
        return self._ring.state()

    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore the kept versions from the tensors that :meth:`state` returned."""
        self._ring.set_state(state)
