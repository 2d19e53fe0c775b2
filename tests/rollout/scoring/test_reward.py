"""A user's reward function, in the process that calls it."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.base.errors import EnvError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring import RewardFunction, Scores, load_reward
from headrace.rollout.scoring.reward import reward_reference, split_reference

ROW = {"prompt": "1+1=", "answer": 2}
Load = Callable[[str], RewardFunction]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Writes a file that defines ``reward`` and imports it."""
    with ThreadPoolExecutor(max_workers=2) as hands:

        def of(code: str) -> RewardFunction:
            path = tmp_path / "my_reward.py"
            path.write_text(textwrap.dedent(code))
            return load_reward(f"{path}:reward", hands)

        yield of


def scored(reward: RewardFunction, *completions: str, prompt: object = "1+1=") -> Scores:
    row = {**ROW, "prompt": prompt}
    return asyncio.run(
        reward.score(ScoreCompletions(call=0, prompt=prompt, completions=completions or ("2",), row=row))
    )


@pytest.mark.parametrize("head", ["def", "async def"])
@pytest.mark.parametrize(
    "body",
    [
        "reward(completion, answer): return 0.5 if completion == str(answer) else 0",
        "reward(completion, **row): return 0.5 if row == {'prompt': '1+1=', 'answer': 2} else 0",
        "reward(prompt, completion): return 0.5 if (prompt, completion) == ('1+1=', '2') else 0",
        "reward(completion, nonsense=None): return 0.5 if nonsense is None else 0",
    ],
)
def test_a_reward_of_one_completion_gets_what_it_asks_for(load: Load, head: str, body: str) -> None:
    reward = load(f"{head} {body}")
    assert not reward.by_group
    assert scored(reward) == Scores(rewards=(0.5,))


@pytest.mark.parametrize("code", ["async def reward(completion):", "reward = lambda completion: later()"])
def test_the_time_of_a_reward_that_waits_is_the_time_for_which_it_waits(load: Load, code: str) -> None:
    reward = load(f"""
        import asyncio

        async def later():
            await asyncio.sleep(0.05)
            return 1.0

        {code if code.startswith("reward") else code + " return await later()"}
    """)
    assert scored(reward) == Scores(rewards=(1.0,))
    assert 0.05 <= reward.times.mean_s < 60


@pytest.mark.parametrize("head", ["def", "async def"])
def test_a_reward_over_lists_gets_columns_as_long_as_the_completions(load: Load, head: str) -> None:
    reward = load(f"""
        {head} reward(prompts, completions, answer, **columns):
            assert set(columns) == {{"completion_ids", "trainer_state", "log_extra", "log_metric"}}  # as TRL has it
            return [float(p == "1+1=" and c == str(a)) for p, c, a in zip(prompts, completions, answer, strict=True)]
    """)
    assert reward.by_group
    assert scored(reward, "2", "3", "2") == Scores(rewards=(1.0, 0.0, 1.0))


def test_a_reward_over_lists_sees_a_chat_as_chat_messages(load: Load) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    reward = load(f"""
        def reward(prompts, completions, **columns):
            assert prompts == [{chat!r}] * 2
            assert completions == [[{{"role": "assistant", "content": c}}] for c in ("2", "3")]
            return [1, None]
    """)
    assert scored(reward, "2", "3", prompt=chat) == Scores(rewards=(1.0, None))


@pytest.mark.parametrize(
    "code",
    [
        """
        class Exact:
            def __call__(self, completion, answer):
                return completion == str(answer)
        reward = Exact()
        """,
        """
        class Exact:
            async def __call__(self, completion, answer):
                return completion == str(answer)
        reward = Exact()
        """,
        """
        import functools
        def either(completion, wanted): return completion == wanted
        reward = functools.partial(either, wanted="2")
        """,
        """
        import functools
        def logged(function):
            @functools.wraps(function)
            def outer(*args, **kwargs): return function(*args, **kwargs)
            return outer
        @logged
        async def reward(completion): return 1.0
        """,
        "reward = lambda completion: 1",
        "from math import pi\nimport numpy\ndef reward(completion): return numpy.float32(1)",
    ],
)
def test_anything_that_can_be_called_is_a_reward(load: Load, code: str) -> None:
    assert scored(load(code)) == Scores(rewards=(1.0,))


@pytest.mark.parametrize(
    ("returned", "failure"),
    [
        ("None", ""),
        ("float('nan')", "reward_nan: returned nan"),
        ("-float('inf')", "reward_nan: returned -inf"),
        ("-1e308", "reward_nan: returned -1e+308, which is infinite in float32"),
        ("'1.0'", "reward_error: returned a str, not a number"),
        ("[1.0]", "reward_error: returned a list, not a number"),
        ("10 ** 400", "reward_error: OverflowError: int too large to convert to float"),
    ],
)
def test_what_is_no_number_is_a_failure_in_words(load: Load, returned: str, failure: str) -> None:
    scores = scored(load(f"def reward(completion): return {returned}"))
    assert scores == (Scores(rewards=(), failure=failure) if failure else Scores(rewards=(None,)))


@pytest.mark.parametrize(
    ("returned", "failure"),
    [
        ("[1.0]", "reward_error: returned 1 rewards for 2 completions"),
        ("None", "reward_error: returned a NoneType, not a list"),
        ("1.0", "reward_error: returned a float, not a list"),
        ("'12'", "reward_error: returned a str, not a list"),
        ("{'rewards': [1, 2], 'x': 1}", "reward_error: returned a dict, not a list"),
        ("[1.0, float('nan')]", "reward_nan: returned nan"),
        ("(1 / (1 - i) for i in range(2))", "reward_error: ZeroDivisionError: division by zero at my_reward.py:1"),
    ],
)
def test_a_list_that_does_not_fit_is_a_failure_in_words(load: Load, returned: str, failure: str) -> None:
    reward = load(f"def reward(prompts, completions, **columns): return {returned}")
    assert scored(reward, "a", "b") == Scores(rewards=(), failure=failure)


@pytest.mark.parametrize("head", ["def", "async def"])
@pytest.mark.parametrize(
    ("statement", "failure"),
    [
        ("raise ValueError('no such\\nanswer')", "ValueError: no such answer at my_reward.py:3"),
        ("return helper(completion)", "KeyError: '2' at my_reward.py:6"),
        ("import sys; sys.exit(2)", "SystemExit: 2 at my_reward.py:3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt at my_reward.py:3"),
        ("import asyncio; raise asyncio.CancelledError('mine')", "CancelledError: mine at my_reward.py:3"),
        ("import pytest; pytest.fail('no')", "Failed: no at my_reward.py:3"),
        ("raise BaseException('weird')", "BaseException: weird at my_reward.py:3"),
        ("return int('x' + completion)", "ValueError: invalid literal for int() with base 10: 'x2' at my_reward.py:3"),
    ],
)
def test_a_reward_that_raises_is_a_failure_with_file_and_line(
    load: Load, head: str, statement: str, failure: str
) -> None:
    reward = load(f"""
        {head} reward(completion):
            {statement}

        def helper(completion):
            return {{}}[completion]
    """)
    assert scored(reward) == Scores(rewards=(), failure=f"reward_error: {failure}")


@pytest.mark.parametrize("head", ["def", "async def"])
@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ("ValueError('file \\udc80 is missing')", "ValueError: file ? is missing at my_reward.py:7"),
        ("Silent()", "Silent, which cannot be printed"),
        ("Loud()", "Loud, which cannot be printed"),
    ],
)
def test_an_error_that_cannot_be_told_is_a_failure_all_the_same(
    load: Load, head: str, error: str, failure: str
) -> None:
    reward = load(f"""
        class Silent(Exception):
            def __str__(self): raise RuntimeError("no words")
        class Loud(BaseException):
            def __str__(self): raise KeyboardInterrupt
        {head} reward(completion):
            raise {error}
    """)
    assert scored(reward) == Scores(rewards=(), failure=f"reward_error: {failure}")


def test_a_stop_iteration_is_a_failure_and_not_a_call_that_never_returns(load: Load) -> None:
    reward = load("def reward(completion): return next(iter([]))")
    assert scored(reward).failure == "reward_error: StopIteration at my_reward.py:1"


def test_a_callable_object_that_raises_names_its_file_and_line(load: Load) -> None:
    reward = load("""
        class Broken:
            def __call__(self, completion):
                raise RuntimeError("broken")
        reward = Broken()
    """)
    assert scored(reward).failure == "reward_error: RuntimeError: broken at my_reward.py:4"


def test_a_column_that_the_rows_lack_is_a_failure_that_names_it(load: Load) -> None:
    failure = scored(load("def reward(completion, solution): return 1")).failure
    assert failure == "reward_error: TypeError: reward() missing 1 required positional argument: 'solution'"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def other(completion): ...", "defines no 'reward'"),
        ("import math\ndef reward(completion:\n    return 1\n", r"my_reward\.py:2: "),
        ("import math\nimport not_a_module\ndef reward(c): ...", r"No module named 'not_a_module' at my_reward\.py:2"),
        ("1 / 0\ndef reward(completion): ...", r"ZeroDivisionError: division by zero at my_reward\.py:1"),
        ("import sys\nsys.exit('needs a GPU')\ndef reward(c): ...", r"SystemExit: needs a GPU at my_reward\.py:2"),
        ("reward = 3", "is a int"),
        ("def reward(text): return 1", r"takes \(text\)"),
        ("def reward(completion): return 1\0", "is not Python|null byte"),
    ],
)
def test_a_file_that_gives_no_reward_is_refused_in_words(load: Load, code: str, problem: str) -> None:
    with pytest.raises(EnvError, match=problem):
        load(code)


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("reward.py", "does not name a function"),
        ("reward.py:a.b", "does not name a function"),
        ("/nowhere/reward.py:reward", "/nowhere/reward.py does not exist"),
        ("/:reward", "cannot be read"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_in_words(reference: str, problem: str) -> None:
    with pytest.raises(EnvError, match=problem):
        split_reference(reference)


def test_the_names_of_a_file_are_offered_when_the_asked_one_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text("from math import pi as tau\nasync def f(): ...\nclass C: ...\nx = 1\n")
    with pytest.raises(EnvError, match="name one of: C, f, tau, x"):
        split_reference(f"{path}:g")


def top_level(completion: str) -> float:
    return 1.0


class Callable_:
    def __call__(self, completion: str) -> float:
        return 1.0

    def method(self, completion: str) -> float:
        return 1.0


def test_a_function_of_a_file_is_named_by_file_and_name() -> None:
    assert reward_reference(top_level) == f"{Path(__file__).resolve()}:top_level"


def test_what_another_process_cannot_load_is_refused_with_a_remedy() -> None:
    def closure(completion: str) -> float:
        return 1.0

    for function in (lambda completion: 1.0, closure, Callable_(), Callable_().method, len):
        with pytest.raises(EnvError, match=r"cannot be loaded by another process(.|\n)*remedy: define it with 'def'"):
            reward_reference(function)
