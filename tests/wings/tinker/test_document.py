"""The page about the protocol says what the server does for every method of the pinned client, and it is so."""

from datetime import UTC, datetime

import pytest
from tinker import AdminClient, RestClient, types
from tinker._exceptions import APIStatusError

from tests.docs.pages import blocks
from tests.wings.tinker.serving import NAME, served, tiny
from tools import tinker_methods

PATH = "tinker://nobody:train:0/weights/x"
NOW = datetime.now(UTC)
REFUSED = {
    "ServiceClient.copy_weights": (PATH,),
    "RestClient.get_audit_log": (),
    "RestClient.copy_weights": (PATH, "project"),
    "RestClient.publish_checkpoint_from_tinker_path": (PATH,),
    "RestClient.unpublish_checkpoint_from_tinker_path": (PATH,),
    "RestClient.assign_session_project": ("session", "project"),
    "RestClient.export_session_trace": ("session",),
    "RestClient.get_billing_usage": (NOW, NOW),
    "RestClient.get_current_checkpoint_storage_usage": (),
    "AdminClient.get_audit_log": (),
    "AdminClient.get_billing_usage": (NOW, NOW),
    "AdminClient.get_current_checkpoint_storage_usage": (),
    "RestClient.search_sessions": (types.SessionSearchRequest(),),
}
"""The arguments with which a method that the page calls refused is called."""


def test_the_table_is_that_of_the_installed_client():
    assert tinker_methods.PAGE.read_text(encoding="utf-8") == tinker_methods.updated_page(), (
        "python -m tools.tinker_methods"
    )


def test_a_method_that_the_table_lacks_is_named(monkeypatch):
    known = tinker_methods.ANSWERS["RestClient"]
    monkeypatch.setitem(tinker_methods.ANSWERS, "RestClient", {k: v for k, v in known.items() if k != "whoami"})
    with pytest.raises(SystemExit, match=r"RestClient\.whoami"):
        tinker_methods.table()


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
@pytest.mark.filterwarnings("ignore:DEPRECATED.*AdminClient:FutureWarning")  # the old names of its methods
def test_every_method_that_the_page_calls_refused_is_refused_by_name(service, server, monkeypatch):
    monkeypatch.setenv("TINKER_PROJECT_ID", "project")  # without one, the client itself refuses to copy
    clients = {kind.__name__: kind(base_url=server[0], api_key=server[1]) for kind in (RestClient, AdminClient)}
    clients["ServiceClient"] = service
    listed = {
        f"{kind}.{name}"
        for kind, answers in tinker_methods.ANSWERS.items()
        for name, answer in answers.items()
        if answer.startswith("refused:")
    }
    assert listed == set(REFUSED)
    for method, given in REFUSED.items():
        kind, _, name = method.partition(".")
        with pytest.raises(APIStatusError, match="is not served; "):
            getattr(clients[kind], name)(*given).result()


def test_every_method_of_the_rest_client_that_the_page_calls_served_answers(service, server):
    trained = service.create_lora_training_client(base_model=NAME, rank=2, seed=1).result()
    trained.save_weights_and_get_sampling_client().result()
    paths = [trained.save_state(name).result().path for name in ("one", "two")]
    external = trained.save_weights_external("three").result().path
    run, session = trained.model_id, trained.model_id.partition(":")[0]
    rest, answers = RestClient(base_url=server[0], api_key=server[1]), tinker_methods.ANSWERS["RestClient"]
    given = {
        "get_training_run": (run,),
        "get_training_run_by_tinker_path": (paths[0],),
        "get_weights_info_by_tinker_path": (paths[0],),
        "list_checkpoints": (run,),
        "get_external_weights_urls": (external,),
        "set_checkpoint_ttl_from_tinker_path": (external, 3600),
        "delete_checkpoint": (run, "weights/one"),
        "delete_checkpoint_from_tinker_path": (paths[1],),
        "get_session": (session,),
        "get_sampler": (rest.get_session(session).result().sampler_ids[0],),
    }
    for name in [each for each, answer in answers.items() if answer.startswith("served")]:
        found = getattr(rest, name)(*given.get(name, ()))
        if name != "get_telemetry":
            found.result()


def test_the_script_of_the_page_runs_as_it_is(tmp_path, monkeypatch):
    (script,) = (block for block in blocks("python") if block.page == "docs/tinker.md")
    model, names = "Qwen/Qwen3-0.6B", {}
    tiny(tmp_path / model)
    monkeypatch.chdir(tmp_path)  # the client finds the tokenizer there
    with served(tmp_path / model, tmp_path / "state", name=model) as (url, key):
        given = {"BASE_URL": url, "API_KEY": key, "TELEMETRY": "0"}
        for name, value in given.items():
            monkeypatch.setenv(f"TINKER_{name}", value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        exec(compile(script.text, script.page, "exec"), names)  # noqa: S102 - the document's own code
    assert names["losses"][-1] < names["losses"][0]
    assert names["answer"].sequences[0].tokens
