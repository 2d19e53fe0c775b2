"""Scoring: rewards, as a stage of its own with its own workers and deadlines. A new kind of reward is a file here and
a row of ``AnyReward``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
RewardConfig = Annotated[AnyReward, Field(discriminator="kind")]

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
