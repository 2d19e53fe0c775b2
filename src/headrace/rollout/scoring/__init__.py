"""Scoring: the computation of rewards, in worker processes with deadlines.

A new kind of reward is a file here and a member of ``AnyReward``.
"""

from __future__ import annotations

from typing import Annotated

from headrace.base.config.kinds import Kinds
from headrace.rollout.scoring.base import (
    NO_CONTEXT,
    Graded,
    Grader,
    RewardSection,
    Scorer,
    Scores,
    ScoringContext,
    TurnScorer,
)
from headrace.rollout.scoring.code import CodeReward
from headrace.rollout.scoring.exact import ExactReward
from headrace.rollout.scoring.function import FunctionReward
from headrace.rollout.scoring.judge import JudgeReward
from headrace.rollout.scoring.math import MathReward
from headrace.rollout.scoring.reward import RewardFunction, load_reward

AnyReward = FunctionReward | ExactReward | MathReward | CodeReward | JudgeReward
REWARDS = Kinds(
    AnyReward, group="headrace.scorers", setting="env.rewards", contract=RewardSection, implied={"ref": "function"}
)
"""All kinds of rewards, including the kinds of installed packages."""
RewardConfig = Annotated[AnyReward, REWARDS]

__all__ = [
    "NO_CONTEXT",
    "AnyReward",
    "CodeReward",
    "ExactReward",
    "FunctionReward",
    "Graded",
    "Grader",
    "JudgeReward",
    "MathReward",
    "RewardConfig",
    "RewardFunction",
    "RewardSection",
    "Scorer",
    "Scores",
    "ScoringContext",
    "TurnScorer",
    "load_reward",
]
