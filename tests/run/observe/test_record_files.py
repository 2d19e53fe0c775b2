"""Files of records survive what processes and disks do to them."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import DataError, RunError
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.control.observer import Observers
from headrace.run.observe.jsonl import JsonlWriter, Recorder, read_jsonl, read_steps

SPANS = [Span(lane="engine", name=f"générate {i}", start_s=i, end_s=i + 0.5, step=i) for i in range(4)]


def write(path: Path, records: list[Span]) -> None:
    with JsonlWriter[Span](path) as writer:
        writer.write(records)


def step(number: int, **changes: object) -> StepRecord:
    return StepRecord(step=number, version=number + 1, clock_s=1.0, wall_s=1.0, **changes)


def test_a_step_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record = step(3, ages={0: 5, 7: 1}, metrics={"loss": 0.25}, reward_mean=0.5, dropped_groups={"stale": 2})
    with JsonlWriter[StepRecord](tmp_path / "metrics.jsonl") as writer:
        writer.write([record])
    assert read_steps(tmp_path / "metrics.jsonl") == [record]


def test_a_recorder_writes_what_it_is_told_where_readers_look(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.spans(SPANS[:2])
        recorder.step(step(0))
        recorder.event(Event(wall_s=1.0, text="checkpoint"))
        assert read_steps(tmp_path / "metrics.jsonl") == [step(0)]
        assert read_jsonl(tmp_path / "events.jsonl", Event) == [Event(wall_s=1.0, text="checkpoint")]
        recorder.spans(SPANS[2:])
    assert read_jsonl(tmp_path / "trace.jsonl", Span) == SPANS


def test_spans_wait_for_the_end_of_a_step_or_the_next_look_at_the_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with Recorder(tmp_path) as recorder:
        observers = Observers([recorder])
        observers.spans(SPANS[:1])
        assert read_jsonl(trace, Span) == []
        observers.step(step(0))
        assert read_jsonl(trace, Span) == SPANS[:1]
        observers.spans(SPANS[1:2])
        observers.update(LiveState(steps_done=1, steps_total=2, verdict="balanced"))
        assert read_jsonl(trace, Span) == SPANS[:2]
        assert msgspec.json.decode((tmp_path / "live.json").read_bytes(), type=LiveState).verdict == "balanced"
        observers.spans(SPANS * 1024)
        assert len(read_jsonl(trace, Span)) == 2 + 4096
        observers.spans(SPANS[3:4])
        observers.flush()
        assert len(read_jsonl(trace, Span)) == 3 + 4096


def test_a_span_takes_less_than_a_hundred_bytes_of_disk(tmp_path: Path) -> None:
    episode = Span(
        lane="rollout", name="episode", start_s=123456.123456789, end_s=123457.123456789, of=EpisodeKey(12345, 7)
    )
    write(tmp_path / "trace.jsonl", [episode])
    assert (tmp_path / "trace.jsonl").stat().st_size < 100


def test_a_number_that_is_not_finite_comes_back_as_none(tmp_path: Path) -> None:
    with JsonlWriter[StepRecord](tmp_path / "metrics.jsonl") as writer:
        writer.write([step(0, reward_mean=float("nan"), metrics={"loss": float("inf")})])
    (back,) = read_steps(tmp_path / "metrics.jsonl")
    assert back.reward_mean is None
    assert back.metrics == {"loss": None}


@given(cut=st.integers(min_value=0))
def test_a_file_cut_anywhere_loses_at_most_the_torn_line_and_takes_new_ones(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "trace.jsonl"
    write(path, SPANS)
    data = path.read_bytes()
    data = data[: cut % (len(data) + 1)]
    path.write_bytes(data)
    whole = SPANS[: data.count(b"\n")]
    assert read_jsonl(path, Span) == whole
    write(path, [SPANS[0]])
    assert read_jsonl(path, Span) == [*whole, SPANS[0]]


def test_a_torn_line_longer_than_one_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, SPANS[:1])
    with path.open("ab") as file:
        file.write(b'{"lane":"' + b"x" * 200_000)
    write(path, SPANS[1:2])
    assert read_jsonl(path, Span) == SPANS[:2]


def test_what_was_written_survives_the_kill_of_its_process(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from headrace.run.observe.jsonl import JsonlWriter; from headrace.base.types.trace import Span\n"
        "writer = JsonlWriter(Path(sys.argv[1]))\n"
        "for i in range(3): writer.write([Span(lane='engine', name='generate', start_s=i, end_s=i + 1.0)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60).returncode == -9
    assert [span.start_s for span in read_jsonl(path, Span)] == [0, 1, 2]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, SPANS)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b'{"lane": 3}', *lines[2:]]))
    with pytest.raises(DataError, match="line 2 is not a Span") as caught:
        read_jsonl(path, Span)
    assert caught.value.remedy


def test_a_damaged_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, SPANS[:2])
    with path.open("ab") as file:
        file.write(b'{"lane":"eng\0\0\0\xff\n\n')
    assert read_jsonl(path, Span) == SPANS[:2]


def test_lines_that_are_left_out_are_told_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write(path, SPANS)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b'{"lane": 3}', *lines[2:-1], b"step,loss", b""]))
    told: list[str] = []
    assert read_jsonl(path, Span, told.append) == [SPANS[0], *SPANS[2:]]
    assert len(told) == 1
    assert "line 2 is not a Span" in told[0]
    assert "nor are 1 others" in told[0]


def test_a_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("step,loss\n")
    with pytest.raises(DataError, match="line 1 is not a StepRecord"):
        read_steps(path)


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = [step(number, reward_mean=0.1) for number in range(5)]
    again = [step(number, reward_mean=0.2) for number in (3, 4, 5)]
    with JsonlWriter[StepRecord](path) as writer:
        writer.write(first)
    with JsonlWriter[StepRecord](path) as writer:
        writer.write(again)
    assert read_steps(path) == [*first[:3], *again]


def test_a_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written") as caught:
        JsonlWriter[StepRecord](tmp_path / "nowhere" / "metrics.jsonl")
    assert "--resume" in caught.value.remedy


def test_a_full_disk_says_so() -> None:
    with JsonlWriter[Span](Path("/dev/full")) as writer, pytest.raises(RunError, match="No space left"):
        writer.write(SPANS)
