"""The base of every section of a run file."""

from __future__ import annotations

import pydantic


class Section(pydantic.BaseModel):
    """A frozen record of settings that knows no unknown key. Each component declares its own, beside its class."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
