"""The batches of the learner benchmark whose samples begin alike, as the paths of prefix trees.

Shape legend: S samples of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Draw = Callable[[int], Ids]
"""Returns that many random ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The samples of a batch."""

    ids_S: list[Ids]
    """The ids of each sample."""
    prompts_S: list[int]
    """The number of first tokens of each sample that carry no loss."""
    groups_S: list[int]
    """The group of each sample, from 0."""


def group_paths(draw: Draw, *, prompts: list[list[int]], prompt: int, answer: int) -> Paths:
    """Return groups of answers of ``answer`` tokens. ``prompts`` names, for each sample of each group, the prompt that
    it answers, by number; each has ``prompt`` tokens."""
    texts = {number: draw(prompt) for number in sorted({number for group in prompts for number in group})}
    members = [(place, number) for place, group in enumerate(prompts) for number in group]
    return Paths(
        ids_S=[np.concatenate([texts[number], draw(answer)]) for _, number in members],
        prompts_S=[prompt] * len(members),
        groups_S=[place for place, _ in members],
    )


def agent_paths(draw: Draw, *, turns: int, forks: int, prompt: int, thought: int, said: int) -> Paths:
    """Return the turns of one episode of an agent, each a sample: it sees the prompt of ``prompt`` tokens and what was
    said in earlier turns, ``said`` tokens each, but not its earlier thoughts, and answers with ``thought`` tokens. The
    second half of its ``turns`` goes on in ``forks`` different ways."""
    found = Paths(ids_S=[], prompts_S=[], groups_S=[])

    def walk(history: Ids, count: int) -> Ids:
        """Add ``count`` turns after ``history``, and return the history after them."""
        for _ in range(count):
            found.ids_S.append(np.concatenate([history, draw(thought)]))
            found.prompts_S.append(len(history))
            found.groups_S.append(0)
            history = np.concatenate([history, draw(said)])
        return history

    trunk = walk(draw(prompt), turns // 2)
    for _ in range(forks):
        walk(trunk, turns - turns // 2)
    return found


SHAPES: dict[str, Callable[..., Paths]] = {"groups": group_paths, "agents": agent_paths}


def paths_of(request: dict[str, Any], draw: Draw) -> Paths:
    """Return the samples that a request describes by the name of a shape in :data:`SHAPES` and its arguments."""
    arguments = dict(request)
    return SHAPES[arguments.pop("shape")](draw, **arguments)


OTHERWISE = [[0, 0, 0, 1, 0, 0, 0], [2, 2, 2, 3, 2, 2, 2]]
"""Two groups of seven, in each of which one sample begins otherwise."""
BY_ACCIDENT = [[0, 0, 0, 1, 0, 0, 0], [2, 2, 2, 1, 2, 2, 2], [3, 3, 3, 1, 3, 3, 3]]
"""Three groups of seven, in each of which one sample begins otherwise: all three alike."""
APART = [list(range(14))]
"""Samples that share nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCase:
    """A batch whose samples begin alike, or not at all, and what is expected of it."""

    what: str
    """What it is, in words."""
    shape: dict[str, Any]
    """The samples, as :func:`paths_of` takes them."""
    least: float
    """How many times faster a step should at least be than one that computes every sample whole."""


def tree_cases(*, quick: bool) -> list[TreeCase]:
    """Return the batches of the benchmark; with ``quick``, small ones."""
    prompt, answer = (16, 8) if quick else (256, 128)
    turns, forks, thought, said = (4, 2, 6, 4) if quick else (20, 4, 80, 48)
    groups = {"shape": "groups", "prompt": prompt, "answer": answer}
    agents = {"shape": "agents", "turns": turns, "forks": forks, "prompt": answer, "thought": thought, "said": said}
    return [
        TreeCase(what="one sample of each group begins otherwise", shape={**groups, "prompts": OTHERWISE}, least=1.6),
        TreeCase(what="and alike in all groups", shape={**groups, "prompts": BY_ACCIDENT}, least=1.6),
        TreeCase(what=f"an agent of {turns} turns and {forks} forks", shape=agents, least=2.5),
        TreeCase(what="nothing is shared", shape={**groups, "prompts": APART}, least=0.98),
    ]
