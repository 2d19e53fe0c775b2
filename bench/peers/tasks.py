"""The three tasks that every side trains: model, rows, reward and settings, in one directory.

``demo``  two-digit addition with the demo's model (0.4M parameters), three digits an answer
``long``  a 28M model whose answers have geometric lengths of mean 128, at most 512 tokens: the end of the sequence has
          the same small probability everywhere
``slow``  the demo, and every reward takes 50 to 500 ms, as a judge or a program that runs does
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
    """What both sides are given; a side reads nothing else."""

    directory: Path
    """Holds ``model``, ``train.jsonl``, ``held_out.jsonl`` (if accuracy means something) and ``reward.py``."""
    prompts: int
    """Of a step."""
    group: int
    """Answers to each prompt."""
    new_tokens: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: int = 0
    steps: int
    every: int = 0
    """Steps between two measurements of held-out accuracy; 0 for none."""
    max_age: int = 2
    """Versions that the weights may move on between sampling a token and training it, of a side that allows any."""
    micro: int
    """Answers of one forward pass of a side that pads: what was fastest for it here."""

    @property
    def episodes(self) -> int:
        """Of a step."""
        return self.prompts * self.group


def demo(directory: Path, seed: int) -> Task:
    """The demo as it comes."""
    build_demo(directory, seed=seed)
    return Task(
        directory=directory, prompts=64, group=4, new_tokens=4, lr=3e-4, warmup=5, steps=150, every=10, micro=256
    )


def slow(directory: Path, seed: int) -> Task:
    """The demo with rewards that take their time, side by side."""
    build_demo(directory, seed=seed)
    fast = (directory / "reward.py").read_text().replace("def reward(", "def right(")
    (directory / "reward.py").write_text(fast + SLOW)
    return Task(
        directory=directory, prompts=16, group=4, new_tokens=4, lr=3e-4, warmup=5, steps=60, max_age=6, micro=64
    )


SLOW = '''

async def reward(completion: str, answer: int) -> float:
    """After 50 to 500 ms, the same for the same answer on every side."""
    import asyncio
    import zlib

    await asyncio.sleep(0.05 + 0.45 * (zlib.crc32(f"{completion} {answer}".encode()) % 1000) / 999)
    return right(completion, answer)
'''

ODD = '''"""Something that differs from answer to answer: the share of characters with odd codes."""


def reward(completion: str, answer: int) -> float:
    return sum(ord(character) % 2 for character in completion) / max(1, len(completion))
'''


def long(directory: Path, seed: int) -> Task:
    """28M parameters; nothing is to be learned here but speed."""
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


TASKS = {"demo": demo, "long": long, "slow": slow}
