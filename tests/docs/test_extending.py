"""The transport that the page about extending shows keeps the contract of transports, with every codec."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from headrace.base import plugins
from headrace.sync.codecs import CODECS
from headrace.sync.config import TRANSPORTS, Route
from headrace.testing.sync import CHECKS, Pair, open_pair
from tests.docs.pages import ROOT, read_blocks

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of the page, and its entry point, as an installed package would have it."""
    (block,) = [each for each in read_blocks(ROOT / "docs/extending.md") if each.title == "my_transport.py"]
    (tmp_path / block.title).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    titled = [each for each in read_blocks(ROOT / "docs/extending.md") if each.title == "pyproject.toml"]
    (named,) = [each for each in titled if "headrace.transports" in each.text]
    rows = tomllib.loads(named.text)["project"]["entry-points"]
    monkeypatch.setattr(
        plugins,
        "get_entry_points",
        lambda group: [EntryPoint(name=name, value=value, group=group) for name, value in rows.get(group, {}).items()],
    )
    vars(TRANSPORTS).pop("_offers", None)
    yield
    vars(TRANSPORTS).pop("_offers", None)
    sys.modules.pop("my_transport", None)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport_of_the_page_keeps_the_contract(check: Callable[[Pair], None], codec: str, tmp_path: Path) -> None:
    with open_pair(
        Route(transport="mine", codec=codec, address=str(tmp_path / "place"), deadline_s=10.0), seed=7
    ) as pair:
        check(pair)
