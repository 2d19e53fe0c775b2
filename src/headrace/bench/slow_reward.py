"""The demo's reward behind a wait of 50 to 500 ms, as tools and sandboxes take."""

import asyncio
import zlib


async def reward(completion: str, prompt: str, answer: int) -> float:
    """1 for the right sum; the wait is fixed by prompt and completion."""
    await asyncio.sleep(0.05 + 0.45 * (zlib.crc32(f"{prompt}{completion}".encode()) / 0xFFFFFFFF))
    written = completion[::-1]
    return float(len(written) == 3 and written.isascii() and written.isdigit() and int(written) == answer)
