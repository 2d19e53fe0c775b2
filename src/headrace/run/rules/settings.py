"""The table of the rules that depend on the settings alone, :data:`SETTINGS`. See :mod:`headrace.run.rules` for how to
add a rule.

``c`` is the record of the settings of a run. A function that returns ``Broken`` is the test of a rule: it returns false
if the rule holds, and true if the rule is broken, or a mapping with values for the rule's error message.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.groups import Gdpo
from headrace.algo.advantages.outcomes import Floats
from headrace.algo.advantages.tokens import Prpo
from headrace.algo.config import AlgoConfig
from headrace.algo.losses.supervised import Ce, RefKl
from headrace.algo.reductions import ConstantDivisor, SequenceMeanTokenSum, TokenMean
from headrace.base.errors import DataError, nearest
from headrace.flow.columns import ColumnsConfig
from headrace.flow.filters import LengthFilter
from headrace.learner import LearnerConfig
from headrace.learner.auxiliary.config import MOST_VERSIONS, CriticConfig, Frozen, OtherModel, SampledVersions
from headrace.learner.config import COLUMNS
from headrace.rollout.environments.agents import RESERVED, TrainedAgent
from headrace.run.rules import Broken, SettingsRule
from headrace.run.rules.sections import RunSections

Rules = tuple[SettingsRule[RunSections], ...]
"""Several rules that read the settings alone."""

# -- weights: model, sync, engine ------------------------------------------------------------------------------------

_WEIGHTS: Rules = (
    SettingsRule(
        broken=lambda c: not c.learner.memory.masters and c.model.dtype == "float32",
        reason="learner.memory.masters=false has no effect: with model.dtype='float32' the optimizer keeps no copy",
        remedy="leave it out, or set model.dtype = 'bfloat16'",
    ),
    SettingsRule(
        broken=lambda c: c.sync.codec == "adapter" and c.model.lora is None,
        reason="sync.codec='adapter' sends adapters alone, and model.lora is not set",
        remedy="set model.lora, or sync.codec = 'full'",
    ),
    SettingsRule(
        broken=lambda c: c.model.deterministic and c.sync.codec.startswith("cast"),
        reason="model.deterministic=true with sync.codec={sync.codec!r}: weights that are rounded on their way give "
        "other log-probabilities than the learner's",
        remedy="set sync.codec = 'full' or 'delta', or leave model.deterministic out",
    ),
    SettingsRule(
        broken=lambda c: c.sync.rolling is not None and c.sync.rolling > c.engine.count,
        reason="sync.rolling={sync.rolling} engines are to commit at once, and engine.count={engine.count}",
        remedy="set sync.rolling <= {engine.count}, or leave it out",
    ),
    SettingsRule(
        broken=lambda c: c.flow.columns != ColumnsConfig() and c.launch.remote,
        reason="flow.columns is set, and with launch.kind={launch.kind!r} engines and learner may be on several "
        "machines, between which kept-sets and experts travel with the tokens",
        remedy="leave flow.columns out, or set launch.kind = 'local'",
    ),
)

# -- episodes: environment, agents, filters ---------------------------------------------------------------------------


def _check_adapter_agents(is_bad: Callable[[RunSections, str], bool]) -> Callable[[RunSections], Broken]:
    """Return the test of a rule about the agents that train a LoRA adapter of their own (``model.lora.agents``). The
    rule is broken if ``is_bad(settings, agent's name)`` is true for one of these agents."""

    def broken(c: RunSections) -> Broken:
        """Return the name of the first agent for which ``is_bad`` is true, its entry of ``env.agents`` (``None`` if the
        agent has no entry), and the most similar name in ``env.agents``; false if there is no such agent."""
        rows = {agent.name: agent for agent in c.env.agents}
        for name in c.model.adapter_agents:
            if is_bad(c, name):
                return {"name": name, "row": rows.get(name), "nearest": nearest(name, rows)}
        return False

    return broken


def _find_ineffective_filter(c: RunSections) -> Broken:
    """Return the index and the ``max_tokens`` of the first length filter whose ``max_tokens`` has no effect, because no
    answer can be longer; false if there is no such filter. Only single-turn environments are checked."""
    for index, each in enumerate(c.flow.filters):
        max_tokens = each.max_tokens if isinstance(each, LengthFilter) else None
        if max_tokens is not None and max_tokens >= c.engine.max_new_tokens and c.env.kind == "single_turn":
            return {"index": index, "max_tokens": max_tokens}
    return False


_EPISODES: Rules = (
    SettingsRule(
        broken=_check_adapter_agents(lambda c, name: name in RESERVED),
        reason="model.lora.agents: {name!r} is taken: " + ", ".join(sorted(RESERVED)) + " are authors in every "
        "episode; the policy has an adapter without being named",
        remedy="choose another name",
    ),
    SettingsRule(
        broken=_check_adapter_agents(lambda c, name: not c.env.has_endpoint),
        reason="model.lora.agents: {name!r} is never asked: with env.kind={env.kind!r} the policy answers alone",
        remedy="set env.kind = 'rollout' or 'program', or leave model.lora.agents out",
    ),
    SettingsRule(
        broken=_check_adapter_agents(
            lambda c, name: bool(c.env.agents) and all(row.name != name for row in c.env.agents)
        ),
        reason="model.lora.agents: {name!r} is not among env.agents",
        remedy="{nearest}; or add a table",
    ),
    SettingsRule(
        broken=_check_adapter_agents(
            lambda c, name: any(row.name == name and not isinstance(row, TrainedAgent) for row in c.env.agents)
        ),
        reason="model.lora.agents: {name!r} is to train an adapter, and in env.agents it is {row}",
        remedy="set its kind to 'trained', or leave it out of model.lora.agents",
    ),
    SettingsRule(
        broken=lambda c: bool(c.launch.join) and not c.env.remote,
        reason="launch.join={launch.join!r}, and env.kind={env.kind!r} runs in no worker that another machine "
        "could bring",
        remedy="leave launch.join out, or set env.kind = 'env', 'rollout', 'program' or 'bridge'",
    ),
    SettingsRule(
        broken=lambda c: not c.env.workers and not c.launch.join,
        reason="env.workers=0 keeps no environment on this machine, and no other may join",
        remedy="set env.workers >= 1, or launch.join = 'ADDRESS:PORT'",
    ),
    SettingsRule(
        broken=_find_ineffective_filter,
        reason="flow.filters[{index}] 'length': max_tokens={max_tokens}, and no answer has more than "
        "engine.max_new_tokens={engine.max_new_tokens}",
        remedy="set max_tokens < {engine.max_new_tokens}, or leave it out: what was cut off is meant",
    ),
)

# -- rollout shards: settings that need access to episodes while they run ---------------------------------------------

_SHARDS: Rules = (
    SettingsRule(
        broken=lambda c: (
            c.launch.rollouts > 0
            and next(({"name": row.name} for row in c.env.agents if not isinstance(row, TrainedAgent)), False)
        ),
        reason="launch.rollouts={launch.rollouts}, and agent {name!r} of env.agents has an engine of its own, which "
        "the controller alone asks",
        remedy="leave launch.rollouts out, or train the agent",
    ),
    SettingsRule(
        broken=lambda c: c.launch.rollouts > 0 and bool(c.launch.join),
        reason="launch.rollouts={launch.rollouts} with launch.join={launch.join!r}: the workers that other machines "
        "bring for env.kind={env.kind!r} belong to the controller, and each shard starts its own",
        remedy="leave launch.rollouts or launch.join out",
    ),
    SettingsRule(
        broken=lambda c: c.launch.rollouts > 0 and c.flow.pivots is not None,
        reason="launch.rollouts={launch.rollouts} with flow.pivots: branches are sampled by the controller, which does "
        "not see how the turns of a shard grow",
        remedy="leave launch.rollouts or flow.pivots out",
    ),
    SettingsRule(
        broken=lambda c: c.launch.rollouts > 0 and any(reward.by_turn for reward in c.env.components),
        reason="launch.rollouts={launch.rollouts}, and a component of env.rewards has by_turn: turns are scored while "
        "their episode runs, and the controller gets the episodes of shards when they have ended",
        remedy="leave launch.rollouts out, or score whole answers",
    ),
)

# -- learning: the columns that a loss reads, and the part that computes them -----------------------------------------


def _describe_loss(algo: AlgoConfig) -> str:
    """Return the setting that chose the loss, with its value, for an error message: ``algo.bundle`` if a bundle of the
    same name contains the loss, or else ``algo.loss``."""
    named = f"algo.bundle={algo.bundle!r}" if algo.bundle == algo.loss.kind else f"algo.loss={algo.loss.kind!r}"
    return "algo.bundle='sft'" if isinstance(algo.loss, Ce) and algo.bundle == "sft" else named


def _has_foreign_reference(learner: LearnerConfig) -> bool:
    """Return whether the reference policy π_ref is another model, not an earlier version of the model that is
    trained."""
    reference = learner.reference
    return isinstance(reference, OtherModel) or (isinstance(reference, Frozen) and reference.path is not None)


def _find_missing_columns(c: RunSections) -> Broken:
    """Return the names of the columns (values for each token, such as a policy's logprobs) that the loss reads and the
    learner does not compute; false if the learner computes all of them."""
    missing = sorted(c.algo.columns - COLUMNS - {"log_ref", "top_k"})
    return {"missing": ", ".join(missing)} if missing else False


def _is_distillation(algo: AlgoConfig) -> bool:
    """Return whether the loss learns from a teacher's distribution over its top-k tokens."""
    return "top_k" in algo.columns


def _keeps_too_few_versions(c: RunSections) -> Broken:
    """Return the number of old versions that the learner keeps and the maximum age of a token, if ``algo.old =
    "sampled"`` and the learner keeps too few versions; else false. ``sampled`` compares each token with the weights
    that sampled it."""
    num_kept = c.learner.old.versions if isinstance(c.learner.old, SampledVersions) else 0
    return c.algo.old == "sampled" and num_kept < c.flow.largest_age and {"kept": num_kept, "age": c.flow.largest_age}


def _lacks_teacher(c: RunSections) -> Broken:
    """Return the name of the loss or the advantage that learns from a teacher, if the settings have no teacher; else
    false."""
    distils, algo = _is_distillation(c.algo), c.algo
    if c.learner.teachers or not (distils or algo.advantage.by_teacher):
        return False
    return {"what": f"algo.loss={algo.loss.kind!r}" if distils else f"algo.advantage={algo.advantage.kind!r}"}


_TO_REWARDS = "to learn from rewards, set algo.loss = 'dapo' (or another that looks at them)"
_BOTH_OLD = "set both: algo.old = 'kept' and learner.old.kind = 'lagged', 'refreshed' or 'ema'; or neither"

_LEARNING: Rules = (
    SettingsRule(
        broken=lambda c: isinstance(c.algo.loss, Ce) and {"loss": _describe_loss(c.algo)},
        reason="{loss} would teach the model its own answers, right and wrong alike: a run trains what the model has "
        "just sampled, and this loss (cross-entropy) does not look at what it earned. It is not fine-tuning on "
        "demonstrations, of which a run has none",
        remedy=f"{_TO_REWARDS}; to imitate demonstrations, use headrace sft (docs/sft.md)",
    ),
    SettingsRule(
        broken=lambda c: "pairs" in c.algo.columns and {"loss": _describe_loss(c.algo)},
        reason="{loss} learns from pairs of answers, one preferred to the other, and a run has none: it samples groups "
        "of answers and gives each a reward",
        remedy=f"{_TO_REWARDS}; to learn from given pairs, use headrace dpo (docs/sft.md)",
    ),
    SettingsRule(
        broken=lambda c: (
            isinstance(c.algo.loss, RefKl)
            and not _has_foreign_reference(c.learner)
            and {"loss": _describe_loss(c.algo)}
        ),
        reason="{loss} is nothing but the distance from the reference, which is this model's own past: it would bring "
        "the model back to where it came from, whatever its answers earned",
        remedy=f"{_TO_REWARDS}; to imitate another model, set learner.reference.kind = 'model' and its path",
    ),
    SettingsRule(
        broken=_find_missing_columns,
        reason="algo.loss={algo.loss.kind!r} with its corrections reads {missing}, which the learner does not compute",
        remedy="choose another algo.loss or algo.correction",
    ),
    SettingsRule(
        broken=_lacks_teacher,
        reason="{what} learns from a teacher, and there is none",
        remedy="add [[learner.teachers]] with kind = 'model' and its path; or, to learn from this model's own past, "
        "'ema' or 'lagged'",
    ),
    SettingsRule(
        broken=lambda c: bool(c.learner.teachers) and not (_is_distillation(c.algo) or c.algo.advantage.by_teacher),
        reason="learner.teachers (kind {learner.teachers[0].kind!r}) has no effect: nothing learns from a teacher",
        remedy="set algo.loss = 'distill' or algo.advantage = 'reverse_kl', or leave learner.teachers out",
    ),
    SettingsRule(
        broken=lambda c: c.algo.old == "kept" and c.learner.old is None,
        reason="algo.old='kept', and learner.old does not say which weights",
        remedy=_BOTH_OLD,
    ),
    SettingsRule(
        broken=lambda c: c.algo.old not in ("kept", "sampled") and c.learner.old is not None,
        reason="learner.old.kind={learner.old.kind!r} has no effect with algo.old={algo.old!r}",
        remedy=_BOTH_OLD,
    ),
    SettingsRule(
        broken=lambda c: c.learner.old is not None and (c.algo.old == "sampled") != (c.learner.old.kind == "sampled"),
        reason="algo.old={algo.old!r} with learner.old.kind={learner.old.kind!r}: the weights of each token's version "
        "belong to 'sampled', and other kept weights to 'kept'",
        remedy="set algo.old = 'sampled' and leave learner.old.kind out, or set algo.old = 'kept' and another kind",
    ),
    SettingsRule(
        broken=lambda c: c.algo.old == "sampled" and c.flow.largest_age == 0,
        reason="algo.old='sampled' has no effect with flow.max_age=0: the learner's weights sampled every token",
        remedy="leave algo.old out, or set flow.max_age >= 1",
    ),
    SettingsRule(
        broken=_keeps_too_few_versions,
        reason="algo.old='sampled' needs a copy of the weights for each of {age} versions, and {kept} are kept",
        remedy=f"leave learner.old.versions out, and flow.max_age at {MOST_VERSIONS} or less",
    ),
)

# -- credit: rewards, segments, branches, the critic -------------------------------------------------------------------


def _find_ignored_weights(c: RunSections) -> Broken:
    """Return the weights of ``env.rewards`` if they differ and the advantage is ``gdpo`` without weights of its own,
    which ignores the weights of ``env.rewards``; else false."""
    advantage, weights = c.algo.advantage, [reward.weight for reward in c.env.rewards]
    if not isinstance(advantage, Gdpo) or advantage.weights is not None or len(set(weights)) < 2:
        return False
    return {"weights": weights}


def _has_wrong_number_of_weights(c: RunSections) -> Broken:
    """Return the number of weights of the advantage ``gdpo`` and the number of ``env.rewards``, if they differ; else
    false."""
    advantage, num_rewards = c.algo.advantage, len(c.env.rewards)
    if not isinstance(advantage, Gdpo) or advantage.weights is None or not num_rewards:
        return False
    num_weights = len(advantage.weights)
    return num_weights != num_rewards and {"num_weights": num_weights, "num_rewards": num_rewards}


def _count_graded_by_turn(c: RunSections) -> int | None:
    """Return the number of ``env.rewards`` that grade single turns or segments (process rewards) if the advantage is
    ``prpo``, the only advantage that credits segments; else ``None``."""
    return sum(reward.by_turn for reward in c.env.rewards) if isinstance(c.algo.advantage, Prpo) else None


def _find_ineffective_over_turns(c: RunSections) -> Broken:
    """Return the first process reward whose ``over_turns`` (the way in which the values of turns are combined) is set
    without effect; else false. With ``prpo`` process rewards do not count in the episode's reward."""
    if _count_graded_by_turn(c) is None:
        return False
    without_effect = (reward for reward in c.env.rewards if reward.by_turn and reward.over_turns != "mean")
    return next(({"reward": reward} for reward in without_effect), False)


def _compute_trial_credit(c: RunSections) -> Floats | DataError | None:
    """Return the credit that the advantage computes for two invented episodes of one token each, with rewards 0 and 1,
    in one group. The rules use it to find out what kind of advantage it is.

    The result is the error if the advantage refuses these episodes, and ``None`` if it reads more than rewards, groups
    and lengths, such as a critic's values.
    """
    advantage = c.algo.advantage
    if isinstance(advantage, Prpo) or advantage.stateful or advantage.by_critic or advantage.by_teacher:
        return None
    ones = np.ones(2, np.int64)
    parts_EK = np.array([[0.0], [1.0]]).repeat(max(1, len(c.env.rewards)), axis=1)
    try:
        return c.algo.credit(Outcomes(rewards_E=np.array([0.0, 1.0]), parts_EK=parts_EK, groups_E=ones, lengths_E=ones))
    except DataError as error:
        return error


def _advantage_refuses_trial(c: RunSections) -> Broken:
    """Return the reason why the advantage refuses two invented episodes (:func:`_compute_trial_credit`); false if it
    accepts them. An advantage that refuses them would refuse the episodes of the run as well."""
    credit = _compute_trial_credit(c)
    return isinstance(credit, DataError) and {"why": credit.problem}


def _credits_tokens(c: RunSections) -> bool:
    """Return whether the advantage computes a credit for each token, which a run does not support, instead of one
    credit for each episode."""
    credit = _compute_trial_credit(c)
    return isinstance(credit, np.ndarray) and (c.algo.advantage.per_token or credit.shape != (2,))


def _compares_branches(algo: AlgoConfig) -> bool:
    """Return whether the advantage can compare the branches of a pivot, as it compares the episodes of a group. A pivot
    is a place in a failed episode from which several continuations (branches) are sampled."""
    advantage = algo.advantage
    if advantage.scope != "group" or advantage.per_token or advantage.by_turn or advantage.stateful:
        return False
    if advantage.by_critic or advantage.by_teacher or not advantage.compares_siblings:
        return False
    ones = np.ones(2, np.int64)
    try:
        return advantage(Outcomes(rewards_E=np.array([0.0, 1.0]), groups_E=ones, lengths_E=ones)).shape == (2,)
    except DataError:
        return False


def _find_ineffective_critic_setting(c: RunSections) -> Broken:
    """Return the name and the value of a setting in ``[learner.critic]`` that differs from its default although the
    advantage has no critic; else false."""
    given, default = c.learner.critic.model_dump(), CriticConfig().model_dump()
    changed = [key for key, value in given.items() if value != default[key]]
    if c.algo.advantage.by_critic or not changed:
        return False
    return {"key": changed[0], "value": given[changed[0]]}


_SEPARABLE = (TokenMean, ConstantDivisor, SequenceMeanTokenSum)
"""The reductions with which the losses of branches can be reduced separately from the losses of whole episodes."""

_CREDIT: Rules = (
    SettingsRule(
        broken=_find_ignored_weights,
        reason="algo.advantage='gdpo' normalises each reward by itself: the weights of env.rewards do not count",
        remedy="set algo.advantage.weights = {weights}",
    ),
    SettingsRule(
        broken=_has_wrong_number_of_weights,
        reason="algo.advantage.weights has {num_weights} entries for {num_rewards} env.rewards",
        remedy="give one for each, in order",
    ),
    SettingsRule(
        broken=lambda c: c.algo.advantage.stateful,
        reason="algo.advantage={algo.advantage.kind!r} keeps a baseline between batches, which a run does not carry on",
        remedy="choose another algo.advantage",
    ),
    SettingsRule(
        broken=lambda c: _count_graded_by_turn(c) == 0,
        reason="algo.advantage={algo.advantage.kind!r} credits segments by their process rewards, and none of "
        "env.rewards has by_turn",
        remedy="add a component with by_turn = true, which then grades every segment",
    ),
    SettingsRule(
        broken=lambda c: _count_graded_by_turn(c) == len(c.env.rewards) and not c.env.remote,
        reason="algo.advantage={algo.advantage.kind!r} aligns segments with an outcome, and all env.rewards are "
        "process rewards",
        remedy="add a component without by_turn, which scores the whole answer",
    ),
    SettingsRule(
        broken=_find_ineffective_over_turns,
        reason="env.rewards {reward.label!r} has over_turns={reward.over_turns!r}, which has no effect with "
        "algo.advantage={algo.advantage.kind!r}: process rewards do not count in the episode's",
        remedy="leave over_turns out",
    ),
    SettingsRule(
        broken=_advantage_refuses_trial,
        reason="algo.advantage={algo.advantage.kind!r} does not fit env.kind={env.kind!r}: {why}",
        remedy="choose another algo.advantage",
    ),
    SettingsRule(
        broken=_credits_tokens,
        reason="algo.advantage={algo.advantage.kind!r} credits single tokens, and a run credits whole episodes",
        remedy="choose another algo.advantage",
    ),
    SettingsRule(
        broken=lambda c: c.flow.pivots is not None and c.env.kind == "program",
        reason="flow.pivots with env.kind='program': what a program does cannot be repeated up to a pivot",
        remedy="leave flow.pivots out, or write the environment as a class or a rollout",
    ),
    SettingsRule(
        broken=lambda c: c.flow.pivots is not None and c.flow.pivots.gap >= c.engine.max_new_tokens,
        reason="flow.pivots.gap={flow.pivots.gap}, and no answer has more than "
        "engine.max_new_tokens={engine.max_new_tokens}: there is no place for a pivot",
        remedy="set flow.pivots.gap < {engine.max_new_tokens}",
    ),
    SettingsRule(
        broken=lambda c: c.flow.pivots is not None and not _compares_branches(c.algo),
        reason="algo.advantage={algo.advantage.kind!r} cannot compare the branches of flow.pivots, which are groups of "
        "their own",
        remedy="set algo.advantage = 'grpo' (or 'rloo', 'maxrl', 'opo')",
    ),
    SettingsRule(
        broken=lambda c: c.flow.pivots is not None and not isinstance(c.algo.reduction, _SEPARABLE),
        reason="algo.reduction={algo.reduction.kind!r} cannot reduce the branches of flow.pivots by themselves",
        remedy="set algo.reduction = 'token_mean' (or 'constant', 'sequence_mean_token_sum')",
    ),
    SettingsRule(
        broken=lambda c: (
            c.algo.advantage.compares_siblings
            and c.flow.min_episodes == 1
            and {"setting": "group_size" if c.flow.group_size == 1 else "min_episodes"}
        ),
        reason="flow.{setting}=1 with algo.advantage={algo.advantage.kind!r}, which compares the episodes of a group: "
        "one by itself earns no credit",
        remedy="set flow.{setting} >= 2, or algo.advantage = 'gae' or 'reinforce_pp'",
    ),
    SettingsRule(
        broken=_find_ineffective_critic_setting,
        reason="learner.critic.{key}={value!r} has no effect: algo.advantage={algo.advantage.kind!r} has no critic",
        remedy="set algo.advantage = 'gae', or leave [learner.critic] out",
    ),
    SettingsRule(
        broken=lambda c: c.algo.advantage.by_critic and c.learner.parallel.world > 1,
        reason="algo.advantage={algo.advantage.kind!r} trains a critic, which works in one process only, and "
        "learner.parallel asks for {learner.parallel.world} ranks",
        remedy="leave learner.parallel out, or choose another algo.advantage",
    ),
    SettingsRule(
        broken=lambda c: c.algo.advantage.by_critic and c.learner.critic.warmup_steps >= c.run.steps,
        reason="learner.critic.warmup_steps={learner.critic.warmup_steps} leaves none of run.steps={run.steps} to the "
        "policy",
        remedy="set run.steps above learner.critic.warmup_steps",
    ),
)

_STALENESS: Rules = (
    SettingsRule(
        broken=lambda c: c.algo.minibatches > c.flow.groups_per_step,
        reason="algo.minibatches={algo.minibatches} parts of a batch of flow.groups_per_step={flow.groups_per_step} "
        "groups: some would have no group",
        remedy="set algo.minibatches <= {flow.groups_per_step}",
    ),
    SettingsRule(
        broken=lambda c: c.flow.largest_age > 0 and not c.algo.corrected and not c.algo.allow_uncorrected,
        reason="flow.max_age={flow.max_age} trains tokens of older weights, and algo corrects for none of it",
        remedy="set algo.correction = 'tis' (or another), algo.old = 'engine', or flow.max_age = 0; to insist, "
        "algo.allow_uncorrected = true",
    ),
)


def find_idle_clip(config: RunSections) -> list[str]:
    """Return a list with one warning for a run that trains tokens of older weights with a loss whose clip never acts;
    an empty list for any other run. The clip never acts if the loss compares π with the learner's own weights before
    the step, since the ratio is then always 1."""
    if config.flow.largest_age == 0 or not config.algo.clip_is_idle:
        return []
    weights = " and ".join(repr(part.kind) for part in config.algo.correction) or "nothing"
    return [
        f"flow.max_age={config.flow.max_age} with algo.old='learner': the ratio of loss {config.algo.loss.kind!r} is 1 "
        f"for every token, so its bounds never act, and only {weights} holds back tokens of older weights; with "
        "algo.old = 'engine' and without algo.correction the loss's own bounds do"
    ]


SETTINGS: Rules = (*_STALENESS, *_WEIGHTS, *_EPISODES, *_SHARDS, *_LEARNING, *_CREDIT)
"""The rules that ``load_config`` checks, in this order."""
