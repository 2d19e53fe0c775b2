"""Rewards for code: the program in a completion is run on the tests of its row. Each test runs in a new process of the
sandbox."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

import pydantic
from pydantic import Field

from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import Grader, RewardSection
from headrace.rollout.scoring.grading import BlockingGrader, Unscorable, get_column
from headrace.rollout.scoring.sandbox import Finished, Reason, SandboxLimits, run_python
from headrace.rollout.scoring.sandbox.base import MIB

WALL_PER_CPU = 3
"""The wall-clock time limit of a test, as a multiple of its processor time limit."""
MAX_CODE = 200_000
"""The largest number of characters of code that is run. A longer answer earns 0."""
MAX_VALUE = 100_000
"""The largest number of characters of a printed value that is compared."""
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)
"""A pattern for a code block in triple backquotes: its language and its content."""


class CodeReward(RewardSection):
    """The fraction of the row's tests that the code in the completion passes. Without ``partial`` it is 1 if the code
    passes all tests, and 0 otherwise.

    The code is the last Python block in triple backquotes, or the last block of another language, or the whole
    completion if there is no block. The column of tests contains a list, or the JSON text of a list, of

    - ``{"stdin": "1 2", "stdout": "3"}``: the input and the expected output of the program; white space at line ends
      and at the end does not count; also ``{"inputs": [...], "outputs": [...]}`` for the whole column;
    - ``{"call": "add(1, 2)", "returns": 3}``: an expression, and its expected value after the code has run;
    - ``"assert add(1, 2) == 3"``: statements that must not raise.

    The expected results of the first two kinds never enter the sandbox. Statements run in the same process as the code,
    which could tamper with them. Prefer the first two kinds if a model may learn to do so.
    """

    kind: Literal["code"] = "code"
    """Selects this reward."""
    tests_column: str = "tests"
    """The column with the tests."""
    partial: bool = True
    """Whether the reward is the fraction of passed tests. If not, all tests must pass."""
    max_tests: int = Field(default=10, ge=1)
    """The largest number of tests that are run. The first tests of the row are used."""
    cpu_s: int = Field(default=5, ge=1)
    """The processor time limit of one test, in seconds. Its wall-clock time may be three times as long, because other
    processes use the processors too."""
    memory_mb: int = Field(default=512, ge=64)
    """The memory limit of one test, in MiB."""
    may_lack: tuple[str, ...] = ("user",)
    """Guards of the sandbox that this system may refuse: ``user``, ``files``, ``network``, ``processes``, ... If any
    other guard is missing, the run does not start. Only root can start a process as another user (``user``)."""
    timeout_s: float = Field(default=180.0, gt=0)
    """The time limit for all tests of one completion together, in seconds."""
    concurrency: int = Field(default=4, ge=1, le=16)
    """The largest number of completions that are tested at once in each worker."""

    @pydantic.model_validator(mode="after")
    def _timeout_fits_tests(self) -> Self:
        """Refuse a ``timeout_s`` that is shorter than the longest possible time of all tests."""
        needed_s = self.max_tests * WALL_PER_CPU * self.cpu_s
        if self.timeout_s < needed_s:
            raise ConfigError(
                f"env.rewards {self.label!r}: {self.max_tests} tests of cpu_s={self.cpu_s} each may take "
                f"{needed_s} s, and timeout_s={self.timeout_s:g}",
                remedy=f"set timeout_s >= {needed_s}, or lower max_tests or cpu_s",
            )
        return self

    def columns(self) -> dict[str, str]:
        """Return the column with the tests, which every row must have, and the setting that names it."""
        return {self.tests_column: f"tests_column={self.tests_column!r}"}

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Return a grader that runs tests. Before that, run an empty program to check that the sandbox works. Raises
        :class:`~headrace.base.errors.EnvError` if it does not."""
        probe = run_python("")
        if not probe.ok:
            raise EnvError(
                f"env.rewards {self.label!r}: the sandbox cannot start Python here: {probe.reason} {probe.detail} "
                f"{probe.stderr[-300:]}",
                remedy="it needs Linux >= 5.3 and this Python readable for other users",
            )
        refused_guards = {name: why for name, why in missing_guards(probe).items() if name not in self.may_lack}
        if refused_guards:
            details = "; ".join(f"{name} ({why})" for name, why in refused_guards.items())
            raise EnvError(
                f"env.rewards {self.label!r}: the sandbox lacks guards on this system: {details}",
                remedy=f"allow namespaces to this user, or accept it: may_lack = {[*self.may_lack, *refused_guards]}",
            )
        return BlockingGrader(self.grade, executor)

    def grade(self, request: ScoreCompletions) -> float:
        """Return the fraction of tests that the program in the completion passes, from 0 to 1. Without ``partial``, a
        program that fails any test earns 0."""
        tests = read_tests(get_column(request, self.tests_column), self.tests_column)[: self.max_tests]
        code = extract_code(request.completions[0])
        if not code.strip() or len(code) > MAX_CODE:
            return 0.0
        num_passed = 0
        for test in tests:
            passes = self._passes(code, test)
            num_passed += passes
            if not passes and not self.partial:
                return 0.0
        return num_passed / len(tests)

    def _passes(self, code: str, test: Any) -> bool:
        """Return whether the program ``code`` passes one test. The test is Python statements as text, a call with its
        expected value, or an input with its expected output."""
        limits = SandboxLimits(wall_s=WALL_PER_CPU * self.cpu_s, cpu_s=self.cpu_s, memory_bytes=self.memory_mb * MIB)
        # the random marker in the output proves that the program ran to its end
        match test:
            case str():
                marker = secrets.token_hex(16)
                files = {"answer.py": code, "test.py": test}
                finished = _refuse_not_started(run_python(_TEST_PROGRAM, files=files, stdin=marker, limits=limits))
                return finished.ok and finished.stdout.endswith(marker)
            case {"call": call}:
                marker = secrets.token_hex(16)
                files = {"answer.py": code, "call.py": str(call)}
                finished = _refuse_not_started(run_python(_CALL_PROGRAM, files=files, stdin=marker, limits=limits))
                _, _, value = finished.stdout.rpartition(marker)
                return finished.ok and marker in finished.stdout and same_value(value, test["returns"])
            case _:
                finished = _refuse_not_started(run_python(code, stdin=str(test["stdin"]), limits=limits))
                return finished.ok and same_text(finished.stdout, str(test["stdout"]))


_TEST_PROGRAM = """\
import sys
word, names = sys.stdin.read(), {"__name__": "answer"}
exec(compile(open("answer.py").read(), "answer.py", "exec"), names)
exec(compile(open("test.py").read(), "test.py", "exec"), names)
sys.stdout.write(word)
"""
"""The program that runs an answer and then the test's statements. It prints the marker from its input only if nothing
raised an exception."""
_CALL_PROGRAM = """\
import sys
word, names = sys.stdin.read(), {"__name__": "answer"}
exec(compile(open("answer.py").read(), "answer.py", "exec"), names)
sys.stdout.write(word + repr(eval(open("call.py").read(), names)))
"""
"""The program that runs an answer and then prints the marker from its input and the value of the test's expression."""


def missing_guards(probe: Finished) -> dict[str, str]:
    """Return the guards that were missing in the run ``probe``, each with the reason. A missing network namespace is
    omitted if the system call filter works, because the filter also blocks network sockets."""
    missing = dict(probe.missing)
    if "system calls" not in missing:
        missing.pop("network", None)
    return missing


def _refuse_not_started(finished: Finished) -> Finished:
    """Return ``finished`` unchanged. Raises :class:`Unscorable` for a run that could not start, because it says nothing
    about the answer."""
    if finished.reason is Reason.NOT_STARTED:
        raise Unscorable(f"the sandbox could not start: {finished.detail}", remedy="look at the machine's limits")
    return finished


def extract_code(completion: str) -> str:
    """Return the program in the answer ``completion``: the last Python block in triple backquotes, or the last block of
    another language, or the whole answer if there is no block.

    >>> extract_code("Like this:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```")
    'print(1)\\n'
    """
    blocks = _BLOCK.findall(completion)
    python = [block for language, block in blocks if language.lower() in ("python", "py", "python3")]
    if python or blocks:
        return str(python[-1] if python else blocks[-1][1])
    return completion


def read_tests(cell: Any, name: str) -> list[Any]:
    """Return the tests in ``cell``, the value of a row's column ``name``, as a list. Raises :class:`Unscorable` if the
    list is empty or an element is not a test."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = [cell]  # the text is not JSON: it is one test of statements
    if isinstance(cell, Mapping) and {"inputs", "outputs"} <= set(cell):
        cell = [{"stdin": i, "stdout": o} for i, o in zip(cell["inputs"], cell["outputs"], strict=False)]
    tests = list(cell) if isinstance(cell, Sequence) else []
    for test in tests:
        if not isinstance(test, str) and not (
            isinstance(test, Mapping) and ({"stdin", "stdout"} <= set(test) or {"call", "returns"} <= set(test))
        ):
            raise Unscorable(
                f"column {name!r} holds {str(test)[:80]!r}, which is not a test", remedy="see docs/scoring.md"
            )
    if not tests:
        raise Unscorable(f"column {name!r} holds no tests", remedy="give every row at least one")
    return tests


def same_text(printed: str, expected: str) -> bool:
    """Return whether two texts are equal line by line, ignoring white space at the end of lines and at the end of the
    text."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected)]
    return lines[0] == lines[1]


def same_value(printed: str, expected: Any) -> bool:
    """Return whether ``printed``, parsed as a Python literal, equals ``expected``. A list equals a tuple with the same
    elements. The result is ``False`` for text of more than ``MAX_VALUE`` characters, and for text that is not a
    literal."""
    if len(printed) > MAX_VALUE:
        return False
    try:
        value = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return bool(_normalize(value) == _normalize(expected))


def _normalize(value: Any) -> Any:
    """Return a value in a form that can be compared: tuples become lists, and the keys of mappings become text."""
    if isinstance(value, list | tuple):
        return [_normalize(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _normalize(each) for key, each in value.items()}
    return value
