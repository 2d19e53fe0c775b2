"""``headrace view`` and ``headrace report`` as programs: what they say when something is in the way."""

from __future__ import annotations

import socket
import webbrowser
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError
from headrace.run.cli.app import app
from headrace.wings.view.serving import ViewConfig, open_browser
from tests.wings.view.browsing import viewed
from tests.wings.view.synthetic import write_run


def refused(*arguments: str) -> HeadraceError:
    error = CliRunner().invoke(app, list(arguments)).exception
    assert isinstance(error, HeadraceError)
    return error


def test_a_directory_without_a_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    error = refused("view", str(tmp_path), "--no-browser")
    assert "holds no run" in error.problem
    assert "name a directory" in error.remedy
    assert "is not a directory" in refused("view", str(tmp_path / "nowhere")).problem


def test_a_taken_port_is_told_with_its_remedy(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        error = refused("view", str(run_dir), "--no-browser", "--port", str(busy.getsockname()[1]))
    assert "cannot listen there: Address already in use" in error.problem
    assert "--port" in error.remedy
    assert "is not a port" in refused("view", str(run_dir), "--port", "70000").problem


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_is_made_and_asked_for(host: str, run_dir: Path) -> None:
    with viewed("--host", host, run_dir) as address:
        base, _, token = address.partition("?token=")
        port = base.rstrip("/").rpartition(":")[2]
        assert len(token) >= 20
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            assert http.get("/api/runs").status_code == 401
            assert http.get("/", params={"token": token}).status_code == 303
            assert http.get("/api/runs").status_code == 200


def test_live_shows_only_the_run_that_wrote_last(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_run(tmp_path / name, steps=1, name=name)
    with viewed("--live", "--token", "sesame", tmp_path) as address:
        told = httpx.get(f"{address.partition('?')[0]}api/runs", headers={"authorization": "Bearer sesame"})
        assert [run["name"] for run in told.json()] == ["new"]


@pytest.mark.parametrize("there_is", ["none", "one of the terminal"])
def test_no_browser_is_said_and_the_view_goes_on(
    there_is: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found() -> webbrowser.BaseBrowser:
        if there_is == "none":
            raise webbrowser.Error("could not locate runnable browser")
        return webbrowser.GenericBrowser("lynx")

    monkeypatch.setattr(webbrowser, "get", found)
    said: list[str] = []
    open_browser("http://127.0.0.1:1/", said.append, tmp_path).join(5)
    assert len(said) == 1
    assert "no browser was found" in said[0]


def test_the_token_is_in_a_page_of_ours_and_not_in_the_arguments_of_the_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[str] = []

    class Browser(webbrowser.BaseBrowser):
        def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
            given.append(url)
            return True

    monkeypatch.setattr(webbrowser, "get", Browser)
    open_browser("http://127.0.0.1:1/?token=hush", lambda _: None, tmp_path).join(5)
    page = Path(given[0].removeprefix("file://"))
    assert "hush" not in given[0]
    assert "url=http://127.0.0.1:1/?token=hush" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0


def test_terms_refuse_an_empty_host() -> None:
    with pytest.raises(HeadraceError, match="--host is empty"):
        ViewConfig(host="")


def test_report_writes_one_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    said = CliRunner().invoke(app, ["report", str(directory)])
    assert said.exit_code == 0, said.exception
    assert (directory / "report" / "report.html").stat().st_size > 50_000
    assert [path.name for path in (directory / "report").iterdir()] == ["report.html"]
    assert "report.html" in said.output.replace("\n", "")


def test_report_of_no_run_is_refused_in_words(tmp_path: Path) -> None:
    assert "holds no run" in refused("report", str(tmp_path)).problem
