"""One contract for all engines: the embedded one, and servers behind their protocols."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from headrace.engine.capabilities import Capabilities
from headrace.engine.config import ENGINES
from headrace.testing.engine_contract import CLAUSES, SUITES, Suite, run_clause
from headrace.testing.engine_rig import MAX_CONTEXT, native_rig, served_rig
from headrace.testing.servers import fake_server
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.launching import ServeRequirements
from tests.models.wrapped import tiny_wrapper

ROOM = 2 * MAX_CONTEXT
"""The longest sequence whose positions are not scaled, in the suite of a model that scales them."""


class TextPartSuite(Suite):
    """A suite over the text part of a multimodal checkpoint."""

    def requirements(self, directory: Path, can: Capabilities) -> ServeRequirements:
        """Make the checkpoint in ``directory``, of the sizes of all suites."""
        sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "initializer_range": 0.05}
        return ServeRequirements(
            path=str(tiny_wrapper(directory, self.kind, **sizes)),
            dtype="float32",
            max_context=MAX_CONTEXT,
            record_kept=can.kept_sets,
            sleeps=can.releases,
        )


SUITES_HERE = {
    **SUITES,
    "wrapper": TextPartSuite(kind="gemma3", clauses=CLAUSES, is_supported=lambda can: can.embedded),
    "longrope": Suite(
        kind="llama",
        extra={
            "max_position_embeddings": 4 * ROOM,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "short_factor": [1.0 + place / 16 for place in range(16)],
                "long_factor": [4.0] * 16,
                "original_max_position_embeddings": ROOM,
            },
        },
        clauses=CLAUSES,
        is_supported=lambda can: can.embedded,
    ),
    "hybrid": Suite(
        kind="qwen3_5_text",
        extra={
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "initializer_range": 0.1,  # beyond, float32 itself is not exact to the contract's 1e-4
        },
        clauses=CLAUSES,
        is_supported=lambda can: can.embedded,
    ),
}
CASES = [
    *(
        (kind, name, "files")
        for kind in ENGINES.own_names()
        for name, suite in SUITES_HERE.items()
        if suite.is_supported(ENGINES.load(kind).capabilities)
    ),
    *(("vllm", name, "gloo") for name in SUITES),
]


GATE = {
    *(("native", name, "files") for name in (*SUITES, "hybrid")),
    *(("vllm", "model", "files"), ("vllm", "adapters", "gloo"), ("sglang", "model", "files")),
}
"""The cases of every day; the others take the same ways in other pairs."""


@pytest.mark.parametrize(
    ("kind", "name", "weights_by"),
    [case if case in GATE else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_engine_keeps_what_it_promises_and_refuses_the_rest(
    kind: str, name: str, weights_by: Literal["files", "gloo"], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    wanted, scratch = SUITES_HERE[name].requirements(tmp_path / "m", ENGINES.load(kind).capabilities), tmp_path / "s"
    scratch.mkdir()
    with ExitStack() as opened:
        if kind == "native":
            rig = opened.enter_context(native_rig(wanted, scratch))
        else:
            url, _ = opened.enter_context(fake_server(kind, wanted))
            server = ServerConfig(urls=(url,), any_version=True, weights_by=weights_by)
            rig = opened.enter_context(served_rig(kind, server, wanted, scratch))
        for clause in SUITES_HERE[name].clauses:  # in that order: the first of them brings the first weights
            with subtests.test(clause.name):
                run_clause(clause, rig)
