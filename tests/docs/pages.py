"""The blocks of code in the documents, as a reader finds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *(?P<fence>`{3,})(?P<info>[^`\n]*)$")
TITLE = re.compile(r'title="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Of its fence, from 1."""
    language: str
    """The first word behind the fence; empty where there is none."""
    title: str
    """The file that it is, where it says so: ``title="run.toml"``."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """All of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").split("\n")
    start, fence, info = 0, "", ""
    for number, line in enumerate(lines):
        match = FENCE.match(line)
        if match and not fence:
            start, fence, info = number, match["fence"], match["info"].strip()
        elif fence and line.strip() == fence:
            title = TITLE.search(info)
            found.append(
                Block(
                    page=page.relative_to(ROOT).as_posix(),
                    line=start + 1,
                    language=info.split()[0] if info else "",
                    title=title[1] if title else "",
                    text="\n".join(lines[start + 1 : number]) + "\n",
                )
            )
            fence = ""
    assert not fence, f"{page}: the block of line {start + 1} does not end"
    return found


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def blocks(*languages: str) -> list[Block]:
    """Those in one of ``languages``."""
    return [block for block in BLOCKS if block.language in languages]
