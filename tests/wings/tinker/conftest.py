"""One small model and one server for the tests that need no server of their own."""

import pytest

from tests.wings.tinker.serving import client, free_connections, served, tiny

pytest.importorskip("tinker")


def pytest_collection_modifyitems(items):
    """The client never closes the connection of its first request."""
    for item in items:
        if "tinker" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="module", autouse=True)
def collected():
    yield
    free_connections()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tinker") / "model", init_std=0.2)


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    with served(model, tmp_path_factory.mktemp("tinker-state")) as found:
        yield found


@pytest.fixture(scope="session")
def service(server):
    with client(*server) as found:
        yield found
