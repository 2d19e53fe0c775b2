from __future__ import annotations

from pathlib import Path

import pytest

from tests.policy.builders import tiny


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("policy") / "model")
