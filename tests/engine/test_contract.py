"""One contract for all engines: the embedded one, and servers behind their protocols."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.served.config import ServerConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.testing.engine_contract import CLAUSES, Clause, keep
from headrace.testing.engine_rig import Rig, native_rig, served_rig
from headrace.testing.engine_servers import fake_server

KINDS = ("native", "vllm", "sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "m", TinySpec(vocab="0123456789+= abcdefgh", init_std=0.2))


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    kind, scratch = request.param, tmp_path_factory.mktemp(request.param)
    if kind == "native":
        with native_rig(model, scratch) as made:
            yield made
        return
    with (
        fake_server(kind, model) as (url, _),
        served_rig(kind, ServerConfig(urls=(url,), any_version=True), model, scratch) as made,
    ):
        yield made


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.name)
def test_engine_keeps_what_it_promises_and_refuses_the_rest(clause: Clause, rig: Rig) -> None:
    keep(clause, rig)
