"""The agents of a run, and the engines or adapters that answer for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.base.errors import EpisodeError, nearest
from headrace.base.types.episode import role_of
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN
from headrace.engine import Engine
from headrace.rollout.environments.agents import POLICY

FROZEN_AGENT = "frozen_agent"
"""The reason why a turn sampled by frozen weights carries no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """The agents of a run, by role: which engine or adapter answers for each. The runner of episodes looks them up for
    every turn that is sampled."""

    known: frozenset[str] = frozenset()
    """Roles that an episode may use beside the policy; empty: any name, and all of them are the policy under
    training."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """The engines of the roles whose weights are frozen."""
    adapters: tuple[str, ...] = ()
    """Roles that train adapters of their own, beside the policy's, in the policy's engines."""
    stand_in: str = ""
    """The role whose adapter answers in place of the policy; empty: the policy's own."""

    def frozen(self, name: str) -> Engine | None:
        """Return the engine of the agent ``name`` if its weights are frozen; ``None`` for an agent that is the policy
        under training.

        Raises :class:`~headrace.base.errors.EpisodeError` for an unknown name.
        """
        role = role_of(name)
        if self.known and role != POLICY and role not in self.known:
            raise EpisodeError(
                f"an answer of agent {name[:80]!r} is asked for, which [[env.agents]] does not know",
                remedy=f"{nearest(role, self.known)}; or add a table for it",
            )
        return self.engines.get(role)

    def adapter(self, name: str) -> str:
        """Return the name of the adapter that answers for the trained agent ``name``: that of its role if the role
        trains one, or else the policy's, whose name is empty unless another role stands in for it."""
        role = role_of(name)
        return role if role in self.adapters else self.stand_in


POLICY_ALONE = Agents()
"""The agents of a run without ``[[env.agents]]``: every name is the policy under training."""


def of_frozen(tokens: Tokens) -> Tokens:
    """Return the tokens of an agent with frozen weights with the version that marks frozen weights: the versions of its
    engine are not those of the run."""
    return msgspec.structs.replace(tokens, versions_T=np.full(len(tokens), FROZEN, np.int32))
