"""The allocation of an engine's key-value cache, whose size depends on the memory that is free when the engine
starts."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from headrace.base.errors import ConfigError
from headrace.engine.config import SHARED_CACHE_SHARE, EngineConfig
from headrace.engine.native.blocks import count_blocks
from headrace.models.paged.base import BLOCK, LayerShape, PagedCache


def make_cache(
    config: EngineConfig, max_context: int, shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device
) -> PagedCache:
    """Allocate and return the key-value cache, for ``config.cache_tokens`` tokens. If that is not set, the cache is
    large enough for ``config.max_sequences`` sequences of ``max_context`` tokens, but takes at most the share
    ``config.cache_share`` of the free memory. ``shapes`` are the shapes of keys and values in each layer, which are
    stored as ``dtype`` on ``device``.

    Raises :class:`~headrace.base.errors.ConfigError` if there is not enough memory.
    """
    block_bytes = BLOCK * dtype.itemsize * sum(shape.numbers for shape in shapes)
    free_bytes = free_device_bytes(device)
    share = SHARED_CACHE_SHARE if config.cache_share is None else config.cache_share
    if config.cache_tokens is not None:
        num_blocks = count_blocks(config.cache_tokens)
    else:
        max_blocks = config.max_sequences * count_blocks(max_context)
        num_blocks = max(1, min(max_blocks, int(share * free_bytes) // max(1, block_bytes)))
    why = f"{free_bytes} are free"
    try:
        if num_blocks * block_bytes <= free_bytes:
            return PagedCache(shapes, num_blocks, dtype=dtype, device=device)
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises RuntimeError
        why = str(error)
    raise ConfigError(
        f"engine.cache_tokens={num_blocks * BLOCK} needs {num_blocks * block_bytes} bytes of memory on {device}: {why}",
        remedy="lower engine.cache_tokens, engine.max_sequences or engine.max_context",
    )


def free_device_bytes(device: torch.device) -> int:
    """Return the free memory of ``device`` in bytes: of the GPU, or of the machine if the device is the processor."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
