"""What every test runs under: one thread for each process, no network, hypothesis without deadlines."""

import os

# before anything imports numpy or torch: with tests side by side, threads only get into each other's way
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator  # noqa: E402 - the environment above must stand first
from pathlib import Path  # noqa: E402 - as above

import pytest  # noqa: E402 - as above
from hypothesis import HealthCheck, settings  # noqa: E402 - as above

from headrace.base.heap import gc_disabled  # noqa: E402 - as above

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# CI draws the same examples every time; at a desk each run draws new ones
settings.register_profile("ci", settings.get_profile("house"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "house")

ROOT = Path(__file__).parents[1]
SLOW_CASES = frozenset(
    line for line in (ROOT / "tests/slow_cases.txt").read_text().splitlines() if line and not line.startswith("#")
)
"""The cases that `make test` leaves to `make test-slow`, since it runs others of the same test or of the same kind."""

STALE_LINES = pytest.StashKey[list[str]]()
"""The key of the lines of tests/slow_cases.txt that name no case, in the configuration of a test run."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude all that exists once the tests are collected from garbage collection: a collection that traverses what a
    thousand modules and nine thousand cases consist of takes a second, and each run in a test's own process begins
    with one."""
    with gc_disabled():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of tests/slow_cases.txt slow: a line is a case, or a test with all of its cases. Store the lines
    that name no case of a file that was collected as a whole, for tests/gate/test_slow_cases.py."""
    found = set()
    for item in items:
        names = {item.nodeid, item.nodeid.partition("[")[0]} & SLOW_CASES
        if names:
            item.add_marker(pytest.mark.slow)
            found |= names
    # the option is not there when pytest's cache is off
    is_whole = not any("::" in argument for argument in config.args) and not config.getoption("lf", default=False)
    files = {item.nodeid.partition("::")[0] for item in items} if is_whole else set()
    config.stash[STALE_LINES] = sorted(line for line in SLOW_CASES - found if line.partition("::")[0] in files)


@pytest.fixture(scope="session", autouse=True)
def kept_fork_server() -> Iterator[None]:
    """Runs of the tests' own process fork from one server: a server of its own costs each of them five seconds."""
    from headrace.launch import forking

    def environment() -> dict[str, str]:
        """That of the fork server, without the name of the running test, which pytest sets and no part reads."""
        return {name: value for name, value in variables().items() if name != "PYTEST_CURRENT_TEST"}

    variables = forking.fork_server_environment
    with pytest.MonkeyPatch.context() as patch, forking.keep_fork_server():
        patch.setattr(forking, "fork_server_environment", environment)
        yield
