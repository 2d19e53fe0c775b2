"""Settings of what people see."""

from __future__ import annotations

from typing import Literal

from headrace.config import Section


class ObserveConfig(Section):
    """What is shown while a run goes on, and what it leaves behind."""

    view: Literal["auto", "plain", "none"] = "auto"
    """``auto``: a live picture on a terminal, one line per step elsewhere; ``plain``: lines; ``none``: silence."""
    report: bool = True
    """Write the report with pictures at the end."""
