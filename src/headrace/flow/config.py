"""Settings of the flow."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from headrace.base.config import Section
from headrace.base.config.addresses import refuse_secret
from headrace.base.errors import ConfigError
from headrace.flow.age_tuning import AgeTuning
from headrace.flow.filters import FiltersConfig, refuse_impossible
from headrace.flow.pivots import PivotConfig
from headrace.flow.policies import AnyPolicy, Bounded, PolicyConfig
from headrace.flow.state import FlowLimits

LedgerKind = Literal["sqlite", "memory", "redis"]


class FlowConfig(Section):
    """How much is in flight, how old a token may be, and what makes a batch."""

    groups_per_step: int = Field(default=16, ge=1)
    """Groups that one optimizer step trains."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per group: attempts at one task that share a baseline. 1 is for an ``algo.advantage`` with another
    baseline: ``gae``, ``reinforce_pp``."""
    policy: PolicyConfig = Bounded()
    """When a group may start, which groups make the next batch, and what becomes of those that are too old. A name
    alone stands for its table: ``policy = "windowed"`` is ``[flow.policy] kind = "windowed"``."""
    max_age: NonNegativeInt | Literal["auto"] = 1
    """The staleness bound: no token is trained by a learner more than this many versions newer than the weights that
    sampled it. 0 is synchronous. ``"auto"``: found while the run goes on, see ``age_tuning``. Unset: what the policy
    fixes, or 1."""
    age_tuning: AgeTuning = AgeTuning()
    """Only with ``max_age = "auto"``: how far the bound may go, and what moves it."""
    lead: int | None = Field(default=None, ge=0)
    """How many batches generation may run ahead of training; unset: ``max_age``. Less than ``max_age`` leaves the bound
    as slack for stragglers."""
    order: Literal["ready_first", "strict"] = "ready_first"
    """``ready_first``: a batch is made of what is ready, as long as every group still meets its bound; ``strict``:
    groups are trained in the order they were admitted."""
    capacity: PositiveInt | Literal["auto"] | None = None
    """Most groups being generated or scored at once; unset: no limit but the lead. ``"auto"``: found while the run goes
    on, between one batch and what the lead allows, from how full the engine's cache is, what waits, and whether
    sequences had to leave it."""
    min_episodes: int = Field(default=2, ge=1)
    """A group with fewer scored episodes than this is dropped: it has no baseline. Unset: 2, or 1 where ``group_size``
    is 1."""
    ledger: LedgerKind = "sqlite"
    """Where the record of the run is kept: a file of the run directory; the memory of the run, which ends with it; or
    a Redis server (``ledger_url``)."""
    ledger_url: str = ""
    """Of the Redis server: ``redis://host:6379/0``, ``rediss://...`` for TLS, or ``unix:///path/of/socket``; without a
    password."""
    ledger_password_env: str = ""
    """Environment variable that holds the password of the Redis server; unset: it wants none."""
    record_tokens: int = Field(default=256, ge=0)
    """Tokens of each running answer that a crash may cost, at most (or ``engine.flush_tokens``, if that is more): the
    others are recorded, and a resumed run continues from them. 0: answers are recorded when they end."""
    max_failed_groups: int = Field(default=32, ge=1)
    """The run stops when this many groups in a row were dropped because their episodes failed."""
    max_idle_batches: int = Field(default=20, ge=1)
    """The run stops when this many batches in a row carry no signal: every group's rewards are all equal; and when
    filters drop as many groups in a row as make that many batches."""
    filters: FiltersConfig = ()
    """Which scored groups, and which of their episodes, are trained: one table after the other, each sees what the one
    before it left. A dropped group is made up for by another."""

    pivots: PivotConfig | None = None
    """Resample failed episodes from within, and train the branches too; unset: no branches."""

    @property
    def first(self) -> int | None:
        """How many episodes of a group that have finished are enough; ``None``: all are needed."""
        return next((each.first for each in self.filters if each.first is not None), None)

    @property
    def greatest_age(self) -> int:
        """The age that no token will ever be trained above."""
        return self.age_tuning.limit if self.max_age == "auto" else self.max_age

    @property
    def effective_lead(self) -> int:
        """How far generation may ever run ahead: ``lead``, or the bound where it is not set."""
        return self.greatest_age if self.lead is None else self.lead

    def limits(self) -> FlowLimits:
        """What a run begins with."""
        return FlowLimits(
            batch_size=self.groups_per_step,
            max_age=self.age_tuning.start if self.max_age == "auto" else self.max_age,
            lead=self.lead,
            capacity=self.groups_per_step if self.capacity == "auto" else self.capacity,
            strict=self.order == "strict",
        )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, tree: Any) -> Any:
        """A policy's name becomes its table, and what the policy and the group's size fix is filled in."""
        if not isinstance(tree, dict):
            return tree
        tree = dict(tree)
        if tree.get("group_size") == 1:
            tree = {"min_episodes": 1, **tree}
        if isinstance(tree.get("policy"), str):
            tree["policy"] = {"kind": tree["policy"]}
        policy = tree.get("policy", Bounded())
        for choice in get_args(AnyPolicy):
            named = isinstance(policy, dict) and policy.get("kind") == choice.model_fields["kind"].default
            if named or isinstance(policy, choice):
                tree = {**choice.fixes, **tree}
        return tree

    @model_validator(mode="after")
    def _policy_fits(self) -> Self:
        for key, value in self.policy.fixes.items():
            given = getattr(self, key)
            if given != value:
                raise ConfigError(
                    f"flow.{key}={given!r} does not fit flow.policy={self.policy.kind!r}, which makes it "
                    f"{'none' if value is None else repr(value)}",
                    remedy=f"leave flow.{key} out, or set flow.policy = 'bounded'",
                )
        if self.policy.paced and self.effective_lead > self.greatest_age:
            raise ConfigError(
                f"flow.lead={self.lead} is more than flow.max_age={self.greatest_age}: the bound would never let it "
                "happen",
                remedy=f"set flow.lead <= {self.greatest_age}, or raise flow.max_age",
            )
        self.policy.refuse(max_age=self.greatest_age, lead=self.effective_lead, strict=self.order == "strict")
        return self

    @model_validator(mode="after")
    def _tuning_acts(self) -> Self:
        if self.max_age != "auto" and self.age_tuning != AgeTuning():
            raise ConfigError(
                f"flow.age_tuning has no effect with flow.max_age={self.max_age}",
                remedy="set flow.max_age = 'auto', or leave flow.age_tuning out",
            )
        if self.max_age == "auto" and self.policy.masks_stale:
            raise ConfigError(
                "flow.max_age='auto' with flow.policy.per='token': a step that a crash made again would not mask the "
                "same tokens",
                remedy="set flow.max_age to a number, or flow.policy.per = 'group'",
            )
        if self.capacity == "auto" and self.effective_lead == 0:
            raise ConfigError(
                "flow.capacity='auto' has no effect where generation never runs ahead (flow.lead=0): one batch is the "
                "least and the most there can be",
                remedy="leave flow.capacity out, or raise flow.max_age and flow.lead",
            )
        return self

    @model_validator(mode="after")
    def _ledger_can_be_found(self) -> Self:
        if bool(self.ledger_url) != (self.ledger == "redis"):
            raise ConfigError(
                f"flow.ledger={self.ledger!r} with flow.ledger_url={self.ledger_url!r}",
                remedy="give flow.ledger = 'redis' and flow.ledger_url = 'redis://host:6379/0' together, or neither",
            )
        remedy = "name an environment variable that holds it: flow.ledger_password_env"
        refuse_secret("flow.ledger_url", self.ledger_url, remedy)
        if self.ledger_password_env and self.ledger != "redis":
            raise ConfigError(
                f"flow.ledger_password_env={self.ledger_password_env!r} is set, and flow.ledger={self.ledger!r} needs "
                "none",
                remedy="set flow.ledger = 'redis', or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _sizes_can_work(self) -> Self:
        if isinstance(self.capacity, int) and self.capacity < self.groups_per_step:
            raise ConfigError(
                f"flow.capacity={self.capacity} is smaller than one batch (flow.groups_per_step="
                f"{self.groups_per_step}): no step could ever start",
                remedy=f"set flow.capacity >= {self.groups_per_step}",
            )
        if self.min_episodes > self.group_size:
            raise ConfigError(
                f"flow.min_episodes={self.min_episodes} is more than flow.group_size={self.group_size}: every group "
                "would be dropped",
                remedy=f"set flow.min_episodes <= {self.group_size}",
            )
        refuse_impossible(self.filters, group_size=self.group_size, min_episodes=self.min_episodes)
        return self
