"""A proposer and its solvers: the policy under training writes tasks for itself.

    headrace demo --dir runs/demo
    headrace train examples/proposer_solver.toml

The proposer is given a number and writes a second one, which makes a sum. Four solvers try that sum side by side; each
earns 1 for the right answer. The proposer earns most where half of them are right: a sum that is neither too easy nor
too hard; and less the more often its number was written lately, or it would soon write only a few (R-Zero's penalty of
repetition, arXiv 2508.05004). Solvers are compared with solvers, and the proposer with proposers.

Held-out sums are given as they are, to one solver.
"""

import asyncio
from collections import deque

import headrace

SOLVERS = 4
RECENT = deque(maxlen=512)
"""The last numbers that the proposer wrote."""


def is_right(written, answer):
    """Return whether ``written`` is ``answer``, as three digits, the least significant first."""
    digits = written[::-1]
    return len(digits) == 3 and digits.isascii() and digits.isdigit() and int(digits) == answer


async def play(task, policy):
    """Let the proposer write a sum with the number of ``task``, and the solvers solve it; return their rewards."""
    if "prompt" in task:
        reply = await policy.chat(task["prompt"], agent="solver")
        return float(is_right(reply.message.content, task["answer"]))
    proposed = await policy.chat(f"{task['number']}+", agent="proposer", max_new_tokens=2)
    second = proposed.message.content
    if len(second) != 2 or not second.isascii() or not second.isdigit():
        return headrace.Episode(agent_rewards={"proposer": 0.0})
    question, answer = f"{task['number']}+{second}=", task["number"] + int(second)
    RECENT.append(second)
    repeated = RECENT.count(second) / len(RECENT)
    names = [f"solver/{number}" for number in range(SOLVERS)]
    replies = await asyncio.gather(*(policy.chat(question, agent=name) for name in names))
    rewards = {
        name: float(is_right(reply.message.content, answer)) for name, reply in zip(names, replies, strict=True)
    }  # fmt: skip
    solved = sum(rewards.values()) / SOLVERS
    proposed_well = 1 + 2 * solved * (1 - solved) - min(4 * repeated, 1)
    return headrace.Episode(agent_rewards={**rewards, "proposer": proposed_well})
