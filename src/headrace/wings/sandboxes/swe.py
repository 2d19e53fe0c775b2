"""Tasks from rows of SWE-bench, SWE-Gym and SWE-smith: a problem in a repository, and named tests that must pass.

    row ─▶ image, or a local repository at its base commit ─▶ agent
        ─▶ test patch ─▶ run the files of the named tests ─▶ 1 if all of FAIL_TO_PASS and PASS_TO_PASS pass, else 0

Rows of SWE-smith have no test patch: their ``patch`` introduces the bug, and its reverse is the solution. Sources:
the dataset cards of SWE-bench/SWE-bench, SWE-Gym/SWE-Gym and SWE-bench/SWE-smith-*, as of November 2026.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import DataError, EpisodeError
from headrace.rollout.environments.data import Row, load_rows
from headrace.wings.sandboxes.base import SandboxSession
from headrace.wings.sandboxes.outputs import TestsReward, run_tests
from headrace.wings.sandboxes.tasks import NamedTests, TaskDirectory

DIRECTORY = "/testbed"
"""The directory of the repository in a session, as in images of SWE-bench."""
TEST_COMMAND = "python -m pytest -rA -q --tb=no --show-capture=no -p no:cacheprovider"
_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
"""Activate the conda environment of images of SWE-bench."""
_IMAGES = ("image_name", "docker_image", "image")
"""The columns of a row that may name an image, in order of preference."""
_CHANGED = re.compile(r"^diff --git a/(.+?) b/(.+)$", re.MULTILINE)
_WRITTEN = re.compile(r"^\+\+\+ (?:b/)?([^\t\n]+)", re.MULTILINE)
_QUOTED = re.compile(r"^(?:diff --git|\+\+\+) .*\"", re.MULTILINE)
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (.+)$", re.MULTILINE)
_PASSING = frozenset({"PASSED", "XFAIL"})
_SUMMARY = "short test summary info"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECK_PATCH = (
    """(folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT && export GIT_INDEX_FILE=$folder/index """
    "&& {git}read-tree {commit} && {git}apply --cached --check -)"
)
"""Check that a patch applies to a commit, with an index outside the repository, so that the repository stays
unchanged."""
_CLEAN_REPOSITORY = rf"""cd {DIRECTORY} && [[ -d .git && ! -L .git ]] || exit
kept=$(git config --file .git/config --get-regexp \
  '^(core\.(repositoryformatversion|bare)|extensions\.(objectformat|refstorage|partialclone))$')
rm -rf .git/config .git/config.worktree .git/commondir .git/info/attributes .git/info/grafts .git/hooks || exit
rm -f .git/*.lock
while read -r name value; do
  [[ ! $name ]] || git config --file .git/config "$name" "$value"
done <<< "$kept"
true"""
"""Remove hooks and settings of a repository through which git would run programs of the agent, such as filters, and
lock files that a killed git has left."""
_MISSING_FILES = (
    """while IFS= read -r file; do ({git}cat-file -e "{commit}:$file" || [ -e {folder}/"$file" ]) 2> /dev/null """
    """|| printf '%s\\n' "$file"; done"""
).replace("{folder}", DIRECTORY)
"""Print the files of the standard input that exist neither in a commit nor in the directory."""


def is_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the columns of a task of SWE-bench."""
    return "instance_id" in row and "problem_statement" in row


def read_rows(path: Path) -> list[Row]:
    """Return the tasks in the JSONL and Parquet files of the directory ``path`` as rows: their columns, the problem as
    ``prompt``, the id as ``task``, and as ``solution`` an answer that solves the task (for checks; no model reads it).
    A row that cannot be attempted has the reason as ``problem``, and its episodes fail with that reason. Return no rows
    if a row is not a task of this kind."""
    rows: list[Row] = []
    for file in sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".parquet")):
        for row in load_rows(file):
            if not is_row(row):
                return []
            row |= {"prompt": row["problem_statement"], "task": row["instance_id"], "problem": "", "solution": ""}
            try:
                row["solution"] = _solution(open_row(row), row)
            except DataError as error:
                row["problem"] = str(error)
            rows.append(row)
    return rows


def open_row(row: Mapping[str, Any], image_names: str = "", test_command: str = "") -> TaskDirectory:
    """Return the task of a row. ``image_names`` is a template for the image's name if the row has none.
    ``test_command`` runs the tests; the test files are appended to it; empty: :data:`TEST_COMMAND`. Raises
    :class:`~headrace.base.errors.DataError` for a row that lacks a required column or is not supported."""
    name = str(row["instance_id"])
    if "expected_output_json" in row:
        words = "compares the output of tests that its image hides, as R2E-Gym does"
        raise _make_unsupported_error(name, words, "leave it out")
    must_pass = (*_names(row, "FAIL_TO_PASS"), *_names(row, "PASS_TO_PASS"))
    if not _names(row, "FAIL_TO_PASS"):
        raise DataError(f"the task {name} has no tests in FAIL_TO_PASS", remedy="leave it out")
    for test in must_pass if not test_command else ():
        if "::" not in test or test.startswith("-"):
            words = f"names the test {test[:120]!r}, which is none of pytest"
            raise _make_unsupported_error(name, words, "set test_command to what runs it, or leave it out")
    if not str(row["problem_statement"] or "").strip():
        raise DataError(f"the task {name} has an empty problem_statement", remedy="leave it out")
    tests, base = str(row.get("test_patch") or ""), str(row.get("base_commit") or "")
    if base and not _COMMIT.fullmatch(base):
        raise DataError(f"the task {name} has base_commit={base[:60]!r}", remedy="give a commit of 40 letters")
    if not base and tests:
        raise DataError(f"the task {name} has a patch of tests and no base_commit", remedy="give both, or none")
    return TaskDirectory(
        name=name,
        instruction=str(row["problem_statement"]),
        context=Path(),
        image=_image(row, name, image_names),
        test_command=test_command or TEST_COMMAND,
        directory=DIRECTORY,
        named=NamedTests(
            repository=str(row.get("repo") or ""),
            base_commit=base,
            bug="" if base else str(row.get("patch") or ""),
            patch=tests,
            names=must_pass,
            solution=str(row.get("patch") or "") if base else "",
        ),
    )


async def begin(session: SandboxSession, task: TaskDirectory, repositories: str) -> None:
    """Build the environment of a task in a session. The repository comes from the folder ``repositories``, at the base
    commit and without other commits; if that is empty, from the image. Then apply the row's bug, if it has one, and
    check its tests. Raises :class:`~headrace.base.errors.EpisodeError` if that fails."""
    assert task.named is not None
    if repositories or session.spec.image == "":
        archive = await asyncio.to_thread(_check_out, task, task.named, repositories)
        if len(archive) > session.spec.limits.disk_bytes:
            raise _make_setup_error(
                task, f"its repository has {len(archive)} bytes", "give it more: env.options.disk_mb"
            )
        await session.unpack(archive)
    await session.run(_ACTIVATE)
    if task.named.bug:
        await _apply(session, task, task.named.bug)
        await _run_or_fail(session, task, _git("add -A && git commit -q -m task --no-verify"))
    await _refuse_unusable_tests(session, task, task.named)


async def _refuse_unusable_tests(session: SandboxSession, task: TaskDirectory, named: NamedTests) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` if no agent could solve the task: the test patch does not apply
    to the base commit, or a file of the named tests does not exist in that commit, in the session's directory, in the
    test patch or in the solution. The session is not changed."""
    commit = named.base_commit or "HEAD"
    if named.patch:
        done = await session.run(_CHECK_PATCH.format(git=_git(""), commit=commit), stdin=_as_patch(named.patch))
        if not done.ok:
            raise _make_no_tests_error(task, f"test_patch does not fit to {commit}: {done.stderr[-300:].strip()}")
    patches = f"{named.patch}\n{named.solution}"
    if task.test_command != TEST_COMMAND or _QUOTED.search(patches):
        return  # the names of tests or files cannot be compared as paths
    patched_files = {*(path for _, path in _CHANGED.findall(patches)), *_WRITTEN.findall(patches)}
    needed_files = "".join(f"{file}\n" for file in _files(named.names) if file not in patched_files)
    done = await session.run(_MISSING_FILES.format(git=_git(""), commit=commit), stdin=needed_files.encode())
    if missing := done.stdout.splitlines():
        raise _make_no_tests_error(
            task, f"there is no {missing[0]!r}, which its tests name, and {len(missing) - 1} more of them"
        )


async def grade(session: SandboxSession, task: TaskDirectory, named: NamedTests) -> TestsReward:
    """Return the reward 1 if all named tests pass in the session as the agent of ``task`` has left it, else 0. The
    files of the test patch are first reset to the base commit."""
    session.directory = DIRECTORY
    if not (await session.run(_CLEAN_REPOSITORY)).ok:
        return TestsReward(reward=0.0, ended="their patch cannot be applied")  # the agent has removed the repository
    for path in dict.fromkeys(path for pair in _CHANGED.findall(named.patch) for path in pair):
        quoted = shlex.quote(path)
        await session.run(_git(f"checkout -q {named.base_commit} -- {quoted} || rm -rf {quoted}"))
    if named.patch:
        try:
            await _apply(session, task, named.patch)
        except EpisodeError as error:
            if error.reason not in ("task_setup", "session_file"):
                raise
            # the agent's changes conflict with the test patch
            return TestsReward(reward=0.0, ended="their patch cannot be applied")
    files = _files(named.names)
    session.directory = DIRECTORY
    done = await run_tests(session, f"{_ACTIVATE}; {task.test_command} {shlex.join(files)}", task.tests_s)
    return TestsReward(reward=passes(done.stdout, named.names), ended=done.ended)


def passes(stdout: str, names: Sequence[str]) -> float:
    """Return 1 if pytest's summary in ``stdout`` lists all tests ``names`` as passed, else 0. A row's name may end at
    its first space, because SWE-bench cuts names there; then no test whose name begins with it may have failed.

    >>> said = f"{_SUMMARY} ===\\nPASSED t.py::a[x y]\\nFAILED t.py::b - no\\n"
    >>> passes(said, ["t.py::a[x"]), passes(said, ["t.py::a[x y]", "t.py::b"]), passes(said, ["t.py::c"])
    (1.0, 0.0, 0.0)
    """
    _, found, summary = stdout.rpartition(_SUMMARY)
    passed: set[str] = set()
    failed: set[str] = set()
    for outcome, text in _OUTCOME.findall(summary) if found else ():
        name = text if outcome == "PASSED" else text.partition(" - ")[0]
        (passed if outcome in _PASSING else failed).update((name, name.split()[0]))
    return float(all(name in passed and name not in failed for name in names))


def _files(names: Sequence[str]) -> list[str]:
    """Return the files of tests, given as ``FILE::TEST``, each once."""
    return list(dict.fromkeys(name.partition("::")[0] for name in names if "::" in name))


def _as_patch(patch: str) -> bytes:
    """Return a patch as bytes with a line end, as git requires."""
    return (patch if patch.endswith("\n") else f"{patch}\n").encode("utf-8", "surrogateescape")


def _image(row: Mapping[str, Any], name: str, image_names: str) -> str:
    """Return the name of a row's image: from its columns, or from the template ``image_names``."""
    for column in _IMAGES:
        if row.get(column):
            return str(row[column])
    small = name.lower()
    try:
        return image_names.format(
            instance_id=name, id_1776=small.replace("__", "_1776_"), id_s=small.replace("__", "_s_")
        )
    except (KeyError, IndexError, ValueError):
        raise DataError(
            f"image_names={image_names!r} is no form of names", remedy="use {instance_id}, {id_1776} and {id_s} in it"
        ) from None


def _names(row: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """Return the names of tests in a column, a list or its JSON. Raises :class:`~headrace.base.errors.DataError` for
    another value."""
    value = row.get(column)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if value is None or isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise DataError(
            f"the task {row['instance_id']} has {column}={str(row.get(column))[:80]!r}", remedy="give a list of tests"
        )
    return tuple(value)


def _solution(task: TaskDirectory, row: Mapping[str, Any]) -> str:
    """Return an answer of a model that solves the task: a block with the command that applies the solution; empty if
    there is none."""
    assert task.named is not None
    patch = str(row.get("patch") or "").rstrip("\n")
    if not patch:
        return ""
    backwards = "-R " if task.named.bug else ""
    return f"```bash\ngit apply {backwards}- <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH\n```"


def _check_out(task: TaskDirectory, named: NamedTests, repositories: str) -> bytes:
    """Return a tar archive of the repository of ``task`` at the base commit of its tests ``named``, without other
    commits. ``repositories`` is the folder of the clones. Raises :class:`~headrace.base.errors.EpisodeError` if there
    is no such clone or commit."""
    if not repositories:
        raise _make_setup_error(task, "there is no image and no folder of repositories", "set env.options.repositories")
    owner, _, name = named.repository.rpartition("/")
    places = [Path(repositories, each) for each in (f"{owner}/{name}", f"{owner}__{name}")]
    places = [Path(f"{place}{end}") for place in places for end in ("", ".git")]
    source = next((place for place in places if place.is_dir()), None)
    if source is None or not name:
        raise _make_setup_error(
            task, f"no repository {named.repository!r} in {repositories}", f"clone it to {places[0]}"
        )
    if not named.base_commit:
        raise _make_setup_error(task, "the row has no base_commit", "use its image")
    upload = "git -c uploadpack.allowAnySHA1InWant=true -c safe.directory=* upload-pack"
    with tempfile.TemporaryDirectory() as folder:
        for words in (
            ["init", "-q"],
            ["fetch", "-q", "--depth", "1", "--upload-pack", upload, f"file://{source.resolve()}", named.base_commit],
            ["-c", "advice.detachedHead=false", "checkout", "-q", named.base_commit],
        ):
            done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=False)
            if done.returncode:
                raise _make_setup_error(
                    task, f"{named.base_commit} of {source}: {done.stderr[-300:].strip()}", "fetch it there"
                )
        Path(folder, ".git", "FETCH_HEAD").unlink(missing_ok=True)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(folder, arcname=DIRECTORY.lstrip("/"), filter=_without_names)
    return buffer.getvalue()


def _without_names(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member of an archive without the user and group names of this machine."""
    member.uname = member.gname = ""
    return member


def _git(words: str) -> str:
    """Return a shell command that runs git in the repository, whose files may belong to another user."""
    # ignore settings and replaced objects that the agent may have left
    program = "GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 git"
    git = f"&& {program} -c safe.directory='*' -c user.name=task -c user.email=task@localhost "
    return f"cd {DIRECTORY} {git}" + words.replace("&& git ", git)


async def _apply(session: SandboxSession, task: TaskDirectory, patch: str) -> None:
    """Apply a patch to the repository. Raises :class:`~headrace.base.errors.EpisodeError` if it does not apply."""
    await _run_or_fail(session, task, _git("apply --whitespace=nowarn -"), _as_patch(patch))


async def _run_or_fail(session: SandboxSession, task: TaskDirectory, command: str, stdin: bytes = b"") -> None:
    """Run a command. Raises :class:`~headrace.base.errors.EpisodeError` if it fails."""
    done = await session.run(command, stdin=stdin)
    if not done.ok:
        raise _make_setup_error(
            task, f"{command[-80:]!r}: {(done.stderr or done.stdout)[-300:].strip()}", "correct the row"
        )


def _make_setup_error(task: TaskDirectory, text: str, remedy: str) -> EpisodeError:
    """Return the error for an environment that cannot be built because of ``text``."""
    return EpisodeError(
        f"the environment of the task {task.name} cannot be made: {text}", remedy=remedy, reason="task_setup"
    )


def _make_no_tests_error(task: TaskDirectory, text: str) -> EpisodeError:
    """Return the error for a row whose tests cannot be run because of ``text``."""
    return EpisodeError(
        f"the tests of the task {task.name} cannot be run: {text}", remedy="leave it out", reason="task_invalid"
    )


def _make_unsupported_error(name: str, text: str, remedy: str) -> DataError:
    """Return the error for the row ``name`` with a part that is not supported."""
    return DataError(f"the task {name} {text}, which is not supported", remedy=remedy)
