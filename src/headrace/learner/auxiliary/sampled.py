"""The exact π_old of every token: log π under the learner's weights of the version that sampled it.

    version of the learner        v − 2    v − 1      v
    tokens of the batch           ▒▒▒▒▒    ▒▒▒▒▒    ▒▒▒▒▒
    log π_old computed by         copy 2   copy 1   the model itself: log π without its gradient

π/μ is the product of two ratios: π_old/μ is 1 but for the mismatch of engine and learner, and π/π_old is what the
updates since the token's version have changed. One pass over the samples with tokens of a version is needed for each
version older than the present one. Source: arXiv 2605.12070.

Shape legend: N tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.base.errors import RunError
from headrace.learner.auxiliary.base import AuxiliaryModel, LearnerParts
from headrace.learner.auxiliary.config import SampledVersions
from headrace.learner.auxiliary.kept import Copy, Ring
from headrace.learner.work import StepWork


class SampledPolicies(AuxiliaryModel):
    """The policies that sampled the tokens of a batch, as far as they are older than the model."""

    name = "sampled"

    def __init__(self, parts: LearnerParts, config: SampledVersions) -> None:
        self._forward = parts.forward
        trained = parts.optimizer.trained
        self._ring = Ring([Copy(parts.model, trained, config.device) for _ in range(config.versions)])

    @property
    def swaps_weights(self) -> bool:
        return True

    def prepare(self, work: StepWork) -> StepWork:
        batch = work.batch
        ages_N = np.where(batch.versions_N < 0, 0, batch.step - batch.versions_N.astype(np.int64))
        log_old_N = np.full(batch.num_tokens, np.nan, np.float32)
        old_N = work.mask_N & (ages_N > 0)
        for age in np.unique(ages_N[old_N]).tolist():
            if age > len(self._ring):
                raise RunError(
                    f"step {batch.step} has tokens of version {batch.step - age}, and the weights of the last "
                    f"{len(self._ring)} versions are kept",
                    remedy="set learner.old.versions to the greatest age of a token (flow.max_age)",
                )
            mask_N = old_N & (ages_N == age)
            with self._ring.swapped_in_from(age):
                log_old_N[mask_N] = self._forward.logprobs(batch, mask_N)[mask_N]
        return replace(work, log_old_N=torch.from_numpy(log_old_N))

    def before_update(self) -> None:
        self._ring.before_update()

    def state(self) -> Iterable[tuple[str, Tensor]]:
        return self._ring.state()

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        self._ring.set_state(state)
