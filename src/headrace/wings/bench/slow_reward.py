"""Rewards behind a wait of 50 to 500 ms, as tools and sandboxes take, and without one."""

import asyncio
import zlib


async def right(completion: str, prompt: str, answer: int) -> float:
    """The demo's: 1 for the right sum."""
    await _wait(completion, prompt)
    written = completion[::-1]
    return float(len(written) == 3 and written.isascii() and written.isdigit() and int(written) == answer)


async def slow_odd(completion: str, prompt: str) -> float:
    """Something that differs from answer to answer."""
    await _wait(completion, prompt)
    return odd(completion)


def odd(completion: str) -> float:
    """The same at once: the share of characters with odd codes."""
    return sum(ord(character) % 2 for character in completion) / max(1, len(completion))


async def _wait(completion: str, prompt: str) -> None:
    """It is fixed by prompt and completion."""
    await asyncio.sleep(0.05 + 0.45 * (zlib.crc32(f"{prompt}{completion}".encode()) / 0xFFFFFFFF))
