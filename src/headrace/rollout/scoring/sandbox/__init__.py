"""A sandbox for code that nobody has read: a fresh process for each sample, without network, under limits."""

from headrace.rollout.scoring.sandbox.base import Finished, Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.run import run, run_python

__all__ = ["Finished", "Reason", "SandboxLimits", "run", "run_python"]
