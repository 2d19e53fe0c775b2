"""Checks the built pages: every link and anchor has a target, and nothing is fetched from another host."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHES = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
}
"""Attributes from which a browser fetches without a click, by tag."""
CSS_URL = re.compile(r"(?:url\(\s*[\"']?|@import\s+[\"'])([^\"')\s]+)")


class Page(HTMLParser):
    """The links, fetched URLs and anchors of one page."""

    def __init__(self, text: str) -> None:
        """Read the page with the HTML ``text``."""
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = {"", "__"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the attributes ``attrs`` of ``tag``; called by the parser."""
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        for name in FETCHES.get(tag, ()):
            if name in values:
                self.fetched.append(values[name].split()[0] if values[name].strip() else "")
        if "style" in values:
            self.fetched += CSS_URL.findall(values["style"])


@cache
def _page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def problems(site: Path) -> list[str]:
    """Return one line for each problem of the built pages in ``site``."""
    _page.cache_clear()
    lines: list[str] = []
    for file in sorted(site.rglob("*.html")):
        name, page = file.relative_to(site), _page(file)
        lines += [f"{name}: fetches {url} from elsewhere" for url in page.fetched if _foreign(url)]
        lines += [f"{name}: {why}" for url in (*page.links, *page.fetched) if (why := _broken(url, file, site))]
    for file in sorted(site.rglob("*.css")):
        urls = CSS_URL.findall(file.read_text(encoding="utf-8"))
        lines += [f"{file.relative_to(site)}: fetches {url} from elsewhere" for url in urls if _foreign(url)]
    return lines


def _foreign(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme not in ("", "data", "file")


def _broken(url: str, file: Path, site: Path) -> str:
    """Return why a link has no target; empty if it has one, or leads out of the site."""
    if _foreign(url) or url.startswith(("data:", "javascript:")):
        return ""
    parts = urlsplit(url)
    target = file if not parts.path else (file.parent / unquote(parts.path)).resolve()
    if parts.path.startswith("/"):
        target = site / unquote(parts.path).lstrip("/")
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return f"{url} leads to nothing"
    anchor = unquote(parts.fragment)
    if target.suffix == ".html" and anchor not in _page(target).anchors and not anchor.startswith("__"):
        return f"{url}: there is no such anchor"
    return ""
