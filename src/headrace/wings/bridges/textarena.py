"""The bridge to ``textarena``, games for one player or several: ``env.entry = "textarena/GuessTheNumber-v0"``.

``env.options`` are the keyword arguments of ``textarena.make``, and ``players`` (1). The number of a dataset row is
the seed of its game. Several players are the agents ``player/0``, ``player/1``, ... of one episode, each with its own
conversation and reward; all are the policy under training, unless ``[[env.agents]]`` says otherwise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from headrace.base.errors import BudgetSpent
from headrace.base.types.chat import Message
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bridges.base import EpisodeRandom, task_number


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a rollout function, which runs one episode: the policy plays the game ``what``, for all players.
    ``options`` are ``env.options``: the number of ``players``, and keyword arguments of ``textarena.make``."""
    import textarena

    players = int(options.pop("players", 1))

    def begin(number: int) -> TextArenaGame:
        """Return a new game, with ``number`` as its seed."""
        return TextArenaGame(lambda: _unwrapped(textarena.make(what, **options), textarena), players, number)

    begin(0)  # raises now, rather than in the first episode, if textarena rejects the name or an option

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Run one episode: play the game that the row's number selects, and return the rewards of the players."""
        return await play(await asyncio.to_thread(begin, task_number(task)), policy)

    return rollout


class TextArenaGame:
    """A game of textarena in progress, for one episode."""

    def __init__(self, make_game: Callable[[], Any], players: int, number: int) -> None:
        """Start the game that ``make_game`` returns, with ``players`` players and ``number`` as its seed."""
        self.players = players
        self._random = EpisodeRandom(number)
        """State of the global random generators for this episode."""
        with self._random.active():
            self._game = make_game()
            self._game.reset(num_players=players, seed=number)

    def turn(self) -> tuple[int, str]:
        """Return the number of the player whose turn it is, and the new messages for this player as text."""
        with self._random.active():
            player, new_messages = self._game.get_observation()
        names = self._game.state.role_mapping
        lines = [f"[{names.get(who, f'Player {who}')}] {text}" for who, text, _ in new_messages if who != player]
        return player, "\n".join(lines)

    def act(self, action: str) -> bool:
        """Execute the text ``action`` of the player whose turn it is, and return whether the game is over."""
        with self._random.active():
            done, _ = self._game.step(action)
        return bool(done)

    def final_rewards(self) -> list[float]:
        """End the game and return the reward of each player; a player without a reward gets 0."""
        rewards, _ = self._game.close()
        return [float((rewards or {}).get(player, 0.0)) for player in range(self.players)]


async def play(game: TextArenaGame, policy: EpisodePolicy) -> Episode:
    """Play the game to its end, and return the episode with the reward of each player. ``policy`` samples the moves of
    all players; each player has its own conversation. If the token budget of a player is spent, the game ends with a
    reward of 0 for all players."""
    conversations: dict[int, list[Message]] = defaultdict(list)
    done = False
    rewards = [0.0] * game.players
    while not done:
        player, observation = await asyncio.to_thread(game.turn)
        conversations[player].append(Message(role="user", content=observation))
        try:
            reply = await policy.chat(conversations[player], agent=f"player/{player}" if game.players > 1 else "policy")
        except BudgetSpent:
            if len(conversations[player]) == 1:  # the first observation alone exceeds the budget: nothing was sampled
                raise
            break
        conversations[player].append(reply.message)
        done = await asyncio.to_thread(game.act, reply.message.content)
    if done:
        rewards = game.final_rewards()
    if game.players == 1:
        return Episode(reward=rewards[0])
    return Episode(agent_rewards={f"player/{player}": reward for player, reward in enumerate(rewards)})


def _unwrapped(game: Any, textarena: Any) -> Any:
    """Return the game without textarena's observation wrappers, which would repeat earlier observations that the
    conversation already contains. ``textarena`` is the imported package."""
    while isinstance(game, textarena.ObservationWrapper):
        game = game.env
    if isinstance(game, textarena.Wrapper):
        game.env = _unwrapped(game.env, textarena)
    return game


BRIDGE = Bridge(
    make=make,
    example="textarena/GuessTheNumber-v0",
    package="textarena",
    install="'headrace[textarena]'",
)
