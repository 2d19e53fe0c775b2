"""A sandbox for untrusted code: each run is a new process without network access and with resource limits."""

from headrace.rollout.scoring.sandbox.base import Finished, Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.run import run, run_python

Limits = SandboxLimits
"""The public name of the limits: ``headrace.sandbox.Limits``."""

__all__ = ["Finished", "Limits", "Reason", "SandboxLimits", "run", "run_python"]
