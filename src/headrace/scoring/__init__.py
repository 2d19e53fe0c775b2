"""Scoring: rewards, as a stage of its own with its own workers and deadlines."""

from headrace.scoring.base import Scorer, Scores
from headrace.scoring.reward import RewardFunction, load_reward

__all__ = ["RewardFunction", "Scorer", "Scores", "load_reward"]
