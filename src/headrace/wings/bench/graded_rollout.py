"""The demo's question as an environment: a worker asks for the one answer, and leaves the grading to the reward."""

from typing import Any


async def rollout(task: dict[str, Any], policy: Any) -> None:
    """One answer."""
    await policy.sample(policy.prompt_ids)
