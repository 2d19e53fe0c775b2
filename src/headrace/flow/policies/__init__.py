"""Staleness policies: when a group may start, and which groups make the next batch."""

from headrace.flow.config import FlowConfig
from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.bounded import Bounded

__all__ = ["Bounded", "Selection", "StalenessPolicy", "make_policy"]


def make_policy(config: FlowConfig) -> StalenessPolicy:
    """The policy that ``config`` describes."""
    return Bounded(
        batch_size=config.groups_per_step,
        max_age=config.max_age,
        lead=config.effective_lead,
        capacity=config.capacity,
        strict=config.order == "strict",
    )
