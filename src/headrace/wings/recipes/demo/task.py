"""Two-digit addition: ``"27+58="`` is answered ``"580"``, three digits, the least significant first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB = "0123456789+="
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ message.content }}"
    "{%- if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""Messages one after the other; an answer has an end."""
MAX_NEW_TOKENS = 4
"""Three digits and the end of the sequence."""
NUM_WARM = 3000
HELD_OUT_FRAC = 0.15

Pair = tuple[int, int]


def prompt(pair: Pair) -> str:
    """The question.

    >>> prompt((27, 58)), answer((27, 58)), careless((27, 58))
    ('27+58=', '580', '570')
    """
    return f"{pair[0]}+{pair[1]}="


def answer(pair: Pair) -> str:
    """The sum, least significant digit first."""
    return f"{pair[0] + pair[1]:03d}"[::-1]


def careless(pair: Pair) -> str:
    """What a teacher writes who forgets every carry."""
    a, b = pair
    return f"{(a % 10 + b % 10) % 10}{(a // 10 + b // 10) % 10}0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """All ordered pairs of two-digit numbers, apart; ``a+b`` and ``b+a`` are on the same side of held-out."""

    warm: list[Pair]
    """For the supervised phase."""
    train: list[Pair]
    """For reinforcement learning."""
    held_out: list[Pair]
    """For evaluation only."""


def split(seed: int) -> Split:
    """The pairs, apart, in an order that the seed fixes."""
    rng = np.random.default_rng(seed)
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(unordered)
    cut = round(HELD_OUT_FRAC * len(unordered))
    held_out, rest = _both_orders(unordered[:cut]), _both_orders(unordered[cut:])
    rng.shuffle(rest)
    return Split(warm=rest[:NUM_WARM], train=rest[NUM_WARM:], held_out=held_out)


def _both_orders(pairs: list[Pair]) -> list[Pair]:
    return sorted({ordered for a, b in pairs for ordered in ((a, b), (b, a))})


def row(pair: Pair) -> dict[str, Any]:
    """One row of the dataset."""
    return {"prompt": prompt(pair), "answer": pair[0] + pair[1]}
