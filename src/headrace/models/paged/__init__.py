"""Attention over a key-value cache in blocks: the interface (:mod:`.base`), and implementations in order of
preference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from headrace.base.errors import ConfigError, nearest
from headrace.models.paged.base import AttentionMaker

Offer = Callable[[torch.dtype, torch.device], AttentionMaker | None]
"""An entry of the registry: a function that returns the maker of the implementation, or ``None`` if it cannot run."""


def _compiled(dtype: torch.dtype, device: torch.device) -> AttentionMaker | None:
    """Return the maker of the attention that is compiled for the CPU; ``None`` if it does not support this dtype and
    device, or could not be built."""
    if device.type != "cpu":
        return None
    from headrace.models.kernels.ops import FORMATS
    from headrace.models.paged import compiled

    return compiled.maker(dtype) if dtype in FORMATS else None


def _triton(dtype: torch.dtype, device: torch.device) -> AttentionMaker | None:
    """Return the maker of the attention in Triton; ``None`` if the device is not a GPU or Triton is not installed."""
    if device.type != "cuda" or not importlib.util.find_spec("triton"):
        return None
    from headrace.models.paged.triton import TritonAttention

    return TritonAttention


def _reference(dtype: torch.dtype, device: torch.device) -> AttentionMaker | None:
    """Return the maker of the attention in plain torch, which runs everywhere."""
    from headrace.models.paged.reference import ReferenceAttention

    return ReferenceAttention


IMPLEMENTATIONS: dict[str, Offer] = {"compiled": _compiled, "triton": _triton, "reference": _reference}
"""The implementations in order of preference. The last implementation runs everywhere."""


def choose(dtype: torch.dtype, device: torch.device, prefer: str | None = None) -> tuple[str, AttentionMaker]:
    """Return the name and the maker of the best implementation, or of the implementation ``prefer``, for caches of
    ``dtype`` on ``device``.

    Raises :class:`~headrace.base.errors.ConfigError` if ``prefer`` does not exist or cannot run here.

    >>> choose(torch.float64, torch.device("cpu"))[0]
    'reference'
    """
    if prefer is not None and prefer not in IMPLEMENTATIONS:
        raise ConfigError(f"attention={prefer!r} does not exist", remedy=nearest(prefer, IMPLEMENTATIONS))
    for name in IMPLEMENTATIONS if prefer is None else [prefer]:
        maker = IMPLEMENTATIONS[name](dtype, device)
        if maker is not None:
            return name, maker
    raise ConfigError(
        f"attention={prefer!r} cannot run on {device.type} with {str(dtype).removeprefix('torch.')}",
        remedy="leave it out: the best one that runs is chosen then",
    )
