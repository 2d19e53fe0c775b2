"""What a codec does to numbers, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.base.config import validate
from headrace.base.errors import ConfigError, WeightsError
from headrace.models.weights import weight_tensors
from headrace.run.session import load_config
from headrace.sync import SyncConfig
from headrace.sync.codecs import CODECS, get_codec
from headrace.sync.config import TRANSPORTS, Route
from headrace.sync.transports import make_publisher, make_receiver
from headrace.testing.sync import encode_and_decode
from tests.models.kinds import plain, tiny

torch.set_num_threads(1)


def weight(seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(70, 33, generator=torch.Generator().manual_seed(seed)) * scale


def test_float8_is_off_by_at_most_a_sixteenth_or_a_thousandth_of_the_row() -> None:
    before = weight() * torch.logspace(-6, 6, 70)[:, None]  # rows of very different size
    after = encode_and_decode(get_codec("cast_fp8"), "w", before)
    scale = before.abs().amax(1, keepdim=True) / 448
    assert ((after - before).abs() <= torch.maximum(before.abs() / 16, scale * 2**-10) * (1 + 1e-5)).all()


def test_float8_scales_each_row_of_every_expert_by_itself() -> None:
    experts = torch.stack([weight(1), weight(2, scale=40.0)])
    experts[0, 3] *= 1e-5
    apart = torch.stack([encode_and_decode(get_codec("cast_fp8"), "w", expert) for expert in experts])
    assert torch.equal(encode_and_decode(get_codec("cast_fp8"), "w", experts), apart)


def test_float8_keeps_zeros_and_what_is_no_matrix() -> None:
    form = get_codec("cast_fp8")
    assert torch.equal(encode_and_decode(form, "w", torch.zeros(3, 4)), torch.zeros(3, 4))
    assert torch.equal(encode_and_decode(form, "w", torch.full((3, 4), 1e-45)), torch.zeros(3, 4))
    assert encode_and_decode(form, "w", torch.zeros(0, 4)).shape == (0, 4)
    bias = weight()[0]
    assert torch.equal(encode_and_decode(form, "b", bias), bias)


def test_cast_is_the_rounding_of_torch_and_leaves_whole_numbers_alone() -> None:
    assert torch.equal(encode_and_decode(get_codec("cast_bf16"), "w", weight()), weight().bfloat16().float())
    counts = torch.tensor([2**40 + 1])
    assert torch.equal(encode_and_decode(get_codec("cast_bf16"), "n", counts), counts)


def test_learner_in_float32_feeds_an_engine_in_bfloat16(tmp_path: Path) -> None:
    route = Route(codec="cast_bf16", address=str(tmp_path / "weights"))
    learner, engine = {"w": weight()}, {"w": torch.zeros(70, 33, dtype=torch.bfloat16)}
    publisher, receiver = make_publisher(route, learner), make_receiver(route, engine)
    publisher.copy(0)
    receiver.stage(publisher.announce(0, 0))
    receiver.commit(0)
    assert torch.equal(engine["w"], weight().bfloat16())
    publisher.close()


def test_adapter_codec_refuses_a_model_that_is_trained_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sends adapters alone"):
        make_publisher(Route(codec="adapter", address=str(tmp_path / "weights")), {"layers.0.weight": weight()})
    with pytest.raises(ConfigError, match=r"model\.lora is not set"):
        load_config({"model": {"path": "m"}, "sync": {"codec": "adapter"}})


def test_adapter_codec_names_each_version(tmp_path: Path) -> None:
    route = Route(codec="adapter", address=str(tmp_path / "weights"))
    publisher = make_publisher(route, {"q.lora_A.weight": weight()})
    publisher.copy(0)
    assert publisher.announce(3, 0).adapter == "adapter-v3"
    publisher.close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2"])
def test_tied_and_fused_parameters_arrive_and_stay_tied(tmp_path: Path, kind: str) -> None:
    """gpt2 has one tensor for embedding and head, qwen3_moe one for the same matrix of all experts."""
    directory = tiny(tmp_path / "model", kind)
    learner, engine = plain(directory), plain(directory)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.mul_(1.5)
    route = Route(address=str(tmp_path / "weights"))
    publisher = make_publisher(route, weight_tensors(learner))
    receiver = make_receiver(route, weight_tensors(engine))
    publisher.copy(0)
    receiver.stage(publisher.announce(0, 0))
    receiver.commit(0)
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        assert torch.equal(engine(ids).logits, learner(ids).logits)
    head, embedding = engine.get_output_embeddings().weight, engine.get_input_embeddings().weight
    assert (head is embedding) == (kind == "gpt2")
    assert any(tensor.ndim == 3 for tensor in weight_tensors(engine).values()) == (kind == "qwen3_moe")
    publisher.close()


def test_snapshot_that_has_changed_since_is_never_sent_again(tmp_path: Path) -> None:
    tensors = {"w": weight()}
    publisher = make_publisher(Route(address=str(tmp_path / "weights")), tensors)
    publisher.copy(0)
    publisher.announce(5, 0)
    with (tmp_path / "weights").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(WeightsError, match=r"version 5: tensor w has changed in the learner's buffer"):
        publisher.resend(5, 0)
    with pytest.raises(WeightsError, match="version 4 is not in slot 0 any more"):
        publisher.resend(4, 0)
    publisher.copy(0)
    with pytest.raises(WeightsError, match="version 5 is not in slot 0 any more"):
        publisher.resend(5, 0)
    publisher.close()


def test_every_row_of_the_tables_can_be_chosen_in_a_run_file_and_nothing_else() -> None:
    for transport in TRANSPORTS.rows:
        for codec in CODECS:
            made = validate(SyncConfig, {"transport": transport, "codec": codec})
            assert (made.transport, made.codec) == (transport, codec)
    hosts = ({"transport": "shm", "host": "10.0.0.1"}, {"transport": "http", "host": "0.0.0.0"})
    for wrong in ({"transport": "pigeon"}, {"codec": "morse"}, {"directory": "/tmp", "transport": "shm"}, *hosts):
        with pytest.raises(ConfigError):
            validate(SyncConfig, wrong)
    with pytest.raises(ConfigError, match="did you mean 'delta'"):
        get_codec("dleta")
    with pytest.raises(ConfigError, match="did you mean 'shm'"):
        make_receiver(Route(transport="smh"), {})
