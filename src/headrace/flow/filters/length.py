"""A filter for answers that were truncated or are too long. A filter decides about a scored group: it keeps the group,
drops it, leaves episodes out, or masks episodes (their rewards count in the baseline, their tokens carry no loss)."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, StopReason
from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict


class LengthFilter(FilterSection):
    """A filter that masks or leaves out each episode with a turn that reached the length limit, or with more than
    ``max_tokens`` sampled tokens. These episodes are counted under the reason ``overlong``.

    ``mask`` is the overlong filtering of DAPO: advantages are computed over all sampled episodes, and a truncated
    answer contributes no loss. ``leave_out`` computes advantages over the other episodes. A group with too few episodes
    left is dropped, and so is a group whose answers are all masked, unless ``all_masked`` keeps it. Source: Yu et al.
    (DAPO), arXiv 2503.14476, section 3.4.
    """

    advice: ClassVar[str] = "raise engine.max_new_tokens (or the filter's max_tokens), or ask for shorter answers"
    """Advice for a user whose groups are all dropped by this filter."""

    kind: Literal["length"] = "length"
    """Selects this filter."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Greatest number of sampled tokens of an episode. Unset: only truncated answers count as too long."""
    action: Literal["mask", "leave_out"] = "mask"
    """The treatment of an answer that is too long: ``mask`` or ``leave_out``."""
    all_masked: Literal["replace", "keep"] = "replace"
    """The treatment of a group whose answers are all masked. ``replace`` drops it (``overlong``), and another group
    takes its place in the batch, as in DAPO. ``keep`` leaves it in its batch, where it trains nothing, as in TRL
    (``mask_truncated_completions``): such a batch has fewer tokens that carry loss."""

    @pydantic.model_validator(mode="after")
    def _refuse_keep_without_mask(self) -> LengthFilter:
        """Raise :class:`ConfigError` for ``all_masked = "keep"`` with another action than ``mask``, where it would have
        no effect."""
        if self.all_masked == "keep" and self.action != "mask":
            raise ConfigError(
                f"filter 'length' has all_masked='keep' and action={self.action!r}: nothing is masked",
                remedy="set action = 'mask', or leave all_masked out",
            )
        return self

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return the decision to mask the episodes of ``group`` that are too long, or to leave them out, as ``action``
        says; :data:`KEEP` if no episode is too long."""
        too_long = frozenset(episode.key.place for episode in group.scored if self._is_too_long(episode))
        if not too_long:
            return KEEP
        if self.action == "mask":
            return Verdict(reason="overlong", mask=too_long, keep_masked=self.all_masked == "keep")
        return Verdict(reason="overlong", leave_out=too_long)

    def _is_too_long(self, episode: EpisodeGraph) -> bool:
        """Return whether the episode was truncated at the length limit, or has more than ``max_tokens`` sampled
        tokens."""
        return was_cut(episode) or (self.max_tokens is not None and episode.length > self.max_tokens)


def was_cut(episode: EpisodeGraph) -> bool:
    """Return whether a sampled turn of the episode ended because it reached the length limit. Turns of branches are
    ignored."""
    return any(turn.stop_reason is StopReason.LENGTH for turn in episode.turns if turn.branch is None)
