"""A recorded run, repeated bit for bit; and what is said where that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, ReplayDiffers
from headrace.run.session import load_config, train
from headrace.run.session.repeating import read_settings_to_replay
from tests.run.session.runs import forge, make_run, verb
from tests.run.session.serial import same_learner

STEPS = 12
FICKLE_REWARD = """
    import random, time

    def reward(completion):
        time.sleep(random.random() / 50)
        return sum(character in "01234" for character in completion) / 4
"""
"""Always the same, sooner or later: so the interleaving is never the same by itself."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """The directory of an asynchronous run that commits while sequences run, drops groups and evaluates meanwhile."""
    directory = tmp_path_factory.mktemp("replay")
    run_file = make_run(
        directory,
        model_dir,
        reward=FICKLE_REWARD,
        data={"path": "rows.jsonl", "eval_path": "rows.jsonl"},
        engine={"max_new_tokens": 12, "max_sequences": 16},
        flow={"groups_per_step": 2, "group_size": 4, "max_age": 2},
        algo={"correction": "tis"},
        run={"dir": "recorded", "steps": STEPS, "eval_every": 5, "stall_timeout_s": 60},
    )
    train(run_file, overrides=["observe.view=none", "flow.filters=[{kind='zero_variance'}]"])
    return directory / "recorded"


def replay(recorded: Path, run_dir: Path, *overrides: str) -> None:
    settings = [f"run.dir={run_dir}", "observe.view=none", "run.stall_timeout_s=5", *overrides]
    train(load_config(read_settings_to_replay(recorded), settings), replay=recorded)


def test_an_asynchronous_run_is_repeated_bit_for_bit(recorded: Path, tmp_path: Path) -> None:
    told = verb("train", "--replay", recorded, "--set", f"run.dir={tmp_path / 'again'}", "--json")
    then, now = json.loads((recorded / "summary.json").read_text()), json.loads(told)
    assert now["versions_agree"] == STEPS + 1
    assert then["max_token_age"] >= 1
    for figure in ("age_histogram", "tokens_trained", "reward_first", "reward_last", "eval_before", "eval_after"):
        assert now[figure] == then[figure], figure
    last = Path("checkpoints") / f"step-{STEPS:06d}"
    assert same_learner(recorded / last, tmp_path / "again" / last)


def edit_ledger(sql: str) -> Callable[[Path], None]:
    def edit(run_dir: Path) -> None:
        assert forge(run_dir, sql) == 1

    return edit


def rename_a_request(run_dir: Path) -> None:
    """A request in the middle of the run becomes one that nobody will send, in a record without checksums."""
    path = run_dir / "interleaving-engine.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(index for index in range(len(lines) // 2, len(lines)) if lines[index]["told"] == "generate")
    lines[place]["seeds"][0] = 5
    for line in lines:
        del line["crc"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(
            edit_ledger("UPDATE episodes SET reward = reward + 1 WHERE group_number = 3 AND position = 1"),
            r"group 3 episode 1: its reward is [\d.]+, and was [\d.]+ in",
            id="a reward",
        ),
        pytest.param(
            edit_ledger("UPDATE versions SET checksum = 'other' WHERE version = 2"),
            rf"2 of {STEPS + 1} versions agree; version 2 has other weights than in .* and was other",
            id="a version",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            rename_a_request,
            r"before step \d+ of the engine the recorded .* to generate the request of seed 5.* of group \d+ episode",
            id="a line of the log",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_difference_is_named(
    recorded: Path, tmp_path: Path, edit: Callable[[Path], None], words: str
) -> None:
    shutil.copytree(recorded, tmp_path / "recorded")
    edit(tmp_path / "recorded")
    with pytest.raises(ReplayDiffers, match=words):
        replay(tmp_path / "recorded", tmp_path / "again")


def test_other_settings_are_another_run(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.lr=0.02, and the run in .* has 0.01"):
        replay(recorded, tmp_path / "again", "learner.lr=0.02")


def forget_the_interleaving(run_dir: Path) -> None:
    (run_dir / "interleaving-engine.jsonl").unlink()


def cut_the_interleaving(run_dir: Path) -> None:
    path = run_dir / "interleaving-engine.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if f'"version":{STEPS}' in line)
    path.write_text("".join(lines[:last]))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (forget_the_interleaving, "the messages to its engine are not recorded"),
        (cut_the_interleaving, f"lacks the commit of version {STEPS}"),
        (edit_ledger("INSERT INTO notes (kind, detail, at_s) VALUES ('start', 'step 3', 0)"), "it has 2 lives"),
        (
            edit_ledger("UPDATE steps SET dropped_tokens = '{\"columns_lost\": 1}' WHERE step = 3"),
            "columns of groups could not be read when step 3 was trained",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused_with_the_reason(
    recorded: Path, tmp_path: Path, edit: Callable[[Path], None], reason: str
) -> None:
    shutil.copytree(recorded, tmp_path / "recorded")
    edit(tmp_path / "recorded")
    with pytest.raises(ConfigError, match=f"cannot be replayed: .*{reason}"):
        replay(tmp_path / "recorded", tmp_path / "again")
