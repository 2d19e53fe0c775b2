"""Rates that ``headrace bench gpu`` has measured replace those of the catalogue in a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.errors import ConfigError, DataError
from headrace.wings.bench.gpu.base import GpuStageOutcome
from headrace.wings.bench.gpu.files import GpuFile, make_card_rates, write_file
from headrace.wings.plan import Cluster, ClusterFile, make_site
from headrace.wings.plan.card import apply_rates, read_rates
from tests.wings.plan.test_planning import asked

FIGURES = {
    "copy_device_gb_s": 2900.0, "product_bfloat16_tflops": 640.0, "decode_share": 0.5, "train_share": 0.3,
    "overhead_s": 0.004, "sync_gb_s": 2.0,
}  # fmt: skip


def written(path: Path, *, card: str = "NVIDIA H100 80GB HBM3", pretend: bool = False, **figures: Any) -> Path:
    stages = [GpuStageOutcome(name="facts", state="done", figures={**FIGURES, **figures})]
    content = GpuFile(
        made="now", pretend=pretend, card=card, budget_s=600.0, rates=make_card_rates(card, stages), stages=stages
    )
    write_file(path, content)
    return path


def test_a_plan_computes_with_what_was_measured(tmp_path: Path) -> None:
    rates = read_rates(written(tmp_path / "gpu.json"))
    file = ClusterFile(cluster=Cluster(accelerator="H100", count=8))
    site, catalogue = make_site(asked(), file, rates=rates), make_site(asked(), file)
    assert "NVIDIA H100 80GB HBM3 as headrace bench gpu measured it: 50% of it" in site.view
    params, kv = site.request.shape.active, site.request.shape.kv_numbers
    size = site.request.bytes_per_number
    read = float((site.request.shape.params - site.request.shape.expert_params) * size)
    bandwidth = 2900e9 * 0.5 * site.fit.ways
    wanted = max((read + 1000.0 * kv * size) / bandwidth, 2.0 * params / (640e12 * 0.5 * site.fit.ways)) + 0.004
    assert site.engine_cost().step_s(1, 1000.0) == pytest.approx(wanted)
    assert site.engine_cost().step_s(256, 256e3) > catalogue.engine_cost().step_s(256, 256e3)


def test_lengths_and_memory_are_not_those_of_the_file(tmp_path: Path) -> None:
    cluster = apply_rates(read_rates(written(tmp_path / "gpu.json")), Cluster(accelerator="H100", count=8))
    assert cluster.device.memory_gb == 80


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pretend": True}, "was made with --pretend"),
        ({"decode_share": 0.0}, "has no decode_share"),
        ({"train_share": 0.0}, "has no train_share"),
    ],
)
def test_a_file_without_figures_of_a_gpu_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_rates(written(tmp_path / "gpu.json", **changes))


def test_a_file_of_something_else_or_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(DataError, match="neither the directory of a run nor a file of headrace bench gpu"):
        read_rates(tmp_path / "other.json")
    tree = msgspec.json.decode(written(tmp_path / "gpu.json").read_bytes())
    (tmp_path / "later.json").write_bytes(msgspec.json.encode({**tree, "format": 2}))
    with pytest.raises(DataError, match="has format 2, and 1 is read"):
        read_rates(tmp_path / "later.json")


@pytest.mark.parametrize(
    ("card", "cluster", "problem"),
    [
        ("NVIDIA H200", {"accelerator": "H100"}, "'H100', and --calibrate was measured on NVIDIA H200"),
        ("NVIDIA GeForce RTX 3090", {"accelerator": "RTX-4090"}, "measured on NVIDIA GeForce RTX 3090"),
        ("NVIDIA H100 80GB HBM3", {"accelerator": "H100", "decode_share": 0.7}, "cluster.decode_share is given"),
        ("NVIDIA H100 80GB HBM3", {"accelerator": "H100", "peak_tflops": 900}, "cluster.peak_tflops is given"),
    ],
)  # fmt: skip
def test_rates_of_another_gpu_and_rates_that_are_given_twice_are_refused(
    tmp_path: Path, card: str, cluster: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        apply_rates(
            read_rates(written(tmp_path / "gpu.json", card=card)), Cluster.model_validate({**cluster, "count": 1})
        )


@pytest.mark.parametrize(
    ("card", "accelerator"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
    ],
)  # fmt: skip
def test_the_names_of_driver_and_catalogue_are_matched(tmp_path: Path, card: str, accelerator: str) -> None:
    rates = read_rates(written(tmp_path / "gpu.json", card=card))
    assert apply_rates(rates, Cluster(accelerator=accelerator, count=1)).decode_share == 0.5
