"""The demo's reward after a wait of 50 to 500 ms, as tools and sandboxes take."""

import asyncio
import zlib


async def slow_sum(completion: str, prompt: str, answer: int) -> float:
    """Return 1 for the correct sum ``answer`` and else 0; the wait depends on prompt and completion alone."""
    await asyncio.sleep(0.05 + 0.45 * (zlib.crc32(f"{prompt}{completion}".encode()) / 0xFFFFFFFF))
    written = completion[::-1]
    return float(len(written) == 3 and written.isascii() and written.isdigit() and int(written) == answer)
