"""The verdict names the part that holds a run up, with shares that add up, what there is to gain, and settings."""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.observation import Account, Bound, Cause
from headrace.run.observe import VerdictSettings, make_verdict_settings
from headrace.run.observe.account import make_account
from headrace.run.observe.verdict import judge
from headrace.run.observe.words import percent
from tests.run.observe.staged import Stage
from tests.run.observe.synthetic import step_record

share = st.floats(0, 1)
KNOWN = VerdictSettings(
    reward_workers=2, max_age=1, lead=1, group_size=4, groups_per_step=8, max_new_tokens=64, engines=1, order="strict"
)


def account(engine: dict[str, float], learner: dict[str, float], **parts: object) -> Account:
    """Of 100 seconds, from the waits of both in percent; the rest of the time they work."""
    busy = {"engine_busy_s": 100 - sum(engine.values()), "learner_busy_s": 100 - sum(learner.values())}
    waits = {"engine_waits_s": engine, "learner_waits_s": learner}
    return Account(**{"seconds": 100.0, "trained_tokens": 6200, "generated_tokens": 7000, **busy, **waits, **parts})


RUNS = {
    "engine": (account({"controller": 2}, {"engine": 38}), Bound.GENERATION, "engine.max_new_tokens (now 64)"),
    "prompts": (account({}, {"engine": 38}, prefill_s=70.0), Bound.PREFILL, "flow.group_size (now 4)"),
    "tail": (account({"environment": 30}, {"engine": 28}, straggler_s=22.0), Bound.STRAGGLERS, "flow.max_age (now 1)"),
    "capacity": (account({}, {"engine": 38}, held_back_s=80.0), Bound.CAPACITY, "flow.capacity"),
    "learner": (account({"learner": 42}, {"nobody": 3}), Bound.LEARNER, "learner.parallel"),
    "controller that works all the time": (
        account({"controller": 60}, {"engine": 20, "controller": 10}, controller_busy_s=97.0),
        Bound.CONTROLLER,
        "flow.groups_per_step (now 8)",
    ),
    "controller that is waited for": (
        account({"controller": 50}, {"controller": 40, "engine": 5}, controller_busy_s=66.0),
        Bound.CONTROLLER,
        "flow.group_size (now 4)",
    ),
    "environments": (
        account({"environment": 70}, {"environment": 60, "engine": 20}),
        Bound.ENVIRONMENT,
        "flow.max_age (now 1)",
    ),
    "rewards": (account({"scoring": 60}, {"scoring": 55, "engine": 10}), Bound.SCORING, "env.reward_workers (now 2)"),
    "teachers": (account({"teachers": 60}, {"teachers": 55}), Bound.TEACHERS, "teachers' engines"),
    "weights": (account({"sync": 30}, {"sync": 28}), Bound.SYNC, "sync.codec"),
    "disk": (account({"ledger": 30}, {"ledger": 28}), Bound.LEDGER, "run.dir"),
    "stopped": (account({"stopped": 30}, {"stopped": 28}), Bound.STOPPED, "kill -STOP"),
    "stopped for a while": (
        account({"stopped": 9, "controller": 30}, {"stopped": 9, "engine": 8, "controller": 8, "nobody": 7}),
        Bound.NOTHING,
        "the time in which a process is stopped",
    ),
    "turns": (account({"learner": 45}, {"engine": 55}), Bound.TURNS, "flow.max_age (now 1)"),
    "nothing": (
        account({"learner": 4, "controller": 30}, {"engine": 9, "controller": 9, "scoring": 8, "nobody": 9}),
        Bound.NOTHING,
        "No single change",
    ),
    "processors": (
        account({"controller": 50}, {"controller": 40}, controller_busy_s=80.0, observed_s=50.0, processors_s=49.0,
                queued_s={"controller": 12.0, "learner": 15.0}),
        Bound.PROCESSORS,
        "take a machine with more",
    ),
    "nobody waits": (account({"learner": 9}, {"engine": 6}), Bound.BALANCED, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_part_that_holds_the_run_up_is_named_with_the_shares_of_all(name: str) -> None:
    spent, bound, advised = RUNS[name]
    verdict = judge(spent, KNOWN)
    assert verdict.bound is bound, str(verdict)
    assert advised in verdict.advice
    assert str(verdict).startswith(f"{bound}: The learner works {percent(1 - spent.learner_idle)}")
    assert f"The engine works {percent(1 - spent.engine_idle)}" in verdict.finding
    if spent.controller_busy_s:
        assert f"The controller works {percent(spent.controller_busy_s / 100)}." in verdict.finding


def test_a_learner_that_stands_idle_for_half_the_time_is_not_called_the_bound() -> None:
    half = account({"learner": 30, "controller": 22}, {"controller": 20, "engine": 16, "nobody": 10})
    assert judge(half).bound is not Bound.LEARNER
    assert judge(account({"learner": 52}, {"engine": 19})).bound is not Bound.BALANCED


def test_a_part_that_both_sides_wait_for_longest_is_named_with_both_shares() -> None:
    """Less than half of the learner's waiting, and more of both sides' waiting than anything else."""
    half = account({"learner": 30, "controller": 22}, {"controller": 20, "engine": 16, "nobody": 10})
    assert judge(half).bound is Bound.CONTROLLER
    assert judge(half).frac == pytest.approx(0.20)
    assert (
        "Both together wait longest for the controller: 20% of the learner's time, 22% of the engine's."
        in judge(half).finding
    )
    rewards = account({"learner": 20, "scoring": 36}, {"scoring": 27, "engine": 20, "controller": 8})
    assert judge(rewards).bound is Bound.SCORING
    assert "for rewards: 27% of the learner's time, 36% of the engine's." in judge(rewards).finding
    assert "The engine works 44% of the time and waits 56%: 36% for rewards" in judge(rewards).finding


def test_a_part_is_not_the_bound_where_another_is_waited_for_longer() -> None:
    each_other = account({"learner": 45, "controller": 12}, {"controller": 20, "engine": 16, "sync": 14})
    assert judge(each_other).bound is Bound.NOTHING, "the engine waits longest for the learner"
    nearly = account({"learner": 45, "controller": 5}, {"controller": 11, "engine": 10})
    assert judge(nearly).bound is Bound.NOTHING, "the learner works 79%, and the engine waits 45% for it"
    no_part = account({"learner": 20, "controller": 22}, {"controller": 20, "engine": 16, "nobody": 24})
    assert judge(no_part).bound is Bound.NOTHING, "messages are on their way for longer than the controller works"
    apart = account({"environment": 40}, {"controller": 20, "engine": 16, "scoring": 16})
    assert judge(apart).bound is Bound.NOTHING, "the two sides wait for different parts"


def test_a_controller_that_is_always_busy_and_that_nobody_waits_for_is_not_the_bound() -> None:
    beside = account({"learner": 28, "controller": 2}, {"engine": 18, "controller": 4}, controller_busy_s=85.0)
    assert judge(beside).bound is not Bound.CONTROLLER
    waited = account({"learner": 10, "controller": 20}, {"engine": 18, "controller": 4}, controller_busy_s=85.0)
    assert judge(waited).bound is Bound.CONTROLLER


def test_waiting_for_processors_counts_only_where_the_learner_depends_on_it() -> None:
    queued = {"engine": 20.0}
    beside = account({"learner": 60}, {"nobody": 5}, observed_s=100.0, processors_s=60.0, queued_s=queued)
    assert judge(beside).bound is Bound.LEARNER, "nobody waits for that engine"
    between = account({"learner": 20}, {"engine": 60}, observed_s=100.0, processors_s=60.0, queued_s={"engine": 64.0})
    assert judge(between).bound is Bound.PROCESSORS
    assert "(engine 48%)" in judge(between).finding, "64 of the 80 s that it works, 60 of which the learner waits for"


def test_what_there_is_to_gain_is_bounded_by_the_part_that_would_bind_next() -> None:
    """rate / the greatest share that another part works: a reader can work it out from the page."""
    rewards = judge(account({"scoring": 60}, {"scoring": 55, "engine": 5}))
    assert rewards.max_tok_s == pytest.approx(62 / 0.40), "not the engine: it may sample more at once"
    assert rewards.gain == (
        "If nothing had to wait, the learner would hold the run up: at most 155 tokens/s instead of 62."
    )
    learner = judge(account({"learner": 50}, {"engine": 3}))
    assert learner.max_tok_s == pytest.approx(62 / 0.5), "not the learner's own work"
    turns = judge(account({"learner": 45}, {"engine": 55}))
    assert turns.max_tok_s == pytest.approx(62 / 0.55)
    crowded = account({"learner": 45}, {"engine": 55}, observed_s=50.0, processors_s=40.0)
    assert judge(crowded).max_tok_s == pytest.approx(62 / 0.8)
    assert "the lack of processors would hold the run up" in judge(crowded).gain
    queued = {"learner": 45.0, "controller": 20.0}
    processor_waits = account(
        {}, {"controller": 40}, controller_busy_s=40.0, observed_s=100.0, processors_s=30.0, queued_s=queued
    )
    assert judge(processor_waits).max_tok_s == pytest.approx(62 / (1 - 0.45 - 0.20))
    assert "Other programs use the processors" in judge(processor_waits).advice
    shared = account(
        {}, {"controller": 40}, controller_busy_s=40.0, observed_s=100.0, processors_s=62.0, queued_s=queued
    )
    assert "Its own processes and other programs share them" in judge(shared).advice


def test_no_rate_is_told_that_no_run_will_see() -> None:
    alone = judge(account({"learner": 98}, {"engine": 1}))
    assert alone.bound is Bound.LEARNER
    assert alone.gain == ""
    assert alone.max_tok_s == 0


def test_advice_knows_the_settings() -> None:
    turns = account({"learner": 45}, {"engine": 55})
    assert "With flow.max_age = 0" in judge(turns, VerdictSettings(max_age=0, lead=0)).advice
    assert "raise flow.lead from 1 to 3" in judge(turns, VerdictSettings(max_age=3, lead=1)).advice
    assert "raise flow.max_age (now 2)" in judge(turns, VerdictSettings(max_age=2, lead=2)).advice
    assert "share a device" in judge(turns, VerdictSettings(alternating=True, max_age=0, lead=0)).advice
    slow = account({}, {"engine": 60})
    cores = {"on_cpu": True, "processors": 8}
    assert (
        "4 of 8 processors are free"
        in judge(slow, VerdictSettings(engine_threads=2, learner_threads=2, **cores)).advice
    )
    assert (
        "lower launch.learner_threads (now 4)"
        in judge(slow, VerdictSettings(engine_threads=4, learner_threads=4, **cores)).advice
    )
    assert "engine.count (now 2)" in judge(slow, VerdictSettings(engines=2)).advice
    for each in (turns, slow):
        assert "where it is" not in judge(each, KNOWN).advice


def test_settings_come_from_the_resolved_run_file() -> None:
    tree = {
        "flow": {"max_age": "auto", "lead": 1, "capacity": "auto", "order": "strict"},
        "launch": {"kind": "local", "engine_threads": 3, "learner_threads": None},
        "sync": {"interrupt": "sleep"},
    }
    found = make_verdict_settings(tree, processors=8, on_cpu=True)
    assert (found.max_age, found.lead, found.capacity) == (None, 1, None)
    assert (found.engine_threads, found.learner_threads, found.alternating) == (3, 4, True)
    assert make_verdict_settings({}) == VerdictSettings()


def test_sync_stragglers_and_waste_are_told_besides() -> None:
    wasted = {"stale": 500, "zero_variance": 900}
    waits = {"engine": 38.0}
    said = judge(account({}, waits, exposed_sync_s=4.0, straggler_s=12.0, wasted_tokens=wasted)).besides
    assert said == (
        "Besides: the learner is blocked by the sync 4% of the time; 12% of the time it waits for the last tenth of "
        "a batch's episodes; 20% of the sampled tokens are never trained (zero_variance 900, stale 500)."
    )
    assert judge(account({}, waits)).besides == ""


def test_ages_are_told_of_all_steps_and_turns_of_those_for_which_they_are_known() -> None:
    turns = {"turns_s": 3.0, "turns_least_s": 2.0}
    steps = [step_record(0), step_record(1, metrics=turns), step_record(2, ages={0: 30, 2: 60}, metrics=turns)]
    spent = make_account([], steps, (0.0, 3.0))
    assert judge(spent).besides == "Tokens are trained at a mean age of 0.9."  # whether the parts had processors?
    assert judge(msgspec.structs.replace(spent, observed_s=3.0)).besides == (
        "Tokens are trained at a mean age of 0.9. A synchronous run (flow.max_age = 0) would have taken 6.0 s to 9.0 s "
        "instead of 3.0 s."
    )
    young = make_account([], [step_record(0, ages={0: 90}, metrics=turns)], (0.0, 1.0))
    assert judge(young).besides == ""


CAUSES = [str(cause) for cause in Cause]


@st.composite
def accounts(draw: st.DrawFn) -> Account:
    """Any account whose shares are disjoint and whole."""

    def side(without: str) -> tuple[float, dict[str, float]]:
        weights = draw(st.lists(st.floats(0, 1), min_size=4, max_size=4))
        causes = draw(st.permutations([cause for cause in CAUSES if cause != without]))[:3]
        whole = sum(weights) or 1.0
        busy, *waits = [100 * weight / whole for weight in weights]
        return (busy if sum(weights) else 100.0), dict(zip(causes, waits, strict=True))

    engine_s, engine_waits = side("engine")
    learner_s, learner_waits = side("learner")
    observed = draw(st.sampled_from([0.0, 50.0]))
    return Account(
        seconds=100.0,
        engine_busy_s=engine_s,
        engine_waits_s=engine_waits,
        prefill_s=draw(share) * engine_s,
        learner_busy_s=learner_s,
        learner_waits_s=learner_waits,
        controller_busy_s=100 * draw(share),
        straggler_s=draw(share) * (100 - learner_s),
        held_back_s=100 * draw(share),
        observed_s=observed,
        processors_s=draw(share) * observed,
        queued_s={"learner": draw(share) * observed, "controller": draw(share) * observed} if observed else {},
        trained_tokens=6200,
        generated_tokens=7000,
    )


@given(
    accounts(),
    st.sampled_from([VerdictSettings(), KNOWN, VerdictSettings(max_age=0, lead=0), VerdictSettings(alternating=True)]),
)
def test_every_sentence_adds_up_and_says_what_the_figures_say(spent: Account, settings: VerdictSettings) -> None:
    verdict = judge(spent, settings)
    for who in ("learner", "engine"):
        told = re.search(rf"The {who} works (\d+)% of the time and waits (\d+)%: ([^.]*)\.", verdict.finding)
        if told:  # with all of its time at work it waits for nothing
            work, idle = int(told[1]), int(told[2])
            parts = [int(each) for each in re.findall(r"(\d+)%", told[3])]
            assert work + idle == 100
            assert sum(parts) == idle
            assert f"{idle}%" == percent(getattr(spent, f"{who}_idle")), "the tile says the same"
    assert 0 <= verdict.frac <= 1
    rate = spent.per_second(spent.trained_tokens)
    assert verdict.max_tok_s == 0 or rate < verdict.max_tok_s < 10 * rate
    assert bool(verdict.gain) is bool(verdict.max_tok_s)
    assert bool(verdict.advice) is (verdict.bound is not Bound.BALANCED)
    if verdict.bound is Bound.LEARNER:
        assert spent.learner_idle <= 0.2 + 1e-9
    if verdict.bound is Bound.BALANCED:
        assert max(spent.learner_idle, spent.engine_idle) <= 0.2 + 1e-9


STAGES = {
    Bound.GENERATION: Stage(token_s=0.04),
    Bound.LEARNER: Stage(learn_s=0.0024),
    Bound.SCORING: Stage(reward_s=2.0, flow={"max_age": 1, "lead": 1}),
    Bound.STRAGGLERS: Stage(
        length=lambda seed: 601 if seed % 24 == 0 else 24 + seed % 2, flow={"max_age": 1, "lead": 1}
    ),
    Bound.SYNC: Stage(stage_s=1.5, flow={"max_age": 1, "lead": 1}),
    Bound.CAPACITY: Stage(room=64, learn_s=0.0003, flow={"capacity": 4}),
    Bound.PREFILL: Stage(prompt_s=0.08),
    Bound.BALANCED: Stage(),
    Bound.TURNS: Stage(flow={"max_age": 0, "lead": 0}),
}


@pytest.mark.parametrize("bound", STAGES)
def test_a_staged_run_gets_the_verdict_on_what_is_slow_in_it(tmp_path: Path, bound: Bound) -> None:
    _, seen = STAGES[bound].run(tmp_path)
    total = seen.accountant.complete()
    assert judge(total).bound is bound, (str(judge(total)), total)
    for busy_s, waits_s in ((total.learner_busy_s, total.learner_waits_s), (total.engine_busy_s, total.engine_waits_s)):
        assert busy_s + sum(waits_s.values()) == pytest.approx(total.seconds)


@dataclass(frozen=True)
class Advised:
    """What the verdict on a staged run advises, and the run with that change."""

    words: str
    before: Stage
    after: Stage


FAST = {"learn_s": 0.0003, "token_s": 0.005}
ADVISED = {
    Bound.TURNS: Advised(
        "flow.max_age = 1 lets the next batch be sampled",
        Stage(flow={"max_age": 0, "lead": 0}),
        Stage(flow={"max_age": 1, "lead": 1}),
    ),
    Bound.CAPACITY: Advised(
        "Raise flow.capacity (now 4), or leave it out",
        Stage(room=64, learn_s=0.0003, flow={"capacity": 4}),
        Stage(room=64, learn_s=0.0003),
    ),
    Bound.SCORING: Advised(
        "raise flow.lead from 1 to 3",
        Stage(reward_s=2.0, flow={"max_age": 3, "lead": 1}),
        Stage(reward_s=2.0, flow={"max_age": 3, "lead": 3}),
    ),
    Bound.STRAGGLERS: Advised(
        "raise flow.max_age (now 1)",
        Stage(length=lambda seed: 601 if seed % 24 == 0 else 24, room=64, **FAST, flow={"max_age": 1, "lead": 1}),
        Stage(length=lambda seed: 601 if seed % 24 == 0 else 24, room=64, **FAST, flow={"max_age": 4, "lead": 4}),
    ),
    Bound.SYNC: Advised(
        "make fewer, larger steps (flow.groups_per_step (now 4))",
        Stage(stage_s=1.5, flow={"max_age": 1, "lead": 1, "groups_per_step": 4}),
        Stage(stage_s=1.5, room=64, flow={"max_age": 1, "lead": 1, "groups_per_step": 8}),
    ),
}


@pytest.mark.parametrize("bound", ADVISED)
def test_a_run_gains_from_what_is_advised_and_no_more_than_is_said(tmp_path: Path, bound: Bound) -> None:
    case, rates = ADVISED[bound], []
    for place, stage in enumerate((case.before, case.after)):
        directory = tmp_path / str(place)
        directory.mkdir()
        _, seen = stage.run(directory)
        total = seen.accountant.complete()
        rates.append(total.per_second(total.trained_tokens))
        if not place:
            verdict = judge(total, make_verdict_settings({"flow": {"order": "strict", **stage.flow}}))
    assert verdict.bound is bound, str(verdict)
    assert case.words in verdict.advice, str(verdict)
    assert rates[1] > 1.15 * rates[0], (rates, str(verdict))
    assert not verdict.max_tok_s or rates[1] <= 1.05 * verdict.max_tok_s, (rates, str(verdict))
