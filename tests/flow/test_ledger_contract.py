"""Every kind of ledger keeps the contract."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.flow import FlowConfig
from headrace.flow.ledger.opening import LEDGERS, make_ledger
from headrace.testing.ledgers import GROUP_SIZE, LEDGER_CHECKS, OpenLedger
from tests.redis_server import RedisServer, started

_numbers = count()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp(prefix="hr-"))  # a socket's path is short
    server = started(directory)
    yield server
    server.kill()
    shutil.rmtree(directory)


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", LEDGERS)
def test_ledger_keeps_the_contract(
    kind: str, check: Callable[[OpenLedger], None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("redis").url if kind == "redis" else ""
    config = FlowConfig(ledger=kind, ledger_url=url, group_size=GROUP_SIZE, groups_per_step=1)
    if kind != "memory":
        check(lambda: make_ledger(config, tmp_path))
        return
    ledger = make_ledger(config, tmp_path)  # it ends with the run: closing is the end of it
    ledger.close, close = (lambda: None), ledger.close
    check(lambda: ledger)
    close()
    assert not list(tmp_path.iterdir())


def test_url_without_redis_and_redis_without_url_are_refused() -> None:
    for settings in ({"ledger": "redis"}, {"ledger_url": "redis://localhost"}):
        with pytest.raises((ConfigError, ValueError), match="ledger_url"):
            FlowConfig(**settings)
