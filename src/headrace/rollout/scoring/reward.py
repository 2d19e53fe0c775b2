"""The loading and calling of a user's reward function, and the values that the function logs in addition to its
rewards."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.clock import being_cancelled
from headrace.base.config.user_code import find_in_file, load_file, where
from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import CallTimes, ContextField, Scores
from headrace.rollout.scoring.signature import NOT_COLUMNS, inspect_signature

LARGEST = float(np.finfo(np.float32).max)
"""The largest absolute value of a reward, because the learner computes in float32."""


def reward_reference(function: Callable[..., Any]) -> str:
    """Return ``file.py:name`` of a function, from which a worker process can load it. Raises :class:`EnvError` for a
    function that is not at the top level of a file."""
    source = _source_file(function)
    name = _get_name(function)
    if source is None or not Path(source).is_file() or not name.isidentifier():
        raise EnvError(
            f"reward function {name} cannot be loaded by another process: it is not a function of a file",
            remedy="define it with 'def' at the top level of a .py file, or set env.reward = 'file.py:name'",
        )
    return f"{Path(source).resolve()}:{name}"


def _get_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object, for error messages."""
    return function.__qualname__ if inspect.isfunction(function) else type(function).__qualname__ + "(...)"


def split_reference(reference: str) -> tuple[Path, str]:
    """Return the file and the name in ``file.py:name``, after a check that the file exists and defines the name. The
    code of the file is not run. Raises :class:`EnvError` if the check fails."""
    try:
        return find_in_file(reference, "env.reward")
    except ConfigError as error:
        raise EnvError(error.problem, remedy=error.remedy) from None


class RewardFunction:
    """A user's reward function, sync or async, as a :class:`~headrace.rollout.scoring.base.Grader`.

    ``reward(completion, **row)`` scores one completion; ``reward(prompts, completions, **columns)`` scores a list, with
    each column of the row repeated for every completion. Both may have the parameters ``completion_ids``,
    ``trainer_state``, ``log_extra`` and ``log_metric``; the second form also receives them in ``**columns``, as in TRL.
    """

    def __init__(self, function: Callable[..., Any], executor: ThreadPoolExecutor) -> None:
        """Wrap ``function``. A function that is not async runs in threads of ``executor``. Raises
        :class:`~headrace.base.errors.EnvError` for a function that is not a reward function."""
        self._function = function
        self._executor = executor
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self.name = _get_name(function)
        """The name of the function, for error messages."""
        self.signature = inspect_signature(function)
        """The parameters of the function."""
        self.by_group = self.signature.by_group
        self.times = CallTimes()
        """The durations of the calls."""
        self.signature.refuse_form(self.name)

    @property
    def wants(self) -> frozenset[ContextField]:
        """The fields of :class:`ScoringContext` that the function has parameters for. Only these fields are sent to the
        worker."""
        parameters: dict[ContextField, str] = {"completion_ids": "completion_ids", "trainer": "trainer_state"}
        return frozenset(field for field, name in parameters.items() if self.signature.is_passed(name))

    async def score(self, request: ScoreCompletions, on_start: Callable[[], None] = lambda: None) -> Scores:
        """Call the function for the completions of ``request``; every error becomes a failure of the :class:`Scores`.
        ``on_start`` is called, from any thread, when the call begins."""
        (scores,) = await self.score_each([request], on_start)
        return scores

    async def score_each(self, requests: Sequence[ScoreCompletions], on_start: Callable[[], None]) -> list[Scores]:
        """Call the function for each of ``requests`` sequentially, and return the scores of each. A function that is
        not async runs in one thread for all of them. ``on_start`` is called when the first call begins."""
        logs = [RewardLog(len(request.completions)) for request in requests]
        pairs = list(zip(requests, logs, strict=True))
        if self._is_async:
            on_start()
            return [await self._finish(self._call_async(*pair), None, *pair) for pair in pairs]

        def call_all() -> list[tuple[Any, BaseException | None]]:
            """Report that the calls begin, then make them."""
            on_start()
            return [_call_for_future(lambda pair=pair: self._call(*pair)) for pair in pairs]  # type: ignore[misc]

        outcomes = await asyncio.get_running_loop().run_in_executor(self._executor, call_all)
        return [await self._finish(*outcome, *pair) for outcome, pair in zip(outcomes, pairs, strict=True)]

    def _call(self, request: ScoreCompletions, log: RewardLog) -> Any:
        """Call a function that is not async for one request, and return its result. ``log`` receives the values that
        the function logs."""
        arguments = self._make_arguments(request, log)
        with self.times.measure() as call:
            returned = self._function(**arguments)
            call.counts = not inspect.isawaitable(returned)
        return returned

    async def _call_async(self, request: ScoreCompletions, log: RewardLog) -> Any:
        """Call an async function for one request, and return its result. ``log`` receives the values that the function
        logs."""
        arguments = self._make_arguments(request, log)
        with self.times.measure():
            return await self._function(**arguments)

    async def _await_result(self, returned: Awaitable[Any]) -> Any:
        """Wait for the result of a call, which has returned ``returned``. If the function is not async, but returns an
        awaitable, such as a lambda that calls an async function, the wait is what takes the time of its calls, so it is
        measured too."""
        with nullcontext() if self._is_async else self.times.measure():
            return await returned

    async def _finish(
        self, returned: Any, error: BaseException | None, request: ScoreCompletions, log: RewardLog
    ) -> Scores:
        """Return the scores of one call for ``request`` from the value ``returned``, which is awaited if it is
        awaitable, or from the ``error`` that the call raised. ``log`` contains the values that the function logged."""
        try:
            if error is None:
                result = await self._await_result(returned) if inspect.isawaitable(returned) else returned
                scores = _as_scores(result if self.by_group else [result], len(request.completions))
                metrics = {name: tuple(values) for name, values in log.metrics.items()}
                return msgspec.structs.replace(scores, metrics=metrics, extra=log.rows())
        except BaseException as raised:
            if being_cancelled():  # user code may raise CancelledError too
                raise
            error = raised
        return Scores(rewards=(), failure=f"reward_error: {_describe_error(error, _source_file(self._function))}")

    def _make_arguments(self, request: ScoreCompletions, log: RewardLog) -> dict[str, Any]:
        """Return the keyword arguments of the call for ``request``: the columns of the row, and the other values that
        the signature accepts, such as the methods of ``log``. A function over a group receives a list with one value
        per completion for each argument."""
        signature = self.signature
        row = {key: value for key, value in request.row.items() if signature.accepts(key)}
        ids = [ids_T.tolist() for ids_T in request.completion_ids]
        special: dict[str, Any] = {"trainer_state": request.trainer, "log_extra": log.column, "log_metric": log.metric}
        if not self.by_group:
            context_values = {**special, "completion_ids": ids[0] if ids else []}
            task_values: dict[str, Any] = {"prompt": request.prompt}
            if request.turn >= 0:
                task_values |= {"history": request.history, "turn": request.turn}
            return {
                **{key: value for key, value in task_values.items() if signature.accepts(key)},
                **row,
                **{key: value for key, value in context_values.items() if signature.is_passed(key)},
                "completion": request.completions[0],
            }
        count = len(request.completions)
        is_chat = not isinstance(request.prompt, str)
        completions: list[Any] = list(request.completions)
        if is_chat:
            completions = [[{"role": "assistant", "content": text}] for text in request.completions]
        columns = {key: [value] * count for key, value in row.items() if key not in NOT_COLUMNS}
        special |= {"prompts": [request.prompt] * count, "completions": completions, "completion_ids": ids}
        return {**columns, **{key: value for key, value in special.items() if signature.is_passed(key)}}


def load_reward(reference: str, executor: ThreadPoolExecutor) -> RewardFunction:
    """Import the function that ``file.py:name`` names, and return it as a grader. If it is not async, it runs in
    ``executor``. Raises :class:`EnvError` if the file cannot be loaded."""
    path, name = split_reference(reference)
    try:
        module = load_file(path)
    except ConfigError as error:
        raise EnvError(f"env.reward={reference!r}: {error.problem}", remedy=error.remedy) from None
    function = vars(module)[name]
    if not callable(function):
        raise EnvError(f"env.reward={reference!r} is a {type(function).__name__}", remedy="name a function")
    return RewardFunction(function, executor)


def _call_for_future(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the value of ``call`` and ``None``, or ``None`` and the exception that it raised. The exception is a
    return value because a future cannot carry every exception, for example ``StopIteration``."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - the boundary of user code: its failure is a record
        return None, error


def _as_scores(returned: Any, expected: int) -> Scores:
    """Return the value ``returned`` by a reward function as scores. Anything but ``expected`` values, each a finite
    number or ``None``, becomes a failure."""
    if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
        return Scores(rewards=(), failure=f"reward_error: returned a {type(returned).__name__}, not a list")
    values = list(returned)
    if len(values) != expected:
        return Scores(rewards=(), failure=f"reward_error: returned {len(values)} rewards for {expected} completions")
    rewards: list[float | None] = []
    for value in values:
        if value is None:
            rewards.append(None)
            continue
        try:
            if isinstance(value, str | bytes):
                raise TypeError("text")
            number = float(value)
        except (TypeError, ValueError):
            return Scores(rewards=(), failure=f"reward_error: returned a {type(value).__name__}, not a number")
        if not math.isfinite(number):
            return Scores(rewards=(), failure=f"reward_nan: returned {number}")
        if abs(number) > LARGEST:
            return Scores(rewards=(), failure=f"reward_nan: returned {number}, which is infinite in float32")
        rewards.append(number)
    return Scores(rewards=tuple(rewards))


def _describe_error(error: BaseException, source: str | None) -> str:
    """Return the text of ``error`` with its line in the file ``source``. Characters that cannot be encoded are
    replaced."""
    return where(error, source).encode("utf-8", "replace").decode()


def _source_file(function: Callable[..., Any]) -> str | None:
    """Return the path of the file that defines a function, or the class of a callable object; ``None`` if there is no
    such file."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a callable object, or a built-in function
        pass
    try:
        return inspect.getsourcefile(type(function))
    except (TypeError, OSError):
        return None


MAX_TEXT = 4096
"""The largest number of characters of one value of ``log_extra``; longer values are cut."""


class RewardLog:
    """The values that one call of a reward function logs with ``log_metric`` and ``log_extra``."""

    def __init__(self, num_completions: int) -> None:
        """Create an empty log for a call that scores ``num_completions`` completions."""
        self._columns: dict[str, list[Any]] = {}
        """The logged values of every column, by name: one value for each completion."""
        self._num_completions = num_completions
        self.metrics: dict[str, list[float]] = {}
        """The logged values of every metric, by name."""

    def metric(self, name: str, value: float) -> None:
        """Record ``value`` for the metric ``name``. ``metrics.jsonl`` contains the mean of a step as
        ``logged/NAME``."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def column(self, column: str, values: list[Any]) -> None:
        """Record one value per completion for ``column``, which is shown with the episodes. If a column is logged
        again, the values are appended."""
        self._columns.setdefault(str(column), []).extend(values)

    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return the logged columns of each completion. Raises :class:`ValueError` if the number of values of a column
        differs from the number of completions."""
        for column, values in self._columns.items():
            if len(values) != self._num_completions:
                raise ValueError(
                    f"log_extra({column!r}) was given {len(values)} values for {self._num_completions} completions"
                )
        if not self._columns:
            return ()
        return tuple(
            {name: plain_value(values[index]) for name, values in self._columns.items()}
            for index in range(self._num_completions)
        )


def plain_value(value: Any) -> Any:
    """Return a value that can be serialised: numbers and short texts unchanged, and anything else as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | dict):
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, OverflowError):
            value = repr(value)
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
