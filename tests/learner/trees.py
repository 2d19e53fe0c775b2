"""Batches whose samples are the paths of prefix trees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.base.types.batch import Batch
from headrace.base.types.recorded import KeptSets, Routing
from tests.learner.builders import VOCAB_SIZE

Ids = list[int]


def make_batch(samples: Sequence[tuple[Ids, int]], groups: Sequence[int], seed: int = 0) -> Batch:
    """A batch of ``samples``, each with its ids and the number of its first tokens that carry no loss."""
    rng = np.random.default_rng(seed)
    lengths = np.array([len(ids) for ids, _ in samples], np.int32)
    mask = np.concatenate([np.arange(len(ids)) >= prompt for ids, prompt in samples])
    return Batch(
        step=0,
        lengths_S=lengths,
        groups_S=np.array(groups, np.int32),
        episodes_S=np.arange(len(samples), dtype=np.int32),
        ids_N=np.concatenate([np.array(ids, np.int32) for ids, _ in samples]),
        mask_N=mask,
        logprobs_N=np.where(mask, -rng.uniform(0.1, 4.0, len(mask)), 0).astype(np.float32),
        versions_N=np.where(mask, 0, -1).astype(np.int32),
        advantages_N=np.where(mask, rng.normal(size=len(mask)), 0).astype(np.float32),
    )


def forest(seed: int = 0) -> Batch:
    """Fifteen samples of three groups, in which trees are up to six levels deep: the turns of an episode that loses its
    thoughts, a fork of it, siblings of which one begins otherwise, and a group that begins as that one does. Some
    samples are equal, and some end where others go on; loss tokens are among the shared ones."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> Ids:
        return [int(each) for each in rng.integers(0, VOCAB_SIZE, count)]

    samples: list[tuple[Ids, int]] = []
    history = draw(7)
    for turn in range(5):
        samples.append((history + draw(4 + turn), len(history)))
        history = history + draw(3)
    samples += [(history[:16] + draw(9), 16), (history[:16], 12), (history[:16] + draw(2), 14)]
    prompt, other = draw(9), draw(8)
    samples += [(prompt + draw(5), 9), (other + draw(6), 8), (prompt + draw(3), 9), (prompt + draw(8), 7)]
    samples += [(other + draw(2), 8), samples[-1], (draw(5), 2)]
    order = rng.permutation(len(samples))
    return make_batch([samples[place] for place in order], [place // 5 for place in range(len(samples))])


def routed_alike(batch: Batch, num_layers: int, num_experts: int, seed: int = 0) -> Batch:
    """Recorded experts, which are those of the same beginning nearly everywhere: a few samples differ at one token, or
    lack the record of one."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(batch.lengths_S) - batch.lengths_S
    shape = (batch.num_tokens, num_layers, num_experts)
    experts_NLK = np.argsort(rng.random(shape), -1)[..., :2].astype(np.uint8)
    known_N = rng.random(batch.num_tokens) < 0.9
    first: dict[tuple[int, ...], int] = {}
    for start, length in zip(starts, batch.lengths_S, strict=True):
        for place in range(start, start + length):
            same = first.setdefault(tuple(batch.ids_N[start : place + 1].tolist()), place)
            experts_NLK[place], known_N[place] = experts_NLK[same], known_N[same]
    for sample in rng.permutation(len(starts))[:4]:
        place = starts[sample] + rng.integers(batch.lengths_S[sample])
        known_N[place] = sample % 2
        experts_NLK[place] = (experts_NLK[place] + 1) % num_experts
    return msgspec.structs.replace(batch, routing=Routing(known_T=known_N, experts_RLK=experts_NLK[known_N]))


def kept(batch: Batch, seed: int = 0) -> Batch:
    """Kept-sets of the loss tokens, of which those with the same history differ."""
    rng = np.random.default_rng(seed)
    spans = [
        sorted({int(token), *rng.integers(0, VOCAB_SIZE, 5).tolist()}) if mask and rng.random() < 0.7 else []
        for token, mask in zip(batch.ids_N, batch.mask_N, strict=True)
    ]
    return msgspec.structs.replace(batch, kept=KeptSets.from_spans(spans))


def naive_rows(batch: Batch, samples: Sequence[int]) -> int:
    """The number of different beginnings of the samples, with the experts of their tokens: counted one by one."""
    nodes: set[tuple[object, ...]] = set()
    starts = np.cumsum(batch.lengths_S) - batch.lengths_S
    routing = batch.routing
    rows = None if routing is None else np.cumsum(routing.known_T) - 1
    for sample in samples:
        path: tuple[object, ...] = ()
        for place in range(starts[sample], starts[sample] + batch.lengths_S[sample]):
            record: object = None
            if routing is not None and rows is not None and routing.known_T[place]:
                record = tuple(routing.experts_RLK[rows[place]].ravel().tolist())
            path = (path, int(batch.ids_N[place]), record)
            nodes.add(path)
    return len(nodes)
