"""Who answers in an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.base.errors import EpisodeError, nearest
from headrace.base.types.episode import role_of
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN
from headrace.engine import Engine
from headrace.rollout.environments.agents import POLICY

FROZEN_AGENT = "frozen_agent"
"""Why a turn carries no loss that weights sampled which are not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """The agents of a run."""

    known: frozenset[str] = frozenset()
    """Roles that may be asked beside the policy; empty: any, and all of them are the policy under training."""
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """Of the roles whose weights are frozen."""
    adapters: tuple[str, ...] = ()
    """Roles that train adapters of their own, beside the policy's, in the policy's engines."""
    posing: str = ""
    """Whose adapter answers in the policy's place; empty: its own."""

    def frozen(self, name: str) -> Engine | None:
        """The engine of an agent with frozen weights; ``None``: it is the policy under training.

        Raises :class:`~headrace.base.errors.EpisodeError` for a name that there is not.
        """
        role = role_of(name)
        if self.known and role != POLICY and role not in self.known:
            raise EpisodeError(
                f"an answer of agent {name[:80]!r} is asked for, which [[env.agents]] does not know",
                remedy=f"{nearest(role, self.known)}; or add a table for it",
            )
        return self.engines.get(role)

    def adapter(self, name: str) -> str:
        """Whose adapter answers for an agent that is trained: its own role's, or the policy's (empty)."""
        role = role_of(name)
        return role if role in self.adapters else self.posing


POLICY_ALONE = Agents()
"""Every name is the policy under training."""


def of_frozen(tokens: Tokens) -> Tokens:
    """Tokens of an agent with frozen weights: versions of its own mean nothing to the run."""
    return replace(tokens, versions_T=np.full(len(tokens), FROZEN, np.int32))
