"""A program that prints the signatures of reward functions as JSON: ``python -m
headrace.rollout.scoring.print_signatures FILE.py:NAME ...``. It is a separate process, because it executes the user's
files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.base.errors import HeadraceError
from headrace.rollout.scoring.reward import load_reward


def main(references: Sequence[str]) -> None:
    """Print one line of JSON: for each reference ``FILE.py:NAME``, its signature, or a problem and its remedy."""
    results: dict[str, object] = {}
    with ThreadPoolExecutor(max_workers=1) as executor:
        for reference in references:
            try:
                results[reference] = load_reward(reference, executor).signature
            except HeadraceError as error:
                results[reference] = {"problem": error.problem, "remedy": error.remedy}
    sys.stdout.write("\n" + msgspec.json.encode(results).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
