"""Four hundred updates of an engine that decodes meanwhile, with bits that flip on the way and a restart in the middle.

After each commit the engine has exactly the weights of that version; afterwards every token that it served is held
against a whole pass of the version that it is stamped with.

Shape legend: S sequences with tokens of one version, T tokens of the longest, V the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.base.clock import RealClock
from headrace.base.errors import NeedsFull
from headrace.base.types.episode import TokenChunk
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.sync.codecs import get_codec
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher
from headrace.testing.sync import TOKEN, are_equal, encode_and_decode, receiver_with_faults
from tests.engine.native.harness import MAX_CONTEXT, joined, request
from tests.models.kinds import plain, tiny

torch.set_num_threads(1)

BATCH = 32
TOLERANCE = 2e-4
"""Of a logprob: a step of the engine and a whole pass add up in another order."""


class Learner:
    """Weights that differ a little from version to version; what each was."""

    def __init__(self, directory: Path, route: Route, rng: np.random.Generator) -> None:
        self._tensors = weight_tensors(load_model(ModelConfig(path=str(directory), dtype="float32")))
        self._start = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        self._rng, self._codec = rng, get_codec(route.codec)
        self.publisher = make_publisher(route, self._tensors, TOKEN)
        self.versions: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def move(self) -> None:
        """A version more."""
        for name, tensor in self._tensors.items():
            flat, start = tensor.view(-1), self._start[name].view(-1)
            places = torch.from_numpy(self._rng.permutation(len(flat))[: 1 + len(flat) // 8])
            noise = torch.from_numpy(self._rng.normal(size=len(places))).float()
            flat[places] = start[places] * (1 + 0.5 * noise)
        self.versions.append({n: encode_and_decode(self._codec, n, t).clone() for n, t in self._tensors.items()})


class Life:
    """One life of the engine, from its start to its end."""

    def __init__(self, directory: Path, route: Route, rng: np.random.Generator) -> None:
        model = load_model(ModelConfig(path=str(directory), dtype="float32"))
        self._tensors = weight_tensors(model)
        self.receiver, self.weather = receiver_with_faults(route, self._tensors, rng.spawn(1)[0])
        self._engine = NativeEngine(
            model,
            EngineConfig(max_sequences=BATCH),
            max_context=MAX_CONTEXT,
            receiver=self.receiver,
            clock=RealClock(),
        )
        self._rng = rng
        self._known = 0
        self.prompts: list[list[int]] = []
        self.chunks: dict[int, list[TokenChunk]] = defaultdict(list)
        self.gaps_s: list[float] = []

    def decode_until(self, staged: Future[bool]) -> bool:
        """Two steps at least, and as many as fit into the staging; what it gave."""
        steps = 0
        while self._engine.stats().version >= 0 and (steps < 2 or not staged.done()):
            stats = self._engine.stats()
            for _ in range(BATCH - stats.running - stats.waiting):
                self._ask()
            for chunk in self._engine.step():
                self.chunks[chunk.request_id].append(chunk)
            steps += 1
        return staged.result(60)

    def commit(self, version: int, expected: Mapping[str, Tensor]) -> None:
        """Every tensor is that of ``version`` afterwards."""
        self._engine.commit(version, Interrupt.INFLIGHT_RECOMPUTE)
        (report,) = self._engine.take_swaps()
        self.gaps_s.append(report.gap_s)
        assert are_equal(dict(self._tensors), dict(expected))

    def served(self) -> list[tuple[list[int], Tokens]]:
        """Prompts and what followed them."""
        return [(self.prompts[one], joined(chunks)) for one, chunks in self.chunks.items()]

    def _ask(self) -> None:
        prompt = self._rng.integers(3, 12, 4).tolist()
        self.prompts.append(prompt)
        length = int(self._rng.integers(3, 30))
        self._engine.add(request(len(self.prompts) - 1, prompt, max_new_tokens=length, seed=len(self.prompts)))


@dataclass(slots=True, kw_only=True)
class Account:
    """What happened on the way."""

    flipped: int = 0
    repaired: list[int] = field(default_factory=list)


def bring(learner: Learner, life: Life, account: Account, *, flip: bool) -> bool:
    """The next version, from the learner to the engine's side, in the stager's thread; whether it was sent again."""
    learner.move()
    version = len(learner.versions) - 1
    to = [life.receiver.address]
    learner.publisher.copy(version % 2)
    update = learner.publisher.announce(version, version % 2, to)
    life.weather.flip_next = flip
    account.flipped += flip
    try:
        life.receiver.stage(update)
    except NeedsFull:
        life.receiver.stage(learner.publisher.resend(version, version % 2, to))
        return True
    return False


@torch.inference_mode()
def worst_mismatch(
    model: torch.nn.Module, learner: Learner, served: list[tuple[list[int], Tokens]]
) -> tuple[float, float]:
    """How far recorded logprobs are from those of their version at most, and from the version before's on average."""
    by_version: dict[int, list[tuple[list[int], Tokens]]] = defaultdict(list)
    for prompt, tokens in served:
        for version in np.unique(tokens.versions_T).tolist():
            by_version[version].append((prompt, tokens))
    worst, others = 0.0, []
    for version, answers in sorted(by_version.items()):
        found = _mismatch(model, learner.versions[version], answers, version)
        worst = max(worst, float(found.max()))
        if version:
            others.append(float(_mismatch(model, learner.versions[version - 1], answers, version).mean()))
    return worst, float(np.mean(others))


def _mismatch(
    model: torch.nn.Module, weights: Mapping[str, Tensor], answers: list[tuple[list[int], Tokens]], version: int
) -> np.ndarray:
    for name, tensor in weight_tensors(model).items():
        tensor.data = weights[name]
    longest = max(len(prompt) + len(tokens) for prompt, tokens in answers)
    ids_ST = torch.zeros(len(answers), longest, dtype=torch.long)
    for row, (prompt, tokens) in enumerate(answers):
        ids_ST[row, : len(prompt) + len(tokens)] = torch.tensor([*prompt, *tokens.ids_T.tolist()])
    logprobs_STV = model(input_ids=ids_ST, use_cache=False).logits.float().log_softmax(-1)
    found = []
    for row, (prompt, tokens) in enumerate(answers):
        places = np.flatnonzero(tokens.versions_T == version) + len(prompt)
        expected = logprobs_STV[row, places - 1, ids_ST[row, places]].numpy()
        found.append(np.abs(expected - tokens.logprobs_T[places - len(prompt)]))
    return np.concatenate(found)


pytestmark = pytest.mark.timeout(900)
WAYS = [("shm", "full"), ("shm", "delta"), ("files", "delta"), ("http", "cast_bf16"), ("group", "delta")]


@pytest.mark.parametrize(
    ("transport", "codec", "updates"),
    [("shm", "delta", 24), *(pytest.param(*way, 400, marks=pytest.mark.slow) for way in WAYS)],
)
def test_every_token_is_of_the_version_that_it_is_stamped_with(
    tmp_path: Path, transport: str, codec: str, updates: int
) -> None:
    rng, learners, engines = np.random.default_rng(11).spawn(3)  # one for each thread
    route = Route(transport=transport, codec=codec, address=str(tmp_path / "place"), deadline_s=20.0)
    directory = tiny(tmp_path / "model", "qwen3")
    learner, account, lives = Learner(directory, route, learners), Account(), [Life(directory, route, engines)]
    flips = set(rng.permutation(np.arange(1, updates))[: updates // 10].tolist())
    with ThreadPoolExecutor(1) as stager:
        for version in range(updates):
            if version == updates // 2:
                lives[-1].receiver.close()
                lives.append(Life(directory, route, engines))
            life = lives[-1]
            if life.decode_until(stager.submit(bring, learner, life, account, flip=version in flips)):
                account.repaired.append(version)
            life.commit(version, learner.versions[version])
    lives[-1].receiver.close()
    learner.publisher.close()

    restarted = {updates // 2} if codec == "delta" else set()
    assert account.repaired == sorted(flips | restarted)
    served = [answer for life in lives for answer in life.served()]
    assert sum(len(tokens) for _, tokens in served) > updates * BATCH / 2
    worst, apart = worst_mismatch(plain(directory), learner, served)
    assert worst < TOLERANCE < apart / 20
    gaps_ms = np.array([gap_s for life in lives for gap_s in life.gaps_s]) * 1e3
    print(
        f"{transport} {codec}: {account.flipped} bits flipped, {sum(len(t) for _, t in served)} tokens, worst mismatch "
        f"{worst:.1e} (version before: {apart:.1e}), gap p50 {np.median(gaps_ms):.2f} ms"
    )
