"""A debate: two debaters answer the same sum, hear each other, stand by their answer or concede, and a judge decides.

    headrace demo --dir runs/demo
    headrace train examples/debate.toml

All three are the policy under training, and each has a reward of its own. A debater earns 1 for a right last word, and
a stake that the judge gives to one of them and takes from the other. The judge, who is asked where the last words
differ, earns 1 if the one it points at is right. Debaters are compared with debaters, judges with judges. What is
reported is whether the debate came to the right answer.
"""

import asyncio

import headrace

SIDES = ("debater/0", "debater/1")
CONCEDE = "1"
STAKE = 0.25


def is_right(written, answer):
    """Return whether ``written`` is ``answer``, as three digits, the least significant first."""
    digits = written[::-1]
    return len(digits) == 3 and digits.isascii() and digits.isdigit() and int(digits) == answer


async def reconsider(policy, side, question, own, other):
    """Return the last word of ``side`` on ``question`` after it has heard the other: its ``own`` first answer, or the
    ``other`` one if it concedes."""
    heard = {"role": "user", "content": f"{other.message.content}="}
    messages = [{"role": "user", "content": question}, own.message, heard]
    reply = await policy.chat(messages, agent=side, max_new_tokens=1)
    return (other if reply.message.content == CONCEDE else own).message.content


async def debate(task, policy):
    """Play the two rounds of a debate on ``task`` and, if the last words differ, ask the judge; return the rewards."""
    question, answer = task["prompt"], task["answer"]
    opening = await asyncio.gather(*(policy.chat(question, agent=side) for side in SIDES))
    heard = zip(SIDES, opening, reversed(opening), strict=True)
    last = await asyncio.gather(*(reconsider(policy, side, question, own, other) for side, own, other in heard))
    right = [float(is_right(words, answer)) for words in last]
    rewards = dict(zip(SIDES, right, strict=True))
    if last[0] == last[1]:
        return headrace.Episode(reward=right[0], agent_rewards=rewards)
    verdict = await policy.chat(f"{last[0]}={last[1]}={question}", agent="judge", max_new_tokens=1)
    picked = {"0": 0, "1": 1}.get(verdict.message.content)
    rewards["judge"] = 0.0 if picked is None else right[picked]
    if picked is not None:
        rewards[SIDES[picked]] += STAKE
        rewards[SIDES[1 - picked]] -= STAKE
    return headrace.Episode(reward=rewards["judge"], agent_rewards=rewards)
