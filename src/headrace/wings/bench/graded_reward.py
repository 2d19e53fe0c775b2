"""The demo's reward with marks for single digits, behind a wait: answers of any length earn different rewards."""

import asyncio


async def reward(completion: str, answer: int) -> float:
    """The share of the right digits that stand in their places."""
    await asyncio.sleep(0.03)
    return sum(map(str.__eq__, completion, f"{answer:03d}"[::-1])) / 3
