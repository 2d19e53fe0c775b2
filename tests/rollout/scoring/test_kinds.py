"""Every kind of reward that comes ready-made."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring import CodeReward, ExactReward, FunctionReward, Grader, JudgeReward, MathReward, Scores


def ask(completion: str, **row: Any) -> ScoreCompletions:
    return ScoreCompletions(
        call=0, prompt=row.get("prompt", "p"), completions=(completion,), row={"prompt": "p", **row}
    )


def graded(section: Any, completion: str, **row: Any) -> Scores:
    with ThreadPoolExecutor(max_workers=4) as hands:

        async def score() -> Scores:
            grader: Grader = section.grader(hands)
            return await grader.score(ask(completion, **row), lambda: None)

        return asyncio.run(score())


@pytest.mark.parametrize(
    ("settings", "completion", "answer", "right"),
    [
        ({}, " 42\n", "42", True),
        ({}, "42", 42, True),
        ({}, "x 42", "42", False),
        ({}, "b", ["a", "b"], True),
        ({"pattern": r"answer is \(?([A-D])"}, "The answer is A. No, the answer is (C)", "C", True),
        ({"pattern": r"\d+"}, "3 and 4", "4", True),
        ({"pattern": r"\d+"}, "none", "4", False),
        ({"ignore_case": True}, "Paris", "paris", True),
        ({}, "Paris", "paris", False),
    ],
)
def test_an_exact_answer_is_right_or_wrong(settings: dict[str, Any], completion: str, answer: Any, right: bool) -> None:
    assert graded(ExactReward(**settings), completion, answer=answer) == Scores(rewards=(float(right),))


def test_a_row_without_the_column_is_told_in_words() -> None:
    assert graded(ExactReward(), "x").failure.startswith(
        "reward_error: the row has no column 'answer' (it has: prompt)"
    )


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        ExactReward(pattern="(")


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"So it is $\frac{1}{2}$.", "0.5", True),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", True),
        ("The answer is 7", 7, True),
        (r"$x^2 - 1$", r"$(x-1)(x+1)$", True),
        ("I do not know", "7", False),
        ("__import__('os').system('touch /tmp/hacked')", "7", False),
    ],
)
def test_mathematics_is_compared_by_what_it_means(completion: str, answer: Any, right: bool) -> None:
    pytest.importorskip("math_verify")
    assert graded(MathReward(), completion, answer=answer) == Scores(rewards=(float(right),))


ADD = "```python\ndef add(a, b):\n    return a + b\n```"


@pytest.mark.parametrize(
    ("completion", "tests", "reward"),
    [
        (ADD, [{"call": "add(1, 2)", "returns": 3}, {"call": "add('a', 'b')", "returns": "ab"}], 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, json.dumps(["assert add(2, 2) == 4"]), 1.0),
        (ADD, "assert add(2, 2) == 4", 1.0),
        ("print(sum(map(int, input().split())))", {"inputs": ["1 2", "3 4"], "outputs": ["3\n", "8"]}, 0.5),
        ("def f(): return [(1, 2)]", [{"call": "f()", "returns": [[1, 2]]}], 1.0),
        ("import sys; sys.exit(0)", ["assert False"], 0.0),
        ("def add(a, b): raise SystemExit(0)", [{"call": "add(1, 2)", "returns": 3}], 0.0),
        ("no code at all", ["assert True"], 0.0),
        ("", ["assert True"], 0.0),
    ],
)
def test_code_earns_the_share_of_tests_that_it_passes(completion: str, tests: Any, reward: float) -> None:
    assert graded(CodeReward(may_lack=("user", "files", "ipc")), completion, tests=tests) == Scores(rewards=(reward,))


def test_code_that_must_pass_everything_earns_nothing_for_half() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    assert graded(CodeReward(partial=False), ADD, tests=tests) == Scores(rewards=(0.0,))


@pytest.mark.parametrize("tests", [[], [1], [{"call": "f()"}], "[]"])
def test_rows_without_sound_tests_fail_in_words(tests: Any) -> None:
    assert graded(CodeReward(), "x = 1", tests=tests).failure.startswith("reward_error: column 'tests' holds")


def test_tests_that_cannot_all_run_in_time_are_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s >= 600"):
        CodeReward(max_tests=40)


@contextmanager
def judge(*replies: tuple[int, str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that answers these one after the other, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append({
                "path": self.path,
                "key": self.headers.get("Authorization"),
                **json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
            })  # fmt: skip
            status, text = replies[min(len(asked), len(replies)) - 1]
            data = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_judge_is_asked_and_its_score_brought_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    with judge((200, 'Fine {not json}. {"score": 1} then {"score": 7.5}')) as (url, asked):
        section = JudgeReward(
            base_url=url,
            model="m",
            api_key_env="JUDGE_KEY",
            system="be strict",
            prompt="{prompt}|{completion}|{answer}",
        )
        assert graded(section, "two {x}", prompt=[{"role": "user", "content": "1+1"}], answer=2).rewards == (0.75,)
    (request,) = asked
    assert (request["path"], request["key"], request["temperature"]) == ("/v1/chat/completions", "Bearer k", 0.0)
    assert [message["content"] for message in request["messages"]] == ["be strict", "user: 1+1|two {x}|2"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, "no score"), "gave no score from 0 to 10"),
        ((200, '{"score": 1000000}'), "gave no score from 0 to 10"),
        ((200, '{"score": true}'), "gave no score from 0 to 10"),
        ((200, '{"score": "NaN"}'), "gave no score from 0 to 10"),
        ((500, "broken"), "the judge answered 500"),
        ((200, "x" * (1 << 21)), "longer than"),
    ],
)
def test_a_judge_that_says_nothing_useful_is_a_failure(reply: tuple[int, str], words: str) -> None:
    with judge(reply) as (url, _):
        failure = graded(JudgeReward(base_url=url, model="m"), "c").failure
    assert failure.startswith("reward_error: ")
    assert words in failure


def test_a_judge_that_is_not_there_or_silent_is_a_failure() -> None:
    assert graded(JudgeReward(base_url="http://127.0.0.1:9/v1", model="m"), "c").failure.startswith(
        "reward_error: the judge at http://127.0.0.1:9 cannot be reached: ConnectError"
    )
    quiet = JudgeReward(base_url="http://127.0.0.1:9/v1", model="m", timeout_s=0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # accepts, and never answers
        silent = quiet.model_copy(update={"base_url": f"http://127.0.0.1:{server.server_port}/v1"})
        assert graded(silent, "c").failure.startswith("reward_timeout: the judge has not answered")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base_url": "localhost"}, "is not an address"),
        ({"prompt": "grade it"}, "does not show the answer"),
        ({"prompt": "{completion} {a.b}"}, "not a plain name"),
        ({"prompt": "{completion} {"}, "cannot be filled in"),
        ({"scale": [1, 1]}, "has no room"),
    ],
)
def test_judges_that_cannot_be_asked_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JudgeReward(**{"base_url": "http://x/v1", "model": "m", **settings})


def test_a_key_that_is_not_set_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        JudgeReward(base_url="http://x/v1", model="m", api_key_env="NO_SUCH_KEY").check()


def test_a_function_of_turns_gets_what_was_read_before(tmp_path: Any) -> None:
    (tmp_path / "f.py").write_text("def f(completion, history, turn): return len(history) + 10 * turn")
    section = FunctionReward(ref=f"{tmp_path}/f.py:f", by_turn=True).check()
    with ThreadPoolExecutor() as hands:
        request = ScoreCompletions(call=0, prompt="p", completions=("c",), row={}, history="abc", turn=2)
        assert asyncio.run(section.grader(hands).score(request, lambda: None)) == Scores(rewards=(23.0,))


def test_a_function_of_groups_cannot_score_turns(tmp_path: Any) -> None:
    (tmp_path / "f.py").write_text("def f(completions): return [1.0]")
    with ThreadPoolExecutor() as hands, pytest.raises(EnvError, match="scored by turn"):
        FunctionReward(ref=f"{tmp_path}/f.py:f", by_turn=True).grader(hands)
