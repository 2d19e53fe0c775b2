"""The auxiliary model of a teacher that a separate engine has computed. The teacher's log-probabilities of each token
are in the batch.

    teacher's engine ··▶ scoring ··▶ the episode's columns ··▶ batch.teacher_scores ──▶ log ν, K likeliest entries

Shape legend: N tokens of the batch.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.algo.base import Ratio
from headrace.algo.objective import Objective
from headrace.base.errors import RunError
from headrace.base.types.versions import FROZEN
from headrace.learner.auxiliary.base import AuxiliaryModel, LearnerParts
from headrace.learner.forward import TopK
from headrace.learner.work import StepWork


class ExternalTeacher(AuxiliaryModel):
    """The teacher policy of distillation, computed by another process before the batch was assembled. It runs no model,
    and reads the teacher's log-probabilities from the batch."""

    name = "teacher"
    columns = frozenset({"top_k"})

    def __init__(self, parts: LearnerParts) -> None:
        """Record which of the teacher's columns the objective of ``parts`` reads."""
        self._objective = parts.objective
        self._reads_top = "top_k" in parts.objective.columns
        """Whether the objective reads the teacher's likeliest entries."""

    @property
    def has_state(self) -> bool:
        """Return ``False``: this model has no state."""
        return False

    def prepare(self, work: StepWork) -> StepWork:
        """Return ``work`` with the teacher's K likeliest entries, if the objective reads them, and with the objective's
        credit for log ν added to the advantages. Raises :class:`~headrace.base.errors.RunError` if tokens in the mask
        have no teacher's log-probability."""
        teacher_scores = work.batch.teacher_scores
        missing_N = work.mask_N if teacher_scores is None else work.mask_N & ~teacher_scores.known_T
        if teacher_scores is None or missing_N.any() or (self._reads_top and not teacher_scores.ids_TK.shape[1]):
            raise RunError(
                f"step {work.batch.step} learns from teachers, and {int(missing_N.sum())} of {int(work.mask_N.sum())} "
                f"tokens come without what they say{'' if missing_N.any() else ', which is without likeliest entries'}",
                remedy="train episodes that were scored with these learner.teachers",
            )
        dated_N = work.mask_N & (teacher_scores.versions_T != FROZEN)
        if dated_N.any():
            version = Ratio(float(teacher_scores.versions_T[dated_N].sum()), int(dated_N.sum()))
            work = replace(work, metrics={**work.metrics, "teacher_version": version})
        if self._reads_top:
            top = TopK(ids_NK=torch.tensor(teacher_scores.ids_TK), logs_NK=torch.tensor(teacher_scores.logs_TK))
            work = replace(work, top=top)
        return credited(work, self._objective, teacher_scores.logprobs_T.astype(np.float64))


def credited(work: StepWork, objective: Objective, log_nu_N: npt.NDArray[np.float64]) -> StepWork:
    """Return ``work`` with the objective's credit for log ν added to the advantages, and with the metric
    ``kl_teacher``; unchanged if the objective has no such credit. ``log_nu_N`` is the teacher's log-probability of each
    token, ``[N]``; the credit of a loss token is a function of log ν − log μ."""
    credit = objective.teaching
    if credit is None:
        return work
    gap_N = np.where(work.mask_N, log_nu_N - work.batch.logprobs_N, 0.0)
    advantages_N = work.batch.advantages_N + np.where(work.mask_N, credit.credit_tokens(gap_N), 0.0)
    batch = msgspec.structs.replace(work.batch, advantages_N=advantages_N.astype(np.float32))
    measured = {"kl_teacher": Ratio(-float(gap_N.sum()), int(work.mask_N.sum()))}
    return replace(work, batch=batch, metrics={**work.metrics, **measured})
