"""Stages the pages of the site and builds it."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.site.generated import GENERATED

STAGED = Path("build/docs")
LINK = re.compile(r"(?<!!)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s#]+)(#[^()\s]*)?\)")
"""Matches a link in Markdown; groups: text in brackets, target, anchor."""
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".json": "json",
    ".jsonl": "json",
    ".html": "html",
    ".css": "css",
    ".yaml": "yaml",
    ".sh": "sh",
}
FENCE = re.compile(r"^( *)(`{3,})")


def build(root: Path) -> str:
    """Build site/ of the repository at ``root`` from scratch; return the output of a failed build, or an empty text."""
    stage(root)
    shutil.rmtree(root / "site", ignore_errors=True)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    return "" if done.returncode == 0 else f"{done.stdout[-6000:]}{done.stderr[-6000:]}"


def stage(root: Path) -> None:
    """Copy docs/ of the repository at ``root`` to :data:`STAGED`, insert the generated parts, and add a page for each
    file that is linked to."""
    source, staged = root / "docs", root / STAGED
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(source, staged)
    linked: set[Path] = set()
    for page in sorted(source.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for mark, generate in GENERATED.items():
            if mark in text:
                text = "\n".join(generate() if mark in line else line for line in text.split("\n"))
        text = _replace_links(text, page, root, linked)
        (staged / page.relative_to(source)).write_text(text, encoding="utf-8")
    for file in sorted(linked):
        _write_page(file, root, staged)


def prose_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of ``text`` outside code blocks with their numbers, which start at 0."""
    fence, lines = "", []
    for number, line in enumerate(text.split("\n")):
        opening = FENCE.match(line)
        if opening and not fence:
            fence = opening[2]
        elif fence and line.strip() == fence:
            fence = ""
        elif not fence:
            lines.append((number, line))
    return lines


def _replace_links(text: str, page: Path, root: Path, linked: set[Path]) -> str:
    """Return ``text``, the text of ``page``, with links out of docs/ replaced by links to the pages of those files,
    which are added to ``linked``. ``root`` is the repository."""
    docs, lines = root / "docs", text.split("\n")

    def replace_link(link: re.Match[str]) -> str:
        """Return the replacement of ``link``, a match of :data:`LINK`, and add its file to ``linked``."""
        words, target, anchor = link[1], link[2], link[3] or ""
        if ":" in target:
            return link[0]
        file = Path(os.path.normpath(page.parent / target))
        if file.is_relative_to(docs) or not file.exists():
            return link[0]  # the check of the site reports missing targets
        linked.add(file)
        here = page.relative_to(docs).parent.as_posix()
        return f"{words}({posixpath.relpath(_get_page_path(file, root), here)}{anchor})"

    for number, line in prose_lines(text):
        lines[number] = LINK.sub(replace_link, line)
    return "\n".join(lines)


def _get_page_path(file: Path, root: Path) -> str:
    return f"files/{file.relative_to(root).as_posix()}.md"


def _write_page(file: Path, root: Path, staged: Path) -> None:
    """Write a page below ``staged`` that shows ``file``, or lists its names if it is a folder. ``root`` is the
    repository."""
    title = file.relative_to(root).as_posix()
    page = staged / _get_page_path(file, root)
    page.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        names = sorted(path.name for path in file.iterdir() if not path.name.startswith(("_", ".")))
        body = "\n".join(f"- `{name}`" for name in names)
    elif file.suffix == ".md":
        body = _plain(file.read_text(encoding="utf-8"))
    else:
        fence = "`" * 6
        text = file.read_text(encoding="utf-8").rstrip()
        body = f"{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}"
    page.write_text(f"# {title}\n\nA file of the repository.\n\n{body}\n", encoding="utf-8")


def _plain(text: str) -> str:
    """Return the text of a Markdown page with headings one level deeper and without links."""
    lines = text.split("\n")
    for number, line in prose_lines(text):
        unlinked = LINK.sub(lambda link: link[1][1:-1], line)
        lines[number] = f"#{unlinked}" if unlinked.startswith("#") else unlinked
    return "\n".join(lines)
