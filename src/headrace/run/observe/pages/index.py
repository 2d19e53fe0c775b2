"""All attempts of an evaluation on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.run.observe.pages.html import figure, page, text

MAX_TASKS = 5000
"""Tasks that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the result."""

    name: str
    value: float
    """As it is shown, without a unit."""
    low: float | None = None
    """Lower end of its interval; ``None``: it has none."""
    high: float | None = None
    """Upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """What the index says of one attempt."""

    reward: float | None
    """``None``: it failed."""
    cause: str
    """Why it failed."""
    page: str
    """Where its page is; empty where it has none."""


def index_page(
    title: str, figures: Sequence[Figure], notes: Sequence[str], tasks: Sequence[Sequence[AttemptSummary]]
) -> str:
    """The whole document."""
    listed = tasks[:MAX_TASKS]
    rows = "".join(
        f"<tr><td>{number + 1}</td><td>{figure(_mean(attempts))}</td>"
        f"<td class='left'>{' '.join(map(_attempt, attempts))}</td></tr>"
        for number, attempts in enumerate(listed)
    )
    more = f"<p class='faint'>{len(tasks) - len(listed)} more tasks are in episodes.jsonl.</p>"
    body = [
        f"<p class='brand'>headrace eval</p><h1>{text(title, 500)}</h1>",
        *(f"<p class='bad'>{text(note, 2000)}</p>" for note in notes),
        f"<dl class='cards'>{''.join(map(_card, figures))}</dl>",
        "<section><h2>Attempts</h2><div class='wide'><table><thead><tr><th>task</th><th>mean reward</th>"
        f"<th class='left'>attempts</th></tr></thead><tbody>{rows}</tbody></table></div>",
        more if len(tasks) > len(listed) else "",
        "</section>",
    ]
    return page(f"{title} · headrace eval", "\n".join(filter(None, body)))


def _card(shown: Figure) -> str:
    both = shown.low is not None and shown.high is not None
    words = f"95 %: {figure(shown.low)} to {figure(shown.high)}" if both else "no interval"
    return f"<div><dt>{text(shown.name, 80)}</dt><dd>{figure(shown.value)}<small>{words}</small></dd></div>"


def _attempt(attempt: AttemptSummary) -> str:
    kind = "bad" if attempt.reward is None else "good" if attempt.reward > 0 else ""
    words = "failed" if attempt.reward is None else figure(attempt.reward)
    said = f"<span class='{kind}' title='{text(attempt.cause, 500)}'>{words}</span>"
    return f"<a href='{text(attempt.page, 500)}'>{said}</a>" if attempt.page else said


def _mean(attempts: Sequence[AttemptSummary]) -> float:
    return sum(attempt.reward or 0.0 for attempt in attempts) / len(attempts) if attempts else 0.0
