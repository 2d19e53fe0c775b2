"""An agent works on task directories with the commands of a shell; their tests give the reward."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EnvError, EpisodeError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import StopReason
from headrace.rollout.environments.data import load_rows
from headrace.rollout.environments.entry import as_rollout
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.registry import ENVIRONMENTS
from headrace.rollout.environments.scripted import SCRIPTS
from headrace.wings.sandboxes.environment import ShellEnv, ShellSettings
from headrace.wings.sandboxes.local.driver import LocalDriver
from headrace.wings.sandboxes.tasks import open_task
from headrace.wings.sandboxes.world import Worlds, close_shared_worlds
from tests.wings.sandboxes.task_files import HARBOR, TERMINAL_BENCH, write_task

HERE = {"image": "machine"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "repairs.py"
SOLVED = "sed -i s/41/42/ answer.sh"


class Saying:
    """A model that says what it was told to say, and keeps what it read."""

    seed = 0

    def __init__(self, says: Sequence[str | ToolCall]) -> None:
        self._says = list(says)
        self.read: list[str] = []

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions | None = None
    ) -> Reply:
        self.read.append(messages[-1].content)
        said = self._says.pop(0)
        message = Message(role="assistant", content=said) if isinstance(said, str) else Message(
            role="assistant", tool_calls=(said,)
        )  # fmt: skip
        return Reply(
            message=message, turn=len(self.read), stop_reason=StopReason.STOP, num_prompt_tokens=1, num_tokens=1
        )

    async def sample(self, prompt_ids_T: Any, options: ChatOptions | None = None) -> Reply:
        raise NotImplementedError


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made
        made.run(close_shared_worlds())


def attempt(
    runner: asyncio.Runner, directory: Path, says: Sequence[str | ToolCall], **options: Any
) -> tuple[Episode, list[str]]:
    """Attempt a task with what a model says; return the episode, and what the model read."""
    model = Saying(says)
    with ThreadPoolExecutor(1) as executor:
        rollout = as_rollout(partial(ShellEnv, **{**HERE, **options}), executor)
        return runner.run(rollout(load_rows(directory)[0], EpisodePolicy(model))), model.read


def block(command: str) -> str:
    return f"I think this helps:\n```bash\n{command}\n```\n"


def test_it_is_registered_under_its_name() -> None:
    assert ENVIRONMENTS.load("shell") is ShellEnv


def test_an_agent_that_solves_the_task_earns_what_the_tests_write(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    says = [block("ls; cat lib/note.txt; echo $WORD $PLACE"), block("cd data; cat made"), block("pwd"),
            block("cd ..; " + SOLVED), block("submit")]  # fmt: skip
    episode, read = attempt(runner, directory, says)
    assert episode.reward == 1.0
    assert read[0] == "Make answer.sh print 42."
    assert read[1] == "answer.sh\ndata\nlib\nhelloset /app/data"
    assert read[2:5] == ["built", "/app/data", "[exit code 0]"]


def test_an_agent_that_does_not_solve_it_earns_what_the_tests_write_then(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    episode, read = attempt(runner, directory, ["no command", block("false"), "submit"])
    assert episode.reward == 0.25
    assert read[1].startswith("Your answer held no command")
    assert read[2] == "[exit code 1]"


@pytest.mark.parametrize(
    ("cheat", "reward"),
    [
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 555 /logs/verifier", 0.25),
        ("mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests", 0.25),
        ("(while :; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &", 0.25),
        ("export EXPECTED=41 PATH=/app; cd /", 0.25),
        ("export BASH_ENV=/app/x; echo 'EXPECTED=41' > /app/x", 0.25),
        ("ln -s /etc /logs; ln -s / /tests", 0.25),
        ("cat /dev/zero > /tmp/full", 0.0),
    ],
)
def test_what_an_agent_leaves_does_not_stand_for_the_tests(
    runner: asyncio.Runner, tmp_path: Path, cheat: str, reward: float
) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    episode, _ = attempt(runner, directory, [block(cheat), block("submit")])
    assert episode.reward == reward


@pytest.mark.parametrize(
    ("cheat", "earns"),
    [
        ("export CHEAT=1", 'test -n "$CHEAT"'),
        ("export BASH_ENV=/app/x; echo CHEAT=1 > /app/x", 'test -n "$CHEAT"'),
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 555 /logs/verifier /logs", "false"),
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json", "false"),
        ("mkdir -p /tests/deep; touch /tests/deep/planted; chmod 000 /tests/deep", "test -e /tests/deep"),
        ("ln -s /app /tests; touch planted", "test -e /tests/planted"),
        ("touch /conftest.py /pytest.ini", "test -e /conftest.py -o -e /pytest.ini"),
        (
            'd=$(python3 -m site --user-site); mkdir -p $d; echo \'open("/tmp/c", "w")\' > $d/usercustomize.py',
            "/usr/bin/python3 -c pass; test -e /tmp/c",
        ),
        ("true", "mkfifo /logs/verifier/reward.txt; false"),
    ],
)
def test_tests_find_neither_variables_nor_files_that_the_agent_has_prepared_for_them(
    runner: asyncio.Runner, tmp_path: Path, cheat: str, earns: str
) -> None:
    """These tests write a reward only if they find what the agent has left; what it has left is all that could be
    read otherwise."""
    tests = f"#!/bin/bash\n{earns} && echo 1 > /logs/verifier/reward.txt\n"
    directory = write_task(tmp_path / "task", HARBOR, **{"tests/test.sh": tests})
    assert attempt(runner, directory, [block(cheat), block("submit")], command_s=900)[0].reward == 0.0


def test_tests_begin_in_the_directory_of_the_task_even_if_the_agent_has_taken_it_away(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    tests = "#!/bin/bash\ntest $PWD = /app && echo 1 > /logs/verifier/reward.txt\n"
    directory = write_task(tmp_path / "task", HARBOR, **{"tests/test.sh": tests})
    assert attempt(runner, directory, [block("cd /; rm -r /app"), block("submit")])[0].reward == 1.0


def test_a_task_of_terminal_bench_is_judged_by_its_pytest(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", TERMINAL_BENCH)
    assert attempt(runner, directory, [block("echo hello > greeting"), "submit"])[0].reward == 1.0


def test_answers_can_be_plain_lines_or_calls_of_a_tool(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    assert attempt(runner, directory, [SOLVED, "submit"], action="line", system="")[0].reward == 1.0
    for fenced in ("```bash\necho hi\n```", "```\necho hi\n```", "~~~console\r\necho hi\r\n~~~\r\n"):
        assert attempt(runner, directory, [fenced, "submit"], action="line")[1][1] == "hi"
    call = ToolCall(id="1", name="run", arguments=json.dumps({"command": f"{SOLVED}; cat answer.sh"}))
    episode, read = attempt(runner, directory, [call, "It is done."], action="tool")
    assert episode.reward == 1.0
    assert "echo 42" in read[1]


def test_the_repairs_of_the_example_are_made_by_its_commands(runner: asyncio.Runner, tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, tmp_path], check=True)
    directory = min((tmp_path / "train").iterdir())
    wanted = re.findall("# (.)", (directory / "environment/program.sh").read_text())
    assert len(wanted) == 3
    options = {"action": "line", "system": "", "commands": 3}
    assert attempt(runner, directory, [f"fix {letter}" for letter in wanted], **options)[0].reward == 1.0


def test_the_check_of_environments_gives_the_solution_by_a_call_too(runner: asyncio.Runner, tmp_path: Path) -> None:
    """A solution with a block of its own is given whole, in an answer and as an argument."""
    solve = "cat > x.md <<'EOF'\n```\ncode\n```\nEOF\nsed -i s/41/42/ /app/answer.sh\n"
    directory = write_task(tmp_path / "task", HARBOR, **{"solution/solve.sh": solve})
    (row,) = load_rows(directory)
    run = Tool(
        name="run",
        description="",
        parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    )
    (call,) = SCRIPTS["each tool once, then the row's answer"](row, [run], 0).tool_calls
    assert attempt(runner, directory, [call, "It is done."], action="tool")[0].reward == 1.0
    assert attempt(runner, directory, [row["solution"], "submit"])[0].reward == 1.0


def test_the_last_command_is_followed_by_the_tests(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    assert attempt(runner, directory, ["true", SOLVED], action="line", commands=2)[0].reward == 1.0


def test_episodes_of_one_task_share_its_environment_and_nothing_else(runner: asyncio.Runner, tmp_path: Path) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nRUN head -c 9 /dev/urandom | base64 > made && mkdir data && touch data/made\n"
    directory = write_task(tmp_path / "task", HARBOR, **{"environment/Dockerfile": dockerfile})
    seen = [attempt(runner, directory, [f"cat made; ls; touch from-{n}", "submit"], action="line")[1][1] for n in "ab"]
    assert seen[0] == seen[1]
    assert "from" not in seen[1]


def test_the_environment_that_was_used_longest_ago_is_given_up_and_made_again(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nRUN head -c 9 /dev/urandom | base64 > made\n"
    paths = {n: write_task(tmp_path / n, HARBOR, **{"environment/Dockerfile": dockerfile}) for n in "abc"}
    order = "abacab"  # two are kept: c takes the place of b, and b that of c
    say = ["cat made", "submit"]
    seen = [(n, attempt(runner, paths[n], say, action="line", environments=2)[1][1]) for n in order]
    made = {n: [text for name, text in seen if name == n] for n in "abc"}
    assert len(set(made["a"])) == 1
    assert len(set(made["b"])) == 2


def num_stores(worlds: Worlds) -> int:
    """The number of stores of files that the driver of these worlds holds."""
    assert isinstance(worlds._driver, LocalDriver)
    return len(worlds._driver._uses)


def test_an_environment_that_is_given_up_frees_its_files(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def body() -> None:
        worlds = Worlds(replace(ShellSettings(image="machine").worlds, kept_environments=2))
        stores = set()
        for number in range(5):
            task = open_task(write_task(tmp_path / str(number), HARBOR))
            await (await worlds.enter(str(number), task)).stop()
            stores.add(num_stores(worlds))
        assert stores == {1, 2}
        await worlds.close()

    runner.run(body())


def test_long_output_is_cut_in_its_middle(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    _, read = attempt(
        runner, directory, ["seq 1000", "sleep 99", "submit"], action="line", output_chars=100, command_s=0.2
    )
    assert read[1].startswith("1\n2\n3")
    assert "[3793 characters left out]" in read[1]
    assert read[1].endswith("999\n1000")
    assert read[2] == "[the command was ended: wall time]"


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {"image": "none"}, ("task_image", "needs the image 'python:3.12-slim'")),
        ({"tests/test.sh": None}, {}, ("task_invalid", "has no tests")),
        ({"environment/Dockerfile": "FROM x\nRUN apt-get install -y nothing"}, {}, ("task_setup", "exit code")),
        ({"environment/Dockerfile": "FROM x\nRUN sleep 99"}, {}, ("task_setup", "wall_time|longer than")),
        ({"environment/Dockerfile": "FROM x\nCOPY ../../etc/passwd /app/"}, {}, ("task_setup", "outside|no such file")),
        ({"environment/Dockerfile": "FROM x\nCOPY missing /app/"}, {}, ("task_setup", "COPY missing")),
        ({"environment/Dockerfile": "FROM x\nCOPY answer.sh lib/note.txt /new"}, {}, ("task_invalid", "need a folder")),
        ({"environment/Dockerfile": "FROM x\nENV A=${B:?unset}"}, {}, ("task_invalid", "B is not set")),
        ({"task.toml": "[environment]\nmemory_mb = inf"}, {}, ("task_invalid", "memory_mb=inf")),
        ({"task.toml": "[environment]\nallow_internet = true"}, {}, ("task_network", "requests a network")),
        ({"tests/test.sh": "echo lots > /logs/verifier/reward.txt"}, {}, ("task_reward", "'lots' to reward.txt")),
        ({"tests/test.sh": "echo NaN > /logs/verifier/reward.txt"}, {}, ("task_reward", "'NaN'")),
        ({"tests/test.sh": ": > /logs/verifier/reward.txt"}, {}, ("task_reward", "'' to reward.txt")),
    ],
)
def test_a_task_that_cannot_be_attempted_fails_its_episode_by_name(
    runner: asyncio.Runner,
    tmp_path: Path,
    changes: dict[str, str | None],
    options: dict[str, str],
    expected: tuple[str, str],
) -> None:
    reason, words = expected
    fast = {"task.toml": "[environment]\nbuild_timeout_sec = 1.0"} if "sleep" in str(changes) else {}
    directory = write_task(tmp_path / "task", HARBOR, **{**fast, **changes})
    with pytest.raises(EpisodeError, match=words) as error:
        attempt(runner, directory, ["submit"], **options)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("tests", "reward"),
    [
        ('echo \'{"reward": 0.5, "more": 1}\' > /logs/verifier/reward.json', 0.5),
        ("echo '{\"correctness\": 0.75}' > /logs/verifier/reward.json", 0.75),
        ("true", 0.0),
        ("sleep 99", 0.0),
        ("mkfifo /logs/verifier/reward.txt", 0.0),
        ("ln -s /dev/zero /logs/verifier/reward.txt", 0.0),
        ("sleep 99 > /logs/verifier/reward.txt", 0.0),
        ("cat /dev/zero > /app/x; echo 1 > /logs/verifier/reward.txt", 0.0),
    ],
)
def test_rewards_are_read_as_the_field_writes_them(
    runner: asyncio.Runner, tmp_path: Path, tests: str, reward: float
) -> None:
    settings = "[verifier]\ntimeout_sec = 1.0"
    directory = write_task(tmp_path / "task", HARBOR, **{"tests/test.sh": tests, "task.toml": settings})
    assert attempt(runner, directory, ["submit"])[0].reward == reward


def built(tmp_path: Path, dockerfile: str, check: str = "true") -> Path:
    """A task with this Dockerfile, whose tests earn 1 where ``check`` holds."""
    tests = f"#!/bin/bash\n{check} && echo 1 > /logs/verifier/reward.txt\n"
    return write_task(
        tmp_path / "task", HARBOR, **{"environment/Dockerfile": f"FROM x\n{dockerfile}\n", "tests/test.sh": tests}
    )


@pytest.mark.parametrize(
    ("dockerfile", "check"),
    [
        ("ENV PATH=/opt/bin:$PATH\nCOPY --chmod=755 answer.sh /opt/bin/hi\nRUN hi", "hi"),
        ("ENV FLAVOUR=blue", 'test "$FLAVOUR" = blue'),
        ("ENV WORD=other", 'test "$WORD" = set'),  # a container's own variables come after those of its image
        ("ARG A=1\nRUN test $A = 1", 'test -z "$A"'),
        ("RUN test -z $WORD", "true"),
        ("ENV W=/app/sub\nWORKDIR $W\nWORKDIR deeper", "test $PWD = /app/sub/deeper"),
        ("ARG D=/srv\nCOPY answer.sh $D/x.sh", "test -e /srv/x.sh"),
        ("WORKDIR /app\nCOPY answer.sh /app", "test -f /app/answer.sh"),
        ("WORKDIR /app\nCOPY answer.sh lib/note.txt ./", "test -f answer.sh && test -f note.txt"),
        ("COPY lib /srv", "test -f /srv/note.txt"),
        ('SHELL ["/bin/bash", "-c"]\nRUN [[ a == a ]]', "true"),
        ("RUN printf '%s' $0 > /srv-shell", "test $(cat /srv-shell) = /bin/sh"),
        ("RUN seq 1 400000", "true"),
    ],
)
def test_steps_of_a_dockerfile_are_carried_out_as_docker_does(
    runner: asyncio.Runner, tmp_path: Path, dockerfile: str, check: str
) -> None:
    directory = built(tmp_path, dockerfile, check)
    assert attempt(runner, directory, [block("submit")])[0].reward == 1.0


def test_arguments_of_a_dockerfile_end_with_its_last_step(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = built(tmp_path, "ARG A=1\nENV B=2$A")
    _, read = attempt(runner, directory, [block("echo [$A] $B $WORD"), "submit"])
    assert read[1] == "[] 21 set"


def test_copies_keep_modes_links_and_empty_folders_and_leave_out_what_is_ignored(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    check = (
        "cd /app && ./tool && test -L link && test -L absolute && test -d empty && test ! -x answer.sh && "
        "test ! -e out/log && test -e out/kept && test -L sub && test -x /tests/helper && test -L /tests/alias"
    )
    directory = built(tmp_path, "COPY . /app/\nRUN cd /app && ./tool && cat sub/note.txt", check)
    context = directory / "environment"
    for tool in (context / "tool", directory / "tests/helper"):
        tool.write_text("true\n")
        tool.chmod(0o755)
    (context / "empty").mkdir()
    (context / "out").mkdir()
    (context / "out/log").touch()
    (context / "out/kept").touch()
    (context / ".dockerignore").write_text("# what\nout\n!out/kept\n")
    (context / "link").symlink_to("tool")
    (context / "sub").symlink_to("lib")
    (context / "absolute").symlink_to("/etc/passwd")
    (directory / "tests/alias").symlink_to("helper")
    assert attempt(runner, directory, [block("submit")])[0].reward == 1.0


@pytest.mark.parametrize("place", ["environment", "environment/lib", "tests", "tests/deep"])
@pytest.mark.parametrize("target", ["file", "folder"])
def test_links_never_bring_files_of_this_machine_into_a_session(
    runner: asyncio.Runner, tmp_path: Path, place: str, target: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("SECRET")
    (tmp_path / "folder/file").write_text("SECRET")
    directory = built(tmp_path, "COPY . /app/", "! grep -Rqs SECRE[T] /app /tests")
    (directory / place).mkdir(exist_ok=True)
    (directory / place / "full").symlink_to(tmp_path / target)
    assert attempt(runner, directory, [block("submit")])[0].reward == 1.0
    directory = directory.rename(tmp_path / "again")
    (directory / place / "leads-out").symlink_to("../" * (place.count("/") + 2) + target)
    with pytest.raises(EpisodeError, match=r"leads-out leads to .*outside") as error:
        attempt(runner, directory, ["submit"])
    assert error.value.reason == "task_invalid"


def test_a_link_that_leads_to_itself_is_refused_as_a_source(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = built(tmp_path, "COPY itself /app/")
    (directory / "environment/itself").symlink_to("itself")
    with pytest.raises(EpisodeError, match="itself"):
        attempt(runner, directory, ["submit"])


@pytest.mark.parametrize("source", ["leads-out", "leads-out/*", "leads-out/file"])
def test_a_source_that_a_link_leads_outside_is_refused(runner: asyncio.Runner, tmp_path: Path, source: str) -> None:
    directory = built(tmp_path, f"COPY {source} /app/")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("SECRET")
    (directory / "environment/leads-out").symlink_to(tmp_path / "folder")
    with pytest.raises(EpisodeError, match="outside"):
        attempt(runner, directory, ["submit"])


def test_tests_may_print_more_than_a_command_may(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = built(tmp_path, "WORKDIR /app", "seq 1 400000 && seq 1 400000 >&2")
    assert attempt(runner, directory, [block("submit")])[0].reward == 1.0
    printing = "import pathlib\n\n\ndef test_it():\n    print('x' * 3000000)\n"
    directory = write_task(tmp_path / "bench", TERMINAL_BENCH, **{"tests/test_outputs.py": printing})
    assert attempt(runner, directory, ["submit"])[0].reward == 1.0


def test_a_shell_that_lost_its_state_says_so_to_the_model(runner: asyncio.Runner, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", HARBOR)
    _, read = attempt(runner, directory, [block("cd /tmp; exec echo hi"), block("submit")])
    assert read[1].startswith("hi\n[the next command begins where this one began: ")


def test_a_limit_that_ends_the_tests_is_recorded(runner: asyncio.Runner, tmp_path: Path) -> None:
    changes = {"tests/test.sh": "sleep 99", "task.toml": "[verifier]\ntimeout_sec = 0.5"}
    ended, _ = attempt(runner, write_task(tmp_path / "task", HARBOR, **changes), [block("ls"), block("submit")])
    assert ended.reward == 0.0
    assert [columns.get("tests") for columns in ended.extra.values()] == [None, "ended: wall time"]


@pytest.mark.parametrize(
    ("tests", "ended"),
    [
        ("sleep 99 > /logs/verifier/reward.txt", "wall time"),
        ("mkdir /logs/verifier/reward.json", "reward.json is no plain file"),
        ("cat /dev/zero > /app/x; : > /logs/verifier/reward.txt", "the disk is full"),
        ("head -c 7000000 /dev/zero > /logs/verifier/reward.txt", "reward.txt cannot be read"),
    ],
)
def test_why_there_is_no_reward_is_recorded(runner: asyncio.Runner, tmp_path: Path, tests: str, ended: str) -> None:
    changes = {"tests/test.sh": tests, "task.toml": "[verifier]\ntimeout_sec = 2.0"}
    episode, _ = attempt(runner, write_task(tmp_path / "task", HARBOR, **changes), ["submit"], disk_mb=8)
    assert episode.reward == 0.0
    assert [columns["tests"] for columns in episode.extra.values()] == [f"ended: {ended}"]


def test_an_empty_reward_of_tests_that_came_to_their_end_is_named(runner: asyncio.Runner, tmp_path: Path) -> None:
    changes = {"tests/test.sh": ": > /logs/verifier/reward.txt"}
    with pytest.raises(EpisodeError, match=r"have written '' to reward\.txt") as error:
        attempt(runner, write_task(tmp_path / "task", HARBOR, **changes), ["submit"])
    assert error.value.reason == "task_reward"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sandbox": "jial"}, "did you mean 'jail'"),
        ({"commands": 0}, r"env\.options\.commands"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        ShellEnv(**options)


def test_what_commands_have_changed_is_shown_with_their_answers(runner: asyncio.Runner, tmp_path: Path) -> None:
    """New, changed and removed files below the directory of the task, also those whose time was set back."""
    task = write_task(tmp_path / "one", HARBOR)
    commands = [
        "touch -d '2001-01-01' lib/new",
        "cp -p answer.sh old; echo echo 42 > answer.sh; touch -r old answer.sh; rm old lib/note.txt",
        "ls",
        "for i in {10..40}; do touch lib/$i; done",
    ]
    ended, _ = attempt(runner, task, [*map(block, commands), block("submit")])
    assert [columns.get("files", "") for columns in ended.extra.values()][:3] == [
        "+ lib/new", "~ answer.sh, - lib/note.txt", "",
    ]  # fmt: skip
    assert [columns.get("files", "") for columns in ended.extra.values()][3].endswith("+ lib/21, and 19 more")
    assert all(0 < columns["seconds"] < 60 for columns in list(ended.extra.values())[:4])
    assert ended.reward == 1.0


def test_changes_are_not_looked_for_where_that_is_not_wanted(runner: asyncio.Runner, tmp_path: Path) -> None:
    task = write_task(tmp_path / "one", HARBOR)
    ended, _ = attempt(runner, task, [block("touch new"), block("submit")], show_changes=False)
    (shown,) = ended.extra.values()
    assert shown.keys() == {"seconds"}
