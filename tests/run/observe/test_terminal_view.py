"""The live view fits its terminal, and text from elsewhere stays text."""

import contextlib
import io
import os
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from headrace.base.errors import visible
from headrace.base.types.observation import Account, Event, LiveState, QueueCounts, Wait
from headrace.run.observe.terminal import LiveView, PlainView, draw, open_view
from headrace.run.observe.verdict import judge
from headrace.run.observe.words import duration, sparkline
from tests.run.observe.synthetic import step_record

WHERE = Account(seconds=100.0, engine_busy_s=97.0, learner_busy_s=62.0, trained_tokens=6200)
HOSTILE = "[bold red]x[/] [/nothing] \x1b[2J\x1b]0;title\x07 \r\n\x00 \u202eabc\u2066 \ud800 <script> :smile:"


def state(**changes: object) -> LiveState:
    values: dict[str, object] = {
        "steps_done": 42,
        "steps_total": 100,
        "title": "arithmetic",
        "phase": "training",
        "wall_s": 72.0,
        "eta_s": 99.0,
        "learner_version": 42,
        "engine_version": 41,
        "rewards": (0.3, None, 0.5, 0.7),
        "generated_tok_s": 12345.0,
        "trained_tok_s": 8821.0,
        "queue": QueueCounts(submitted=4, running=12, ready=2),
        "ages": {0: 300, 1: 200, 2: 10},
        "account": WHERE,
        "verdict": str(judge(WHERE)),
        "throughput": (100.0, 200.0, 8000.0, 8821.0),
        "waited": (0.0, 0.2, 0.6, 0.38),
        "waits": (
            Wait(loop="rollout", state="busy", what="12 groups", since_s=3.0),
            Wait(loop="learner", state="waiting", what="a batch", since_s=2.2, unblocked_by="scoring"),
        ),
        "warnings": ("the disk is nearly full",),
        "sample": "4 + 5 = 9",
        "sample_reward": 1.0,
    }
    return LiveState(**{**values, **changes})


def shown(of: LiveState, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None, legacy_windows=False)
    console.print(draw(of, width))
    return console.file.getvalue()


def test_a_wide_terminal_shows_everything() -> None:
    text = shown(state(), 120)
    for words in ("step 42/100", "1 min 39 s left", "12,345 tok/s", "97% busy", "version 41", "12 running", "0: 59%"):
        assert words in text
    for words in (
        "a batch",
        "scoring",
        "generation-bound",
        "38%",
        "the disk is nearly full",
        "4 + 5 = 9",
        "arithmetic",
    ):
        assert words in text


def test_throughput_and_waiting_are_drawn_step_by_step() -> None:
    assert f"trained    {sparkline((100.0, 200.0, 8000.0, 8821.0), 30)} 8,821 tok/s" in shown(state(), 120)
    assert f"waited {sparkline((0.0, 0.2, 0.6, 0.38), 15)} 38%" in shown(state(), 120)


def test_the_verdict_says_what_there_is_to_gain() -> None:
    assert "at most 100 tokens/s instead of 62." in " ".join(shown(state(), 120).replace("│", "").split())


def test_a_narrow_terminal_keeps_the_numbers() -> None:
    text = shown(state(), 44)
    assert "step 42/100" in text
    assert "generation-bound" in text
    assert "╭" not in text


def test_a_run_on_given_rows_shows_its_last_step_and_no_engine() -> None:
    text = shown(LiveState(steps_done=3, steps_total=10, learner_version=3, figures="loss 2.5  lr 1e-05"), 80)
    assert "loss 2.5" in text
    assert "version 3" in text
    assert "engine" not in text
    assert "groups" not in text
    assert "none yet" in shown(LiveState(steps_done=0, steps_total=10, figures=""), 80)


def test_before_the_first_step_nothing_is_claimed() -> None:
    empty = LiveState(steps_done=0, steps_total=10)
    text = shown(empty, 80)
    assert "none yet" in text
    assert "not started yet" in text
    assert "busy" not in text
    assert "balanced" not in text


@given(
    st.integers(8, 140),
    st.one_of(st.just(HOSTILE), st.text(max_size=40), st.text(alphabet="漢字[]/\\\x1b\x9b\u200f a", max_size=200)),
)
def test_no_text_escapes_its_place(width: int, text: str) -> None:
    wait = Wait(loop=text, state="waiting", what=text, since_s=1e9, unblocked_by=text)
    picture = shown(state(title=text, sample=text, warnings=(text, text), waits=(wait,)), width)
    for line in picture.split("\n"):
        assert cell_len(line) <= width
        assert not [c for c in line if unicodedata.category(c)[0] == "C"]


def test_markup_in_model_text_is_shown_as_it_is() -> None:
    assert "[red]42[/red]" in shown(state(sample="[red]42[/red]"), 120)


def test_a_pipe_gets_one_line_per_step_and_event() -> None:
    stream = io.StringIO()
    with open_view(stream, steps_total=10) as view:
        assert isinstance(view, PlainView)
        view.update(state())
        view.step(step_record(4, eval_accuracy=0.75))
        view.event(Event(wall_s=3.0, text=HOSTILE, level="warning"))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 5/10  reward 0.404  eval 0.75")
    assert second.startswith("warning: [bold red]x[/]")
    assert "\x1b" not in second


def test_a_stream_without_unicode_is_not_broken_by_it() -> None:
    raw = io.BytesIO()
    with PlainView(io.TextIOWrapper(raw, encoding="ascii"), 10) as view:
        view.event(Event(wall_s=0.0, text="漢字"))
        assert raw.getvalue() == b"??  at 0 s\n"


def everything(control: int) -> Iterator[bytes]:
    """What was written to a terminal that is closed by now."""
    with contextlib.suppress(OSError):
        while True:
            yield os.read(control, 4096)


def test_a_terminal_is_redrawn_and_left_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    control, terminal = os.openpty()
    with open(terminal, "w", encoding="utf-8") as stream, open_view(stream, 100) as view:
        assert isinstance(view, LiveView)
        view.update(state())
        view.step(step_record(0))
        view.event(Event(wall_s=3.0, text="checkpoint written [bold]"))
        view.update(state(sample=HOSTILE))
    written = b"".join(everything(control)).decode()
    os.close(control)
    assert "checkpoint written [bold]" in written
    assert written.rstrip().endswith("\x1b[?25h")
    assert "\x1b[2J" not in written
    assert "\x07" not in written


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    control, terminal = os.openpty()
    with open(terminal, "w", encoding="utf-8") as stream:
        assert isinstance(open_view(stream, 100), PlainView)
    os.close(control)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=200), st.integers(0, 40))
def test_a_sparkline_has_at_most_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_line_of_a_megabyte_is_cut() -> None:
    assert len(visible("x" * 1_000_000, limit=50)) == 51


def test_durations_never_show_sixty_seconds() -> None:
    assert [duration(s) for s in (9.97, 59.7, 3599.7)] == ["10 s", "1 min 00 s", "1 h 00 min"]
