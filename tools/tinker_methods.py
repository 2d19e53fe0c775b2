"""Write the table of the Tinker client's methods in docs/tinker.md: what the server does for each.

    python -m tools.tinker_methods

Names and arguments come from the installed client, and the answers from :data:`ANSWERS`. A method that the client has
and this file has not ends the command, and a test, with its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tinker.md"
BEGIN, END = "<!-- the table is written by python -m tools.tinker_methods -->", "<!-- its end -->"

_PAGE_OF = "the client's own: the page that it names is not of this server"
_PROJECT = "refused: there is one project on this server"
_USER = "refused: there is one user"
_BILL = "refused: nothing is billed"
_STATE = "served, into a model of the same rank and layers"

ANSWERS: dict[str, dict[str, str]] = {
    "ServiceClient": {
        "get_console_url": _PAGE_OF,
        "get_server_capabilities": "served",
        "create_lora_training_client": "served; `optimizer`: AdamW, others refused",
        "copy_weights": _PROJECT,
        "create_training_client_from_state": "served; `optimizer`: AdamW, others refused",
        "create_training_client_from_state_with_optimizer": "served",
        "create_sampling_client": "served; `record_stability_info=True` refused",
        "create_custom_loss": "served: the client computes it in two passes",
        "create_rest_client": "served",
        "close": "served",
        "get_telemetry": "served",
    },
    "TrainingClient": {
        "get_console_url": _PAGE_OF,
        "forward": "served: all losses but `stable_reinforce`; changes nothing",
        "forward_backward": "served: all losses but `stable_reinforce`",
        "forward_backward_custom": "served: a forward, the client's own backward, and a `cross_entropy`",
        "optim_step": "served: `AdamParams`; `DimuonParams` refused",
        "save_state": "served",
        "load_state": _STATE,
        "load_state_with_optimizer": _STATE,
        "save_weights_for_sampler": "served",
        "save_weights_external": "served: peft's format; `age_encryption_recipients` refused",
        "get_info": "served",
        "get_tokenizer": "served",
        "create_sampling_client": "served; `record_stability_info=True` refused",
        "save_weights_and_get_sampling_client": (
            "served: `snapshot`, `inflight`; `record_stability_info=True` refused"
        ),
        "get_telemetry": "served",
    },
    "SamplingClient": {
        "create": "served; `record_stability_info=True` refused",
        "sample": "served; `prompt_alt_tokens_k` refused",
        "compute_logprobs": "served",
        "get_tokenizer": "served",
        "get_base_model": "served",
        "get_telemetry": "served",
        "get_sampler_handle": "served",
        "from_sampler_handle": "served",
        "on_queue_state_change": "served",
    },
    "RestClient": {
        "get_telemetry": "served",
        "get_server_capabilities": "served",
        "get_training_run": "served",
        "get_training_run_by_tinker_path": "served",
        "get_weights_info_by_tinker_path": "served",
        "list_training_runs": "served",
        "list_checkpoints": "served",
        "get_external_weights_urls": "served: one signed URL for each file, valid for an hour",
        "delete_checkpoint": "served",
        "delete_checkpoint_from_tinker_path": "served",
        "get_audit_log": "refused: there is none",
        "copy_weights": _PROJECT,
        "publish_checkpoint_from_tinker_path": _USER,
        "unpublish_checkpoint_from_tinker_path": _USER,
        "set_checkpoint_ttl_from_tinker_path": "served",
        "list_user_checkpoints": "served",
        "get_session": "served",
        "list_sessions": "served",
        "assign_session_project": _PROJECT,
        "export_session_trace": "refused: no trace is kept",
        "whoami": "refused by the client itself: the key of this server names no user",
        "get_sampler": "served",
        "get_billing_usage": _BILL,
        "get_current_checkpoint_storage_usage": _BILL,
        "search_sessions": "refused: `list_sessions` names them all",
    },
    "AdminClient": {
        "get_telemetry": "served",
        "get_audit_log": "refused: there is none",
        "get_billing_usage": _BILL,
        "get_current_checkpoint_storage_usage": _BILL,
    },
}
"""What the server does for each method of the client; an ``_async`` twin does the same."""


def methods() -> dict[str, dict[str, str]]:
    """Return the public methods of every class of clients of the installed package, each with its arguments."""
    import tinker

    kinds = {name: kind for name, kind in vars(tinker).items() if name.endswith("Client")}
    order = [*ANSWERS, *sorted(kinds.keys() - ANSWERS.keys())]
    return {name: dict(_list_methods(kinds[name])) for name in order if name in kinds}


def _list_methods(kind: type) -> Iterator[tuple[str, str]]:
    for method, member in vars(kind).items():
        is_public = not method.startswith("_") and not method.endswith("_async")
        if is_public and not isinstance(member, property):
            function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            parameters = [
                name for name in inspect.signature(function).parameters if name not in ("self", "cls", "holder")
            ]
            yield method, ", ".join(parameters)


def table() -> str:
    """Return the table. Raises :class:`SystemExit`, which names them, for methods without an answer and answers
    without a method."""
    methods_by_class, lines = methods(), ["| method | arguments | |", "|---|---|---|"]
    given, answered = (
        {(kind, name) for kind in table for name in table[kind]} for table in (methods_by_class, ANSWERS)
    )
    if given != answered:
        missing, gone = (sorted(map(".".join, names)) for names in (given - answered, answered - given))
        raise SystemExit(f"methods without an answer: {missing}; answers without a method: {gone}; mend {__file__}")
    for kind, own in methods_by_class.items():
        for name, arguments in own.items():
            lines.append(f"| `{kind}.{name}` | {f'`{arguments}`' if arguments else ''} | {ANSWERS[kind][name]} |")
    return "\n".join(lines)


def updated_page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(), encoding="utf-8")
