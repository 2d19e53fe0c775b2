"""The map of a run on a cluster: every part on accelerators of its own, with its memory and the times, or a refusal
that names the figure."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.run.cli.app import app
from headrace.run.session import load_config
from headrace.wings.plan import Cluster, ClusterFile, make_site
from headrace.wings.plan.catalogue import model
from headrace.wings.plan.cluster_map import ClusterMap, make_cluster_map
from headrace.wings.plan.planning import make_sizing_request
from headrace.wings.plan.search import Search

RUN: dict[str, Any] = {
    "model": {"path": "qwen3-32b", "dtype": "bfloat16"},
    "engine": {"kind": "vllm", "count": 4, "tensor": 2, "max_new_tokens": 512, "max_sequences": 64},
    "learner": {"memory": {"recompute": True}, "parallel": {"data": 8}},
    "flow": {"groups_per_step": 8, "group_size": 4, "max_age": 1},
    "algo": {"correction": "tis"},
    "launch": {"kind": "ray", "ray": {"engine": {"cpus": 4}, "learner": {"cpus": 4}}},
    "sync": {"transport": "group"},
}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {name: {**RUN.get(name, {}), **sections.get(name, {})} for name in {**RUN, **sections}}


def mapped(cluster: dict[str, Any] | None = None, **sections: dict[str, Any]) -> ClusterMap:
    config = load_config(changed(**sections))
    file = ClusterFile(cluster=Cluster.model_validate({"accelerator": "H100", "count": 16, **(cluster or {})}))
    return make_cluster_map(config, make_site(make_sizing_request(config), file))


def test_every_part_has_accelerators_of_its_own_and_the_memory_that_it_keeps() -> None:
    found = mapped()
    names = ["learner", *(f"learner-{rank}" for rank in range(1, 8)), *(f"engine-{number}" for number in range(4))]
    assert [part.name for part in found.parts] == names
    assert [part.rank for part in found.parts] == [*range(8), None, None, None, None]
    taken = Counter((part.machine, gpu) for part in found.parts for gpu in part.gpus)
    assert len(taken) == sum(taken.values()) == 16
    assert {len(part.gpus) for part in found.parts if part.rank is None} == {2}
    params = model("qwen3-32b").params
    rank, engine = found.parts[0].bytes_by_use, found.parts[-1].bytes_by_use
    assert (rank["weights"], rank["optimizer"]) == (2 * params / 8, 12 * params / 8)
    assert engine["weights"] == 2 * 2 * params
    assert engine["cache up to"] > 0


def test_times_of_the_map_follow_its_parts() -> None:
    found, more = mapped(), mapped({"count": 24}, learner={"parallel": {"data": 16}, "memory": {"recompute": True}})
    assert more.update_s == pytest.approx(found.update_s / 2)
    assert more.batch_tokens == found.batch_tokens > 8 * 4 * 100
    assert found.publication is not None
    assert found.publication_s == pytest.approx(sum(phase.seconds for phase in found.publication.phases))
    assert more.publication is not None
    assert more.publication.copy.seconds == pytest.approx(found.publication.copy.seconds / 2)
    whole = mapped(sync={"transport": "http"})
    assert whole.publication is not None
    assert whole.publication.copy.seconds == pytest.approx(8 * found.publication.copy.seconds)


def test_text_has_a_line_for_the_ranks_of_each_machine_and_one_for_the_times() -> None:
    lines = list(mapped({"count": 24}, learner={"parallel": {"data": 16}, "memory": {"recompute": True}}).lines())
    assert [line.split()[0] for line in lines[2:-1]] == ["1", "2", "0", "0", "0", "0"]
    assert "0-7  learner, ranks 8 to 15" in lines[3]
    assert "on each: weights 4.1 GB" in lines[3]
    assert re.search(r"An update takes .* s for .* tokens; a publication by group .* s \(copy .*verify", lines[-1])


def test_on_one_machine_without_a_cluster_parts_lie_where_a_run_puts_them() -> None:
    found = mapped(
        {"count": 8}, model={"path": "qwen3-8b"}, launch={"kind": "local", "ray": {}},
        engine={"kind": "native", "count": 3, "tensor": 1}, learner={"parallel": {"data": 5}},
    )  # fmt: skip
    assert [part.gpus for part in found.parts] == [(0,), (1,), (2,), (3,), (4,), (7,), (6,), (5,)]


@pytest.mark.parametrize(
    ("cluster", "sections", "problem", "remedy"),
    [
        ({}, {"engine": {"count": 5}}, r"asks for 18 accelerators \(8 for learner.* and 10 for 5", "count >= 18"),
        (
            {"per_node": 4},
            {"engine": {"count": 1, "tensor": 4, "pipeline": 2}},
            r"4 x 2 = 8 accelerators of one machine, and cluster\.per_node=4",
            "engine.pipeline <= 4",
        ),
        (
            {"count": 24, "per_node": 4},
            {"learner": {"parallel": {"tensor": 8}}},
            r"learner\.parallel\.tensor=8 ranks are of one machine, and cluster\.per_node=4",
            "learner.parallel.tensor <= 4",
        ),
        ({}, {"engine": {"count": 1, "tensor": 6}}, r"engine\.tensor=6 .* 64 attention heads \(8 of", "one of 1, 2, 4"),
        (
            {},
            {"learner": {"parallel": {"tensor": 3}}},
            r"tensor=3 does not divide the 64 attention heads \(8 of keys and values\) of qwen3-32b",
            "a divisor of 8",
        ),
        (
            {"host": {"cores": 16}},
            {},
            r"asks for 1 accelerator and 4 cores of one machine, .* for 48 cores",
            "launch.ray.learner.cpus",
        ),
        (
            {},
            {"engine": {"count": 2}, "learner": {"parallel": {"tensor": 8}}},
            r"learner\.parallel\.tensor=8 ranks compute the same micro-batch.* machines 0, 1",
            "fill what the engines leave",
        ),
    ],
)  # fmt: skip
def test_run_that_the_cluster_cannot_hold_is_refused_with_the_figure(
    cluster: dict[str, Any], sections: dict[str, dict[str, Any]], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        mapped(cluster, **sections)
    assert remedy in refused.value.remedy


def test_part_that_its_accelerators_cannot_hold_is_named_with_a_way_out_that_works() -> None:
    small = {"model": {"path": "qwen3-8b"}, "engine": {"count": 1, "tensor": 1}}
    alone = mapped(**small, learner={"parallel": {"data": 1}, "memory": {"recompute": True}})
    (sentence,) = alone.misfits
    assert f"  {sentence}" in alone.lines()
    assert "learner.memory.offload_optimizer = true: " in sentence
    for others in ({}, {"context": 2}):  # the named number is that of data ranks, beside the run's other ranks
        tight: dict[str, Any] = {"parallel": {"data": 1, **others}, "memory": {"recompute": True}}
        (sentence,) = mapped(**small, learner=tight).misfits
        named = re.search(r"each rank of the learner keeps .* \(learner.parallel.data = (\d+)\)", sentence)
        assert named
        tight["parallel"]["data"] = int(named[1])
        assert mapped(**small, learner=tight).misfits == ()
        if int(named[1]) > 2:
            tight["parallel"]["data"] = int(named[1]) // 2
            assert mapped(**small, learner=tight).misfits
    spread = {"parallel": {"data": 16}, "memory": {"recompute": True}}
    large: dict[str, Any] = {"model": {"path": "qwen3-32b"}, "learner": spread}
    (sentence,) = mapped({"count": 24}, **large, engine={"count": 1, "tensor": 1}).misfits
    ways = re.search(r"engine keeps .* at least (\d+) accelerators", sentence)
    assert ways
    assert mapped({"count": 24}, **large, engine={"count": 1, "tensor": int(ways[1])}).misfits == ()


@pytest.mark.parametrize(("per_node", "offered"), [(16, {"shm", "group"}), (8, {"group"})])
def test_transport_of_one_machine_is_not_proposed_for_several(per_node: int, offered: set[str]) -> None:
    config = load_config(RUN)
    file = ClusterFile(cluster=Cluster(accelerator="H100", count=16, per_node=per_node))
    search = Search(site=make_site(make_sizing_request(config), file), clock=RealClock(), seed=0)
    assert set(search._transports()) == offered


def test_program_prints_the_map_as_text_and_as_json_and_refuses_what_has_no_place(tmp_path: Path) -> None:
    run, cluster = tmp_path / "run.toml", tmp_path / "cluster.toml"
    run.write_text(
        '[model]\npath = "qwen3-0.6b"\ndtype = "bfloat16"\n[engine]\nmax_new_tokens = 64\ncount = 2\n'
        "[flow]\ngroups_per_step = 4\ngroup_size = 2\n[algo]\ncorrection = 'tis'\n[sync]\ntransport = 'group'\n"
    )
    cluster.write_text(
        '[cluster]\naccelerator = "H100"\ncount = 4\n[workload]\nanswer_tokens = 40\nprompt_tokens = 10\n'
    )
    runner, both = CliRunner(), ["plan", str(run), "--cluster", str(cluster), "--generation", "2"]
    text = runner.invoke(app, both)
    assert text.exit_code == 0, text.output
    assert "An update takes" in text.output
    tree = json.loads(runner.invoke(app, [*both, "--json"]).stdout)["map"]
    assert [(part["part"], part["machine"], part["gpus"]) for part in tree["parts"]] == [
        ("learner", 0, [0]),
        ("engine-0", 0, [3]),
        ("engine-1", 0, [2]),
    ]
    assert tree["parts"][0]["bytes_on_each"]["optimizer"] == 12 * model("qwen3-0.6b").params
    assert tree["batch_tokens"] == 4 * 2 * (10 + 40)
    assert tree["publication_s"] > 0 < tree["update_s"]
    refused = runner.invoke(app, [*both, "--set", "engine.count=4"])
    assert isinstance(refused.exception, ConfigError)
    assert "asks for 5 accelerators" in refused.exception.problem
