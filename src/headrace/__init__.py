"""Headrace post-trains language models with reinforcement learning: generation never stops, training never waits."""

__version__ = "0.1.0"
