"""Task directories as the field writes them become rows and worlds, or are refused by name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headrace.base.errors import DataError
from headrace.rollout.environments.data import load_rows
from headrace.wings.sandboxes.dockerfile import BuildStep, expand, read_dockerfile, state_after
from headrace.wings.sandboxes.tasks import open_task
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
    assert [step.kind for step in task.steps] == ["ENV", "WORKDIR", "COPY", "RUN"]
    assert not task.asks_network


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ('RUN ["ls", "a b"]', BuildStep(kind="RUN", words=("ls", "a b"))),
        ("RUN [ -e x ] && ls", BuildStep(kind="RUN", words=("/bin/sh", "-c", "[ -e x ] && ls"))),
        ('SHELL ["/bin/bash", "-c"]\nRUN ls', BuildStep(kind="RUN", words=("/bin/bash", "-c", "ls"))),
        ("RUN a \\  \n\n  b", BuildStep(kind="RUN", words=("/bin/sh", "-c", "a   b"))),
        ("COPY --link --chmod=755 a b", BuildStep(kind="COPY", words=("a", "b"), mode=0o755)),
        ('ENTRYPOINT ["/usr/bin/tini", "--"]\nENV A=$B C=d', BuildStep(kind="ENV", words=("A", "$B", "C", "d"))),
        ('COPY ["a b", "/c"]', BuildStep(kind="COPY", words=("a b", "/c"))),
        ("ADD x y /z/", BuildStep(kind="ADD", words=("x", "y", "/z/"))),
        ("ENV A one two", BuildStep(kind="ENV", words=("A", "one two"))),
        ('ENV A="one two"', BuildStep(kind="ENV", words=("A", '"one two"'))),
        ("workdir /x", BuildStep(kind="WORKDIR", words=("/x",))),
        ("ARG V=1", BuildStep(kind="ARG", words=("V", "1"))),
    ],
)
def test_instructions_of_a_dockerfile_are_steps(text: str, step: BuildStep) -> None:
    assert read_dockerfile(f"ARG I=x\nFROM --platform=linux/amd64 ${{I}} AS y\n{text}\nUSER root\n", "it") == (
        "x",
        (step,),
    )


@pytest.mark.parametrize(
    "line",
    ["FROM other", "COPY --from=build a b", "RUN <<EOF", "ADD https://x/y z", "USER nobody", "VOLUME /x",
     "ONBUILD RUN x", "SHELL x", "COPY --chown=me a b", "ADD --keep=x a b", "ENTRYPOINT /serve.sh", "ARG TARGETARCH",
     "COPY <<EOF b", "RUN --mount=type=cache,target=/x y"],
)  # fmt: skip
def test_what_a_session_cannot_do_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(DataError, match=r"the task it has .*which sessions do not support"):
        read_dockerfile(f"FROM x\n{line}\n", "it")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instruction.md": None}, "has no instruction"),
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A", "1"), ("${A}x", "1x"), ("$B", ""), ("${B:-x$A}", "x1"), ("${E:-x}", "x"), ("${E-x}", ""),
        ("${A:+x}", "x"), ("${E:+x}", ""), ("${E+x}", "x"), (r"\$A", "$A"), ("'$A'", "$A"), ('"$A b"', "1 b"),
        (r'"a\"b\c"', r'a"b\c'), ("/opt:$PATH", "/opt:/bin"), ("a$", "a$"),
    ],
)  # fmt: skip
def test_variables_are_replaced_as_docker_does(text: str, value: str) -> None:
    assert expand(text, {"A": "1", "E": "", "PATH": "/bin"}) == value


@pytest.mark.parametrize("text", ["${A", "'a", '"a', "${A%b}", "${B:?needed}", "${}"])
def test_a_form_of_variables_that_docker_would_not_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"without its end|not supported|needed|without a name"):
        expand(text, {"A": "1"})


def test_steps_come_to_the_variables_and_the_directory_of_docker() -> None:
    text = (
        "ARG V=12\nFROM debian:$V\nARG V\nARG PLACE=/srv\nENV PATH=/opt/bin:$PATH BASE=$PLACE/data OLD=$BASE\n"
        "ENV SUB=$BASE/x V$V=1\nWORKDIR $BASE\nWORKDIR deeper\n"
    )
    image, steps = read_dockerfile(text, "it")
    state = state_after(steps, {"PATH": "/bin"}, "/app")
    assert image == "debian:12"
    assert state.directory == "/srv/data/deeper"
    assert state.environment == {
        "PATH": "/opt/bin:/bin", "BASE": "/srv/data", "OLD": "", "SUB": "/srv/data/x", "V12": "1",
    }  # fmt: skip
    assert state.known["V"] == "12"


@pytest.mark.parametrize("text", ["", "RUN ls\nFROM x", "FROM $MISSING", "FROM a b", "# escape=`\nFROM x"])
def test_a_dockerfile_that_docker_would_not_read_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="the task it has"):
        read_dockerfile(text, "it")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('environment = "x"', "environment='x' is no table"),
        ("[environment]\nenv = ['a']", r"env=\['a'\] is no table"),
        ("[environment.env]\n'A=B' = 'c'", r"env\['A=B'\]='c' cannot be set"),
        ("[environment.env]\nA = ['c']", r"env\.A=\['c'\] is no text"),
        ("[verifier.env]\nA = '${KEY}'", r"env\.A='\$\{KEY\}' names a variable of the machine"),
        ("[environment]\nmemory_mb = inf", "memory_mb=inf is no number"),
        ("[environment]\nmemory_mb = 1", "memory of 1 MiB is not what a session can have: 64 MiB or more"),
        ("[environment]\nmemory_mb = -1", "memory of -1 MiB"),
        ("[environment]\nstorage = '1K'", "storage of 0.0009"),
        ("[environment]\nbuild_timeout_sec = -5.0", "build_timeout_sec=-5 is no time"),
        ("[agent]\ntimeout_sec = nan", "timeout_sec=nan is no number"),
        ("[agent]\ntimeout_sec = inf", "timeout_sec=inf is no number"),
        ("[agent]\ntimeout_sec = '5'", "timeout_sec='5' is no number"),
        ("[verifier]\ntimeout_sec = 0", "timeout_sec=0 is no time"),
        ("[environment]\ndocker_image = 3", "docker_image=3 is no text"),
        ("[agnt]\ntimeout_sec = 3", "unknown key 'agnt'; did you mean 'agent'"),
        ("[agent]\ntimeout_secs = 3", r"unknown key 'agent\.timeout_secs'; did you mean 'timeout_sec'"),
    ],
)
def test_settings_that_cannot_work_are_told_by_their_value_and_leave_other_tasks_alone(
    tmp_path: Path, settings: str, words: str
) -> None:
    broken = write_task(tmp_path / "a-broken", HARBOR, **{"task.toml": settings})
    write_task(tmp_path / "good", HARBOR)
    with pytest.raises(DataError, match=words):
        open_task(broken)
    first, second = load_rows(tmp_path)
    assert "a-broken" in first["problem"]
    assert second["problem"] == ""


def test_keys_of_the_format_that_change_nothing_are_accepted_and_unknown_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (
        'schema_version = "1.1"\n[task]\nname = "a/b"\n[metadata]\nanything = 1\n[environment]\ncpus = 2\ngpus = 0\n'
        "skills_dir = 'x'\nzzz_unheard_of = 1\n[verifier.env]\nA = '${KEY:-here}'\n"
    )
    task = open_task(write_task(tmp_path / "one", HARBOR, **{"task.toml": settings}))
    assert task.test_variables == {"A": "here"}
    assert [record.message for record in caplog.records if record.name.startswith("headrace")] == [
        "task.toml: the key 'environment.zzz_unheard_of' is not known and changes nothing"
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("instruction.md", "environment/Dockerfile")
          for kind in ("outside", "pipe", "latin", "dangling")),
        ("task.toml", "outside"), ("task.toml", "latin"), ("tests/test.sh", "outside"), ("tests/test.sh", "dangling"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_the_task_is_told_by_name(tmp_path: Path, name: str, kind: str) -> None:
    directory = write_task(tmp_path / "data/broken", HARBOR)
    path = directory / name
    path.unlink()
    if kind == "outside":
        (tmp_path / "secret").write_text("[agent]\n")
        path.symlink_to("../" * (name.count("/") + 2) + "secret")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"FROM caf\xe9")
    with pytest.raises(DataError, match="broken") as error:
        open_task(directory)
    assert path.name in str(error.value)


@pytest.mark.parametrize(
    "solution",
    [b"#!/bin/bash\n# caf\xe9\necho ok > out\n", b"cat > x.md <<'EOF'\n```\ncode\n```\nEOF\necho ok > out\n",
     b"# " + b"x" * 120_000 + b"\necho ok > out\n"],
)  # fmt: skip
def test_a_solution_that_cannot_stand_in_an_answer_as_it_is_stands_there_in_base64(
    tmp_path: Path, solution: bytes
) -> None:
    directory = write_task(tmp_path / "one", HARBOR)
    (directory / "solution/solve.sh").write_bytes(solution)
    (row,) = load_rows(directory)
    assert row["problem"] == ""
    assert row["solution"].count("```") == 2
    command = row["solution"].removeprefix("```bash\n").removesuffix("\n```")
    assert len(command) < 100_000
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "out").read_text() == "ok\n"


def test_services_beside_the_one_of_the_agent_are_refused_by_name(tmp_path: Path) -> None:
    services = "services:\n  client:\n    build: .\n  db:\n    image: postgres\n"
    with pytest.raises(DataError, match=r"has the services \['client', 'db'\] in docker-compose.yaml"):
        open_task(write_task(tmp_path / "one", TERMINAL_BENCH, **{"docker-compose.yaml": services}))
