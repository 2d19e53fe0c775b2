"""The export of the dashboard of one run as a single HTML file, which is written when a run ends and by ``headrace
report``.

    answers of the API, computed once ───────┐
    styles, logo, modules as one script ─────┼──▶ report/report.html
    index.html, the same page ───────────────┘

The file makes no requests: its Content-Security-Policy allows only its own script and no connections. It contains the
text and the tokens of the latest episodes, up to :data:`EPISODE_BYTES`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import posixpath
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import Clock, RealClock
from headrace.base.errors import HeadraceError, RunError, visible
from headrace.wings.view import episodes, figures
from headrace.wings.view.credit import EpisodeAdvantages
from headrace.wings.view.outliers import find_outliers
from headrace.wings.view.run import OpenRun
from headrace.wings.view.timeline import timeline

REPORT_FILE = Path("report") / "report.html"
"""Path of the report within a run directory."""
EPISODE_BYTES = 4 << 20
"""Largest size of all episodes in one file, as JSON."""
POINTS = 1000
"""Largest number of points of one series in a file; the series of a longer run is thinned."""
STRIP_BINS = 900
STEPS = 8
"""Number of steps at the end, and in the middle, of the run whose spans are exported in detail: about as many as the
page shows first, see static/js/pages/timeline.js. For the rest of the run, the file has only the busy fractions of each
lane."""
TOKENS = 2048
"""Number of tokens that a page requests at once: ``WINDOW`` of static/js/tokens/view.js."""

Answers = dict[str, Any]


def write_page(run_dir: Path) -> Path:
    """Write the dashboard of the run in ``run_dir`` into ``report/report.html`` there, and return its path.

    If the run is still running, was killed or lacks files, the report shows the available data, with notes. Raises
    :class:`~headrace.base.errors.DataError` if ``run_dir`` holds no run and :class:`~headrace.base.errors.RunError` if
    the file cannot be written.
    """
    clock = RealClock()
    run = OpenRun(run_dir, clock)
    try:
        made = make_page(collect_page_answers(run, clock))
    finally:
        run.close()
    target = run_dir / REPORT_FILE
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(exist_ok=True)
        temporary.write_bytes(made)
        temporary.replace(target)
    except OSError as error:
        remedy = "make room on that disk and make the run directory writable; the run itself is not affected"
        raise RunError(f"{target} cannot be written: {error.strerror}", remedy=remedy) from None
    return target


def collect_page_answers(run: OpenRun, clock: Clock) -> Answers:
    """Return the answers to all requests of the pages, by path below ``/api``, for a single run, whose number is 0.
    ``clock`` limits the time of slow answers."""
    metrics = figures.metrics(run)
    answers: Answers = {
        "overview": figures.overview(run),
        "metrics": metrics,
        "series": figures.read_columns(run, [row["name"] for row in metrics], POINTS),
        "flow": figures.flow(run),
        "system": figures.system(run),
        "timeline": _make_windows(run),
    }
    try:
        last = run.steps[-1].step if run.steps else 0
        answers[f"outliers/{last}"] = find_outliers(run, clock, last)
        answers |= _collect_episodes(run)
    except HeadraceError as error:
        answers["episodes"] = {"problem": f"{error.problem}; {error.remedy}"}
    listed = [{"name": run.name, "directory": str(run.directory), **run.state()}]
    return {"runs": listed} | {f"runs/0/{path}": answer for path, answer in answers.items()}


def _make_windows(run: OpenRun) -> list[dict[str, Any]]:
    """Return the answers of the timeline: one for the whole run, and two detailed answers for the parts that its page
    shows first, the end and the middle of the run."""
    whole = timeline(run, "", "", str(STRIP_BINS))
    marks = whole["steps"]
    if len(marks) < 2:
        return [whole]
    first, last = marks[0], marks[-1]
    each = (last["at"] - first["at"]) / max(1, last["step"] - first["step"])
    starts = [last["at"] - STEPS * each, first["at"] + (last["at"] - first["at"] - STEPS * each) / 2]
    windows = [(max(0.0, start), min(whole["extent"][1], max(0.0, start) + STEPS * each)) for start in starts]
    return [whole, *(timeline(run, str(start), str(end), str(STRIP_BINS)) for start, end in windows)]


def _collect_episodes(run: OpenRun) -> Answers:
    """Return the answers about the latest episodes of ``run``, by path: the list, and each episode with its tokens,
    with at most :data:`EPISODE_BYTES` of episodes in total."""
    listed = episodes.list_episodes(run, {})
    answers: Answers = {"episodes": listed}
    advantages = EpisodeAdvantages()
    left, rows = EPISODE_BYTES, []
    for row in listed["rows"]:
        if row["ended_s"] is None:
            continue
        key = row["key"]
        one = {f"episodes/{key}": episodes.read_episode(run, advantages, key)}
        for turn in one[f"episodes/{key}"]["turns"]:
            for first in range(0, turn["tokens"], TOKENS):
                window = episodes.read_window(run, advantages, key, turn["index"], (first, TOKENS))
                one[f"episodes/{key}/turns/{turn['index']}?from={first}&count={TOKENS}"] = window
        left -= len(msgspec.json.encode(one))
        if left < 0:
            break
        rows.append(row)
        answers |= one
    listed["rows"] = rows
    return answers


def make_page(answers: Answers) -> bytes:
    """Return the complete HTML document of the dashboard, in UTF-8, with ``answers``, styles and script embedded in
    it."""
    static = files("headrace.wings.view") / "static"
    mark = base64.b64encode((static / "mark.svg").read_bytes()).decode("ascii")
    script = bundle({path: (static / "js" / path).read_text(encoding="utf-8") for path in _list_modules()}, "main.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    document = (static / "index.html").read_text(encoding="utf-8")
    styles = [(static / path).read_text(encoding="utf-8") for path in _STYLE.findall(document)]
    document = _STYLE.sub("", document).replace("/static/mark.svg", f"data:image/svg+xml;base64,{mark}")
    head, script_tag, rest = document.partition('<script type="module" src="/static/js/main.js"></script>')
    assert script_tag
    name, verdict = answers["runs"][0]["name"], answers["runs/0/overview"]["verdict"]
    head = head.replace("<title>headrace</title>", f"<title>{_escape(name)} · headrace</title>")
    rest = rest.replace("</noscript>", f"<p>{_escape(name)}: {_escape(verdict)}</p></noscript>")
    rest, ending = rest.rsplit("</body>", 1)
    parts = (
        head.replace("<meta charset", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta charset'),
        "<style>\n" + "".join(styles) + "</style>\n" + rest,
        '<script type="application/json" id="answers">' + _encode_json(answers) + "</script>\n",
        f'<script type="module">{script}</script>\n</body>' + ending,
    )
    return "".join(parts).encode()


_STYLE = re.compile(r'<link rel="stylesheet" href="/static/(css/[a-z]+\.css)">\n?')
_UNSAFE = re.compile("[<\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Characters that could end the element that holds the answers, or control an editor or terminal that displays the
file."""


def _encode_json(answers: Answers) -> str:
    """Return ``answers`` as JSON in which characters that are unsafe within an HTML file are escaped."""
    text = msgspec.json.encode(answers).decode("utf-8")
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(text: str) -> str:
    """Escape a text for HTML. Control characters are made visible, and the text is cut to 4000 characters."""
    return html.escape(visible(text, 4000), quote=True)


def _list_modules() -> list[str]:
    """Return the paths of all ES modules of the page, relative to their folder."""
    root = files("headrace.wings.view") / "static" / "js"
    below = [f"{folder.name}/{each.name}" for folder in root.iterdir() if folder.is_dir() for each in folder.iterdir()]
    return sorted([*below, *(each.name for each in root.iterdir() if each.is_file())])


_IMPORT = re.compile(r'^import (\* as (\w+)|\{([^}]*)\}) from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def bundle(modules: dict[str, str], main: str) -> str:
    """Return ES modules, given by path, as one script: each module except ``main`` becomes a function that is called
    once and returns its exports.

    >>> other = 'export const one = 1;\\n'
    >>> print(bundle({"a.js": other, "main.js": 'import { one } from "./a.js";\\nf(one);\\n'}, "main.js"))
    const $a = (() => {
    const one = 1;
    return { one };
    })();
    const { one } = $a;
    f(one);
    <BLANKLINE>
    """
    written: list[str] = []
    done: set[str] = set()

    def write(path: str) -> None:
        """Append the modules that ``path`` imports and that have not been written, and then ``path`` itself."""
        done.add(path)
        code = modules[path]
        for found in _IMPORT.finditer(code):
            # groups: 2 the name of "* as NAME", 3 the names within braces, 4 the path
            other = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[4]))
            if other not in done:
                write(other)
            names = found[2] or f"{{{found[3].replace(' as ', ': ')}}}"
            code = code.replace(found[0], f"const {names} = {_name_exports(other)};\n")
        exported = ", ".join(found[2] for found in _EXPORT.finditer(code))
        code = _EXPORT.sub(r"\1", code)
        whole = f"const {_name_exports(path)} = (() => {{\n{code}return {{ {exported} }};\n}})();\n"
        written.append(code if path == main else whole)

    write(main)
    return "".join(written)


def _name_exports(path: str) -> str:
    """Return the name of the variable for the exports of a module in the script."""
    return "$" + re.sub(r"\W", "_", path.removesuffix(".js"))
