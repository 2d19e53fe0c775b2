"""The report as one HTML file: pictures inside, no scripts, nothing fetched, every text escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.errors import visible
from headrace.run.observe.document import document
from headrace.run.observe.rundata import RunData, about_lives, run_about
from headrace.run.observe.words import duration, number, percent, plural

_LONGEST = 4000
_SHOWN_ABOVE = ("ledger", "age_histogram", "warnings", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture in both themes, with its words."""

    alt: str
    """What it shows, for those who do not see it."""
    caption: str
    light: bytes
    dark: bytes


def page(run: RunData, verdict: str, pictures: Sequence[Picture]) -> str:
    """The whole document."""
    name, about = run.name, " · ".join(filter(None, [run_about(run.config), str(run.directory.resolve())]))
    parts = [
        f"<header><p class='brand'>headrace</p><h1>{_text(name)}</h1><p class='about'>{_text(about)}</p>"
        f"{_verdict(verdict)}</header>",
        *(f"<p class='note' role='note'>{_text(note)}</p>" for note in _notes(run)),
        _cards(run),
        *map(_figure, pictures),
        _conservation(run.summary.get("ledger")),
        _details("Every number of the summary", _pairs(run.summary, skip=_SHOWN_ABOVE)),
        _details("Configuration", _json(run.config)),
    ]
    return document(_text(f"{name} · headrace"), "\n".join(filter(None, parts)), _STYLE, pictures=True)


def _verdict(verdict: str) -> str:
    if not verdict:
        return "<p class='verdict'>No verdict yet: no step, or no trace of one.</p>"
    bound, _, words = verdict.partition(": ")
    return f"<p class='verdict'><b>{_text(bound)}</b> {_text(words)}</p>"


def _notes(run: RunData) -> list[str]:
    """What is missing, how the run ended if it did not finish, and what it warned of."""
    status, cause, warnings = (run.summary.get(key) for key in ("status", "cause", "warnings"))
    ended = [f"The run {status}. {cause or ''}".rstrip()] if status not in (None, "finished") else []
    told = [f"Warning: {warning}" for warning in warnings] if isinstance(warnings, list) else []
    resumed = [words] if (words := about_lives(run.steps)) else []
    return [*run.notes, *ended, *resumed, *told]


def _cards(run: RunData) -> str:
    get = run.measured
    gap = _mapping(run.figures.get("commit_gap_ms")).get("p99")
    idle = f"learner idle {_percent(get('learner_idle_frac'))}, exposed sync {_percent(get('exposed_sync_frac'))}"
    latest = f"the last {len(run.session):,} " if len(run.session) < len(run.steps) else ""
    cards = [
        ("held-out evaluation", _change(get("eval_before"), get("eval_after")), "before → after"),
        ("training reward", _change(get("reward_first"), get("reward_last")), "first step → last tenth"),
        ("optimizer steps", f"{len(run.steps):,}", f"{latest}in {duration(get('wall_s'))}" if get("wall_s") else ""),
        ("generated", _rate(get("generated_tok_s")), f"engine idle {_percent(get('engine_idle_frac'))}"),
        ("trained", _rate(get("trained_tok_s")), idle),
        ("oldest trained token", plural(get("max_token_age"), "version"), _bound(run)),
        (
            "commit gap",
            duration(gap / 1e3) if isinstance(gap, int | float) else "–",
            "99th percentile: the engine stands still",
        ),
        ("engine against learner", number(get("mismatch_kl")), "mismatch KL"),
    ]
    items = [
        f"<div><dt>{_text(label)}</dt><dd>{_text(value)}<small>{_text(words)}</small></dd></div>"
        for label, value, words in cards
    ]
    return f"<dl class='cards'>{''.join(items)}</dl>"


def _figure(picture: Picture) -> str:
    light, dark = (base64.b64encode(png).decode("ascii") for png in (picture.light, picture.dark))
    return (
        f"<figure><picture><source media='(prefers-color-scheme: dark)' srcset='data:image/png;base64,{dark}'>"
        f"<img src='data:image/png;base64,{light}' alt='{_text(picture.alt)}' width='1536'></picture>"
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _conservation(ledger: Any) -> str:
    units = [unit for unit in ("groups", "episodes", "tokens") if isinstance(ledger, dict) and unit in ledger]
    fates = {unit: ledger[unit] for unit in units if isinstance(ledger[unit], dict)}
    if not fates:
        return ""
    reasons = sorted({reason for fate in fates.values() for reason in _mapping(fate.get("dropped"))})
    rows = [
        ("submitted", [fate.get("submitted") for fate in fates.values()]),
        ("trained", [fate.get("trained") for fate in fates.values()]),
    ]
    rows += [
        (f"dropped: {reason}", [_mapping(fate.get("dropped")).get(reason, 0) for fate in fates.values()])
        for reason in reasons
    ]
    rows.append(("in flight", [fate.get("in_flight") for fate in fates.values()]))
    head = "".join(f"<th scope='col'>{unit}</th>" for unit in fates)
    body = "".join(
        f"<tr><th scope='row'>{_text(label)}</th>{''.join(f'<td>{_count(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    verdicts = "".join(f"<td>{_balance(fate)}</td>" for fate in fates.values())
    return (
        "<section><h2>Conservation</h2><p>What was submitted has been trained, was dropped for a counted reason, or is "
        f"still in flight.</p><div class='wide'><table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody>"
        f"<tfoot><tr><th scope='row'>unaccounted for</th>{verdicts}</tr></tfoot></table></div></section>"
    )


def _balance(fate: Mapping[str, Any]) -> str:
    counts = [
        fate.get("submitted"),
        fate.get("trained"),
        fate.get("in_flight"),
        *_mapping(fate.get("dropped")).values(),
    ]
    if not all(isinstance(count, int) for count in counts):
        return "–"
    return _count(counts[0] - sum(counts[1:]))


def _pairs(tree: Mapping[str, Any], skip: Iterable[str]) -> str:
    rows = [
        f"<tr><th scope='row'>{_text(key)}</th><td>{_text(_short(value))}</td></tr>"
        for key, value in tree.items()
        if key not in skip
    ]
    return f"<div class='wide'><table><tbody>{''.join(rows)}</tbody></table></div>" if rows else ""


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>" if body else ""


def _json(tree: Mapping[str, Any]) -> str:
    if not tree:
        return ""
    text = msgspec.json.format(msgspec.json.encode(tree), indent=2).decode("utf-8")
    lines = "\n".join(visible(line, _LONGEST) for line in text.splitlines())
    return f"<pre tabindex='0'>{html.escape(lines)}</pre>"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_short(inner)}" for key, inner in value.items())
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _change(before: float | None, after: float | None) -> str:
    return "–" if before is None and after is None else f"{number(before)} → {number(after)}"


def _rate(value: float | None) -> str:
    return f"{number(value)} tok/s"


def _bound(run: RunData) -> str:
    bound = run.setting("flow", "max_age")
    return f"the bound is {bound}" if isinstance(bound, int) else ""


def _percent(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(text: str) -> str:
    return html.escape(visible(text, _LONGEST), quote=True)


_STYLE = """
h1 { margin: 0 0 12px; font-size: 30px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 19px; }
.about { margin: -8px 0 16px; color: var(--faint); overflow-wrap: anywhere; }
.verdict { margin: 0 0 24px; padding: 14px 18px; background: var(--card); border-left: 5px solid var(--mark);
  border-radius: 8px; font-size: 17px; }
.verdict b { text-transform: uppercase; font-size: 14px; letter-spacing: .05em; color: var(--mark); margin-right: 6px; }
.advice { display: block; color: var(--faint); font-size: 15px; }
.note { margin: 0 0 12px; padding: 8px 14px; border: 1px dashed var(--faint); border-radius: 8px; color: var(--faint);
  overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px; margin: 0 0 24px; }
.cards div, figure, section, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.cards div { padding: 12px 16px; }
dt { color: var(--faint); font-size: 14px; }
dd { font-size: 23px; }
figure { margin: 0 0 20px; padding: 14px 16px; }
img { display: block; width: 100%; height: auto; }
figcaption { margin-top: 8px; color: var(--faint); font-size: 14px; }
section, details { padding: 16px 20px; margin: 0 0 20px; }
section p { margin: 0 0 12px; color: var(--faint); font-size: 14px; }
summary { cursor: pointer; font-weight: 650; }
details > :not(summary) { margin-top: 12px; }
th[scope=row], thead td { text-align: left; font-weight: 400; overflow-wrap: anywhere; }
thead th { color: var(--faint); font-weight: 600; }
tfoot th, tfoot td { border-bottom: 0; font-weight: 650; }
tfoot th[scope=row] { font-weight: 650; }
details td { overflow-wrap: anywhere; }
pre { overflow: auto; max-height: 480px; font-size: 13px; }
@media print { details { break-inside: avoid; } figure { break-inside: avoid; } }
"""
