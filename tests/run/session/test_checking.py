"""``headrace check env`` finds what is wrong, and nothing else."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError, EnvError
from headrace.run.cli.app import app
from headrace.run.session import checking
from headrace.run.session.checking import EnvReport, Level, check_env

CODE = """
    import asyncio, itertools, os, random, socket, threading, time

    import headrace

    def multiply(a: int, b: int) -> int:
        '''Multiply two whole numbers.

        Args:
            a: The first.
            b: The second.
        '''
        return a * b

    def bare(a, b: int = 2):
        return a

    class Sound(headrace.Env):
        tools = [multiply]

        async def reset(self, task):
            self.answer = str(task["answer"])
            return f"{random.Random(self.seed).random()} {task['question']}"

        def step(self, message):
            return headrace.StepResult(reward=float(message.content.strip() == self.answer), done=True)

    class Constant(Sound):
        def step(self, message):
            return headrace.StepResult(reward=0.5, done=True)

    class Endless(Sound):
        def step(self, message):
            return headrace.StepResult(reward=0.0, messages="continue")

    drawn = itertools.count()

    class Forgetful(Sound):
        def reset(self, task):
            self.answer = "7"
            return f"question {next(drawn)}"

    class Sleepy(Sound):
        async def step(self, message):
            time.sleep(0.4)
            return headrace.StepResult(reward=float(len(message.content) > 5), done=True)

    class Deaf(Sound):
        async def step(self, message):
            threading.Event().wait()

    class Locked(Sound):
        def __init__(self):
            self.lock = threading.Lock()
            self.socket = socket.socket()

        def close(self):
            self.socket.close()

    class Bare(Sound):
        tools = [bare]

    class Raising(Sound):
        def step(self, message):
            if not message.content:
                return 1 / 0
            return super().step(message)

    class Typed(Sound):
        def step(self, message):
            return message.content

    class Dying(Sound):
        def step(self, message):
            os._exit(3)

    class Silent(Sound):
        def step(self, message):
            return headrace.StepResult(done=True)

    async def rollout(task, policy):
        first = await policy.chat("hello")
        second = await policy.chat([{"role": "user", "content": "hello"}, first.message])
        return float(first.message.content == str(task["answer"])) + len(second.message.content) / 10_000

    async def counts(task, policy):
        await policy.chat("hello")
        return float(next(drawn))

    def reward(completion, answer):
        return float(completion.strip() == str(answer))

    async def late(completion, answer):
        return None if completion else float("nan")

    async def mute(task, policy):
        return float(task["answer"] == 12)

    def forgot(completion, answer):
        completion.strip() == str(answer)

    def picky(completion, answer):
        return float(completion.strip() == str(answer)) if len(completion) < 50 else None

    def naked():
        return 1.0

    def stuck(completion):
        threading.Event().wait()

    NUMBER = 3
"""
SLOW = pytest.mark.slow
ROWS = [{"question": "3*4", "answer": 12}, {"question": "5*5", "answer": 25}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "my_env.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def checked(file: Path, name: str, **how: Any) -> tuple[EnvReport, dict[str, str]]:
    """The report on ``name``, and what was found wrong by clause."""
    report = check_env(f"{file}:{name}", rows=ROWS, **how)
    return report, {each.clause: each.detail for each in report.findings if each.level is not Level.OK}


@pytest.mark.parametrize(
    ("name", "kind"), [("Sound", "env"), pytest.param("rollout", "rollout", marks=SLOW), ("reward", "reward")]
)
def test_what_is_sound_is_found_sound_with_timings(file: Path, name: str, kind: str) -> None:
    report, wrong = checked(file, name)
    assert report.ok
    assert (report.kind, wrong) == (kind, {})
    assert report.episodes > 10
    assert report.timings is not None
    assert 0 < report.timings.episode_s <= report.timings.slowest_episode_s
    assert "passed" in str(report)


@pytest.mark.parametrize(
    ("name", "clause", "words", "ok"),
    [
        pytest.param("Constant", "rewards differ", "every episode earned 0.5", True, marks=SLOW),
        pytest.param(
            "Endless", "it ends whatever the model says", "more than 64 answers; say done=True", False, marks=SLOW
        ),
        ("Forgetful", "the same seed gives the same episode", "random.Random(self.seed)", False),
        ("Sleepy", "async code does not block", "time.sleep() in async def step: await what waits", False),
        pytest.param("Locked", "its state can be copied", "self.lock, a lock", True, marks=SLOW),
        pytest.param(
            "Bare",
            "tools are described",
            "tool 'bare' has no docstring; argument 'a' of tool 'bare' has no type",
            True,
            marks=SLOW,
        ),
        ("Raising", "its episodes end without an error", "ZeroDivisionError: division by zero at my_env.py:", False),
        pytest.param("Typed", "its episodes end without an error", "step returned a str", False, marks=SLOW),
        pytest.param("Dying", "its episodes end without an error", "env_crashed: ", False, marks=SLOW),
        ("mute", "its episodes end without an error", "nothing_sampled: it ended without asking the model", False),
        pytest.param("Silent", "rewards are numbers", "it never says what an episode earned", True, marks=SLOW),
        pytest.param("late", "rewards are numbers", "nan", False, marks=SLOW),
        pytest.param("counts", "the same seed gives the same episode", "and then", False, marks=SLOW),
    ],
)
def test_what_is_wrong_is_said_in_words(file: Path, name: str, clause: str, words: str, ok: bool) -> None:
    report, wrong = checked(file, name)
    assert words in wrong[clause], wrong
    assert report.ok is ok
    assert set(wrong) <= {clause, "rewards differ", "async code does not block"} | (
        {"rewards are numbers"} if name == "late" else set()
    )


def test_code_that_blocks_for_ever_or_takes_too_long_ends_the_check_at_once(file: Path) -> None:
    report, wrong = checked(file, "Deaf")
    assert "kept the loop of its worker from turning" in wrong["async code does not block"]
    assert report.episodes < 5


def test_a_reward_that_returns_nothing_is_not_found_sound(file: Path) -> None:
    report, wrong = checked(file, "forgot")
    assert not report.ok
    assert wrong.keys() == {"rewards are numbers"}
    assert "returned None for every answer" in wrong["rewards are numbers"]
    unsure = check_env(f"{file}:forgot", rows=[{"answer_of_mine": 3, "answer": None}])
    assert unsure.ok


def test_only_value_beside_the_prompt_is_what_a_script_says_is_right(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, total):\n    return float(completion == str(total))\n")
    report = check_env(f"{tmp_path / 'mine.py'}:reward", rows=[{"prompt": "3+4=", "total": 7}])
    assert [finding.clause for finding in report.findings if finding.level is not Level.OK] == []


def test_a_column_that_a_reward_lacks_is_told_with_those_that_the_rows_have(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, total): return 1.0\n")
    lacking = check_env(f"{tmp_path / 'mine.py'}:reward", rows=[{"prompt": "3+4=", "sum": 7}])
    (told,) = lacking.findings
    assert "requires the parameter 'total'" in told.detail
    assert "the rows have the columns prompt, sum" in told.detail


def test_a_class_that_is_meant_as_a_reward_is_told_to_name_an_object(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Right:\n    def __call__(self, completion, answer): return 1.0\n")
    (told,) = check_env(f"{tmp_path / 'mine.py'}:Right", rows=[{"prompt": "1", "answer": 1}]).findings
    assert "as a reward, name an object of it (score = Right(...))" in told.detail


def test_reward_that_a_file_imports_or_makes_is_tried_as_one_it_defines(tmp_path: Path) -> None:
    made = "def made(limit):\n    return lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]\n"
    (tmp_path / "theirs_of_this_test.py").write_text(made)
    mine = "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\nfrom theirs_of_this_test import made\n"
    (tmp_path / "mine.py").write_text(f"{mine}reward = made(3)\n")
    report = check_env(f"{tmp_path / 'mine.py'}:reward", rows=[{"prompt": "3+4=", "answer": 7}])
    assert (report.kind, report.ok) == ("reward", True), str(report)


def test_answers_that_a_reward_leaves_out_are_counted(file: Path) -> None:
    report, wrong = checked(file, "picky")
    assert not wrong
    (told,) = (each.detail for each in report.findings if each.clause == "rewards are numbers")
    assert told.endswith("; with None, the others do not count")
    assert not told.startswith(f"{report.episodes} of")


def test_of_what_was_not_seen_nothing_is_said(file: Path) -> None:
    report, wrong = checked(file, "stuck", timeout_s=1.0)
    assert "env_timeout" in wrong["its episodes end without an error"]
    assert {each.clause for each in report.findings if each.level is Level.OK} == {
        "it can be loaded", "async code does not block"
    }  # fmt: skip


def test_a_function_that_can_be_no_rollout_was_meant_as_a_reward(file: Path) -> None:
    (finding,) = check_env(f"{file}:naked").findings
    assert "reward function naked takes ()" in finding.detail


def test_what_cannot_be_loaded_is_the_only_finding(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("open('nothing_of_that_name')\n\nclass MyEnv: ...\n")
    report = check_env(f"{tmp_path / 'broken.py'}:MyEnv")
    (finding,) = report.findings
    assert (finding.clause, finding.level) == ("it can be loaded", Level.FAIL)
    assert "nothing_of_that_name" in finding.detail
    assert report.episodes == 1


@pytest.mark.parametrize("name", ["NUMBER", "Nobody"])
def test_what_is_nothing_to_run_is_refused(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_env(f"{file}:{name}")


PROGRAM = """
    import json, os, urllib.request

    task = json.load(open(os.environ["HEADRACE_TASK"]))
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"messages": [{"role": "user", "content": task["question"]}]}).encode(),
        headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    print(json.dumps({"reward": float(said == str(task["answer"]))}))
"""


@SLOW
def test_a_program_is_checked_by_its_command(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(PROGRAM))
    report = check_env(shlex.join([sys.executable, str(tmp_path / "agent.py")]), rows=ROWS[:1])
    assert report.ok, str(report)
    assert report.kind == "program"
    assert {each.clause for each in report.findings if each.level is not Level.OK} == set()


@SLOW
@pytest.mark.parametrize("path", ["agent.py", "./agent.py", "sub/../agent.py"])
def test_a_program_is_found_by_its_path_from_where_the_check_is_started(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "agent.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    report = check_env(shlex.join([sys.executable, path]), rows=ROWS[:1])
    assert report.ok, str(report)


FAILING = """
import os, sys
print(f"no such thing: {os.getcwd()}/notes.txt at {object()}", file=sys.stderr)
sys.exit(7)
"""


def test_a_program_that_always_fails_is_told_at_once_and_as_one_cause(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FAILING)
    told: list[str] = []
    command = shlex.join([sys.executable, str(tmp_path / "agent.py")])
    report = check_env(command, rows=ROWS[:1], on_progress=told.append)
    failed = [line for line in told if "failed" in line]
    assert len(failed) == 2, told
    assert failed[1] == f"the first 4 failed for the same cause: the other {report.left_out} are skipped"
    assert f"(program, 4 episodes, {report.left_out} more not tried): failed" in str(report)
    assert report.episodes == 4
    assert f"episode 1 of {4 + report.left_out} (row 1, where the model says" in failed[0]
    assert "exit code 7: no such thing:" in failed[0]
    wrong = {each.clause: each.detail for each in report.findings if each.level is Level.FAIL}
    assert wrong["it can be started"] == "no episode of it got as far as asking the model"
    assert (
        f"({report.episodes} of {report.episodes} episodes; first row 1" in wrong["its episodes end without an error"]
    )
    assert "it can be loaded" not in str(report)


BROKEN_ON_ONE = """
async def rollout(task, policy):
    await policy.chat("hello")
    return 1.0 / task["number"]
"""


def test_all_is_tried_where_the_rows_fail_differently(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(BROKEN_ON_ONE)
    report = check_env(f"{tmp_path / 'env.py'}:rollout", rows=[{"number": 0}, {"number": 1}])
    assert report.left_out == 0
    detail = next(each.detail for each in report.findings if each.clause == "its episodes end without an error")
    assert f"(9 of {report.episodes} episodes; first row 1, where the model says the row's answer)" in detail


def test_a_script_that_does_not_exist_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (f"{sys.executable} agent.py", "python3 -u agent.py --fast", "bash ./run.sh"):
        with pytest.raises(EnvError, match="there is no file"):
            check_env(command)


def test_a_file_that_imports_what_is_not_installed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import not_installed\ndef reward(completion): ...\n")
    with pytest.raises(ConfigError, match=r"mine\.py:1: there is no module 'not_installed'"):
        check_env(f"{tmp_path / 'mine.py'}:reward")


def test_a_file_without_the_name_of_a_function_is_refused_with_both_ways_to_write_it(file: Path) -> None:
    with pytest.raises(ConfigError, match="names no function") as refused:
        check_env(str(file))
    assert f"{file}:NAME" in refused.value.remedy
    assert f"'python {file}'" in refused.value.remedy


@pytest.mark.parametrize(("command", "words"), [("", "is empty"), ("python 'agent.py", "cannot be split")])
def test_a_command_that_is_none_is_refused_in_words(command: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_env(command)


def test_the_program_tells_findings_as_json_and_by_its_exit_status(file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = ["--data", str(tmp_path / "rows.jsonl"), "--rows", "1"]
    done = CliRunner().invoke(app, ["check", "env", f"{file}:Raising", *arguments, "--json"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    stages = [line for line in done.stderr.splitlines() if line.endswith(" ...")]
    assert len(stages) >= 3, done.stderr
    assert "starting a worker for it, in at most 60 s" in stages[1]
    assert "each for at most 20 s" in stages[2]
    assert told["ok"] is False
    assert {"fail"} == {each["level"] for each in told["findings"] if "ZeroDivisionError" in each["detail"]}
    good = CliRunner().invoke(app, ["check", "env", f"{file}:Sound", *arguments])
    assert good.exit_code == 0, good.output
    assert "rewards differ: from 0 to 1" in good.stdout


SLOW_ROLLOUT = """
import asyncio
async def rollout(task, policy):
    await policy.chat("1 + 1")
    await asyncio.sleep(0.25)
    return 1.0
"""


def test_each_episode_that_takes_long_is_told_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "PROGRESS_EVERY_S", 0.1)
    (tmp_path / "slow.py").write_text(SLOW_ROLLOUT)
    told: list[str] = []
    report = check_env(f"{tmp_path / 'slow.py'}:rollout", on_progress=told.append)
    assert report.ok, str(report)
    for number in range(1, report.episodes + 1):
        assert any(f"episode {number} of {report.episodes}: row 1, where the model says" in each for each in told), told


FOR_TRL = """
    class Sums:
        def __init__(self, bonus: float = 0.0):
            self.bonus, self.said = bonus, ""

        def reset(self, answer, **row):
            self.answer = str(answer)
            return " Say it with the tool."

        def say(self, text: str) -> str:
            '''Say something.

            Args:
                text: What.
            '''
            self.said = text
            return "said"

        def get_reward(self):
            return self.bonus + float(self.said == "a")  # what a script calls it with

    class Broken(Sums):
        def get_reward(self):
            return 1 / 0

    class Unknown:
        def reset(self, **row):
            return None

        def get_reward(self):
            return 0.0
"""


@pytest.fixture(scope="module")
def for_trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "made.py"
    path.write_text(textwrap.dedent(FOR_TRL))
    return path


def test_a_bridge_is_checked_with_the_library_that_it_leads_to(for_trl: Path) -> None:
    rows = [{"prompt": "3*4", **ROWS[0]}]
    report = check_env(f"trl/{for_trl}:Sums", rows=rows, options={"bonus": 1})
    found = {each.clause: each for each in report.findings}
    assert report.ok, str(report)
    assert report.kind == "bridge"
    assert found["rewards differ"].detail == "from 1 to 2"
    assert found["tools are described"].detail == "say"
    assert "its state can be copied" not in found
    broken = check_env(f"trl/{for_trl}:Broken", rows=rows)
    assert (
        "ZeroDivisionError"
        in {each.clause: each.detail for each in broken.findings}["its episodes end without an error"]
    )


def test_where_no_row_says_what_is_right_equal_rewards_are_told_as_such(for_trl: Path) -> None:
    report = check_env(f"trl/{for_trl}:Unknown", rows=[{"prompt": "3*4"}])
    assert report.ok, str(report)
    (finding,) = [each for each in report.findings if each.level is not Level.OK]
    assert "every episode earned 0: no row says what is right" in finding.detail


def test_a_library_that_makes_its_own_tasks_is_tried_on_the_first_of_them() -> None:
    pytest.importorskip("reasoning_gym")
    report = check_env("reasoning_gym/gcd", options={"size": 20})
    assert report.ok, str(report)
    assert report.episodes > 20


def test_what_a_library_refuses_is_the_only_finding() -> None:
    pytest.importorskip("reasoning_gym")
    report = check_env("reasoning_gym/gcd", options={"no_such_setting": 1})
    (finding,) = report.findings
    assert (finding.clause, finding.level) == ("it can be loaded", Level.FAIL)
    assert "no_such_setting" in finding.detail


def test_options_are_those_of_a_bridge_alone(file: Path) -> None:
    with pytest.raises(ConfigError, match="it is not a bridge"):
        check_env(f"{file}:Sound", options={"size": 1})
    done = CliRunner().invoke(app, ["check", "env", f"{file}:Sound", "--option", "size=1"])
    assert done.exit_code != 0


def test_a_file_in_a_folder_that_is_called_like_a_library_is_a_file(tmp_path: Path, file: Path, monkeypatch) -> None:
    (tmp_path / "gem").mkdir()
    (tmp_path / "gem" / "my_env.py").write_text(file.read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Nobody"):
        check_env("gem/my_env.py:Nobody")
