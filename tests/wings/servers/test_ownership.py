"""A server whose weights somebody else changed: no token of theirs is taken for one of ours."""

from __future__ import annotations

import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt
from headrace.engine import EngineConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.testing.engine_checks import LONGER
from headrace.testing.engine_rig import MAX_CONTEXT, SETTINGS, Rig, assert_close, served_rig
from headrace.testing.servers import FakeServer, fake_server
from headrace.wings.servers.client import make, ownership
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.core import ServedEngine
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.make import open_served_engine
from headrace.wings.servers.client.ownership import Labels, own_server
from headrace.wings.servers.client.wire import Address

KINDS = ("vllm", "sglang")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> ServeRequirements:
    model = make_tiny(tmp_path_factory.mktemp("model") / "m", TinySpec(vocab="0123456789+= abcdefgh", init_std=0.2))
    return ServeRequirements(path=str(model), dtype="float32", max_context=MAX_CONTEXT)


class Shared:
    """A server, and the runs at it."""

    def __init__(self, opened: ExitStack, kind: str, wanted: ServeRequirements, scratch: Path) -> None:
        self._opened, self._kind, self._wanted, self._scratch = opened, kind, wanted, scratch
        self.url, self.server = opened.enter_context(fake_server(kind, wanted))

    def run(self) -> Rig:
        """Another one, with weights of its own in use."""
        scratch = self._scratch / str(len(list(self._scratch.iterdir())))
        scratch.mkdir()
        server = ServerConfig(urls=(self.url,), any_version=True)
        rig: Rig = self._opened.enter_context(served_rig(self._kind, server, self._wanted, scratch))
        rig.publish(min(rig.capabilities.interrupts & {Interrupt.INFLIGHT, Interrupt.DRAIN}, key=str))
        return rig


@pytest.fixture(params=KINDS)
def shared(request: pytest.FixtureRequest, wanted: ServeRequirements, tmp_path: Path) -> Any:
    with ExitStack() as opened:
        yield Shared(opened, request.param, wanted, tmp_path)


def ends(rig: Rig, number: int) -> ComponentDied:
    with pytest.raises(ComponentDied) as told:
        rig.run_until(lambda: rig.outputs[number].ended)
    return told.value


def test_second_run_of_a_machine_is_refused_until_the_first_has_ended(
    wanted: ServeRequirements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "EXIT_S", 0.5)
    with ExitStack() as opened:
        shared = Shared(opened, "vllm", wanted, tmp_path)
        shared.run()
        address = Address(url=shared.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(ConfigError, match=f"at {address} gets its weights from another run"), own_server(address):
            pass
    with own_server(address):
        pass


def test_holder_that_goes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "EXIT_S", 60.0)
    address = Address(url="http://127.0.0.1:1")
    with ExitStack() as held:
        held.enter_context(own_server(address))
        gone = threading.Timer(0.3, held.close)
        gone.start()
        with own_server(address):
            gone.join()


def test_run_that_finds_the_weights_of_another_ends_and_has_none_of_its_tokens(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "own_server", lambda _: nullcontext())  # as on different machines
    first = shared.run()
    number = first.add([3, 4, 5], max_new_tokens=LONGER)
    first.run_until(lambda: bool(first.outputs[number].ids))
    second = shared.run()
    late = first.add([3, 4], max_new_tokens=LONGER)
    told = ends(first, late)
    assert isinstance(told, EngineUnfit)
    assert f"at {shared.url} has got weights from another run" in told.problem
    assert "engine.server.urls" in told.remedy
    early = first.outputs[number]
    if early.reason is None:
        assert early.ids == []
    else:  # on a busy machine it was whole before the other weights came, and is of its own
        assert_close(early.logprobs, first.reference_logprobs(0, early))
    assert first.outputs[late].ids == []
    (fine,) = second.finish(second.add([3, 4, 5]))
    assert_close(fine.logprobs, second.reference_logprobs(0, fine))


def test_server_that_was_started_again_has_weights_that_nobody_gave_it(shared: Shared) -> None:
    rig = shared.run()
    as_if_started_again(shared.server)
    number = rig.add([3, 4, 5], max_new_tokens=LONGER)
    told = ends(rig, number)
    assert not isinstance(told, EngineUnfit), "starting the engine again brings its weights"
    assert "'default'" in told.problem
    assert rig.outputs[number].ids == []


def as_if_started_again(server: FakeServer) -> None:
    server.labels[max(server.labels)] = "default"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_never_change_may_be_asked_by_several(
    kind: str, wanted: ServeRequirements, tmp_path: Path
) -> None:
    with fake_server(kind, wanted) as (url, _), ExitStack() as opened:
        engines = [opened.enter_context(fixed(kind, url, wanted, tmp_path)) for _ in range(2)]
        for core in engines:
            core.adopt(0)
        for core in engines:
            assert answered(core) == [0] * 20


def fixed(kind: str, url: str, wanted: ServeRequirements, directory: Path) -> Any:
    settings = {**SETTINGS, "kind": kind, "server": {"urls": [url], "any_version": True}}
    config = EngineConfig.model_validate(settings)
    return open_served_engine(config, wanted, Handover(directory, ServedForm(wanted)), None, RealClock())


def answered(core: ServedEngine) -> list[int]:
    """The versions of an answer."""
    sampling = Sampling(max_new_tokens=20)
    core.add(GenerateRequest(request_id=1, prompt_ids_T=np.array([3, 4], np.int32), sampling=sampling))
    versions: list[int] = []
    while True:
        for chunk in core.step():
            assert not chunk.error
            versions += chunk.tokens.versions_T.tolist()
            if chunk.stop_reason is not None:
                return versions


@pytest.mark.parametrize("label", [":", "x:", "7.5:", " :"])
def test_label_without_a_number_is_no_label(label: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Labels("vLLM", "5f3a").parse(f"{label}5f3a")


def test_nothing_comes_any_more_of_what_is_forgotten(shared: Shared) -> None:
    rig = shared.run()
    numbers = [rig.add([3, at], max_new_tokens=LONGER) for at in range(3)]
    rig.run_until(lambda: all(rig.outputs[number].ids for number in numbers))
    streams = rig.core._streams

    async def forgotten() -> list[int]:
        streams._discard_running()
        return [answer.task.cancelling() for answer in streams._running.values()]

    assert rig.core._wire.call(forgotten(), 30) == [1, 1, 1]
