"""Drafts from a prediction head: they are what the head computes, and change nothing but the number of passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.base.errors import ConfigError, ModelError
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.weights import Interrupt
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.heads import DraftPrices, HeadDrafter, HeadDrafts
from headrace.models import LoraConfig, ModelConfig
from headrace.models.attention import PackedPlan, forward
from tests.engine.native.harness import Weights, make_engine, request, run
from tests.engine.native.schedules import COMMON
from tests.engine.native.test_speculation import PEAKED, bits, eager, many, needs_kernels, speculation_of, visit
from tests.models.headed import Headed, headed

__all__ = ["eager", "headed"]
Index = npt.NDArray[np.int64]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    """The head costs nothing, so that it drafts as much as it may, however bad its drafts are."""
    monkeypatch.setattr("headrace.engine.native.speculation.HEAD_COST", 0.0)


def drafter_of(engine: NativeEngine) -> HeadDrafter:
    assert engine._head is not None
    return engine._head


@torch.no_grad()
def by_hand(engine: NativeEngine, row: int, num: int) -> list[int]:
    """The greedy draft for a row: the model and the head, each over the whole sequence, with no cache at all."""
    model, head = engine._model, drafter_of(engine)._parts.head
    ids = torch.from_numpy(engine._rows.get_ids(row).astype(np.int64))
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    kept: list[torch.Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _m, _a, out: kept.append(out.last_hidden_state[0]))
    forward(model, ids, PackedPlan([len(ids)]))
    hook.remove()
    states, drafted = kept[0][:-1], list[int]()
    while len(drafted) < num:
        following = torch.tensor([*ids[1:].tolist(), *drafted])
        made = head(embedding(following), states, PackedPlan([len(following)]))
        drafted.append(int(output(made[-1:]).argmax()))
        states = torch.cat([states, made[-1:]])  # the head's own state stands for the model's
    return drafted


def watched(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int], list[int]]]:
    """Every draft from now on: the number of its tokens, the drafted ones, and those made by hand."""
    found: list[tuple[int, list[int], list[int]]] = []
    drafter = drafter_of(engine)
    draft = drafter.draft

    def watching(rows_A: Index, most_A: Index, prices: DraftPrices) -> HeadDrafts:
        made = draft(rows_A, most_A, prices)
        for place, row in enumerate(rows_A.tolist()):
            num = int(made.counts_A[place])
            found.append((num, made.ids_AK[place, :num].tolist(), by_hand(engine, row, num)))
        return made

    monkeypatch.setattr(drafter, "draft", watching)
    return found


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("kind", ["qwen2", "glm4_moe", "deepseek_v3"])
def test_drafts_are_those_of_model_and_head_over_the_whole_sequence(
    kind: str, headed: Headed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in pieces and shared prefixes, before and behind drafts that were not drawn, and new weights."""
    config = ModelConfig(path=str(headed(kind, trained=kind != "deepseek_v3")))
    engine = make_engine(config, speculation="heads", draft_tokens=4, max_step_tokens=13, max_sequences=4)
    weights = Weights(config, tmp_path / "b")
    found = watched(engine, monkeypatch)
    for version in (0, 1):
        weights.send(engine, version)
        prompts = [COMMON[: 5 + 3 * n] for n in range(5)] + [COMMON[:20]]
        run(engine, [request(n, prompt, max_new_tokens=24, temperature=0.0) for n, prompt in enumerate(prompts)])
        weights.scale(1.02)
    right = [drafted == expected for _, drafted, expected in found]
    assert len(right) > 60
    assert {num for num, _, _ in found} >= {1, 2, 3, 4}
    assert np.mean(right) > 0.97  # at a border of blocks that sequences share, the head's last entry is another's
    stats = engine.stats()
    assert stats.accepted_tokens < stats.drafted_tokens


@needs_kernels
@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("kind", "trained", "seed"),
    [("qwen2", False, 0), ("qwen2", True, 1), ("glm4_moe", False, 2), ("glm4_moe", True, 3)],
)
def test_random_schedules_with_heads_change_no_bit(
    kind: str, trained: bool, seed: int, headed: Headed, tmp_path: Path
) -> None:
    many(headed(kind, trained=trained), tmp_path / "b", seed, 6, speculation="heads", peaked=1.0 if trained else PEAKED)


@needs_kernels
@pytest.mark.slow
@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("seed", range(8))
def test_many_random_schedules_with_heads_change_no_bit(seed: int, headed: Headed, tmp_path: Path) -> None:
    kind, trained = ("qwen2", "glm4_moe")[seed % 2], seed % 4 < 2
    directory, peaked = headed(kind, trained=trained), 1.0 if trained else PEAKED
    many(directory, tmp_path / "b", 100 + seed, 40, speculation="heads", peaked=peaked)


def answers(
    directory: Path, buffer: Path, speculation: str, **settings: object
) -> tuple[NativeEngine, dict[int, list[bytes]]]:
    """An engine, and what it has answered to six requests."""
    config = ModelConfig(path=str(directory), deterministic=True)
    engine = make_engine(config, speculation=speculation, **settings)
    Weights(config, buffer).send(engine, 0)
    asked = [request(n, COMMON[: 4 + n], max_new_tokens=60, temperature=0.5, seed=n) for n in range(6)]
    return engine, {number: bits(tokens) for number, tokens in visit(engine, asked).items()}


@needs_kernels
@pytest.mark.usefixtures("free")
def test_a_trained_head_saves_passes_on_texts_that_were_never_seen(headed: Headed, tmp_path: Path) -> None:
    directory = headed("qwen2", trained=True)
    _, expected = answers(directory, tmp_path / "a", "off")
    history, _ = answers(directory, tmp_path / "b", "history")
    engine, found = answers(directory, tmp_path / "c", "heads")
    assert found == expected
    assert engine.stats().accepted_tokens > 100 + history.stats().accepted_tokens
    assert engine.stats().steps < 45 < history.stats().steps


@needs_kernels
def test_a_head_whose_drafts_are_not_drawn_rests(headed: Headed, tmp_path: Path) -> None:
    directory = headed("qwen2")
    _, expected = answers(directory, tmp_path / "a", "off", max_sequences=6)
    engine, found = answers(directory, tmp_path / "b", "heads", max_sequences=6)
    assert found == expected
    assert engine.stats().drafted_tokens < 60
    drafter = drafter_of(engine)
    assert drafter._rest > 0
    passes = list[int]()
    drafter._parts.head.register_forward_hook(lambda *_: passes.append(1))
    engine.add(request(9, COMMON[:9], max_new_tokens=20, temperature=0.5))
    for _ in range(10):
        engine.step()
    assert not passes


@needs_kernels
@pytest.mark.usefixtures("free")
def test_a_sequence_that_lacks_entries_of_the_head_gets_no_drafts_and_a_new_one_does(
    headed: Headed, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(headed("qwen2", trained=True)))
    engine = make_engine(config, speculation="heads")
    Weights(config, tmp_path / "b").send(engine, 0)
    drafter = drafter_of(engine)
    engine.add(request(0, COMMON[:9], max_new_tokens=60, temperature=0.0))
    engine.step()
    drafter._rest = 3
    for _ in range(8):  # the state that it had is that of an earlier token
        engine.step()
    assert drafter._rest == 0
    assert engine.stats().drafted_tokens == 0
    engine.add(request(1, COMMON[4:17], max_new_tokens=60, temperature=0.0))
    for _ in range(2):
        engine.step()
    assert drafter.ready(np.arange(2)).tolist() == [False, True]


@needs_kernels
@pytest.mark.usefixtures("free")
def test_a_head_that_computes_nan_drafts_nothing_and_spoils_nothing(headed: Headed, tmp_path: Path) -> None:
    directory = headed("qwen2", trained=True)
    _, expected = answers(directory, tmp_path / "a", "off")
    config = ModelConfig(path=str(directory), deterministic=True)
    engine = make_engine(config, speculation="heads")
    drafter_of(engine)._parts.head.projection.weight.data.fill_(torch.nan)
    Weights(config, tmp_path / "b").send(engine, 0)
    asked = [request(n, COMMON[: 4 + n], max_new_tokens=60, temperature=0.5, seed=n) for n in range(6)]
    assert {number: bits(tokens) for number, tokens in visit(engine, asked).items()} == expected
    speculation = speculation_of(engine)
    assert not (speculation._ways_RK >= 4).any()


@pytest.mark.usefixtures("free")
def test_an_engine_with_adapters_drafts_with_them(headed: Headed, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, agents=("a", "b"))
    config = ModelConfig(path=str(headed("qwen2", trained=True)), lora=lora)
    found = []
    for speculation in ("off", "heads"):
        engine, weights = make_engine(config, speculation=speculation), Weights(config, tmp_path / speculation)
        weights.send(engine, 0)
        asked: list[GenerateRequest] = [
            request(n, COMMON[: 5 + n], max_new_tokens=30, temperature=0.0) for n in range(3)
        ]
        found.append({number: tokens.ids_T.tolist() for number, tokens in visit(engine, asked).items()})
    assert found[0] == found[1]
    assert engine.stats().accepted_tokens > 20


@needs_kernels
@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT, Interrupt.INFLIGHT_RECOMPUTE])
def test_after_a_commit_drafts_are_drawn_from_the_new_output_layer(
    mode: Interrupt, headed: Headed, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(headed("qwen2", trained=True)), deterministic=True)
    engine, weights = make_engine(config, speculation="heads"), Weights(config, tmp_path / "b")
    weights.send(engine, 0)
    engine.add(request(0, COMMON[:9], max_new_tokens=80, temperature=0.0))
    for _ in range(10):
        engine.step()
    with torch.no_grad():  # the vocabulary in reverse: other ids for the same states
        output = weights.model.get_output_embeddings().weight
        output.copy_(output.flip(0))
    weights.stage(engine, 1)
    engine.commit(1, mode)
    before = engine.stats()
    for _ in range(12):
        engine.step()
    drafted = engine.stats().drafted_tokens - before.drafted_tokens
    assert (engine.stats().accepted_tokens - before.accepted_tokens) > drafted / 10


def test_the_cache_of_a_head_is_part_of_the_cache_that_is_planned(headed: Headed) -> None:
    config = ModelConfig(path=str(headed("qwen2")))
    without, with_head = (
        make_engine(config, speculation=speculation, cache_tokens=64).facts()["cache_bytes"]
        for speculation in ("history", "heads")
    )
    assert with_head == without * 3 // 2  # of two layers, and one more


def test_what_cannot_draft_from_heads_is_refused_by_name(
    headed: Headed, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"engine\.speculation='heads', and model\.path=.* is a llama"):
        make_engine(ModelConfig(path=str(model_dir("llama"))), speculation="heads")
    with pytest.raises(ModelError, match=r"engine\.speculation='heads', and model\.path=.* is a qwen3_5_text"):
        make_engine(ModelConfig(path=str(model_dir("qwen3_5_text"))), speculation="heads")
    with pytest.raises(ValueError, match=r"engine\.speculation='heads' is of engine\.kind='native'"):
        EngineConfig(kind="vllm", speculation="heads")
    config = ModelConfig(path=str(headed("qwen2")))
    with pytest.raises(ConfigError, match=r"engine\.speculation='heads', and this engine was given a model without"):
        make_engine(config, headless=True, speculation="heads")
