"""Take the pictures of ``docs/pictures``: ``python -m tests.wings.view.pictures RUN_DIR [RUN_DIR...]``.

Every page is ``view-*.png``; that of an episode shows one with branches. ``reward.png`` and ``timeline.png`` are parts
of the pages of the first run.

With ``--all DIR`` every page is taken light and dark, wide and narrow, into ``DIR``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.wings.view.browsing import ARGUMENTS, CHROMIUM, Watched, viewed
from tests.wings.view.synthetic import branching_episode, write_run

PAGES = ("overview", "timeline", "flow", "episodes", "steps", "system", "compare")
DOCS = Path(__file__).parents[3] / "docs" / "pictures"


def main() -> None:
    arguments = sys.argv[1:]
    everything = Path(arguments.pop(arguments.index("--all") + 1)) if "--all" in arguments else None
    runs = [Path(each) for each in arguments if each != "--all"]
    with viewed(*runs) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        if everything is None:
            take(browser, address, "light", 1280, DOCS / "view-{page}.png")
            take_parts(browser, address)
            take_branches(browser)
        else:
            everything.mkdir(parents=True, exist_ok=True)
            for theme, width in (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)):
                take(browser, address, theme, width, everything / f"{{page}}-{theme}-{width}.png")
        browser.close()


def take(browser: Any, address: str, theme: str, width: int, target: Path) -> None:
    context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
    tab = Watched(context.new_page(), address)
    for page in PAGES:
        tab.open(page)
        snap(tab, target, page)
    tab.open("episodes", ready="tbody a")
    tab.tab.locator("tbody a").first.click()
    tab.tab.wait_for_selector(".t")
    snap(tab, target, "episode")
    context.close()
    for error in tab.errors:
        print(f"{theme} {width}: {error}")


def take_parts(browser: Any, address: str) -> None:
    tab = Watched(browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light"), address)
    for page, part, name in (("overview", "figure.lead", "reward"), ("timeline", ".card:has(.lanes)", "timeline")):
        tab.open(page)
        tab.tab.wait_for_timeout(700)
        tab.tab.locator(part).first.screenshot(path=str(DOCS / f"{name}.png"))


def take_branches(browser: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = write_run(Path(scratch) / "branches", extra=[branching_episode(0, 0)])
        with viewed(run) as address:
            tab = Watched(browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light"), address)
            tab.open("episodes/13.0?by=version&turn=1&at=6")
            tab.tab.get_by_text("experts by layer").wait_for()
            tab.tab.evaluate("scrollTo(0, 0)")
            snap(tab, DOCS / "view-{page}.png", "episode")


def snap(tab: Watched, target: Path, page: str) -> None:
    tab.tab.wait_for_timeout(700)  # until lines have been drawn and bars have grown
    tab.tab.screenshot(path=str(target).format(page=page))


if __name__ == "__main__":
    main()
