"""A fast verifier and a process reward of the speed of a small model, for the benchmark of scoring."""

import asyncio


def verifier(completion: str) -> float:
    """The share of small digits."""
    return sum(character in "01234" for character in completion) / max(1, len(completion))


async def process(completion: str) -> float:
    """The same, 0.2 s after the turn was sampled."""
    await asyncio.sleep(0.2)
    return verifier(completion)
