"""The settings of the flow (``[flow]`` in a run file): which groups of episodes start, and which of them a step trains.

A group holds the attempts at one task. The *bound* or *staleness bound* is the largest age, in versions of the
weights, at which a token may be trained; the *lead* is the number of batches that generation may run ahead of training.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from headrace.base.config import Section
from headrace.base.config.addresses import refuse_secret
from headrace.base.errors import ConfigError
from headrace.flow.columns import ColumnsConfig
from headrace.flow.filters import FiltersConfig, refuse_impossible
from headrace.flow.pacing import JustInTime, PacingConfig
from headrace.flow.pivots import PivotConfig
from headrace.flow.policies import POLICIES, Bounded, PolicyConfig
from headrace.flow.state import FlowLimits
from headrace.flow.tuning import AgeTuning

LedgerKind = Literal["sqlite", "memory", "redis"]


class FlowConfig(Section):
    """The settings of the flow: how many groups are in flight, how old a token may be when it is trained, and which
    groups form a batch."""

    groups_per_step: int = Field(default=16, ge=1)
    """Number of groups that one optimizer step trains."""
    group_size: int = Field(default=8, ge=1)
    """Number of episodes in a group, all attempts at one task that share a baseline. 1 needs an ``algo.advantage`` with
    another baseline: ``gae`` or ``reinforce_pp``."""
    policy: PolicyConfig = Bounded()
    """The staleness policy: it decides when a group may start, which groups make the next batch, and what happens to
    groups that are too old. A name can be given instead of a table: ``policy = "windowed"`` means ``[flow.policy] kind
    = "windowed"``."""
    pacing: PacingConfig = JustInTime()
    """When a group that the policy admits starts: ``just_in_time``, as late as the learner can bear, so that its tokens
    are as new as they can be; ``eager``, at once. A name can be given instead of a table."""
    max_age: NonNegativeInt | Literal["auto"] = 1
    """The staleness bound: no token is trained by a learner more than this many versions newer than the weights that
    sampled it. 0 makes the run synchronous. ``"auto"`` tunes the bound during the run (see ``age_tuning``). Unset: the
    value that the policy requires, or 1."""
    age_tuning: AgeTuning = AgeTuning()
    """The limits and thresholds of ``max_age = "auto"``; it has no effect otherwise."""
    lead: int | None = Field(default=None, ge=0)
    """How many batches generation may run ahead of training. Unset: ``max_age``. A smaller value leaves the rest of the
    bound as slack for stragglers."""
    order: Literal["ready_first", "strict"] = "ready_first"
    """The order of training. ``ready_first`` makes a batch of groups that are ready, as long as every other group still
    meets its bound; ``strict`` trains groups in the order in which they were admitted."""
    capacity: PositiveInt | Literal["auto"] | None = None
    """Greatest number of groups that are generated or scored at once. Unset: only the lead limits it. ``"auto"`` tunes
    it during the run, between one batch and what the lead allows, from the fill level of the engine's cache, the number
    of waiting requests, and the number of preempted sequences."""
    min_episodes: int = Field(default=2, ge=1)
    """A group with fewer scored episodes than this is dropped, because it has no useful baseline. Unset: 2, or 1 where
    ``group_size`` is 1."""
    ledger: LedgerKind = "sqlite"
    """Where the record of the run is kept: in a file of the run directory (``sqlite``), in memory, where it ends with
    the run (``memory``), or on a Redis server (``redis``, see ``ledger_url``)."""
    ledger_url: str = ""
    """URL of the Redis server, without a password: ``redis://host:6379/0``, ``rediss://...`` for TLS, or
    ``unix:///path/of/socket``."""
    ledger_password_env: str = ""
    """Name of the environment variable that holds the password of the Redis server. Empty: the server needs no
    password."""
    record_tokens: int = Field(default=256, ge=0)
    """Greatest number of tokens of each running answer that a crash may lose (or ``engine.flush_tokens``, if that is
    more). The tokens before them are recorded, and a resumed run continues from them. 0 records answers only when they
    end."""
    columns: ColumnsConfig = ColumnsConfig()
    """The store for the kept-sets and experts that are recorded with sampled tokens."""
    max_failed_groups: int = Field(default=32, ge=1)
    """The run stops when this many groups in a row were dropped because their episodes failed."""
    max_idle_batches: int = Field(default=20, ge=1)
    """The run stops when this many batches in a row carry no signal, because all rewards of each group are equal, or
    when filters drop as many groups in a row as make that many batches."""
    filters: FiltersConfig = ()
    """The filters that decide which scored groups, and which of their episodes, are trained. They are applied in order;
    each receives the group as the filter before it returned it. A dropped group is replaced by another group."""

    pivots: PivotConfig | None = None
    """Settings of the branches that are sampled from within failed episodes and trained too. Unset: no branches are
    sampled."""

    @property
    def first(self) -> int | None:
        """Return how many finished episodes complete a group, after which its other episodes are cancelled: the value
        of the first filter that sets such a number. ``None``: a group needs all of its episodes."""
        return next((each.first for each in self.filters if each.first is not None), None)

    @property
    def largest_age(self) -> int:
        """Return the largest age, in versions, at which a token can be trained in this run: ``max_age``, or
        ``age_tuning.limit`` where ``max_age`` is ``"auto"``."""
        return self.age_tuning.limit if self.max_age == "auto" else self.max_age

    @property
    def effective_lead(self) -> int:
        """Return the largest number of batches that generation may run ahead of training: ``lead``, or the staleness
        bound where ``lead`` is not set."""
        return self.largest_age if self.lead is None else self.lead

    def limits(self) -> FlowLimits:
        """Return the limits of the flow at the start of a run. Tuning may replace them during the run."""
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
        """Return a completed copy of ``tree``, the table before its validation: a policy or pacing given as a name
        becomes a table, and settings that follow from the policy or the group size get their values."""
        if not isinstance(tree, dict):
            return tree
        tree = dict(tree)
        if tree.get("group_size") == 1:
            tree = {"min_episodes": 1, **tree}
        for key in ("policy", "pacing"):
            if isinstance(tree.get(key), str):
                tree[key] = {"kind": tree[key]}
        choice = POLICIES.find_class(tree.get("policy", Bounded()))
        return tree if choice is None else {**choice.fixes, **tree}

    @model_validator(mode="after")
    def _refuse_contradicting_policy(self) -> Self:
        """Raise :class:`ConfigError` for a setting that the chosen policy fixes at another value, and for a lead above
        the staleness bound."""
        for key, value in self.policy.fixes.items():
            value_set = getattr(self, key)
            if value_set != value:
                raise ConfigError(
                    f"flow.{key}={value_set!r} does not fit flow.policy={self.policy.kind!r}, which makes it "
                    f"{'none' if value is None else repr(value)}",
                    remedy=f"leave flow.{key} out, or set flow.policy = 'bounded'",
                )
        if self.policy.paced and self.effective_lead > self.largest_age:
            raise ConfigError(
                f"flow.lead={self.lead} is more than flow.max_age={self.largest_age}: the bound would never let it "
                "happen",
                remedy=f"set flow.lead <= {self.largest_age}, or raise flow.max_age",
            )
        self.policy.refuse(max_age=self.largest_age, lead=self.effective_lead, strict=self.order == "strict")
        return self

    @model_validator(mode="after")
    def _refuse_tuning_without_effect(self) -> Self:
        """Raise :class:`ConfigError` for tuning settings that would have no effect, and for a tuned bound with a policy
        that masks single tokens: a step that is repeated after a crash would mask other tokens."""
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
    def _refuse_wrong_ledger_address(self) -> Self:
        """Raise :class:`ConfigError` if the URL or the password variable of a Redis server is set for another kind of
        ledger, if a Redis ledger has no URL, or if the URL contains a password."""
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
    def _refuse_impossible_sizes(self) -> Self:
        """Raise :class:`ConfigError` for sizes with which no step could start, every group would be dropped, or a
        filter would have no effect."""
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
