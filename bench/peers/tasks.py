"""The three tasks of the comparison. A task is a directory with a model, rows and a reward, and settings.

``demo``  two-digit addition with the demo's model (0.4M parameters), with three digits in each answer
``long``  a 28M model whose answers have geometric lengths of mean 128, at most 512 tokens: the end of the sequence has
          the same small probability everywhere
``slow``  the demo with a reward that takes 50 to 500 ms, like a judge or the execution of a program
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.recipes.demo import build_demo

LONG_MEAN, LONG_MOST = 128, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The description of a task, the only input of every side."""

    directory: Path
    """The directory with ``model``, ``train.jsonl``, ``reward.py`` and, if the task can be learned,
    ``held_out.jsonl``."""
    prompts: int
    """The number of prompts of a step."""
    group: int
    """The number of answers to each prompt."""
    new_tokens: int
    """The largest number of tokens of an answer."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: int = 0
    """The number of steps over which the learning rate rises to ``lr``."""
    steps: int
    every: int = 0
    """The number of steps between two measurements of the held-out accuracy; 0: it is not measured."""
    max_age: int = 2
    """The largest age of a trained token, in versions of the weights, for a side that trains on older tokens."""
    micro: int
    """The number of answers in one forward pass, for a side that pads them: the fastest number on this machine."""

    @property
    def episodes(self) -> int:
        """The number of episodes of a step."""
        return self.prompts * self.group


def build_demo_task(directory: Path, seed: int) -> Task:
    """Build the demo in ``directory``, with a model initialised from ``seed``, and return the task ``demo``."""
    build_demo(directory, seed=seed)
    return Task(
        directory=directory, prompts=64, group=4, new_tokens=4, lr=3e-4, warmup=5, steps=150, every=10, micro=256
    )


def build_slow_task(directory: Path, seed: int) -> Task:
    """Build the demo with a slow async reward in ``directory``, with a model initialised from ``seed``, and return the
    task ``slow``."""
    build_demo(directory, seed=seed)
    fast = (directory / "reward.py").read_text().replace("def reward(", "def right(")
    (directory / "reward.py").write_text(fast + SLOW)
    return Task(
        directory=directory, prompts=16, group=4, new_tokens=4, lr=3e-4, warmup=5, steps=60, max_age=6, micro=64
    )


SLOW = '''

async def reward(completion: str, answer: int) -> float:
    """Return the demo's reward after 50 to 500 ms; the time depends only on completion and answer."""
    import asyncio
    import zlib

    await asyncio.sleep(0.05 + 0.45 * (zlib.crc32(f"{completion} {answer}".encode()) % 1000) / 999)
    return right(completion, answer)
'''

ODD = '''"""A reward that differs between answers: the fraction of characters with odd codes."""


def reward(completion: str, answer: int) -> float:
    return sum(ord(character) % 2 for character in completion) / max(1, len(completion))
'''


def build_long_task(directory: Path, seed: int) -> Task:
    """Build a model with 28M parameters and random prompts in ``directory``, both drawn from ``seed``, and return the
    task ``long``. It measures only the speed; there is nothing to learn."""
    directory.mkdir(parents=True)
    letters = "".join(chr(code) for code in range(0x20, 0x7F))
    more = "".join(chr(code) for code in range(0xC0, 0xC0 + 18))
    spec = TinySpec(
        vocab=letters + more, seed=seed, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4,
        intermediate_size=1536, max_positions=1024, even_ends=True, extra={"tie_word_embeddings": True},
    )  # fmt: skip
    make_tiny(directory / "model", spec)
    rng = np.random.default_rng(seed)
    rows = [{"prompt": "".join(rng.choice(list(letters), 16)), "answer": 0} for _ in range(2048)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(ODD)
    return Task(directory=directory, prompts=8, group=8, new_tokens=LONG_MOST, lr=1e-6, steps=8, micro=8)


TASKS = {"demo": build_demo_task, "long": build_long_task, "slow": build_slow_task}
"""The functions that build the tasks, by name."""
