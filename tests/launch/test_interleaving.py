"""What an engine was told is written down, and told again before the very same steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.base.clock import Clock
from headrace.base.errors import DataError, ReplayDiffers
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.engine import Abort, Commit, Generate, GenerateRequest, Message, ScoreTokens, Stage
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.launch.hosts.interleaving import DeliveryRecorder, ReplayGate, RequestNames
from headrace.launch.interleaving import EngineInput, RecordedInput, read_interleaving

IDS = np.array([1, 2], np.int32)


class Hand(Clock):
    """A clock that is set by hand."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s


def request(request_id: int, seed: int) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt_ids_T=IDS, sampling=Sampling(max_new_tokens=4, seed=seed))


def generate(*pairs: tuple[int, int]) -> Generate:
    return Generate(requests=tuple(request(*pair) for pair in pairs))


def ended(request_id: int) -> TokenChunk:
    return TokenChunk(
        request_id=request_id,
        tokens=Tokens.observed([]),
        stop_reason=StopReason.STOP,
    )


def gate_of(recorded: list[RecordedInput], clock: Hand | None = None) -> ReplayGate:
    return ReplayGate(
        recorded,
        RequestNames(),
        clock or Hand(),
        deadline_s=5.0,
        name_request=lambda seed: f"the request of seed {seed}",
    )


COMMIT_0 = RecordedInput(steps=0, kind=EngineInput.COMMIT, version=0)
LAST = RecordedInput(steps=99, kind=EngineInput.COMMIT, version=1)


def test_what_an_engine_is_told_can_be_read_back(tmp_path: Path) -> None:
    recorder = DeliveryRecorder(tmp_path / "record", RequestNames())
    recorder.write([Commit(call=0, version=0), generate((7, 70), (8, 80))], 0)
    recorder.write([], 1)
    recorder.remove_ended([ended(7)])
    recorder.write([Abort(request_ids=(7, 8)), Abort(request_ids=(7,)), ScoreTokens(call=1, ids_T=IDS)], 2)
    recorder.write([Shutdown()], 3)
    assert read_interleaving(tmp_path / "record") == [
        COMMIT_0,
        RecordedInput(steps=0, kind=EngineInput.GENERATE, seeds=(70, 80)),
        RecordedInput(steps=2, kind=EngineInput.ABORT, seeds=(80,)),
        RecordedInput(steps=2, kind=EngineInput.SCORE),
    ]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b'{"steps":0,"told":"commit","version":0}\n{"steps":4,"told":"gen')
    assert read_interleaving(tmp_path / "record") == [COMMIT_0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no json", "line 2: JSON is malformed"),
        ('{"steps":3,"told":"sing"}', "line 2: Invalid enum value 'sing'"),
        ('{"steps":3,"told":"generate"}', "line 2: generate with 0 seeds"),
        ('{"steps":3,"told":"generate","seeds":[5,5]}', "line 2: a seed twice"),
        ('{"steps":3,"told":"commit"}', "line 2: commit with version=None"),
        ('{"steps":3,"told":"commit","version":4}', "line 2: a commit of version 4 after that of version 4"),
        ('{"steps":1,"told":"score"}', "line 2: steps=1 after a line of steps=2: time runs forward"),
    ],
)
def test_a_line_that_no_engine_has_written_is_refused_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "record").write_text('{"steps":2,"told":"commit","version":4}\n' + line + "\n")
    with pytest.raises(DataError, match=words):
        read_interleaving(tmp_path / "record")


def lines_of_two_lives(path: Path) -> list[bytes]:
    """The record of an engine that was started twice."""
    first = DeliveryRecorder(path, RequestNames())
    first.write([Commit(call=0, version=0), generate((7, 70), (8, 80))], 0)
    first.write([Abort(request_ids=(8,))], 2)
    DeliveryRecorder(path, RequestNames()).write([ScoreTokens(call=1, ids_T=IDS), generate((9, 90))], 3)
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (2, b"70,80", b"70,81"),  # another request
        (3, b'"steps":2', b'"steps":1'),  # another moment
        (3, b"{", b"{ "),
        (4, b',"crc":', b',"crc":1'),
    ],
)
def test_a_changed_line_is_refused_by_its_number(tmp_path: Path, number: int, old: bytes, new: bytes) -> None:
    record = tmp_path / "record"
    lines = lines_of_two_lives(record)
    assert len(read_interleaving(record)) == 5
    lines[number - 1] = lines[number - 1].replace(old, new, 1)
    record.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=f"line {number}: it, or a line before it, has changed since"):
        read_interleaving(record)


def test_a_line_without_its_checksum_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "record"
    lines = lines_of_two_lives(record)
    record.write_bytes(b"".join(lines[:4]) + lines[4].partition(b',"crc"')[0] + b"}\n")
    with pytest.raises(DataError, match="line 5: its checksum is missing"):
        read_interleaving(record)


def test_a_line_that_is_gone_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "record"
    lines = lines_of_two_lives(record)
    record.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(DataError, match="line 3: it, or a line before it, has changed since"):
        read_interleaving(record)


def test_a_disk_that_takes_no_more_costs_the_record_and_not_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = DeliveryRecorder(Path("/dev/full"), RequestNames())
    recorder.write([Commit(call=0, version=0)], 0)
    recorder.write([Commit(call=1, version=1)], 1)
    assert capsys.readouterr().err.count("/dev/full cannot be written") == 1


def test_messages_wait_for_their_step_and_their_turn() -> None:
    recorded = [
        COMMIT_0,
        RecordedInput(steps=0, kind=EngineInput.GENERATE, seeds=(70,)),
        RecordedInput(steps=3, kind=EngineInput.GENERATE, seeds=(90, 80)),
        LAST,
    ]
    gate = gate_of(recorded)
    assert gate.must_wait(0)
    assert gate.awaits_message(0)
    assert gate.release([generate((1, 80), (2, 70))], 0) == []
    commit = Commit(call=0, version=0)
    assert gate.release([commit], 0) == [commit, generate((2, 70))]
    assert not gate.must_wait(2)
    assert gate.release([generate((3, 90))], 2) == []
    assert gate.must_wait(3)
    assert not gate.awaits_message(3)
    assert gate.release([], 3) == [generate((3, 90), (1, 80))]


def test_requests_are_withdrawn_when_the_record_says_so() -> None:
    recorded = [
        COMMIT_0,
        RecordedInput(steps=0, kind=EngineInput.GENERATE, seeds=(70,)),
        RecordedInput(steps=2, kind=EngineInput.ABORT, seeds=(70,)),
        LAST,
    ]
    gate = gate_of(recorded)
    early: list[Message] = [Commit(call=0, version=0), generate((1, 70)), Abort(request_ids=(1,))]
    assert gate.release(early, 0) == early[:2]
    assert gate.release([], 2) == [Abort(request_ids=(1,))]


def test_staging_and_the_end_never_wait() -> None:
    update = WeightUpdate(version=0, slot=0, path="", manifest=Manifest(entries=(), total_bytes=0), checksums=())
    at_once: list[Message] = [Stage(call=0, update=update), Shutdown()]
    assert gate_of([COMMIT_0, LAST]).release(at_once, 0) == at_once


def test_behind_the_last_commit_messages_pass_as_they_come() -> None:
    gate = gate_of([COMMIT_0, RecordedInput(steps=5, kind=EngineInput.GENERATE, seeds=(70,))])
    commit = Commit(call=0, version=0)
    assert gate.release([generate((1, 80)), commit], 0) == [commit, generate((1, 80))]
    assert gate.open
    assert gate.release([generate((2, 90))], 1) == [generate((2, 90))]


def test_a_request_that_does_not_come_is_named_with_its_step_and_with_those_that_came_instead() -> None:
    clock = Hand()
    gate = gate_of([COMMIT_0, RecordedInput(steps=4, kind=EngineInput.GENERATE, seeds=(70,)), LAST], clock)
    gate.release([Commit(call=0, version=0), generate((1, 80))], 0)
    assert gate.release([], 4) == []
    clock.time_s = 4.9
    assert gate.release([], 4) == []
    clock.time_s = 5.1
    words = "before step 5 .* to generate the request of seed 70; .* not sent that for 5 s; 1 others .* of seed 80"
    with pytest.raises(ReplayDiffers, match=words):
        gate.release([], 4)


def test_another_version_than_the_recorded_one_is_refused() -> None:
    with pytest.raises(ReplayDiffers, match="told to commit version 1, and now to commit version 2"):
        gate_of([LAST]).release([Commit(call=0, version=2)], 99)


def test_an_engine_with_nothing_left_to_do_before_a_recorded_step_is_another_engine() -> None:
    gate = gate_of([COMMIT_0, LAST])
    gate.release([Commit(call=0, version=0)], 0)
    with pytest.raises(ReplayDiffers, match=r"nothing left to do after 7 steps; .* made 99 before .* commit version 1"):
        gate.refuse_idleness(7)
