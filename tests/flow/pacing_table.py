"""The table of docs/flow.md: ages and speed with groups just in time beside eager ones, simulated.

python -m tests.flow.pacing_table
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from headrace.wings.plan import World
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.spread import Lognormal, Pareto
from tests.flow.test_pacing import BURN_IN, both, mean_age, world

SEEDS = range(5)
STEPS = 100
SPREAD = Lognormal(mean=40, cv=1.0)
SHORT = Lognormal(mean=8, cv=2.0)
TURNS = {"turns": 4, "observed_tokens": 10, "turn_s": Lognormal(mean=0.5, cv=0.3)}
WORLDS: Mapping[str, World] = {
    "idle engine, `max_age = 2`, equal lengths": world(tok_s=400, steps=STEPS),
    "the same, lengths of cv 0.5": world(answers=Lognormal(mean=40, cv=0.5), tok_s=400, steps=STEPS),
    "the same, lengths of cv 1": world(answers=SPREAD, tok_s=400, steps=STEPS),
    "the same, lengths of cv 1, `max_age = 8`": world(answers=SPREAD, tok_s=400, steps=STEPS, max_age=8),
    "the same, lengths of cv 1, 32 groups a step": world(answers=SPREAD, tok_s=1600, steps=STEPS, groups_per_step=32),
    "the same, lengths of cv 1, four slower engines": world(answers=SPREAD, tok_s=400, steps=STEPS, num_engines=4),
    "the same, Pareto lengths (alpha 1.3)": world(answers=Pareto(mean=40, alpha=1.3, cap=4000), tok_s=300, steps=STEPS),
    "idle engine, answers of 8 tokens, cv 2": world(answers=SHORT, tok_s=200, steps=STEPS),
    "the same, four engines": world(answers=SHORT, tok_s=200, steps=STEPS, num_engines=4),
    "engine at half load, lengths of cv 0.5": world(answers=Lognormal(mean=40, cv=0.5), tok_s=800, steps=STEPS),
    "engine about as fast as the learner": world(answers=SPREAD, tok_s=800, steps=STEPS),
    "slow engine, `max_age = 4`": world(answers=SPREAD, tok_s=8000, steps=STEPS, max_age=4),
    "slow environment, `max_age = 8`": world(answers=10, tok_s=800, steps=STEPS, max_age=8, work=TURNS),
}


def _tok_s(outcome: SimulatedOutcome) -> float:
    late = outcome.steps[BURN_IN:]
    return sum(step.tokens for step in late[1:]) / (late[-1].end_s - late[0].end_s)


def _ranged(values: list[float], digits: int) -> str:
    middle, least, most = (f"{each:.{digits}f}" for each in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def main() -> None:
    """Print the table."""
    print("| | engine idle | mean age, eager | just in time | tokens/s, by eager's |\n|---|---|---|---|---|")
    for name, given in WORLDS.items():
        pairs = [both(given, seed=seed) for seed in SEEDS]
        idle = statistics.median(1 - eager.steps[-1].engine_busy_s / eager.seconds for eager, _ in pairs)
        before = statistics.median(mean_age(eager) for eager, _ in pairs)
        ages = _ranged([mean_age(late) for _, late in pairs], 2)
        speeds = _ranged([_tok_s(late) / _tok_s(eager) for eager, late in pairs], 3)
        print(f"| {name} | {idle:.0%} | {before:.2f} | {ages} | {speeds} |", flush=True)


if __name__ == "__main__":
    main()
