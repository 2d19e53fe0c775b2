"""The demo's task, two-digit addition. The answer to ``"27+58="`` is ``"580"``: the sum 085 in three digits, the least
significant digit first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB = "0123456789+="
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ message.content }}"
    "{%- if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""A chat template that joins the messages without role markers, and ends every answer with ``<eos>``."""
NUM_WARM = 3000
"""Number of pairs for the supervised phase."""
HELD_OUT_FRAC = 0.15
"""Fraction of the pairs that are held out for evaluation."""

Pair = tuple[int, int]
"""Two numbers to add."""


def prompt(pair: Pair) -> str:
    """Return the question for a pair of numbers, such as ``27+58=``.

    >>> prompt((27, 58)), answer((27, 58)), careless((27, 58))
    ('27+58=', '580', '570')
    """
    return f"{pair[0]}+{pair[1]}="


def answer(pair: Pair) -> str:
    """Return the correct answer for ``pair``: the sum in three digits, the least significant digit first."""
    return f"{pair[0] + pair[1]:03d}"[::-1]


def careless(pair: Pair) -> str:
    """Return the answer for ``pair`` of a careless teacher, who forgets every carry. It is correct for a sum without
    carries."""
    a, b = pair
    return f"{(a % 10 + b % 10) % 10}{(a // 10 + b // 10) % 10}0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The split of all ordered pairs of two-digit numbers. ``a+b`` and ``b+a`` are either both held out or both not
    held out."""

    warm: list[Pair]
    """Pairs for the supervised phase."""
    train: list[Pair]
    """Pairs for reinforcement learning."""
    held_out: list[Pair]
    """Pairs for evaluation only."""


def split(seed: int) -> Split:
    """Return the split of all pairs into pairs for the supervised phase, for reinforcement learning and for evaluation.
    ``seed`` determines both the split and the order of the pairs."""
    rng = np.random.default_rng(seed)
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(unordered)
    cut = round(HELD_OUT_FRAC * len(unordered))
    held_out, rest = _both_orders(unordered[:cut]), _both_orders(unordered[cut:])
    rng.shuffle(rest)
    return Split(warm=rest[:NUM_WARM], train=rest[NUM_WARM:], held_out=held_out)


def _both_orders(pairs: list[Pair]) -> list[Pair]:
    """Return each of ``pairs`` in both orders, sorted and without repetition."""
    return sorted({ordered for a, b in pairs for ordered in ((a, b), (b, a))})


def row(pair: Pair) -> dict[str, Any]:
    """Return the dataset row of a pair: its question, and the sum as a number."""
    return {"prompt": prompt(pair), "answer": pair[0] + pair[1]}
