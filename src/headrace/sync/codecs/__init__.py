"""How weights become bytes. A new codec is a form in a file here, or a row of two that are there."""

import torch

from headrace.base.errors import ConfigError, nearest
from headrace.sync.base import Codec
from headrace.sync.codecs.cast import Cast
from headrace.sync.codecs.float8 import Float8
from headrace.sync.codecs.full import AsItIs

CODECS = {
    "full": Codec(form=AsItIs()),
    "cast_bf16": Codec(form=Cast(torch.bfloat16)),
    "cast_fp8": Codec(form=Float8()),
    "delta": Codec(form=AsItIs(), differences=True),
    "adapter": Codec(form=AsItIs(), adapters_only=True),
}
"""By the name that ``sync.codec`` gives them."""


def codec_of(name: str) -> Codec:
    """Raises :class:`~headrace.base.errors.ConfigError` for an unknown one."""
    if name not in CODECS:
        raise ConfigError(f"sync.codec={name!r} is no codec", remedy=nearest(name, CODECS))
    return CODECS[name]


__all__ = ["CODECS", "codec_of"]
