"""The four loops of the controller, one file each: rollout, scoring, learning and syncing. ``feeding`` is a part of the
learning loop."""

from headrace.control.loops.learning import LearningLoop
from headrace.control.loops.rollout import RolloutLoop
from headrace.control.loops.scoring import ScoringLoop
from headrace.control.loops.syncing import SyncLoop

__all__ = ["LearningLoop", "RolloutLoop", "ScoringLoop", "SyncLoop"]
