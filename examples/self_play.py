"""Self-play: two players of Nim, both of them the policy under training.

    headrace demo --dir runs/demo
    headrace train examples/self_play.toml

A few matches lie on the table; in turn each player takes one, two or three, and whoever takes the last one wins. A move
that the rules do not know loses. What one wins the other loses: each is credited with its own reward, against what
players of its seat earned in the group, so that nobody is praised for having the better seat.

Held-out games are played against the model as it was when the run began, from either seat.
"""

import headrace


async def play(task, policy):
    """Play a game with the number of matches of ``task``, and return the rewards of the two players, which add up to
    0."""
    seats = ["first", "second"]
    if "seat" in task:  # held out: the other seat is that of the frozen opponent
        seats[1 - task["seat"]] = "opponent"
    left, moves = task["matches"], 0
    while left > 0:
        player = seats[moves % 2]
        reply = await policy.chat(f"{left}=", agent=player, max_new_tokens=1)
        moves += 1
        if reply.message.content not in ("1", "2", "3") or int(reply.message.content) > left:
            winner = seats[moves % 2]
            break
        left -= int(reply.message.content)
        winner = player
    rewards = {player: 1.0 if player == winner else -1.0 for player in seats}
    if "seat" in task:
        return headrace.Episode(reward=rewards[seats[task["seat"]]], agent_rewards=rewards)
    return headrace.Episode(agent_rewards=rewards)
