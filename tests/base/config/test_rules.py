"""The tables of rules for run files: what their rows name, and what a former key is told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, get_args

import pydantic
import pytest

from headrace.base.config import Section, validate
from headrace.base.errors import ConfigError
from headrace.run.rules import SettingsRule, refuse
from headrace.run.rules.settings import SETTINGS
from headrace.run.rules.start import MACHINE, MODEL, ROWS
from headrace.run.session import RunConfig, load_config

TABLES: dict[str, tuple[SettingsRule[Any], ...]] = {
    "SETTINGS": SETTINGS,
    "MACHINE": MACHINE,
    "MODEL": MODEL,
    "ROWS": ROWS,
}
EVERY = [rule for table in TABLES.values() for rule in table]


def sections(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections(part)


def is_setting(key: str) -> bool:
    here: list[type[pydantic.BaseModel]] = [RunConfig]
    found: list[Any] = []
    for part in key.split("."):
        found = [model.model_fields[part].annotation for model in here if part in model.model_fields]
        here = [model for each in found for model in sections(each)]
    return bool(found)


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.reason[:40])
def test_the_words_of_a_rule_name_settings(rule: SettingsRule[Any]) -> None:
    for name in re.findall(r"\{(\w+\.[\w.]+)[^}]*\}", rule.reason + rule.remedy):
        section, key, *_ = name.split(".")
        assert section == "reward" or is_setting(f"{section}.{key.partition('[')[0]}"), name


def test_loading_goes_through_the_table_once_and_a_broken_rule_says_reason_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def broken(config: RunConfig) -> bool | Mapping[str, Any]:
        looks.append(config.run.steps)
        return config.run.steps > 5 and {"most": 5}

    rule: SettingsRule[RunConfig] = SettingsRule(
        broken=broken,
        reason="run.steps={run.steps} with flow.max_age={flow.max_age}",
        remedy="set run.steps <= {most}",
    )
    monkeypatch.setattr("headrace.run.session.config.SETTINGS", (rule, *SETTINGS))
    config = load_config({"model": {"path": "m"}, "run": {"steps": 3}})
    assert looks == [3]
    refuse([rule], config, config)
    with pytest.raises(ConfigError) as refused:
        load_config({"model": {"path": "m"}}, ["run.steps=7"])
    assert (refused.value.problem, refused.value.remedy) == (
        "run.steps=7 with flow.max_age=1",
        "set run.steps <= 5",
    )


class Inner(Section):
    """A section of one key."""

    max_age: int = 1


class Outer(Section):
    """A file whose key was renamed."""

    flow: Inner = Inner()
    former_keys: ClassVar[Mapping[str, str]] = {"flow.staleness": "flow.max_age"}


def test_a_former_key_is_refused_with_its_name_of_today() -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Outer, {"flow": {"staleness": 2}})
    assert refused.value.problem == "flow.staleness has another name now: flow.max_age"
    assert refused.value.remedy == "write flow.max_age"
