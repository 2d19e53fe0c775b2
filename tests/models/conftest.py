from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.kinds import tiny


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model of a kind, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make
