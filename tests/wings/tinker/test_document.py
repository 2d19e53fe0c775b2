"""The page about the protocol names every method of the pinned client."""

import re
from pathlib import Path

import tinker

PAGE = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text(encoding="utf-8")


def test_the_table_names_every_public_method_of_the_client():
    clients = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
    methods = {
        f"{client.__name__}.{name}"
        for client in clients
        for name in vars(client)
        if not name.startswith("_") and not name.endswith("_async") and callable(getattr(client, name))
    }
    listed = re.findall(r"^\| `(\w+Client\.\w+)` \| (?:served|refused|the client's own)", PAGE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(methods)
