"""The site's own checks find what they are for, and its pages ask nobody for anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.base.config import Section
from headrace.run.session.recipes import recipes
from tests.docs.pages import ROOT
from tools.site import build, generated, problems
from tools.site.building import stage

CHROMIUM = shutil.which("chromium")


def page(site: Path, name: str, body: str) -> None:
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text(f"<!doctype html><title>t</title><h2 id=here>h</h2>{body}")


def test_links_that_lead_somewhere_are_left_alone(tmp_path: Path) -> None:
    page(tmp_path, "index.html", '<a href="a/b.html#here">b</a><a href="#here">h</a><a href="https://x.org">x</a>')
    page(tmp_path, "a/b.html", '<a href="../index.html">i</a><a href="/index.html#here">i</a><a href=".">dir</a>')
    page(tmp_path, "a/index.html", '<img src="data:image/png;base64,AA==">')
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="c.html">c</a>', "c.html leads to nothing"),
        ('<a href="index.html#there">c</a>', "index.html#there: there is no such anchor"),
        ('<img src="picture.png">', "picture.png leads to nothing"),
        ('<script src="https://cdn.org/x.js"></script>', "fetches https://cdn.org/x.js from elsewhere"),
        ('<link rel=stylesheet href="//fonts.org/f.css">', "fetches //fonts.org/f.css from elsewhere"),
        ('<p style="background: url(https://x.org/p.png)">', "fetches https://x.org/p.png from elsewhere"),
    ],
)
def test_broken_links_and_foreign_hosts_are_found(tmp_path: Path, body: str, said: str) -> None:
    page(tmp_path, "index.html", body)
    assert problems(tmp_path) == [f"index.html: {said}"]


def test_a_stylesheet_that_fetches_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text(
        '@import "https://fonts.org/a.css"; a { b: url("https://x.org/c.woff2") url(d.png) }'
    )
    assert len(problems(tmp_path)) == 2


def test_links_to_files_of_the_repository_lead_to_pages_of_them(tmp_path: Path) -> None:
    (tmp_path / "docs/in").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/x.py").write_text("print('```')\n")
    (tmp_path / "README.md").write_text("# R\n\n[d](docs/in/a.md)\n\n```sh\n# no heading\n```\n")
    (tmp_path / "docs/in/a.md").write_text(
        "[x](../../src/x.py) [s](../../src) [r](../../README.md)\n```text\n[x](../../src/x.py)\n```\n"
    )
    (tmp_path / "docs/b.md").write_text("before\n*made on the site* <!-- recipes -->\nafter\n")
    stage(tmp_path)
    staged = tmp_path / "build/docs"
    assert (staged / "b.md").read_text() == f"before\n{generated.recipes()}\nafter\n"
    first, *rest = (staged / "in/a.md").read_text().split("\n")
    assert first == "[x](../files/src/x.py.md) [s](../files/src.md) [r](../files/README.md.md)"
    assert rest[1] == "[x](../../src/x.py)", "code is left as it is"
    assert "``````python\nprint('```')\n``````" in (staged / "files/src/x.py.md").read_text()
    assert "- `x.py`" in (staged / "files/src.md").read_text()
    assert "## R\n\nd\n" in (staged / "files/README.md.md").read_text()


def test_settings_page_has_every_section_with_its_words() -> None:
    text = generated.settings()
    for part in (
        "## flow\n",
        "### flow.policy: bounded",
        '| `max_age` | int, `"auto"` | `1` |',
        "### env.rewards: judge",
    ):
        assert part in text
    assert "*required*" in text
    assert ":class:" not in text


def test_types_are_told_in_words() -> None:
    class Table(Section):
        """A record."""

        some: tuple[int, ...] | None = None
        """Some."""

    assert generated._takes(Table.model_fields["some"].annotation) == "list of int"
    assert "| `some` | list of int | unset | Some. |" in "\n".join(generated._table("x", Table))


def test_program_page_has_every_verb_and_recipes_page_every_recipe() -> None:
    program, table = generated.commands(), generated.recipes()
    for part in ("## train\n", "## check env\n", "| `--set` |", "RUN_FILE"):
        assert part in program
    assert all(f"| `{name}` |" in table and f"- **{name}**" in table for name in recipes())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_pages_of_the_site_ask_nobody_for_anything_and_fit_every_width(capfd: pytest.CaptureFixture[str]) -> None:
    assert build(ROOT) == ""
    assert problems(ROOT / "site") == []
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (400, "dark")):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab = context.new_page()
            tab.on("request", lambda request: asked.append(request.url))
            for file in sorted((ROOT / "site").rglob("*.html")):
                tab.goto(file.as_uri())
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, file.name
            context.close()
        browser.close()
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)
