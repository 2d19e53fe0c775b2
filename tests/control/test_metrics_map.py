"""The map of the metrics, in the docstring of ``headrace.control.metrics``, names every number that a run reports."""

import re
from fnmatch import fnmatch

import pytest

from headrace.base.types.metrics import REGISTRY
from headrace.control import Summary, metrics

DRAWN = {name.rstrip(",;:") for name in re.split(r"[\s()]+", metrics.__doc__ or "")}
PATTERNS = [name.replace("...", "*") for name in DRAWN if "*" in name or name.endswith("/...")]
NAMES = [row.name for row in REGISTRY]
OF_THE_LEARNER = {*NAMES[NAMES.index("loss") :], "forward_backward_s", "optim_s", "tokens", "age_mean", "age_max"}
"""Metrics that come with the report of the learner."""


@pytest.mark.parametrize("name", Summary.__struct_fields__)
def test_every_key_of_the_summary_is_on_the_map(name: str) -> None:
    assert name in DRAWN


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_THE_LEARNER])
def test_every_metric_that_the_controller_reports_is_on_the_map(name: str) -> None:
    stem = re.sub(r"/\{\w+\}$", "", name)
    assert {name, stem} & DRAWN or any(fnmatch(name, pattern) for pattern in PATTERNS)
