"""Reward functions and a rollout for benchmarks and fault tests. Runs load them from this file like a user's code."""

import asyncio
import zlib
from typing import Any


async def rollout(task: dict[str, Any], policy: Any) -> None:
    """Sample one answer of ``policy`` to the question of ``task``, without a reward, which the reward function
    computes. Runs whose environment is executed in a worker process use this rollout function."""
    await policy.sample(policy.prompt_ids)


async def partial_credit(completion: str, answer: int) -> float:
    """Return, after 0.03 s, the fraction of the digits of the sum ``answer`` that ``completion`` has at their
    positions.

    Answers of any length can have different rewards, so that groups have a learning signal.
    """
    await asyncio.sleep(0.03)
    return sum(map(str.__eq__, completion, f"{answer:03d}"[::-1])) / 3


def small_digits(completion: str) -> float:
    """Return the fraction of the characters of ``completion`` that are digits below 5, at once, like a fast
    verifier."""
    return sum(character in "01234" for character in completion) / max(1, len(completion))


async def process(completion: str) -> float:
    """Return the result of :func:`small_digits` for ``completion`` after 0.2 s, the time of a small process reward
    model."""
    await asyncio.sleep(0.2)
    return small_digits(completion)


def odd(completion: str) -> float:
    """Return the fraction of the characters of ``completion`` with odd codes, which differs from answer to answer."""
    return sum(ord(character) % 2 for character in completion) / max(1, len(completion))


async def slow_odd(completion: str, prompt: str) -> float:
    """Return the result of :func:`odd` after 50 to 500 ms, a delay that depends on prompt and completion alone."""
    await _wait(completion, prompt)
    return odd(completion)


async def slow_sum(completion: str, prompt: str, answer: int) -> float:
    """Return the demo's reward, 1 if ``completion`` is the sum ``answer`` (three digits, the least significant first)
    and else 0, after 50 to 500 ms, a delay that depends on ``completion`` and ``prompt``."""
    await _wait(completion, prompt)
    written = completion[::-1]
    return float(len(written) == 3 and written.isascii() and written.isdigit() and int(written) == answer)


async def _wait(completion: str, prompt: str) -> None:
    """Wait 50 to 500 ms, the time of a tool or a sandbox. The delay is computed from prompt and completion, so that it
    is the same in every run."""
    await asyncio.sleep(0.05 + 0.45 * (zlib.crc32(f"{prompt}{completion}".encode()) / 0xFFFFFFFF))
