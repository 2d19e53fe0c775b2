"""The codecs, which represent weights as bytes. To add a codec, add a row to :data:`CODECS`, with an existing form (the
representation of one tensor) or a new one in a file of this folder."""

import torch

from headrace.base.errors import ConfigError, nearest
from headrace.sync.base import Codec
from headrace.sync.codecs.forms import Cast, Float8, IdentityForm

CODECS = {
    "full": Codec(form=IdentityForm()),
    "cast_bf16": Codec(form=Cast(torch.bfloat16)),
    "cast_fp8": Codec(form=Float8()),
    "delta": Codec(form=IdentityForm(), differences=True),
    "adapter": Codec(form=IdentityForm(), adapters_only=True),
}
"""The codecs by their names in ``sync.codec``."""


def get_codec(name: str) -> Codec:
    """Return the codec called ``name`` in ``sync.codec``. Raises :class:`~headrace.base.errors.ConfigError` for an
    unknown name."""
    if name not in CODECS:
        raise ConfigError(f"sync.codec={name!r} is not a codec", remedy=nearest(name, CODECS))
    return CODECS[name]


__all__ = ["CODECS", "get_codec"]
