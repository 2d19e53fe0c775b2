"""Filters for groups that sample more episodes than are trained: ``redundancy`` trains the episodes that end first, and
``resample_correct`` the correct answers with the fewest errors. A filter decides about a scored group: it keeps the
group, drops it, or leaves some of its episodes out."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import pydantic
from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict
from headrace.flow.filters.length import was_cut

REDUNDANT = "redundant"
"""The reason under which an episode is counted that was cancelled because enough other episodes of its group had
ended."""


class Redundancy(FilterSection):
    """A filter that trains the first ``keep`` of the ``flow.group_size`` episodes of a group to end, and cancels the
    other episodes in the engine at once. The cancelled episodes are counted under the reason ``redundant``.

    Long answers finish late, so the trained answers are shorter than the sampled ones. Advantages are computed over the
    kept episodes.
    """

    advice: ClassVar[str] = "raise keep, or lower flow.min_episodes"
    """Advice for a user whose groups are all dropped by this filter."""

    kind: Literal["redundancy"] = "redundancy"
    """Selects this filter."""
    keep: int = Field(ge=1)
    """Number of episodes of a group that are trained."""

    @property
    def first(self) -> int | None:
        """Return how many finished episodes complete a group: ``keep``. The controller then cancels the other
        episodes."""
        return self.keep

    def episodes_left(self, num_episodes: int) -> int:
        """Return how many episodes of a group of ``num_episodes`` remain: ``keep``."""
        return self.keep

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Return the problem and the remedy, for an error message, if a group has at most ``keep`` episodes, so that
        the filter would have no effect; otherwise ``None``."""
        if self.keep >= num_episodes:
            return (
                f"keep={self.keep}, and a group has {num_episodes} episodes: none would be redundant",
                f"set keep <= {num_episodes - 1}, or raise flow.group_size",
            )
        return None

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return :data:`KEEP`: the redundant episodes were already cancelled while the group ran."""
        return KEEP


_DRAWS = 0x526F43
"""A constant that is part of the seed of this filter's random generator, so that its draws differ from other draws with
the same seed."""


class ResampleCorrect(FilterSection):
    """A filter that keeps ``keep`` episodes of a group. Correct and incorrect episodes are kept in the proportion in
    which they were sampled: the correct episodes with the fewest errors, and incorrect episodes drawn uniformly. The
    episodes that are left out are counted under the reason ``oversampled``.

    The errors of a correct answer are p_err + p_format. p_err is the share of its tool calls (turns by ``tool``) that
    failed, ½ for an answer without tool calls. p_format is 1 if the answer was truncated or a tag is missing, otherwise
    min(1, (answers − 1)/turns). Ties are broken at random. Advantages are computed over the kept episodes. Source:
    Shang et al. (rStar2-Agent), arXiv 2508.20722, section 3.2. The text of the paper draws correct answers with the
    inverse of their errors, which is infinite at 0; the program of its authors keeps the answers with the fewest
    errors, and so does this filter.
    """

    advice: ClassVar[str] = "raise keep, or lower flow.min_episodes"
    """Advice for a user whose groups are all dropped by this filter."""

    kind: Literal["resample_correct"] = "resample_correct"
    """Selects this filter."""
    keep: int = Field(ge=2)
    """Number of episodes of a group that are trained; the paper keeps half of ``flow.group_size``."""
    min_each: int = Field(default=1, ge=0)
    """The smallest number of correct and of incorrect episodes that are kept, if there are that many."""
    threshold: float = 0.5
    """An answer with a reward above this value counts as correct."""
    answer_tags: tuple[str, str] | None = None
    """The tags around an answer, as ``["<answer>", "</answer>"]``. Unset: tags are not checked."""

    @pydantic.model_validator(mode="after")
    def _refuse_impossible_settings(self) -> ResampleCorrect:
        """Raise :class:`ConfigError` for a ``keep`` that is smaller than ``min_each`` correct plus ``min_each``
        incorrect answers, and for empty answer tags."""
        if 2 * self.min_each > self.keep:
            raise ConfigError(
                f"filter 'resample_correct' has min_each={self.min_each} and keep={self.keep}: both kinds do not fit",
                remedy=f"set min_each <= {self.keep // 2}",
            )
        if self.answer_tags is not None and not all(self.answer_tags):
            raise ConfigError(
                f"filter 'resample_correct' has answer_tags={list(self.answer_tags)!r}: an empty tag stands everywhere",
                remedy='give two texts, as ["<answer>", "</answer>"], or leave answer_tags out',
            )
        return self

    def episodes_left(self, num_episodes: int) -> int:
        """Return how many of ``num_episodes`` episodes remain: at most ``keep``."""
        return min(self.keep, num_episodes)

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Return the problem and the remedy, for an error message, if a group has at most ``keep`` episodes, so that
        none would be left out; otherwise ``None``."""
        if self.keep >= num_episodes:
            return (
                f"keep={self.keep}, and a group has {num_episodes} episodes: it would leave none out",
                f"set keep <= {num_episodes - 1}, or raise flow.group_size",
            )
        return None

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return the decision to leave out all but ``keep`` of the scored episodes; :data:`KEEP` if the group has at
        most ``keep`` of them. The random choices depend only on the run's seed and the number of the group."""
        episodes = group.scored
        if len(episodes) <= self.keep:
            return KEEP
        rng = np.random.default_rng([context.seed, _DRAWS, group.number])
        shuffled = [episodes[index] for index in rng.permutation(len(episodes))]
        correct = [episode for episode in shuffled if (episode.reward or 0.0) > self.threshold]
        incorrect = [episode for episode in shuffled if (episode.reward or 0.0) <= self.threshold]
        # a stable sort keeps the random order of equals
        correct.sort(key=lambda episode: self.errors(episode, context))
        num_wrong = self._num_wrong(len(correct), len(incorrect))
        kept_places = {episode.key.place for episode in [*incorrect[:num_wrong], *correct[: self.keep - num_wrong]]}
        return Verdict(
            reason="oversampled",
            leave_out=frozenset(episode.key.place for episode in episodes) - frozenset(kept_places),
        )

    def _num_wrong(self, num_right: int, num_wrong: int) -> int:
        """Return how many of ``num_wrong`` incorrect answers to keep, in a group with ``num_right`` correct answers. It
        is the share of incorrect answers times ``keep``, adjusted so that at least ``min_each`` answers of each kind
        are kept where the group has that many."""
        share = round(Fraction(num_wrong * self.keep, num_right + num_wrong))
        least = max(min(self.min_each, num_wrong), self.keep - num_right)
        most = min(self.keep - min(self.min_each, num_right), num_wrong)
        return min(max(share, least), most)

    def errors(self, episode: EpisodeGraph, context: FilterContext) -> float:
        """Return p_err + p_format of an episode, from 0 to 2: the share of its tool calls that failed (½ if it made
        none) plus its format errors. The filter keeps the correct answers with the lowest values."""
        calls = [turn.failed for turn in episode.turns if turn.author == "tool" and turn.branch is None]
        failed = sum(calls) / len(calls) if calls else 0.5
        return failed + self._format_errors(episode, context)

    def _format_errors(self, episode: EpisodeGraph, context: FilterContext) -> float:
        """Return p_format of an episode, from 0 to 1: 1 for a truncated answer or one without a complete pair of answer
        tags; otherwise the number of pairs beyond the first, divided by the number of sampled turns. 0 if tags are not
        checked."""
        if was_cut(episode):
            return 1.0
        if self.answer_tags is None:
            return 0.0
        own_turns = [turn.tokens for turn in episode.turns if turn.branch is None]
        sampled_turns = [tokens for tokens in own_turns if tokens.sampled_T.any()]
        text = "".join(context.decode(tokens.ids_T.tolist()) for tokens in sampled_turns)
        opened, closed = (text.count(tag) for tag in self.answer_tags)
        if opened != closed or opened == 0:
            return 1.0
        return min(1.0, (opened - 1) / len(sampled_turns))
