"""The agents of a run: for each agent name, the engine or the adapter that samples its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.base.errors import EpisodeError, nearest
from headrace.base.types.episode import get_role
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN
from headrace.engine import Engine
from headrace.rollout.environments.agents import POLICY

FROZEN_AGENT = "frozen_agent"
"""The reason why a turn sampled by frozen weights carries no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """The agents of a run. The runner of episodes looks up the engine and the adapter of an agent for every turn that
    it samples."""

    known: frozenset[str] = frozenset()
    """Roles of ``[[env.agents]]`` that an episode may use in addition to the policy. If empty, every agent name is
    accepted and means the policy under training."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """The engines of the roles whose weights are frozen, by role."""
    adapters: tuple[str, ...] = ()
    """Roles that train an adapter of their own. Their adapters run in the policy's engines, next to the policy's
    adapter."""
    stand_in: str = ""
    """The role whose adapter answers in place of the policy. If empty, the policy answers itself."""

    def frozen(self, name: str) -> Engine | None:
        """Return the engine of the agent ``name`` if its weights are frozen; ``None`` for an agent that is the policy
        under training.

        Raises :class:`~headrace.base.errors.EpisodeError` for an unknown name.
        """
        role = get_role(name)
        if self.known and role != POLICY and role not in self.known:
            raise EpisodeError(
                f"an answer of agent {name[:80]!r} is asked for, which [[env.agents]] does not know",
                remedy=f"{nearest(role, self.known)}; or add a table for it",
            )
        return self.engines.get(role)

    def adapter(self, name: str) -> str:
        """Return the name of the adapter that samples the answers of the trained agent ``name``. If the role of
        ``name`` trains an adapter, the result is the role. Otherwise it is ``stand_in``; an empty name means the
        policy's own adapter or weights."""
        role = get_role(name)
        return role if role in self.adapters else self.stand_in


POLICY_ALONE = Agents()
"""The agents of a run without ``[[env.agents]]``: every agent name means the policy under training."""


def mark_as_frozen(tokens: Tokens) -> Tokens:
    """Return a copy of ``tokens``, sampled by an engine with frozen weights, in which every version is ``FROZEN``. The
    version numbers of such an engine have no meaning in this run."""
    return msgspec.structs.replace(tokens, versions_T=np.full(len(tokens), FROZEN, np.int32))
