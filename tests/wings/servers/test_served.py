"""An engine that is a server: what it is told, what it is not believed, and what is said when it is not what it should
be."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied, ConfigError
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt
from headrace.engine import EngineConfig
from headrace.models import ModelConfig, load_model
from headrace.models.config import LoraConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.models.weights import weight_tensors
from headrace.testing.engine_rig import MAX_CONTEXT, SETTINGS, served_rig
from headrace.testing.servers import FakeServer, fake_server, vllm
from headrace.testing.servers.base import Handler
from headrace.wings.servers.client.answer import StreamedAnswer, StreamPart, VersionSpan
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.dialect import StreamRequest
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements, model_alone
from headrace.wings.servers.client.make import open_served_engine
from headrace.wings.servers.client.wire import Address
from headrace.wings.servers.sglang import command as sglang_command
from headrace.wings.servers.sglang.dialect import SglangDialect
from headrace.wings.servers.vllm.command import command
from headrace.wings.servers.vllm.dialect import VllmDialect

RECORDED = json.loads((Path(__file__).parent / "recorded" / "vllm-0.32.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "m", TinySpec(vocab="0123456789+= abcdefgh", init_std=0.2))


def wanted(model: Path, **more: Any) -> ServeRequirements:
    return ServeRequirements(path=str(model), dtype="float32", max_context=MAX_CONTEXT, **more)


def bare(lines: list[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]


def events(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bare(lines)]


def shape(tree: Any) -> Any:
    """Names and kinds; of a list, those of what it holds."""
    if isinstance(tree, dict):
        return {key: shape(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shape(tree[0])] if tree else []
    return type(tree).__name__


def test_recorded_answer_of_vllm_becomes_tokens_logprobs_and_versions() -> None:
    first, last = (
        VllmDialect().part(event, seen) for event, seen in zip(bare(RECORDED["stream"]), (0, 2), strict=True)
    )
    assert first == StreamPart(ids=[6, 3], logprobs=[-0.8261509537696838, -3.253582000732422])
    assert last is not None
    assert (last.ids, last.finish_reason) == ([4], "length")
    assert last.spans == (VersionSpan(version="6", start=0, end=3),)


def test_fake_says_what_vllm_was_recorded_to_say(model: Path) -> None:
    body = VllmDialect().body(
        StreamRequest(ids=[3, 4, 5], sampling=Sampling(max_new_tokens=3), max_new_tokens=3, label="0:")
    )
    with fake_server("vllm", wanted(model)) as (url, _), httpx.Client(base_url=url, trust_env=False) as client:
        for path, name in (("/version", "version"), ("/v1/models", "models"), ("/weight_info", "weight_info")):
            assert shape(client.get(path).json()) == shape(RECORDED[name])
        lines = client.post("/inference/v1/generate", json=body).text.split("\n\n")
        assert shape(events(lines)[0]) == shape(events(RECORDED["stream"])[0])
        assert shape(events(lines)[-1]) == shape(events(RECORDED["stream"])[-1])
        refused = client.post(
            "/inference/v1/generate", json={**body, "sampling_params": {**body["sampling_params"], "top_p": 0.0}}
        )
        assert refused.status_code == RECORDED["refused"]["status"]
        assert refused.json()["error"].keys() == RECORDED["refused"]["body"]["error"].keys()


def test_no_seed_is_sent_to_vllm() -> None:
    asked = StreamRequest(ids=[3], sampling=Sampling(max_new_tokens=3, seed=7), max_new_tokens=3, label="0:")
    assert "seed" not in VllmDialect().body(asked)["sampling_params"]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
KEYS = st.sampled_from(
    ("choices", "token_ids", "logprobs", "content", "logprob", "finish_reason", "weight_versions", "version", "start",
     "end", "meta_info", "completion_tokens", "output_token_logprobs", "type", "error")
)  # fmt: skip
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@given(tree=TREES, cut=st.integers(0, 400), dialect=st.sampled_from((VllmDialect(), SglangDialect())))
def test_whatever_a_server_sends_is_a_part_or_no_part_or_refused(tree: Any, cut: int, dialect: Any) -> None:
    event = json.dumps(tree)[: 10**6 if cut > 300 else cut]
    try:
        part = dialect.part(event, 0)
    except ValueError:
        return
    if part is not None:
        taken = answer()
        taken.append(part, 0)
        with contextlib.suppress(ValueError):
            taken.correct_versions([(0, span.end - span.start) for span in part.spans or ()])
        assert taken.chunk().tokens.ids_T.tolist() == list(part.ids)


def answer(**told: Any) -> StreamedAnswer:
    request = GenerateRequest(request_id=1, prompt_ids_T=np.array([3], np.int32), sampling=Sampling(max_new_tokens=9))
    return StreamedAnswer(request=request, prompt=[3], arrival=0, **told)


def test_token_that_arrives_after_the_commit_gets_the_version_that_sampled_it() -> None:
    late = answer()
    late.append(StreamPart(ids=[5, 6], logprobs=[-1.0, -1.0]), 0)
    late.append(StreamPart(ids=[7], logprobs=[-1.0]), 1)
    late.correct_versions([(0, 3)])
    assert late.chunk().tokens.versions_T.tolist() == [0, 0, 0]


def test_reader_who_was_told_another_version_is_told_again() -> None:
    late = answer()
    late.append(StreamPart(ids=[5, 6], logprobs=[-1.0, -2.0]), 1)
    assert late.chunk().tokens.versions_T.tolist() == [1, 1]
    late.correct_versions([(0, 1), (1, 1)])
    again = late.chunk()
    assert again.lost
    assert (again.tokens.ids_T.tolist(), again.tokens.versions_T.tolist()) == ([5, 6], [0, 1])
    assert again.tokens.logprobs_T.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(("version", "tokens"), [(0, 3), (1, 2), (-1, 2), (99999999999, 2)])
def test_spans_that_cannot_be_those_of_an_answer_are_not_believed(version: int, tokens: int) -> None:
    odd = answer()
    odd.append(StreamPart(ids=[5, 6], logprobs=[-1.0, -1.0]), 0)
    with pytest.raises(ValueError, match=r"versions (of|from)"):
        odd.correct_versions([(version, tokens)])


# -- who is there ---------------------------------------------------------------------------------------------------


def opened(model: Path, directory: Path, url: str, **server: Any) -> Any:
    config = EngineConfig.model_validate({**SETTINGS, "kind": "vllm", "server": {"urls": [url], **server}})
    return open_served_engine(config, wanted(model), Handover(directory, ServedForm(wanted(model))), None, RealClock())


def refused(model: Path, directory: Path, url: str, **server: Any) -> str:
    with pytest.raises(ConfigError) as told, opened(model, directory, url, **server):
        pass
    return str(told.value)


def test_server_that_does_not_answer_is_named_with_how_long_and_how_to_start_it(model: Path, tmp_path: Path) -> None:
    told = refused(model, tmp_path, "http://127.0.0.1:9", wait_s=0.6)
    for words in ("vLLM at http://127.0.0.1:9", "after 0.6 s", "ConnectError", "vllm.entrypoints.cli.main serve",
                  "--port 9", "VLLM_SERVER_DEV_MODE=1", "headrace_in_vllm.Extension"):  # fmt: skip
        assert words in told


def test_server_of_another_version_is_refused_with_those_that_were_tested(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "VERSION", "0.9.1")
    with fake_server("vllm", wanted(model)) as (url, _):
        told = refused(model, tmp_path, url)
        assert "vLLM 0.9.1 was not tested: tested are 0.32" in told
        with opened(model, tmp_path, url, any_version=True) as engine:
            assert engine.facts()["server"] == "vLLM 0.9.1"


def test_server_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", TinySpec(vocab="01"))
    with fake_server("vllm", wanted(model)) as (url, _):
        assert f"serves {str(model)!r}, and model.path={str(other)!r} is trained" in refused(other, tmp_path, url)


def test_server_of_another_model_of_that_name_is_refused_where_its_directory_can_be_read(
    model: Path, tmp_path: Path
) -> None:
    vocab = "0123456789+= abcdefgh"
    other = make_tiny(tmp_path / "other" / model.name, TinySpec(vocab=vocab, intermediate_size=96))
    with fake_server("vllm", wanted(other)) as (url, _):
        told = refused(model, tmp_path, url)
        assert f"serves {str(other)!r}, which is another model than model.path={str(model)!r}" in told
        assert "model.layers.0.mlp.down_proj.weight is [64, 96] there and [64, 128] here" in told


@pytest.mark.parametrize("body", ["<html>hello</html>", "{}", "[]"])
def test_what_answers_and_is_no_such_server_is_named(model: Path, tmp_path: Path, body: str) -> None:
    with plain_server({"/health": "{}", "/version": body}) as url:
        assert f"what answers at {url} is not vLLM" in refused(model, tmp_path, url)


@contextmanager
def out_of_sight(directory: Path) -> Iterator[None]:
    """As on another machine."""
    directory.rename(directory.with_suffix(".elsewhere"))
    yield


def test_server_whose_tensors_have_other_shapes_ends_the_engine_with_what_it_said(model: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other" / "m", TinySpec(vocab="0123456789+= abcdefgh", intermediate_size=64))
    with (
        fake_server("vllm", wanted(other)) as (url, _),
        out_of_sight(other),
        served_rig("vllm", ServerConfig(urls=(url,)), wanted(model), tmp_path) as rig,
        pytest.raises(ComponentDied, match="/finish_weight_update with 500"),
    ):
        rig.publish(Interrupt.INFLIGHT)


def test_server_without_routes_for_weights_is_refused(model: Path, tmp_path: Path) -> None:
    answers = {"/health": "{}", "/version": '{"version": "0.32.0"}', "/v1/models": json.dumps(RECORDED["models"])}
    with plain_server(answers) as url:
        assert "VLLM_SERVER_DEV_MODE=1" in refused(model, tmp_path, url)


def test_adapters_that_are_never_trained_reach_the_server_before_the_first_answer(model: Path, tmp_path: Path) -> None:
    settled = wanted(model, lora=LoraConfig(rank=4))
    config = {**SETTINGS, "kind": "vllm"}
    handover = Handover(tmp_path, ServedForm(settled))
    held = load_model(ModelConfig(path=str(model), lora=settled.lora))
    with fake_server("vllm", settled) as (url, server):
        found = EngineConfig.model_validate({**config, "server": {"urls": [url]}})
        with open_served_engine(found, settled, handover, None, RealClock()) as core:
            handover.write(0, weight_tensors(held))
            core.adopt(0)
        assert "/v1/load_lora_adapter" in server.calls
        assert server.files.adapters == {"default": handover.path(0) / "default"}
        assert server.label == "0:"


@pytest.mark.parametrize(
    ("record", "flag"),
    [("record_kept", "--return-sampling-mask"), ("record_routing", "--enable-return-routed-experts")],
)
def test_server_that_tells_no_records_ends_the_engine_with_how_to_start_it(
    record: str, flag: str, tmp_path: Path
) -> None:
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = make_tiny(tmp_path / "m", TinySpec(vocab="0123456789", kind="qwen3_moe", extra=extra))
    with (
        fake_server("vllm", wanted(path)) as (url, _),
        served_rig("vllm", ServerConfig(urls=(url,)), wanted(path, **{record: True}), tmp_path) as rig,
    ):
        rig.publish(Interrupt.INFLIGHT)
        number = rig.add([3, 4], max_new_tokens=4, top_k=3, **{record: True})
        with pytest.raises(ComponentDied) as told:
            rig.finish(number)
    assert f"vLLM at {url} does not report the" in told.value.problem
    assert flag in told.value.remedy


def test_server_that_is_gone_ends_the_engine_with_its_name(model: Path, tmp_path: Path) -> None:
    with ExitStack() as running, ExitStack() as engine:
        url, _ = running.enter_context(fake_server("vllm", wanted(model)))
        rig = engine.enter_context(served_rig("vllm", ServerConfig(urls=(url,)), wanted(model), tmp_path))
        rig.publish(Interrupt.INFLIGHT)
        number = rig.add([3, 4], max_new_tokens=400)
        rig.run_until(lambda: bool(rig.outputs[number].ids))
        httpx.post(f"{url}/pause?mode=keep", trust_env=False)
        running.close()
        # with this request or with a next one: it ends slowly
        with pytest.raises(ComponentDied, match=f"vLLM at {url}"):
            all(rig.finish(one) for one in (number, *(rig.add([3, 4]) for _ in range(9))))


def test_interpreter_without_vllm_is_told_what_to_install(model: Path, tmp_path: Path) -> None:
    config = EngineConfig.model_validate({**SETTINGS, "kind": "vllm", "server": {"python": sys.executable}})
    handover = Handover(tmp_path, ServedForm(wanted(model)))
    with (
        pytest.raises(ConfigError, match="pip install vllm"),
        open_served_engine(config, wanted(model), handover, None, RealClock()),
    ):
        pass


def test_started_server_hears_a_socket_of_this_user_alone_and_its_draws_are_its_own(model: Path) -> None:
    config = EngineConfig.model_validate({**SETTINGS, "kind": "vllm", "server": {"args": ["--enforce-eager"]}})
    address = Address(url="http://vllm", socket="/x/s")
    first, second = (command(config, wanted(model), address).argv for _ in range(2))
    assert first[first.index("--uds") + 1] == "/x/s"
    assert first[first.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert first[-1] == "--enforce-eager"
    assert first[first.index("--seed") + 1] != second[second.index("--seed") + 1]


def test_key_of_a_server_is_in_a_file_of_ours_alone_and_not_in_its_command(model: Path, tmp_path: Path) -> None:
    config = EngineConfig.model_validate({**SETTINGS, "kind": "sglang", "server": {"any_version": True}})
    address = sglang_command.own_address(tmp_path)
    made = sglang_command.command(config, wanted(model), address)
    file = Path(made.argv[made.argv.index("--config") + 1])
    assert json.loads(file.read_text()) == {"api-key": address.token, "admin-api-key": address.token}
    assert (file.suffix, file.stat().st_mode & 0o777) == (".yaml", 0o600)
    assert address.token not in f"{made} {made.argv}"
    runs = sglang_command.command(config, wanted(model), Address(url="http://127.0.0.1:9", token="hush"))
    assert "--api-key KEY" in str(runs)
    assert "hush" not in str(runs)


def test_files_beside_a_model_are_not_shown_to_a_server(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).touch()
    assert model_alone(str(source), tmp_path) == str(source)
    (source / "optimizer.safetensors").touch()
    view = Path(model_alone(str(source), tmp_path))
    assert (view.name, sorted(path.name for path in view.iterdir())) == ("m", ["config.json", "model.safetensors"])


@contextmanager
def plain_server(answers: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = answers.get(self.path)
            self.send_response(404 if known is None else 200)
            self.end_headers()
            self.wfile.write((known or "{}").encode())

        log_message: Callable[..., None] = lambda *_: None

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("everything", [True, False])
def test_address_at_which_something_else_answers_now_ends_the_engine_and_one_refused_request_does_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    gone: list[str] = []

    def unless_gone(path: str, handler: Handler) -> Handler:
        async def answer(server: FakeServer, request: Request) -> Any:
            return PlainTextResponse("what is that?", 404) if path in gone else await handler(server, request)

        return answer

    routes = {(method, path): unless_gone(path, handler) for (method, path), handler in vllm.ROUTES.items()}
    monkeypatch.setattr(vllm, "ROUTES", routes)
    with (
        fake_server("vllm", wanted(model)) as (url, _),
        served_rig("vllm", ServerConfig(urls=(url,)), wanted(model), tmp_path) as rig,
    ):
        rig.publish(Interrupt.INFLIGHT)
        gone += [VllmDialect.stream_path, *(["/health"] if everything else [])]
        number = rig.add([3, 4])
        if everything:
            with pytest.raises(ComponentDied, match="answers 404"):
                rig.run_until(lambda: rig.outputs[number].ended)
        else:
            rig.run_until(lambda: rig.outputs[number].ended)
            assert "answered 404: what is that?" in rig.outputs[number].error
