"""``python -m headrace.rollout.scoring.print_signatures FILE.py:NAME ...``: print the signatures of reward functions as
JSON, or the problem with them. It is a separate process, because it runs the files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.base.errors import HeadraceError
from headrace.rollout.scoring.reward import load_reward


def main(references: Sequence[str]) -> None:
    """Print one line of JSON with a signature, or a problem and its remedy, for each reference."""
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
