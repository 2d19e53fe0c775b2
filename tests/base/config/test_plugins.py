"""Names that installed packages offer: found without an import, refused with the package's name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from headrace.base import plugins
from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry


class Distribution:
    def __init__(self, name: str) -> None:
        self.name = name


def offers(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, str, str]) -> Registry[object]:
    found = []
    for package, name, target in rows:
        entry = EntryPoint(name=name, value=target, group="headrace.losses")
        vars(entry)["dist"] = Distribution(package)
        found.append(entry)
    monkeypatch.setattr(plugins, "get_entry_points", lambda _group: tuple(found))
    return Registry(
        group="headrace.losses",
        setting="algo.loss",
        rows={"grpo": "json:loads"},
        check=lambda made: None if callable(made) else "cannot be called",
    )


def test_a_name_that_nothing_offers_is_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = offers(monkeypatch, ("stranger", "huber", "json:dumps"))
    assert registry.names() == ("grpo", "huber")
    with pytest.raises(ConfigError, match=r"algo.loss='hubber' is not known\n  remedy: did you mean 'huber'"):
        registry.load("hubber")


def test_an_installation_older_than_its_source_is_told_as_such() -> None:
    """A clone that was updated, and not installed again, lists nothing where its source looks."""
    nothing: Registry[object] = Registry(group="headrace.not_there_before", setting="the endpoint")
    with pytest.raises(ConfigError, match=r"the endpoint 'agents' is not known\n  remedy: install Headrace again"):
        nothing.offer("agents")


def test_a_package_that_cannot_be_imported_stops_only_the_runs_that_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = offers(monkeypatch, ("stranger", "huber", "package_that_is_not_there:HUBER"))
    assert callable(registry.load("grpo"))
    with pytest.raises(ConfigError, match=r"offered by the package stranger .* cannot be imported: ModuleNotFound"):
        registry.load("huber")


def test_a_missing_object_of_a_package_is_told_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = offers(monkeypatch, ("stranger", "huber", "json:no_such_thing"))
    with pytest.raises(ConfigError, match="offered by the package stranger as json:no_such_thing"):
        registry.load("huber")


def test_a_name_of_two_packages_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = offers(monkeypatch, ("one", "huber", "json:dumps"), ("two", "huber", "json:loads"))
    with pytest.raises(ConfigError, match="offered by the packages one and two"):
        registry.load("huber")


def test_a_package_cannot_change_what_a_name_of_headrace_means(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = offers(monkeypatch, ("stranger", "grpo", "json:dumps"))
    assert registry.offer("grpo").target == "json:loads"
    assert "the package stranger offers algo.loss='grpo'" in caplog.text


def test_an_object_that_breaks_its_contract_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = offers(monkeypatch, ("stranger", "huber", "json.decoder:FLAGS"))
    with pytest.raises(ConfigError, match=r"which the package stranger offers as json.decoder:FLAGS, cannot be called"):
        registry.load("huber")
