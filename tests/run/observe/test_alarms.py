"""Each alarm goes off when what it watches is wrong for long enough, says so once, and can end the run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.observation import LiveState, StepRecord, Wait
from headrace.run.observe import AlarmWatch, Raised
from headrace.run.observe.alarms import ALARMS, AlarmsConfig
from headrace.run.observe.alarms.base import Lasting
from tests.run.observe.synthetic import step_record

BEGINNING = {"entropy": 2.0, "repetition": 0.1}


class Heard:
    """What alarms have said of some steps and moments."""

    def __init__(self, run_dir: Path, **settings: object) -> None:
        self.raised: list[tuple[str, bool]] = []
        self.words = ""
        self.watch = AlarmWatch(AlarmsConfig(**settings), run_dir, self._on_alarm)
        self._number = 0

    def _on_alarm(self, raised: Raised, stop: bool) -> None:
        self.raised.append((raised.name, stop))
        self.words = str(raised)

    def steps(self, num: int, *, metrics: dict[str, float] | None = None, **changes: object) -> "Heard":
        for _ in range(num):
            self.watch.step(record(self._number, {**BEGINNING, **(metrics or {})}, **changes))
            self._number += 1
        return self

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.raised]


def record(number: int, metrics: dict[str, float], **changes: object) -> StepRecord:
    return step_record(number, metrics=metrics, **{"length_mean": 100.0, **changes})


@pytest.mark.parametrize(
    ("name", "metrics", "changes", "words"),
    [
        ("entropy", {"entropy": 0.1}, {}, "collapsed to 0.1 nats, from 2"),
        ("zero_variance", {"zero_variance_frac": 0.95}, {}, "95% of the groups"),
        ("kl", {"kl_mu_k3": 0.9}, {}, "KL(μ‖π) is 0.9"),
        ("kl", {"kl_ref": 0.8}, {}, "KL(π‖π_ref) is 0.8"),
        ("mismatch", {"mismatch_kl": 0.013}, {}, "KL 0.013, above 0.01"),
        ("length", {}, {"length_mean": 350.0}, "3.5 times as many"),
        ("repetition", {"repetition": 0.7}, {}, "70% of the 4-grams"),
    ],
)
def test_what_is_wrong_for_three_steps_raises_its_alarm_once(
    tmp_path: Path, name: str, metrics: dict[str, float], changes: dict[str, float], words: str
) -> None:
    heard = Heard(tmp_path).steps(12)
    assert heard.names == []
    heard.steps(2, metrics=metrics, **changes)
    assert heard.names == []
    heard.steps(9, metrics=metrics, **changes)
    assert heard.names == [name]
    assert words in heard.words
    assert ALARMS[name].advice in heard.words
    heard.steps(1).steps(3, metrics=metrics, **changes)
    assert heard.names == [name, name]


def test_a_task_that_is_nearly_solved_has_equal_rewards_and_nothing_is_wrong(tmp_path: Path) -> None:
    rewards = {"reward_mean": 0.96, "reward_min": 0.0, "reward_max": 1.0}
    heard = Heard(tmp_path).steps(9, metrics={"zero_variance_frac": 0.95, "reward_p10": 1.0}, **rewards)
    assert heard.names == []
    heard.steps(9, metrics={"zero_variance_frac": 1.0, "reward_p10": 1.0}, **{**rewards, "reward_min": 1.0})
    assert heard.names == []  # what was wrong before is right now
    heard.steps(9, metrics={"zero_variance_frac": 0.95, "reward_p10": 0.0}, **{**rewards, "reward_mean": 0.04})
    assert heard.names == ["zero_variance"]


def test_rewards_that_were_never_lower_are_equal_for_no_good_reason(tmp_path: Path) -> None:
    rewards = {"reward_mean": 1.0, "reward_min": 1.0, "reward_max": 1.0}
    heard = Heard(tmp_path).steps(9, metrics={"zero_variance_frac": 1.0, "reward_p10": 1.0}, **rewards)
    assert heard.names == ["zero_variance"]


def moment(wall_s: float, steps_done: int, phase: str = "training") -> LiveState:
    wait = Wait(loop="learner", state="waiting", what="a batch", since_s=9.0, unblocked_by="scoring")
    return LiveState(steps_done=steps_done, steps_total=100, wall_s=wall_s, phase=phase, waits=(wait,))


def test_a_step_that_takes_five_times_as_long_as_usual_is_a_stall(tmp_path: Path) -> None:
    heard = Heard(tmp_path, min_free_gb=0, stall_s=10)
    for step in range(5):
        heard.watch.update(moment(60.0 * step, step))
    heard.watch.update(moment(240 + 299, 4))
    assert heard.names == []
    heard.watch.update(moment(240 + 301, 4))
    heard.watch.update(moment(240 + 400, 4))
    assert heard.names == ["stall"]
    assert "the learner waits for a batch, which scoring brings" in heard.words


def test_an_evaluation_is_no_stall(tmp_path: Path) -> None:
    heard = Heard(tmp_path, min_free_gb=0, stall_s=10)
    for second in range(0, 3600, 5):
        heard.watch.update(moment(float(second), 0, "evaluating before training"))
    assert heard.names == []


def test_a_disk_without_room_raises_its_alarm_and_may_end_the_run(tmp_path: Path) -> None:
    heard = Heard(tmp_path, min_free_gb=1e9, stop_on=("disk",))
    heard.watch.update(moment(0.0, 0))
    heard.watch.update(moment(1.0, 0))
    assert heard.raised == [("disk", True)]


def test_an_alarm_that_is_off_is_silent(tmp_path: Path) -> None:
    heard = Heard(tmp_path, off=tuple(ALARMS), min_free_gb=1e9)
    heard.watch.update(moment(0.0, 0))
    heard.steps(12).steps(9, metrics={"entropy": 0.0, "mismatch_kl": 9.0})
    assert heard.names == []


def test_every_alarm_has_a_name_that_settings_know() -> None:
    assert AlarmsConfig(off=tuple(ALARMS), stop_on=tuple(ALARMS)).off == tuple(ALARMS)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_an_alarm_goes_off_once_each_time_something_is_wrong_for_long_enough(wrong: list[bool], patience: int) -> None:
    alarm = Lasting(lambda numbers: "wrong" if numbers["it"] else "", patience=patience)
    told = sum(bool(alarm.step({"it": float(each)})) for each in wrong)
    runs = "".join("x" if each else " " for each in wrong).split()
    assert told == sum(len(run) >= patience for run in runs)
