"""``python -m headrace.rollout.scoring.look FILE.py:NAME ...``: print the signatures of reward functions as JSON, or
what is wrong with them. A process of its own, because it runs the files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.base.errors import HeadraceError
from headrace.rollout.scoring.reward import load_reward


def main(references: Sequence[str]) -> None:
    """Print one line."""
    told: dict[str, object] = {}
    with ThreadPoolExecutor(max_workers=1) as executor:
        for reference in references:
            try:
                told[reference] = load_reward(reference, executor).signature
            except HeadraceError as error:
                told[reference] = {"problem": error.problem, "remedy": error.remedy}
    sys.stdout.write("\n" + msgspec.json.encode(told).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
