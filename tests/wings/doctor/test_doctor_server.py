"""Faults that are planted in a server, each told by its name."""

from __future__ import annotations

import asyncio
import json
import shutil
import string
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.launch.inprocess import LocalEngine
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.lora import save_adapter
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.doctor.candidates import make_expectation
from headrace.wings.doctor.diagnosis import examine_server
from headrace.wings.doctor.report import DoctorReport, Fault, Grade
from headrace.wings.doctor.server import ServerProbe
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.config import ServeConfig
from headrace.wings.serve.prompts import ServedModel
from headrace.wings.serve.run import load_served_model

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
Change = Callable[[str, dict[str, Any]], None]


def make(directory: Path, **changes: Any) -> Path:
    spec = {
        "vocab": string.ascii_letters + string.digits + " .,!?[]:", "hidden_size": 32, "num_heads": 2,
        "num_kv_heads": 1, "intermediate_size": 64, "init_std": 0.3, "chat_template": TEMPLATE, "max_positions": 256,
    }  # fmt: skip
    return make_tiny(directory, TinySpec(**{**spec, **changes}))


def moved(directory: Path, to: Path, amount: float = 0.02) -> Path:
    """A copy of the model after one training step, which has moved every weight a little."""
    shutil.copytree(directory, to)
    torch.manual_seed(1)
    tensors = load_file(to / "model.safetensors")
    for tensor in tensors.values():
        tensor.add_(torch.randn_like(tensor), alpha=amount)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def adapter(base: Path, directory: Path, seed: int) -> Path:
    model = load_model(ModelConfig(path=str(base), lora=LoraConfig(rank=2)))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    directory.mkdir(parents=True)
    save_adapter(model, directory)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "base")


class ServerInThread(httpx.BaseTransport):
    """The server's application in this process, behind a transport that changes what passes."""

    def __init__(self, settings: dict[str, Any], ask: Change | None, tell: Change | None) -> None:
        self._config = validate(ServeConfig, {"engine": {"cache_tokens": 1024}, **settings})
        self._loaded = load_served_model(self._config, clock=RealClock())
        self._ask, self._tell = ask, tell
        self._runner = asyncio.Runner()
        self._encoder = ThreadPoolExecutor(1)
        self._runner.run(self._open())

    async def _open(self) -> None:
        self._engine = LocalEngine(self._loaded.core, clock=RealClock())
        await self._engine.__aenter__()
        service = Service(
            engine=self._engine,
            tokenizer=self._loaded.tokenizer,
            served=ServedModel(name="served", max_context=self._loaded.max_context, settings=self._config.serve),
            clock=RealClock(),
            encoder=self._encoder,
        )
        app = httpx.ASGITransport(make_app(ServerState(service=service), ""))
        self._client = httpx.AsyncClient(transport=app, base_url="http://127.0.0.1")

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.read() or b"null")
        if self._ask and body is not None:
            self._ask(path, body)
        answer = self._runner.run(self._client.request(request.method, path, json=body))
        tree = answer.json()
        if self._tell and answer.status_code == 200:
            self._tell(path, tree)
        return httpx.Response(answer.status_code, json=tree)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.run(self._engine.__aexit__(None, None, None))
            self._encoder.shutdown()
            self._runner.close()


@contextmanager
def probing(
    served: Path, *, ask: Change | None = None, tell: Change | None = None, **model: Any
) -> Iterator[ServerProbe]:
    transport = ServerInThread({"model": {"path": str(served), **model}}, ask, tell)
    with ServerProbe("http://127.0.0.1", transport=transport) as probe:
        yield probe


def examined(
    expected: Path, served: Path, *, adapter: Path | None = None, also: list[Path] | None = None, **how: Any
) -> DoctorReport:
    with probing(served, **how) as probe:
        return examine_server(probe, make_expectation(expected, adapter, "auto", also or []))


def test_a_server_that_does_as_it_should_has_no_fault(base: Path) -> None:
    report = examined(base, base)
    assert [each.name for each in report.findings if each.level is not Grade.OK] == []
    assert {each.name for each in report.findings} >= {"weights", "temperature", "defaults", "chat template"}


def test_other_weights_are_told_and_named_where_they_are_known(base: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", seed=7)
    unknown = examined(base, other)
    assert unknown.faults == [Fault.OTHER_WEIGHTS]
    assert "cannot be told" in str(unknown)
    named = examined(base, other, also=[other])
    assert named.faults == [Fault.OTHER_WEIGHTS]
    assert str(other) in str(named)


def test_an_earlier_version_of_the_run_is_told(base: Path, tmp_path: Path) -> None:
    old = shutil.copytree(base, tmp_path / "checkpoints" / "step-000001")
    new = moved(base, tmp_path / "checkpoints" / "step-000002")
    report = examined(new, old)
    assert report.faults == [Fault.STALE_VERSION]
    assert "step-000001" in str(report)


def test_adapters_that_are_missing_or_others_are_told(base: Path, tmp_path: Path) -> None:
    own, other = adapter(base, tmp_path / "own", 1), adapter(base, tmp_path / "other", 2)
    lora = {"rank": 2, "adapter": str(own)}
    assert examined(base, base, adapter=own, lora=lora).faults == []
    assert examined(base, base, adapter=own).faults == [Fault.ADAPTER_NOT_APPLIED]
    report = examined(base, base, adapter=own, lora={**lora, "adapter": str(other)})
    assert report.faults == [Fault.OTHER_ADAPTER]
    assert str(other) in str(report)


def test_half_precision_is_told(base: Path) -> None:
    report = examined(base, base, dtype="bfloat16")
    assert report.faults == [Fault.PRECISION]
    assert "bfloat16, not float32" in str(report)
    assert report.ok  # it is slower to learn from, and no lie
    with probing(base) as probe:
        finer = examine_server(probe, make_expectation(base, None, "bfloat16", []))
    assert finer.faults == [Fault.PRECISION]
    assert "float32, not bfloat16" in str(finer)
    with probing(base, dtype="bfloat16") as probe:
        assert examine_server(probe, make_expectation(base, None, "bfloat16", [])).faults == []


@pytest.mark.parametrize(("theta", "known"), [(500_000.0, True), (77.0, False)])
def test_another_rotary_embedding_is_told(base: Path, tmp_path: Path, theta: float, known: bool) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = theta
    (other / "config.json").write_text(json.dumps(config))
    report = examined(base, other)
    assert report.faults == [Fault.OTHER_ROPE]
    assert (f"rope_theta={theta}" in str(report)) is known


def test_another_chat_template_is_told(base: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", chat_template=TEMPLATE.replace("[{{ m.role }}]", "{{ m.role }}: "))
    assert examined(base, other).faults == [Fault.OTHER_TEMPLATE]


def test_another_chat_template_is_told_by_a_server_without_tokenize(base: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", chat_template=TEMPLATE.replace("[assistant]", "[assistant]..."))

    def ask(path: str, body: dict[str, Any]) -> None:
        if path == "/tokenize":
            body["no such field"] = 1

    assert examined(base, other, ask=ask).faults == [Fault.OTHER_TEMPLATE]


def truncated(base: Path, directory: Path, missing: int) -> tuple[Path, int]:
    """The model without its last ``missing`` tokens, and how many it has left."""
    other = shutil.copytree(base, directory)
    config = json.loads((other / "config.json").read_text())
    whole = config["vocab_size"]
    rows = whole - missing
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    tensors = load_file(other / "model.safetensors")
    cut = {name: each[:rows] if each.shape[0] == whole else each for name, each in tensors.items()}
    save_file({name: each.clone() for name, each in cut.items()}, other / "model.safetensors", {"format": "pt"})
    return other, rows


def test_a_server_whose_vocabulary_is_larger_than_the_models_is_examined_to_the_end(base: Path, tmp_path: Path) -> None:
    large = make(tmp_path / "large", vocab="".join(chr(0x4E00 + place) for place in range(256)))
    report = examined(base, large)
    assert not report.ok
    assert Fault.OTHER_WEIGHTS in report.faults


def test_a_server_that_samples_tokens_which_the_model_lacks_is_told(base: Path, monkeypatch) -> None:
    with probing(base) as probe:
        sample = probe.sample

        def beyond(*given: Any, **settings: Any) -> Any:
            choices = sample(*given, **settings)
            return [replace(each, ids=[10**6, *each.ids[1:]]) for each in choices]

        monkeypatch.setattr(probe, "sample", beyond)
        report = examine_server(probe, make_expectation(base, None, "float32", []))
    assert report.faults == [Fault.OTHER_WEIGHTS] * 2
    assert str(report).count("the server samples token 1000000") == 2


def test_a_truncated_vocabulary_is_told(base: Path, tmp_path: Path) -> None:
    other, rows = truncated(base, tmp_path / "other", 5)
    report = examined(base, other)
    assert report.faults == [Fault.TRUNCATED_VOCABULARY]
    assert f"tokens from {rows} on" in str(report)
    assert any(each.name == "weights" and each.level is Grade.OK for each in report.findings)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"temperature": 0.6}, "temperature 0.6"),
        ({"top_k": 3}, "the likeliest 3 tokens"),
        ({"temperature": 0}, "temperature 0"),
    ],
)
def test_other_sampling_defaults_are_told(base: Path, defaults: dict[str, Any], words: str) -> None:
    def ask(path: str, body: dict[str, Any]) -> None:
        if path == "/v1/completions":
            body.update({name: value for name, value in defaults.items() if name not in body})

    report = examined(base, base, ask=ask)
    assert report.faults == [Fault.OTHER_DEFAULTS]
    assert words in str(report)


def test_logprobs_of_another_temperature_than_that_of_sampling_are_told(base: Path) -> None:
    def ask(path: str, body: dict[str, Any]) -> None:
        if body.get("temperature") == 0.5:
            body["logprobs"] = 20

    def tell(path: str, tree: dict[str, Any]) -> None:
        for choice in tree.get("choices", []):
            told = choice.get("logprobs") or {}
            if len(told.get("tokens") or []) == 1 and told.get("top_logprobs"):
                told["token_logprobs"] = [told["top_logprobs"][0][told["tokens"][0]]]

    report = examined(base, base, ask=ask, tell=tell)
    assert report.faults == [Fault.WRONG_TEMPERATURE]
    assert "are those of temperature 1" in str(report)


def test_logprobs_of_prompts_at_another_temperature_are_told(base: Path) -> None:
    hot = load_model(ModelConfig(path=str(base)))

    def tell(path: str, tree: dict[str, Any]) -> None:
        for choice in tree.get("choices", []):
            if choice["versions"][:1] == [-1]:
                _retell(hot, choice)

    def _retell(model: Any, choice: dict[str, Any]) -> None:
        from headrace.models.attention import PackedPlan, forward

        ids = choice["token_ids"]
        with torch.no_grad():
            logs = (forward(model, torch.tensor(ids), PackedPlan([len(ids)])) / 1.5).log_softmax(-1)
        told = choice["logprobs"]
        told["token_logprobs"] = [None, *(float(logs[at, token]) for at, token in enumerate(ids[1:]))]
        told["top_logprobs"] = [None] * len(ids)

    report = examined(base, base, tell=tell)
    assert report.faults == [Fault.WRONG_TEMPERATURE]
    assert "temperature 1.5" in str(report)


def test_a_server_that_tells_no_prompts_is_judged_by_what_it_samples(base: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", seed=7)

    def ask(path: str, body: dict[str, Any]) -> None:
        if body.get("echo"):
            body["no such field"] = 1

    assert examined(base, base, ask=ask).faults == []
    report = examined(base, other, ask=ask)
    assert report.faults == [Fault.OTHER_WEIGHTS]
    assert "of sampled tokens" in str(report)
