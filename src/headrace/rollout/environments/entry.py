"""The loading of ``env.entry``: it turns the user's class, function or program into a coroutine function that attempts
a row and returns an :class:`Episode`."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from headrace.base.config.user_code import find_in_file, load_file
from headrace.base.errors import BudgetSpent, ConfigError, EnvError, EpisodeError
from headrace.base.types.chat import Message, Reply
from headrace.rollout.environments.interface import Env, StepResult, as_messages
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.program import Program
from headrace.rollout.environments.tools import call_tools, make_tools, run_in_thread

K = TypeVar("K")
Rollout = Callable[[Mapping[str, Any], EpisodePolicy], Awaitable[Episode]]
"""A coroutine function that attempts a row with a policy, and returns the episode with its rewards."""


def load_entry(
    kind: str,
    reference: str,
    executor: Executor,
    adapt: Callable[[Any], Any] = lambda target: target,
    *,
    own_namespace: bool = True,
) -> Rollout:
    """Import the object that ``reference``, a ``file.py:name``, names, or find the program of a command, and return a
    coroutine function that attempts a row. Plain functions run in ``executor``. ``adapt`` may replace the imported
    object; ``own_namespace`` applies to programs.

    Raises :class:`~headrace.base.errors.EnvError` if the file cannot be loaded, or if the object is of another kind.
    """
    if kind == "program":
        return partial(_run_program, Program(shlex.split(reference), own_namespace=own_namespace))
    path, name = find_in_file(reference, "env.entry")
    try:
        target = vars(load_file(path))[name]
    except ConfigError as error:
        raise EnvError(f"env.entry={reference!r}: {error.problem}", remedy=error.remedy) from None
    return _KINDS[kind](adapt(target), reference, executor)


def _describe(target: Any) -> str:
    """Return a description of the object that a user has named in place of a rollout or an environment, for an error
    message."""
    if inspect.isfunction(target):
        parameters = ", ".join(inspect.signature(target).parameters)
        return f"{'an async' if inspect.iscoroutinefunction(target) else 'a plain'} function of ({parameters})"
    return "another class" if isinstance(target, type) else f"a {type(target).__name__}"


def _load_env(target: Any, reference: str, executor: Executor) -> Rollout:
    """Return the rollout function for ``target``, the environment class that ``reference`` (``env.entry``) names. Its
    plain methods run in ``executor``. Raises :class:`~headrace.base.errors.EnvError` if ``target`` is not a class that
    inherits :class:`Env`."""
    if not (isinstance(target, type) and issubclass(target, Env)):
        raise EnvError(
            f"env.entry={reference!r} is {_describe(target)}, and env.kind='env' needs a class that inherits "
            "headrace.Env",
            remedy=f"as a reward, name an object of it (score = {target.__name__}(...))"
            if isinstance(target, type) and "__call__" in vars(target)
            else "write class MyEnv(headrace.Env), or set env.kind = 'rollout' for a function",
        )
    return as_rollout(target, executor)


def as_rollout(target: Callable[..., Any], executor: Executor) -> Rollout:
    """Return a coroutine function that attempts a row with ``target``, which is an ``async def rollout(task, policy)``
    or a constructor of an :class:`Env`. Plain methods of the environment run in ``executor``."""
    return _checked_rollout(target) if inspect.iscoroutinefunction(target) else partial(_play, target, executor)


def _load_rollout(target: Any, reference: str, executor: Executor) -> Rollout:
    """Return the rollout function for ``target``, the async function that ``reference`` (``env.entry``) names. Raises
    :class:`~headrace.base.errors.EnvError` for anything else. ``executor`` is not used by an async function."""
    if not inspect.iscoroutinefunction(target) or len(inspect.signature(target).parameters) < 2:
        raise EnvError(
            f"env.entry={reference!r} is {_describe(target)}, and env.kind='rollout' needs an async function of two "
            "parameters",
            remedy="write async def rollout(task, policy), or set env.kind = 'env' for a class",
        )
    return as_rollout(target, executor)


def _checked_rollout(target: Callable[..., Awaitable[Any]]) -> Rollout:
    """Return a function that calls the user's rollout ``target`` and returns its result as an :class:`Episode`. The
    reward is checked to be a number."""

    async def attempt(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Attempt ``task`` with the user's function, and return the episode."""
        returned = await target(task, policy)
        return _as_episode(returned) if isinstance(returned, Episode) else Episode(reward=as_reward(returned))

    return attempt


_KINDS: dict[str, Callable[[Any, str, Executor], Rollout]] = {"env": _load_env, "rollout": _load_rollout}
"""The function that loads ``env.entry``, by ``env.kind``."""


async def _run_program(program: Program, task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """Run ``program`` as one episode of ``task``, and return an episode with the rewards that the program printed.
    ``policy`` contains the address at which the program reaches the model."""
    result = await program.run(task, policy.variables)
    agent_rewards = result.get("agent_rewards") or {}
    if not isinstance(agent_rewards, dict):
        raise EpisodeError(
            f"agent_rewards is a {type(agent_rewards).__name__}", remedy='print {"agent_rewards": {"first": 1.0}}'
        )
    return Episode(reward=as_reward(result.get("reward")), agent_rewards=_as_rewards(agent_rewards))


async def _play(
    make_env: Callable[[], Env], executor: Executor, task: Mapping[str, Any], policy: EpisodePolicy
) -> Episode:
    """Run one episode of an environment: reset with ``task``, then answers of ``policy`` and steps until the episode is
    done or its budget is spent. ``make_env`` constructs the environment; its plain methods run in ``executor``. Return
    the episode with the reward of each answer."""
    call = partial(_call, executor)
    env = await call(make_env)
    env.seed, env.attempt_kind = policy.seed, policy.attempt_kind
    rewards: dict[int, float] = {}
    extra: dict[int, Mapping[str, str | float]] = {}
    try:
        messages = list(as_messages(await call(env.reset, task)))
        tools = make_tools(env.tools)
        while True:
            reply = await _next_answer(policy, messages, list(env.tools))
            if reply is None:
                # the budget is spent: the episode keeps the rewards of its answers so far
                return Episode(reward=sum(rewards.values()), rewards=rewards, extra=extra)
            messages.append(reply.message)
            if reply.message.tool_calls:
                messages += await call_tools(reply.message, tools, executor)
                continue
            result = _check_step(await call(env.step, reply.message))
            reward = as_reward(result.reward)
            if reward is not None:
                rewards[reply.turn] = reward
            if result.extra:
                extra[reply.turn] = result.extra
            if result.done:
                break
            messages += as_messages(result.messages)
    finally:
        await call(env.close)
    return Episode(reward=sum(rewards.values()) if rewards else None, rewards=rewards, extra=extra)


async def _next_answer(policy: EpisodePolicy, messages: list[Message], tools: list[Callable[..., Any]]) -> Reply | None:
    """Return the model's next answer to ``messages``. If a budget of the episode is spent, return ``None`` to end the
    episode, or raise the error if there was no answer yet."""
    try:
        return await policy.chat(messages, tools=tools)
    except BudgetSpent:
        if not any(message.role == "assistant" for message in messages):
            raise
        return None


def _check_step(result: Any) -> StepResult:
    """Return ``result``, the value that the user's ``step`` returned. Raises
    :class:`~headrace.base.errors.EpisodeError` if it is not a :class:`StepResult`, or if it has neither messages nor
    ``done``."""
    if not isinstance(result, StepResult):
        raise EpisodeError(f"step returned a {type(result).__name__}", remedy="return a headrace.StepResult")
    if not result.done and not result.messages:
        raise EpisodeError("step returned neither messages nor done=True", remedy="return one of them")
    return result


def _as_episode(returned: Episode) -> Episode:
    """Return a copy of the episode that a user's rollout returned, with its rewards as numbers. Raises
    :class:`~headrace.base.errors.EpisodeError` for an invalid field."""
    invalid: list[Any] = [each for each in returned.trained or () if not isinstance(each, Reply)]
    invalid += [turn for turn in returned.rewards if not isinstance(turn, int)]
    if invalid:
        raise EpisodeError(
            f"the episode names an answer by a {type(invalid[0]).__name__}",
            remedy="write rewards={reply.turn: 1.0} and trained=[reply]",
        )
    return Episode(
        reward=as_reward(returned.reward),
        rewards=_as_rewards(returned.rewards),
        agent_rewards=_as_rewards({str(agent): value for agent, value in returned.agent_rewards.items()}),
        trained=returned.trained,
        extra=returned.extra,
    )


def _as_rewards(values: Mapping[K, Any]) -> dict[K, float]:
    """Return ``values`` with every reward as a finite number, by the same keys. Rewards that are ``None`` are
    omitted."""
    return {key: reward for key, value in values.items() if (reward := as_reward(value)) is not None}


async def _call(executor: Executor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function``, a plain or ``async`` function of the user, with ``arguments`` without blocking the event loop,
    and return its result. Plain functions run in ``executor``."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    returned = await run_in_thread(executor, partial(function, *arguments))
    return await returned if inspect.isawaitable(returned) else returned


def as_reward(value: Any) -> float | None:
    """Return a reward as a finite number. ``None``, which means that there is no reward, is returned as it is. Raises
    :class:`~headrace.base.errors.EpisodeError` for any other value."""
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text")
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EpisodeError(f"the reward is a {type(value).__name__}", remedy="return a number") from None
    if not math.isfinite(number):
        raise EpisodeError(f"the reward is {number}", remedy="return a finite number", reason="reward_nan")
    return number
