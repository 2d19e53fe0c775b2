"""The index page of an evaluation: its figures, and all attempts at each task, with links to their pages. The functions
return HTML text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.control.evaluation import IntervalEstimate
from headrace.run.observe.pages.html import figure, page, text

MAX_TASKS = 5000
"""The maximum number of tasks that the index page lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """The entry of one attempt at a task on the index page: its reward or failure, and the path of its page."""

    reward: float | None
    """The reward; ``None`` if the attempt failed."""
    cause: str
    """The cause of the failure; empty if the attempt did not fail."""
    page: str
    """The path of the attempt's page; empty if it has no page."""


def make_index_page(
    title: str, figures: Mapping[str, IntervalEstimate], notes: Sequence[str], tasks: Sequence[Sequence[AttemptSummary]]
) -> str:
    """Return the whole HTML index page of an evaluation. ``title`` is its heading, ``figures`` are the results, and
    ``notes`` are warnings, shown above the results. ``tasks`` has the attempts at each task, in order; at most
    :data:`MAX_TASKS` tasks are listed."""
    shown_tasks = tasks[:MAX_TASKS]
    rows = "".join(
        f"<tr><td>{number + 1}</td><td>{figure(_mean(attempts))}</td>"
        f"<td class='left'>{' '.join(map(_format_attempt, attempts))}</td></tr>"
        for number, attempts in enumerate(shown_tasks)
    )
    more = f"<p class='faint'>{len(tasks) - len(shown_tasks)} more tasks are in episodes.jsonl.</p>"
    body = [
        f"<p class='brand'>headrace eval</p><h1>{text(title, 500)}</h1>",
        *(f"<p class='bad'>{text(note, 2000)}</p>" for note in notes),
        f"<dl class='cards'>{''.join(_format_card(*item) for item in figures.items())}</dl>",
        "<section><h2>Attempts</h2><div class='wide'><table><thead><tr><th>task</th><th>mean reward</th>"
        f"<th class='left'>attempts</th></tr></thead><tbody>{rows}</tbody></table></div>",
        more if len(tasks) > len(shown_tasks) else "",
        "</section>",
    ]
    return page(f"{title} · headrace eval", "\n".join(filter(None, body)))


def _format_card(name: str, shown: IntervalEstimate) -> str:
    """Return a figure as an HTML card with its name, its value and its 95 % interval, or the words ``no interval``."""
    both = shown.low is not None and shown.high is not None
    words = f"95 %: {figure(shown.low)} to {figure(shown.high)}" if both else "no interval"
    return f"<div><dt>{text(name, 80)}</dt><dd>{figure(shown.value)}<small>{words}</small></dd></div>"


def _format_attempt(attempt: AttemptSummary) -> str:
    """Return an attempt as HTML: its reward, or ``failed`` with the cause as a tooltip, as a link to its page if it has
    a page."""
    kind = "bad" if attempt.reward is None else "good" if attempt.reward > 0 else ""
    words = "failed" if attempt.reward is None else figure(attempt.reward)
    label = f"<span class='{kind}' title='{text(attempt.cause, 500)}'>{words}</span>"
    return f"<a href='{text(attempt.page, 500)}'>{label}</a>" if attempt.page else label


def _mean(attempts: Sequence[AttemptSummary]) -> float:
    """Return the mean reward of the attempts at one task; a failed attempt counts as 0. Return 0 without attempts."""
    return sum(attempt.reward or 0.0 for attempt in attempts) / len(attempts) if attempts else 0.0
