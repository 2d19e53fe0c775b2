"""Task directories as the field writes them become rows and worlds, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import DataError
from headrace.rollout.environments.data import load_rows
from headrace.wings.sandboxes.tasks import BuildStep, open_task, read_dockerfile
from tests.wings.sandboxes.task_files import HARBOR, TERMINAL_BENCH, write_task


def test_a_folder_of_tasks_of_both_forms_is_a_dataset(tmp_path: Path) -> None:
    write_task(tmp_path / "b/second", TERMINAL_BENCH)
    write_task(tmp_path / "a-first", HARBOR)
    write_task(tmp_path / "c", HARBOR, **{"tests/test.sh": None})
    write_task(tmp_path / ".hidden", HARBOR)
    rows = load_rows(tmp_path)
    assert [(row["task"], row["prompt"]) for row in rows] == [
        ("a-first", "Make answer.sh print 42."),
        ("second", "Write hello into\nthe file greeting."),
        ("c", "(this task cannot be read)"),
    ]
    assert rows[0]["directory"] == str(tmp_path / "a-first")
    assert rows[0]["solution"] == "```bash\nsed -i s/41/42/ /app/answer.sh\n```"
    assert "has no tests" in rows[2]["problem"]
    assert [row["task"] for row in load_rows(tmp_path / "a-first")] == ["a-first"]


def test_a_folder_without_tasks_is_refused_with_the_readers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no reader finds rows") as error:
        load_rows(tmp_path)
    assert "tasks" in error.value.remedy


def test_limits_variables_and_steps_are_read(tmp_path: Path) -> None:
    task = open_task(write_task(tmp_path / "one", HARBOR))
    assert (task.agent_s, task.tests_s, task.build_s) == (60.0, 30.0, 30.0)
    assert (task.memory_bytes, task.disk_bytes) == (512 << 20, 64 << 20)
    assert (task.variables, task.test_variables) == ({"WORD": "set"}, {"EXPECTED": "42"})
    assert task.image == "python:3.12-slim"
    assert [step.kind for step in task.steps] == ["ENV", "ENV", "WORKDIR", "COPY", "RUN"]
    assert not task.asks_network


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ('RUN ["ls", "a b"]', BuildStep(kind="RUN", words=("ls 'a b'",))),
        ('COPY ["a b", "/c"]', BuildStep(kind="COPY", words=("a b", "/c"))),
        ("ADD x y /z/", BuildStep(kind="COPY", words=("x", "y", "/z/"))),
        ("ENV A one two", BuildStep(kind="ENV", words=("A", "one two"))),
        ('ENV A="one two"', BuildStep(kind="ENV", words=("A", "one two"))),
        ("workdir /x", BuildStep(kind="WORKDIR", words=("/x",))),
        ("ARG V=1", BuildStep(kind="ENV", words=("V", "1"))),
    ],
)
def test_instructions_of_a_dockerfile_are_steps(text: str, step: BuildStep) -> None:
    assert read_dockerfile(f"FROM x AS y\n{text}\nUSER root\n", "it") == ("x", (step,))


@pytest.mark.parametrize(
    "line",
    ["FROM other", "COPY --from=build a b", "RUN <<EOF", "ADD https://x/y z", "USER nobody", "VOLUME /x",
     "ONBUILD RUN x", "SHELL x", "RUN --mount=type=cache,target=/x y"],
)  # fmt: skip
def test_what_a_session_cannot_do_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(DataError, match=r"the task it has .*which sessions do not support"):
        read_dockerfile(f"FROM x\n{line}\n", "it")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instruction.md": None}, "has no an instruction|has no instruction"),
        ({"tests/test.sh": None}, "has no tests"),
        ({"task.toml": "not toml ["}, "cannot be read"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, "memory='much' is no size"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, "environment of their own"),
        ({"steps/one/instruction.md": "x"}, "has several steps"),
        ({"environment/docker-compose.yaml": "services: {}"}, "has services in docker-compose.yaml"),
    ],
)
def test_a_task_that_lacks_a_part_is_told_by_name(tmp_path: Path, changes: dict[str, str | None], words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        open_task(write_task(tmp_path / "broken", HARBOR, **changes))
    assert "broken" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run-tests.sh": None}, "has no tests"),
        ({"task.yaml": "parser_name: pytest"}, "has no instruction"),
        ({"task.yaml": "instruction: x\nparser_name: swebench"}, "parser_name='swebench'"),
        ({"task.yaml": "instruction: !!python/object:os.system x"}, "cannot be read"),
    ],
)
def test_a_task_of_terminal_bench_that_lacks_a_part_is_told_by_name(
    tmp_path: Path, changes: dict[str, str | None], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        open_task(write_task(tmp_path / "broken", TERMINAL_BENCH, **changes))
