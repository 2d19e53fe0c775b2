"""A sandbox for untrusted code: a fresh process for each sample, without network, under limits."""

from headrace.rollout.scoring.sandbox.base import Finished, Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.run import run, run_python

Limits = SandboxLimits
"""The public name of the limits: ``headrace.sandbox.Limits``."""

__all__ = ["Finished", "Limits", "Reason", "SandboxLimits", "run", "run_python"]
