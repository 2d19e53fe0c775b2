"""An engine with an adapter for each of several agents: a sequence is sampled by its own, whatever is beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import RequestError
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens, StaleFork
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import LoraConfig, ModelConfig
from headrace.models.lora import save_adapter
from tests.engine.native.harness import Weights, joined, make_engine, request, run

Dir = Callable[[str], Path]
AGENTS = ("", "proposer", "solver")
PROMPT = list(range(3, 23))


class World:
    """Adapters that differ, in one engine and each in one of its own."""

    def __init__(self, base: Path, tmp_path: Path, *, deterministic: bool = False, **settings: object) -> None:
        self.model = ModelConfig(path=str(base), deterministic=deterministic)
        several = self._with(LoraConfig(rank=4, agents=AGENTS[1:]))
        self.tmp_path, self.settings = tmp_path, settings
        self.engine, self.weights = make_engine(several, **settings), Weights(several, tmp_path / "buffer")
        self.change(1)
        self.weights.send(self.engine, 0)

    def _with(self, lora: LoraConfig) -> ModelConfig:
        return self.model.model_copy(update={"lora": lora})

    @torch.no_grad()
    def change(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        for name, parameter in self.weights.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=draws)

    def lone(self, agent: str) -> NativeEngine:
        """An engine that has the adapter of ``agent`` as its only one."""
        directory = self.tmp_path / f"lone-{agent}-{len(list(self.tmp_path.iterdir()))}"
        directory.mkdir()
        save_adapter(self.weights.model, directory, agent or "default")
        config = self._with(LoraConfig(rank=4, adapter=str(directory)))
        engine = make_engine(config, **self.settings)
        Weights(config, directory / "buffer").send(engine, 0)
        return engine


@pytest.fixture
def world(model_dir: Dir, tmp_path: Path) -> World:
    return World(model_dir("qwen3"), tmp_path)


def ask(number: int, agent: str, prompt: Iterable[int] = PROMPT, **sampling: object) -> GenerateRequest:
    return msgspec.structs.replace(request(number, prompt, seed=number, **sampling), agent=agent)


def answers(engine: NativeEngine, asked: list[GenerateRequest]) -> dict[int, Tokens]:
    return {number: joined(chunks) for number, chunks in run(engine, asked).items()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_agent_samples_as_from_an_engine_of_its_own(
    model_dir: Dir, tmp_path: Path, *, deterministic: bool
) -> None:  # fmt: skip
    world = World(model_dir("qwen3"), tmp_path, deterministic=deterministic)
    asked = [ask(number, AGENTS[number % 3], PROMPT[: 5 + number], max_new_tokens=8) for number in range(6)]
    found = answers(world.engine, asked)
    for place, agent in enumerate(AGENTS):
        own = [msgspec.structs.replace(one, agent="") for one in asked[place::3]]
        for number, tokens in answers(world.lone(agent), own).items():
            assert found[number].ids_T.tolist() == tokens.ids_T.tolist()
            assert found[number].logprobs_T.tobytes() == tokens.logprobs_T.tobytes()
            assert set(found[number].versions_T.tolist()) == {0}
    firsts = {agent: answers(world.engine, [ask(99, agent)])[99].logprobs_T[0] for agent in AGENTS}
    assert len(set(firsts.values())) == 3


def test_agents_share_no_prefix_and_each_finds_its_own_again(world: World) -> None:
    first = answers(world.engine, [ask(0, "proposer")])[0]
    assert world.engine.stats().cached_tokens == 0
    answers(world.engine, [ask(1, "solver")])
    assert world.engine.stats().cached_tokens == 0
    again = answers(world.engine, [msgspec.structs.replace(ask(2, "proposer"), sampling=ask(0, "").sampling)])[2]
    assert world.engine.stats().cached_tokens == 16
    assert again.ids_T.tolist() == first.ids_T.tolist()


@pytest.mark.parametrize("runs", [True, False])
def test_a_fork_by_another_agent_reads_its_parents_tokens_with_its_own_adapter(world: World, *, runs: bool) -> None:
    parent = ask(0, "proposer", max_new_tokens=40)
    world.engine.add(parent)
    for _ in range(6 if runs else 100):
        world.engine.step()
    fork = GenerateRequest(
        request_id=1,
        prompt_ids_T=np.zeros(0, np.int32),
        sampling=request(1, [3], max_new_tokens=6, seed=7).sampling,
        fork=ForkRequest(parent=0, at=4, stale=StaleFork.REUSE),
        agent="solver",
    )
    chunks = run(world.engine, [fork])
    ids = (
        joined(chunks[0]).ids_T.tolist()
        if runs
        else answers(world.lone("proposer"), [msgspec.structs.replace(parent, agent="")])[0].ids_T.tolist()
    )
    plain = request(1, [*PROMPT, *ids[:4]], max_new_tokens=6, seed=7)
    expected = answers(world.lone("solver"), [plain])[1]
    found = joined(chunks[1])
    assert found.ids_T.tolist() == expected.ids_T.tolist()
    np.testing.assert_allclose(found.logprobs_T, expected.logprobs_T, atol=1e-5)


@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME])
def test_a_commit_brings_every_agents_adapter_at_once(world: World, mode: Interrupt) -> None:
    asked = [ask(number, agent, max_new_tokens=30) for number, agent in enumerate(AGENTS)]
    for one in asked:
        world.engine.add(one)
    for _ in range(5):
        world.engine.step()
    world.change(2)
    world.weights.stage(world.engine, 1)
    world.engine.commit(1, mode)
    found = {number: joined(chunks) for number, chunks in run(world.engine).items()}
    assert world.engine.take_swaps()[0].version == 1
    for number, agent in enumerate(AGENTS):
        newest = int(np.flatnonzero(found[number].versions_T == 1)[0])
        goes_on = msgspec.structs.replace(
            asked[number], agent="", answer_ids_T=found[number].ids_T[:newest].astype(np.int32)
        )
        expected = answers(world.lone(agent), [goes_on])[number]
        np.testing.assert_allclose(found[number].logprobs_T[newest:], expected.logprobs_T, atol=1e-5)


def test_a_pinned_agent_stays_under_its_adapter_beside_newer_ones(world: World) -> None:
    pinned = msgspec.structs.replace(ask(0, "solver", max_new_tokens=20), pinned=True)
    expected = answers(world.lone("solver"), [msgspec.structs.replace(pinned, agent="")])[0]
    world.engine.add(pinned)
    world.engine.add(ask(1, "proposer", max_new_tokens=20))
    for _ in range(4):
        world.engine.step()
    world.change(2)
    world.weights.send(world.engine, 1)
    found = {number: joined(chunks) for number, chunks in run(world.engine, [ask(2, "solver")]).items()}
    assert found[0].ids_T.tolist() == expected.ids_T.tolist()
    assert set(found[0].versions_T.tolist()) == {0}
    newer = answers(world.lone("solver"), [msgspec.structs.replace(ask(2, ""), request_id=2)])[2]
    np.testing.assert_allclose(found[2].logprobs_T, newer.logprobs_T, atol=1e-5)


def test_scores_are_the_policys(world: World) -> None:
    asked = ScoreTokens(call=0, ids_T=np.array(PROMPT, np.int32))
    expected = world.lone("").score(asked)
    answers(world.engine, [ask(0, "solver")])
    assert world.engine.score(asked).tobytes() == expected.tobytes()


def test_an_agent_without_an_adapter_is_refused_by_name(world: World) -> None:
    with pytest.raises(RequestError, match="agent 'solvr' has no adapter here") as found:
        world.engine.add(ask(0, "solvr"))
    assert "did you mean 'solver'" in found.value.remedy
    with pytest.raises(RequestError, match="agent 'solver' has no adapter here"):
        world.lone("").add(ask(0, "solver"))
