"""The batches of the learner benchmark in which several samples begin with the same tokens: the samples are the paths
of prefix trees.

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
"""A function that returns the given number of random token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPaths:
    """The samples of a batch, before they are laid out as a :class:`~headrace.base.types.batch.Batch`."""

    ids_S: list[Ids]
    """The token ids of each sample."""
    prompts_S: list[int]
    """The number of first tokens of each sample that carry no loss."""
    groups_S: list[int]
    """The group of each sample, from 0."""


def draw_group(draw: Draw, *, prompts: list[list[int]], prompt: int, answer: int) -> TokenPaths:
    """Return groups of samples, each an answer of ``answer`` tokens to a prompt of ``prompt`` tokens. ``prompts`` has
    the number of the prompt for each sample of each group; samples with the same number have the same prompt.
    ``draw(n)`` returns ``n`` random tokens."""
    texts = {number: draw(prompt) for number in sorted({number for group in prompts for number in group})}
    members = [(place, number) for place, group in enumerate(prompts) for number in group]
    return TokenPaths(
        ids_S=[np.concatenate([texts[number], draw(answer)]) for _, number in members],
        prompts_S=[prompt] * len(members),
        groups_S=[place for place, _ in members],
    )


def draw_agent(draw: Draw, *, turns: int, forks: int, prompt: int, thought: int, observation: int) -> TokenPaths:
    """Return the turns of one episode of an agent, each as one sample. A turn reads the prompt of ``prompt`` tokens and
    the messages of earlier turns, ``observation`` tokens each, but not the thoughts of earlier turns, and answers with
    ``thought`` tokens. The second half of the ``turns`` is sampled in ``forks`` different ways. ``draw(n)`` returns
    ``n`` random tokens."""
    paths = TokenPaths(ids_S=[], prompts_S=[], groups_S=[])

    def walk(history: Ids, count: int) -> Ids:
        """Add ``count`` turns after ``history``, the tokens that the first of them reads, and return the history after
        these turns."""
        for _ in range(count):
            paths.ids_S.append(np.concatenate([history, draw(thought)]))
            paths.prompts_S.append(len(history))
            paths.groups_S.append(0)
            history = np.concatenate([history, draw(observation)])
        return history

    trunk = walk(draw(prompt), turns // 2)
    for _ in range(forks):
        walk(trunk, turns - turns // 2)
    return paths


SHAPES: dict[str, Callable[..., TokenPaths]] = {"groups": draw_group, "agents": draw_agent}
"""The functions that return the samples of a batch, by the name of the shape."""


def draw_paths(request: dict[str, Any], draw: Draw) -> TokenPaths:
    """Return the samples that a request describes by the name of a shape in :data:`SHAPES` and its arguments.
    ``draw(n)`` returns ``n`` random tokens."""
    arguments = dict(request)
    return SHAPES[arguments.pop("shape")](draw, **arguments)


OTHERWISE = [[0, 0, 0, 1, 0, 0, 0], [2, 2, 2, 3, 2, 2, 2]]
"""The prompts of two groups of seven samples; in each group one sample has another prompt."""
BY_ACCIDENT = [[0, 0, 0, 1, 0, 0, 0], [2, 2, 2, 1, 2, 2, 2], [3, 3, 3, 1, 3, 3, 3]]
"""The prompts of three groups of seven samples; in each group one sample has another prompt, the same in all groups."""
APART = [list(range(14))]
"""The prompts of a group whose samples have no tokens in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCase:
    """A batch for the measurement of prefix trees, and its target."""

    description: str
    """The description of the batch, in words."""
    shape: dict[str, Any]
    """The description of the samples for :func:`draw_paths`."""
    min_speedup: float
    """The least factor by which a step should be faster than a step that computes every sample completely."""


def tree_cases(*, quick: bool) -> list[TreeCase]:
    """Return the batches of the benchmark, with their targets; with ``quick``, small batches."""
    prompt, answer = (16, 8) if quick else (256, 128)
    turns, forks, thought, observation = (4, 2, 6, 4) if quick else (20, 4, 80, 48)
    groups = {"shape": "groups", "prompt": prompt, "answer": answer}
    agents = {
        "shape": "agents",
        "turns": turns,
        "forks": forks,
        "prompt": answer,
        "thought": thought,
        "observation": observation,
    }
    return [
        TreeCase(
            description="one sample of each group begins otherwise",
            shape={**groups, "prompts": OTHERWISE},
            min_speedup=1.6,
        ),
        TreeCase(description="and alike in all groups", shape={**groups, "prompts": BY_ACCIDENT}, min_speedup=1.6),
        TreeCase(description=f"an agent of {turns} turns and {forks} forks", shape=agents, min_speedup=2.5),
        TreeCase(description="nothing is shared", shape={**groups, "prompts": APART}, min_speedup=0.98),
    ]
