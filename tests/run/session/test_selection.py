"""What a run file says of filters and epochs is checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.run.session import load_config


def tree(**sections: Any) -> dict[str, Any]:
    return {"model": {"path": "m"}, **sections}


def test_length_that_no_answer_can_exceed_is_refused() -> None:
    flow = {"filters": ["zero_variance", {"kind": "length", "max_tokens": 64}]}
    with pytest.raises(ConfigError) as refused:
        load_config(tree(flow=flow, engine={"max_new_tokens": 64}))
    assert "flow.filters[1] 'length': max_tokens=64" in refused.value.problem
    assert "max_tokens < 64" in refused.value.remedy
    assert load_config(tree(flow=flow, engine={"max_new_tokens": 65})).flow.filters


def test_filter_is_overridden_by_name_and_misspelt_ones_get_the_nearest() -> None:
    assert [each.kind for each in load_config(tree(), ["flow.filters=length"]).flow.filters] == ["length"]
    with pytest.raises(ConfigError, match=r"flow\.filters\[0\]\.kind='zero_var' does not exist(.|\n)*'zero_variance'"):
        load_config(tree(), ["flow.filters=zero_var"])
