"""Games of ``textarena``, for one player or several: ``env.entry = "textarena/GuessTheNumber-v0"``.

``env.options`` are what ``textarena.make`` takes beside the name, and ``players`` (1). The number of a row is the seed
of its game. Several players are agents ``player/0``, ``player/1``, ... of one episode, each with a conversation and a
reward of its own; all are the policy under training, unless ``[[env.agents]]`` says otherwise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from headrace.base.errors import BudgetSpent
from headrace.base.types.chat import Message
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bridges.base import Found, OwnDraws, number_of


def make(what: str, options: dict[str, Any]) -> Found:
    """The game ``what``, played by the policy."""
    import textarena

    players = int(options.pop("players", 1))

    def begin(number: int) -> TextArenaGame:
        return TextArenaGame(lambda: _unwrapped(textarena.make(what, **options), textarena), players, number)

    begin(0)  # what it refuses is known now

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        return await play(await asyncio.to_thread(begin, number_of(task)), policy)

    return rollout


class TextArenaGame:
    """One game under way."""

    def __init__(self, make_game: Callable[[], Any], players: int, number: int) -> None:
        self.players = players
        self._draws = OwnDraws(number)
        with self._draws.held():
            self._game = make_game()
            self._game.reset(num_players=players, seed=number)

    def turn(self) -> tuple[int, str]:
        """Whose turn it is, and what that player has not read yet."""
        with self._draws.held():
            player, news = self._game.get_observation()
        names = self._game.state.role_mapping
        lines = [f"[{names.get(who, f'Player {who}')}] {text}" for who, text, _ in news if who != player]
        return player, "\n".join(lines)

    def act(self, action: str) -> bool:
        """Whether the game is over after that."""
        with self._draws.held():
            done, _ = self._game.step(action)
        return bool(done)

    def earned(self) -> list[float]:
        """By player; 0 for one of whom the game says nothing."""
        rewards, _ = self._game.close()
        return [float((rewards or {}).get(player, 0.0)) for player in range(self.players)]


async def play(table: TextArenaGame, policy: EpisodePolicy) -> Episode:
    """The game to its end. A budget that is spent ends it with nothing earned."""
    said: dict[int, list[Message]] = defaultdict(list)
    done = False
    earned = [0.0] * table.players
    while not done:
        player, news = await asyncio.to_thread(table.turn)
        said[player].append(Message(role="user", content=news))
        try:
            reply = await policy.chat(said[player], agent=f"player/{player}" if table.players > 1 else "policy")
        except BudgetSpent:
            if len(said[player]) == 1:  # it has read too much before its first word
                raise
            break
        said[player].append(reply.message)
        done = await asyncio.to_thread(table.act, reply.message.content)
    if done:
        earned = table.earned()
    if table.players == 1:
        return Episode(reward=earned[0])
    return Episode(agent_rewards={f"player/{player}": reward for player, reward in enumerate(earned)})


def _unwrapped(game: Any, textarena: Any) -> Any:
    """The game without wrappers that repeat at every turn what was observed before: a conversation remembers it."""
    while isinstance(game, textarena.ObservationWrapper):
        game = game.env
    if isinstance(game, textarena.Wrapper):
        game.env = _unwrapped(game.env, textarena)
    return game
