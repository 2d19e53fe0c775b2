"""The report: pictures and one self-contained page, from the files of a run directory and nothing else."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import RunError
from headrace.run.observe.page import Picture, page
from headrace.run.observe.rundata import RunData, load_run
from headrace.run.observe.summary import age_histogram
from headrace.run.observe.words import ages_in_words, number, percent, plural

REPORT_DIR = "report"


def write_report(run_dir: Path) -> Path:
    """Write ``report/report.html`` and its pictures as PNG under ``run_dir``; the path of the page.

    A run that is still going on, was killed or lacks a file gets a report of what there is, with notes. Raises
    :class:`~headrace.base.errors.DataError` if ``run_dir`` holds no run and :class:`~headrace.base.errors.RunError` if
    the report cannot be written.
    """
    run = load_run(run_dir)
    pictures = _pictures(run)
    directory = run_dir / REPORT_DIR
    target = directory / "report.html"
    try:
        directory.mkdir(exist_ok=True)
        for name, picture in pictures.items():
            (directory / f"{name}.png").write_bytes(picture.light)
        target.write_text(page(run, run.verdict, list(pictures.values())), encoding="utf-8")
    except OSError as error:
        remedy = "make room on that disk and make the run directory writable; the run itself is not affected"
        raise RunError(f"{directory} cannot be written: {error.strerror}", remedy=remedy) from None
    return target


def _pictures(run: RunData) -> dict[str, Picture]:
    from headrace.run.observe.pictures import DARK, LIGHT, PICTURES, render

    words = {"reward": _reward, "timeline": _timeline, "throughput": _throughput, "ages": _ages}
    pictures: dict[str, Picture] = {}
    for name, (draw, height) in PICTURES.items():
        alt, caption = words[name](run)
        light, dark = (render(draw, run, theme, height) for theme in (LIGHT, DARK))
        pictures[name] = Picture(alt=alt, caption=caption, light=light, dark=dark)
    return pictures


def _reward(run: RunData) -> tuple[str, str]:
    rewards = [step.reward_mean for step in run.steps if step.reward_mean is not None]
    caption = "Mean reward of the episodes that each step trained on, and on held-out tasks."
    if not rewards:
        return "Reward curve: no reward yet.", caption
    ends = f"from {number(rewards[0])} at the first step to {number(rewards[-1])} at the last"
    return f"Reward curve over {plural(len(rewards), 'step')}, {ends}, best {number(max(rewards))}.", caption


def _timeline(run: RunData) -> tuple[str, str]:
    caption = "What every lane did, when. Colour is work; where a lane is blank or grey, it stood idle."
    idle = run.account
    if idle is None:
        return "Timeline of lanes: no trace.", caption
    shares = (
        f"the engine works {percent(1 - idle.engine_idle)} of the time, the learner {percent(1 - idle.learner_idle)}"
    )
    return f"Timeline of lanes over the whole run and over a few steps from its middle: {shares}.", caption


def _throughput(run: RunData) -> tuple[str, str]:
    rates = (number(run.measured(key)) for key in ("generated_tok_s", "trained_tok_s"))
    alt = "Throughput and queues over time: overall {} tokens generated and {} tokens trained per second.".format(
        *rates
    )
    caption = (
        "Tokens sampled by the engine and tokens that carried loss; below, groups by where they stand at each step."
    )
    return alt, caption


def _ages(run: RunData) -> tuple[str, str]:
    ages = age_histogram(step.ages for step in run.steps)
    caption = "How many versions the weights moved on between sampling a token and training it."
    return f"Histogram of the ages of trained tokens: {ages_in_words(ages)}.", caption
