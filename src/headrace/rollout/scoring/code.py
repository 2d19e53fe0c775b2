"""Code that the model wrote, run against the tests of its row: each test in a fresh process of the sandbox."""

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
from headrace.rollout.scoring.grading import BlockingGrader, Unscorable, column
from headrace.rollout.scoring.sandbox import Finished, Reason, SandboxLimits, run_python
from headrace.rollout.scoring.sandbox.base import MIB

WAITING = 3
"""How much longer than its processor time a test may take by the clock."""
MAX_CODE = 200_000
"""Characters of an answer that are run at most: more is no answer."""
MAX_VALUE = 100_000
"""Characters of a returned value that are compared at most."""
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)


class CodeReward(RewardSection):
    """The share of the row's tests that the code in the completion passes (or all of them, or nothing).

    The code is the last block in triple backquotes, a Python one if there is any; without a block, the whole
    completion. A column of tests holds a list (or JSON text of one) of

    - ``{"stdin": "1 2", "stdout": "3"}``: the program reads the one and prints the other; white space at line ends and
      at the end does not count; also ``{"inputs": [...], "outputs": [...]}`` for the whole column;
    - ``{"call": "add(1, 2)", "returns": 3}``: what the expression is worth after the code has run;
    - ``"assert add(1, 2) == 3"``: statements that must not raise.

    What is expected of the first two never enters the sandbox. Statements run beside the code, which could tamper with
    them: prefer the others where a model may learn to.
    """

    kind: Literal["code"] = "code"
    """Selects this reward."""
    tests_column: str = "tests"
    """Column with the tests."""
    partial: bool = True
    """Whether each test counts for itself; else all of them must pass."""
    max_tests: int = Field(default=10, ge=1)
    """Tests that are run at most, the first ones."""
    cpu_s: int = Field(default=5, ge=1)
    """Processor time of one test, in seconds. By the clock it may take ``WAITING`` times as long, since others compute
    too."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory of one test, in MiB."""
    may_lack: tuple[str, ...] = ("user",)
    """Guards of the sandbox that this system may refuse: ``user``, ``files``, ``network``, ``processes``, ...; a run
    does not start where another one is missing. As another user only root can start a process."""
    timeout_s: float = Field(default=180.0, gt=0)
    """All tests of one completion must be over by then."""
    concurrency: int = Field(default=4, ge=1, le=16)
    """Completions that are tested at once in each worker."""

    @pydantic.model_validator(mode="after")
    def _tests_fit(self) -> Self:
        needed_s = self.max_tests * WAITING * self.cpu_s
        if self.timeout_s < needed_s:
            raise ConfigError(
                f"env.rewards {self.label!r}: {self.max_tests} tests of cpu_s={self.cpu_s} each may take "
                f"{needed_s} s, and timeout_s={self.timeout_s:g}",
                remedy=f"set timeout_s >= {needed_s}, or lower max_tests or cpu_s",
            )
        return self

    def columns(self) -> dict[str, str]:
        """Return the column of the tests."""
        return {self.tests_column: f"tests_column={self.tests_column!r}"}

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Runs tests, where the sandbox stands."""
        probe = run_python("")
        if not probe.ok:
            raise EnvError(
                f"env.rewards {self.label!r}: the sandbox cannot start Python here: {probe.reason} {probe.detail} "
                f"{probe.stderr[-300:]}",
                remedy="it needs Linux >= 5.3 and this Python readable for other users",
            )
        lacking = {name: why for name, why in lacks(probe).items() if name not in self.may_lack}
        if lacking:
            words = "; ".join(f"{name} ({why})" for name, why in lacking.items())
            raise EnvError(
                f"env.rewards {self.label!r}: the sandbox lacks guards on this system: {words}",
                remedy=f"allow namespaces to this user, or accept it: may_lack = {[*self.may_lack, *lacking]}",
            )
        return BlockingGrader(self.grade, executor)

    def grade(self, request: ScoreCompletions) -> float:
        """Between 0 and 1."""
        tests = read_tests(column(request, self.tests_column), self.tests_column)[: self.max_tests]
        code = code_in(request.completions[0])
        if not code.strip() or len(code) > MAX_CODE:
            return 0.0
        passed = 0
        for test in tests:
            good = self._passes(code, test)
            passed += good
            if not good and not self.partial:
                return 0.0
        return passed / len(tests)

    def _passes(self, code: str, test: Any) -> bool:
        limits = SandboxLimits(wall_s=WAITING * self.cpu_s, cpu_s=self.cpu_s, memory_bytes=self.memory_mb * MIB)
        match test:
            case str():
                word = secrets.token_hex(16)
                files = {"answer.py": code, "test.py": test}
                done = _believed(run_python(_STATEMENTS, files=files, stdin=word, limits=limits))
                return done.ok and done.stdout.endswith(word)
            case {"call": call}:
                word = secrets.token_hex(16)
                files = {"answer.py": code, "call.py": str(call)}
                done = _believed(run_python(_CALL, files=files, stdin=word, limits=limits))
                _, _, value = done.stdout.rpartition(word)
                return done.ok and word in done.stdout and same_value(value, test["returns"])
            case _:
                done = _believed(run_python(code, stdin=str(test["stdin"]), limits=limits))
                return done.ok and same_text(done.stdout, str(test["stdout"]))


_STATEMENTS = """\
import sys
word, names = sys.stdin.read(), {"__name__": "answer"}
exec(compile(open("answer.py").read(), "answer.py", "exec"), names)
exec(compile(open("test.py").read(), "test.py", "exec"), names)
sys.stdout.write(word)
"""
_CALL = """\
import sys
word, names = sys.stdin.read(), {"__name__": "answer"}
exec(compile(open("answer.py").read(), "answer.py", "exec"), names)
sys.stdout.write(word + repr(eval(open("call.py").read(), names)))
"""


def lacks(probe: Finished) -> dict[str, str]:
    """The guards that a run was without; a filter of system calls stands in for a network namespace, and the watch of
    the launcher for one of processes."""
    missing = dict(probe.missing)
    if "system calls" not in missing:
        missing.pop("network", None)
    return missing


def _believed(done: Finished) -> Finished:
    """A run that could not be started says nothing of the answer."""
    if done.reason is Reason.NOT_STARTED:
        raise Unscorable(f"the sandbox could not start: {done.detail}", remedy="look at the machine's limits")
    return done


def code_in(completion: str) -> str:
    """The program in an answer.

    >>> code_in("Like this:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```")
    'print(1)\\n'
    """
    blocks = _BLOCK.findall(completion)
    python = [block for language, block in blocks if language.lower() in ("python", "py", "python3")]
    if python or blocks:
        return str(python[-1] if python else blocks[-1][1])
    return completion


def read_tests(cell: Any, name: str) -> list[Any]:
    """The tests of a row; :class:`Unscorable` says what is wrong with them."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = [cell]  # one piece of statements
    if isinstance(cell, Mapping) and {"inputs", "outputs"} <= set(cell):
        cell = [{"stdin": i, "stdout": o} for i, o in zip(cell["inputs"], cell["outputs"], strict=False)]
    tests = list(cell) if isinstance(cell, Sequence) else []
    for test in tests:
        if not isinstance(test, str) and not (
            isinstance(test, Mapping) and ({"stdin", "stdout"} <= set(test) or {"call", "returns"} <= set(test))
        ):
            raise Unscorable(
                f"column {name!r} holds {str(test)[:80]!r}, which is no test", remedy="see docs/scoring.md"
            )
    if not tests:
        raise Unscorable(f"column {name!r} holds no tests", remedy="give every row at least one")
    return tests


def same_text(given: str, expected: str) -> bool:
    """Line by line, but for white space at their ends and at the end of all."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (given, expected)]
    return lines[0] == lines[1]


def same_value(printed: str, expected: Any) -> bool:
    """Whether the value that was printed equals ``expected``: lists and tuples of the same things are the same."""
    if len(printed) > MAX_VALUE:
        return False
    try:
        value = ast.literal_eval(printed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return bool(_plain(value) == _plain(expected))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value
