"""What a server tells of a token beside its logprob: believed only where it can be true."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.engine import EngineConfig
from headrace.models import ModelConfig
from headrace.models.config import LoraConfig
from headrace.models.load import load_model
from headrace.models.lora import read_adapter
from headrace.models.tiny import TinySpec, make_tiny
from headrace.models.weights import weight_tensors
from headrace.wings.servers.client.answer import StreamedAnswer, StreamPart
from headrace.wings.servers.client.dialect import StreamRequest
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.records import RoutingDecoder, decode_array, numbers, refuse_kept
from headrace.wings.servers.client.wire import Address
from headrace.wings.servers.vllm.command import command
from headrace.wings.servers.vllm.dialect import UNBOUNDED, VllmDialect

EXTRA = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}


def wanted(path: Path, **more: Any) -> ServeRequirements:
    return ServeRequirements(path=str(path), dtype="float32", max_context=64, **more)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinySpec(vocab="0123456789", kind="qwen3_moe", num_layers=3, extra=EXTRA)
    return make_tiny(tmp_path_factory.mktemp("mixture") / "m", spec)


@pytest.fixture(scope="module")
def routes(mixture: Path) -> RoutingDecoder:
    found = ServedForm(wanted(mixture)).routes()
    assert found is not None
    return found


def told(count: int, layers: int = 3) -> np.ndarray[Any, Any]:
    return np.arange(count * layers * 2).reshape(count, layers, 2) % 6


def packed(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def headed(shape: tuple[int, ...], kind: str) -> str:
    """A file whose header says so, and that holds nothing else."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": kind})
    return base64.b64encode(file.getvalue()).decode()


def test_layers_without_experts_are_left_out(routes: RoutingDecoder) -> None:
    every = told(4)
    assert routes.convert(every, 4).tolist() == every[:, 1:].tolist()
    assert routes.convert(every.ravel().astype(np.int32), 4).dtype == np.uint8


@pytest.mark.parametrize(
    ("experts", "count"),
    [
        (told(4), 3),
        (told(4, layers=2), 4),
        (told(4) + 6, 4),
        (told(4) - 100, 4),
        (np.zeros((4, 3, 2), np.int32), 4),
        (np.zeros(0, np.int32), 4),
        (np.full((4, 3, 2), 2**40), 4),
    ],
)
def test_experts_that_cannot_be_are_not_believed(experts: Any, count: int, routes: RoutingDecoder) -> None:
    with pytest.raises(ValueError, match=r"experts"):
        routes.convert(experts, count)


@pytest.mark.parametrize("kept", [[[4]], [[4, 9], [6]], [[9, 4], [5]], [[4, 4], [5]], [[], [5]], [[4, 10], [5]]])
def test_kept_sets_that_tokens_cannot_come_from_are_not_believed(kept: Any) -> None:
    with pytest.raises(ValueError, match="kept-set"):
        refuse_kept(kept, [4, 5], 10)


def test_kept_sets_that_can_be_are_taken() -> None:
    refuse_kept([[4, 9], [5]], [4, 5], 10)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: base64.b64encode(data).decode()))
def test_what_is_no_array_is_refused(text: str) -> None:
    for read in (decode_array, numbers):
        with contextlib.suppress(ValueError):
            read(text)


@pytest.mark.parametrize("array", [np.zeros(3, [("a", "u1")]), np.zeros(3), np.asfortranarray(told(4)[0])])
def test_array_of_anything_but_whole_numbers_in_order_is_refused(array: Any) -> None:
    with pytest.raises(ValueError, match="an array"):
        decode_array(packed(array))


def test_shape_larger_than_the_file_takes_no_memory_and_objects_are_not_read() -> None:
    with pytest.raises(ValueError, match="in 0 bytes"):
        decode_array(headed((2**40, 2**10), "|u1"))
    with pytest.raises(ValueError, match="dtype object"):
        decode_array(headed((0,), "|O"))


def test_header_that_would_take_its_parser_down_is_not_parsed() -> None:
    header = b"-" * 9000 + b"1"
    deep = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(ValueError, match="large"):
        decode_array(base64.b64encode(deep).decode())


def test_experts_reach_the_reader_with_the_prompts_at_first_and_none_for_the_last_token(routes: RoutingDecoder) -> None:
    sampling = Sampling(max_new_tokens=9, record_routing=True)
    request = GenerateRequest(request_id=1, prompt_ids_T=np.array([3, 4], np.int32), sampling=sampling)
    answer = StreamedAnswer(request=request, prompt=[3, 4], arrival=0)
    answer.append(StreamPart(ids=[5, 6, 7], logprobs=[-1.0, -1.0, -1.0]), 0)
    assert answer.chunk().tokens.routing is None, "nothing is known of an answer that has not ended"
    answer.num_sent = 0
    answer.experts_NLK = routes.convert(told(4), 4)
    chunk = answer.chunk()
    assert chunk.prompt_routing is not None
    assert chunk.tokens.routing is not None
    assert chunk.prompt_routing.experts_RLK.tolist() == told(4)[:2, 1:].tolist()
    assert chunk.tokens.routing.known_T.tolist() == [True, True, False]
    assert chunk.tokens.routing.experts_RLK.tolist() == told(4)[2:, 1:].tolist()


def test_vllm_that_tells_masks_is_never_asked_for_what_it_refuses() -> None:
    def drawn(**sampling: Any) -> tuple[float, int]:
        ask = StreamRequest(
            ids=[3], sampling=Sampling(max_new_tokens=3, **sampling), max_new_tokens=3, label="0:", record_kept=True
        )
        params = VllmDialect().body(ask)["sampling_params"]
        return params["temperature"], params["top_k"]

    assert drawn(temperature=0.0) == (1.0, 1)
    assert drawn(top_p=0.9) == (1.0, UNBOUNDED)
    assert drawn(top_k=5, temperature=0.7) == (0.7, 5)


def test_vllm_event_with_records_is_read() -> None:
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}, "sampling_mask": [[4, 5]]}
    ended = {"finish_reason": "stop", "routed_experts": packed(told(2).astype(np.uint8)),
             "weight_versions": [{"version": "0", "start": 0, "end": 1}]}  # fmt: skip
    part = VllmDialect().part(json.dumps({"choices": [choice | ended]}), 0)
    assert part is not None
    assert part.kept == [[4, 5]]
    assert part.experts is not None
    assert part.experts.tolist() == told(2).tolist()


def test_server_is_started_for_what_the_run_wants(mixture: Path) -> None:
    config = EngineConfig.model_validate({"kind": "vllm", "device": "cuda:0"})
    address = Address(url="http://vllm", socket="/x/s")
    plain = command(config, wanted(mixture), address)
    assert not {"--enable-lora", "--return-sampling-mask", "--enable-return-routed-experts"} & set(plain.argv)
    lora = LoraConfig(rank=20, agents=("a", "b"))
    whole = command(
        config, wanted(mixture, lora=lora, record_kept=True, record_routing=True, sleeps=True), address
    )  # fmt: skip
    rank, most = (whole.argv[whole.argv.index(flag) + 1] for flag in ("--max-lora-rank", "--max-loras"))
    assert (rank, most) == ("32", "3")
    for flag in ("--enable-lora", "--return-sampling-mask", "--enable-return-routed-experts", "--enable-sleep-mode"):
        assert flag in whole.argv
    assert whole.variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_each_adapter_of_a_version_is_as_peft_keeps_it(mixture: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, agents=("solver",), target_modules=["q_proj"])
    model = load_model(ModelConfig(path=str(mixture), lora=lora))
    form = ServedForm(wanted(mixture, lora=lora))
    held = weight_tensors(model)
    assert {name: tensor.shape for name, tensor in form.tensors().items()} == {
        name: tensor.shape for name, tensor in held.items()
    }
    form.write(held, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["default", "solver"] == sorted(form.folders)
    own = dict(model.named_parameters())
    for path in tmp_path.iterdir():
        tree, tensors = read_adapter(path)
        assert tree["r"] == 4
        assert len(tensors) == 2 * 3
        for name, tensor in tensors.items():
            assert tensor.equal(own[name.replace(".weight", f".{path.name}.weight")])
