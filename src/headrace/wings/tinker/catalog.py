"""The catalogue of a server: endpoints that find, list and delete sessions, training runs and checkpoints.

A model is what one client trains; the protocol also calls it a training run. Its id is ``SESSION:train:NUMBER``. A
checkpoint has the path ``tinker://MODEL/KIND/NAME``, where KIND is ``weights`` (training can continue from it),
``sampler_weights`` or ``external_weights`` (files to download). The dictionaries that methods return are the JSON
answers of endpoints, and the parameter ``body`` is the JSON body of a request. A row is a row of one of the journal's
tables.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.base.clock import Clock
from headrace.base.net.refusal import Refusal, excerpt
from headrace.models.multilora import ATTENTION, HEAD, MLP
from headrace.wings.tinker import schema
from headrace.wings.tinker.files import OWN_FILES, check_ttl, read_state_facts
from headrace.wings.tinker.journal import Journal, decode_facts

FLAGS = {"train_unembed": HEAD, "train_mlp": MLP, "train_attn": ATTENTION}
"""The part of a model for each flag of the client; for whole weights all flags are true."""


class Catalog:
    """The queries of a server's endpoints for sessions, models and checkpoints in the journal. All methods are called
    in one event loop, except :meth:`delete_checkpoint`, which may run in a thread."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        """Create a catalogue of the contents of ``journal``; checkpoints expire by the wall time of ``clock``."""
        self._journal, self._clock = journal, clock

    def model(self, model: str) -> Any:
        """Return the journal's row of the model with the id ``model``. Raises
        :class:`~headrace.base.net.refusal.Refusal` (status 404) for an unknown id."""
        row = self._journal.one("SELECT * FROM models WHERE id = ?", model)
        if row is None:
            raise Refusal(f"there is no model {excerpt(model)}", remedy="create it first", status=404)
        return row

    def checkpoint(self, path: str, *kinds: str) -> Any:
        """Return the journal's row of the checkpoint at ``path``. Raises :class:`~headrace.base.net.refusal.Refusal`
        with status 404 if there is none or it has expired, and with status 400 if ``kinds`` are given and its kind is
        not among them."""
        row = self._journal.one("SELECT * FROM checkpoints WHERE path = ? AND kind != 'ephemeral'", path)
        if row is None or (row["expires_s"] is not None and row["expires_s"] < self._clock.wall()):
            raise Refusal(f"there is no checkpoint {excerpt(path, 200)}", remedy="list the checkpoints", status=404)
        if kinds and row["kind"] not in kinds:
            raise Refusal(
                f"{excerpt(path, 200)} holds {row['kind']}, and this needs {' or '.join(kinds)}",
                remedy="give a path of that kind",
            )
        return row

    def spec(self, row: Any) -> dict[str, Any]:
        """Return the settings of the model that a checkpoint was saved from: its base, rank, seed and trained parts.
        ``row`` is the checkpoint's row of the journal."""
        found: dict[str, Any] = read_state_facts(Path(row["directory"]))["spec"]
        return found

    def weights_info(self, body: bytes) -> dict[str, Any]:
        """Return the facts of a checkpoint that the client needs in order to create a model from it: its base, its rank
        (``None`` for whole weights) and, as flags, the parts that it trains. ``body`` is the JSON that names the
        checkpoint."""
        path = schema.parse(body, schema.PathBody).tinker_path
        row = self.checkpoint(path, "weights", "sampler_weights", "external_weights")
        spec = self.spec(row)
        parts = spec["parts"]
        return {
            "base_model": spec["base"],
            "is_lora": spec["rank"] is not None,
            "lora_rank": spec["rank"],
            **{flag: not parts or part in parts for flag, part in FLAGS.items()},
            "optimizer_config": {"type": "adamw"},
        }

    def training_run(self, model: str) -> dict[str, Any]:
        """Return the model with the id ``model`` as an entry of the client's list of training runs: its base and rank,
        and its newest checkpoints. Raises :class:`Refusal` for an unknown id."""
        row = self.model(model)
        spec = json.loads(row["spec"])
        return {
            "training_run_id": model,
            "base_model": spec["base"],
            "model_owner": "local",
            "is_lora": spec["rank"] is not None,
            "lora_rank": spec["rank"],
            "last_request_time": _format_time(row["used_s"]),
            "last_checkpoint": self._find_last_checkpoint(model, "weights"),
            "last_sampler_checkpoint": self._find_last_checkpoint(model, "sampler_weights"),
        }

    def training_runs(self, limit: int, offset: int, project: str | None = None) -> dict[str, Any]:
        """Return one page of the models in the order of their last use, the latest first: at most ``limit`` models
        after the first ``offset``. With ``project``, list only models whose session was created in that project."""
        query = "SELECT m.id, s.facts FROM models m LEFT JOIN sessions s ON s.id = m.session ORDER BY used_s DESC, m.id"
        rows = self._journal.all(query)
        if project is not None:
            rows = [row for row in rows if decode_facts(row).get("project_id") == project]
        runs = [self.training_run(row["id"]) for row in rows[offset : offset + limit]]
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)}}

    def checkpoints(self, model: str | None, limit: int | None = None, offset: int = 0) -> dict[str, Any]:
        """Return the checkpoints of ``model``, or of all models for ``None``, the newest first: one page of ``limit``
        entries after the first ``offset``, or all of them without a cursor if ``limit`` is ``None``."""
        if model is not None:
            self.model(model)
        of_one = "AND model = ?" if model is not None else ""
        query = f"SELECT * FROM checkpoints WHERE kind != 'ephemeral' {of_one} ORDER BY created_s DESC, path"
        rows = self._journal.all(query, *([] if model is None else [model]))
        kept = rows if limit is None else rows[offset : offset + limit]
        found: dict[str, Any] = {"checkpoints": [_describe_checkpoint(row) for row in kept]}
        if limit is not None:
            found["cursor"] = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return found

    def delete_checkpoint(self, model: str, name: str) -> None:
        """Delete the checkpoint ``name`` (``KIND/NAME``) of ``model``. Raises :class:`Refusal` if there is none."""
        self.remove_checkpoint(self.checkpoint(f"tinker://{model}/{name}")["path"])

    def remove_checkpoint(self, path: str) -> None:
        """Delete the record and the files of the checkpoint at ``path``, if it exists. Samplers that have its weights
        in memory continue to sample."""
        row = self._journal.one("SELECT directory FROM checkpoints WHERE path = ?", path)
        if row is not None:
            self._journal.run("DELETE FROM checkpoints WHERE path = ?", path)
            shutil.rmtree(row["directory"], ignore_errors=True)

    def set_ttl(self, model: str, name: str, body: bytes) -> None:
        """Set when the checkpoint ``name`` (``KIND/NAME``) of ``model`` expires: after the ``ttl_seconds`` of the body,
        counted from now, or never if they are ``None``."""
        row = self.checkpoint(f"tinker://{model}/{name}")
        ttl_s = check_ttl(schema.parse(body, schema.TtlBody).ttl_seconds)
        expires = None if ttl_s is None else self._clock.wall() + ttl_s
        self._journal.run("UPDATE checkpoints SET expires_s = ? WHERE path = ?", expires, row["path"])

    def list_files(self, model: str, name: str) -> list[str]:
        """Return the names of the files of the external checkpoint ``name`` (``KIND/NAME``) of ``model`` that a client
        may download; files that only this server reads are excluded."""
        row = self.checkpoint(f"tinker://{model}/{name}", "external_weights")
        return sorted(each.name for each in Path(row["directory"]).iterdir() if each.name not in OWN_FILES)

    def find_file(self, model: str, name: str, file: str) -> Path:
        """Return the path of the file ``file`` of the external checkpoint ``name`` (``KIND/NAME``) of ``model``. Raises
        :class:`Refusal` (status 404) for a file that :meth:`list_files` does not list."""
        if file not in self.list_files(model, name):
            raise Refusal(f"there is no file {excerpt(file)}", remedy="take a URL of this server", status=404)
        row = self.checkpoint(f"tinker://{model}/{name}", "external_weights")
        return Path(row["directory"]) / file

    def sessions(self, limit: int, offset: int) -> dict[str, Any]:
        """Return one page of the ids of all sessions, the newest first: at most ``limit`` ids after the first
        ``offset``."""
        rows = self._journal.all("SELECT id FROM sessions ORDER BY created_s DESC LIMIT ? OFFSET ?", limit, offset)
        return {"sessions": [row["id"] for row in rows]}

    def session(self, session: str) -> dict[str, Any]:
        """Return the ids of the models and samplers of a session, with the display name and the metadata that its
        client sent. Raises :class:`Refusal` (status 404) for an unknown session."""
        row = self._journal.one("SELECT * FROM sessions WHERE id = ?", session)
        if row is None:
            raise Refusal(f"there is no session {excerpt(session)}", remedy="list them first", status=404)
        facts = decode_facts(row)
        runs = self._journal.all("SELECT id FROM models WHERE session = ? ORDER BY number", session)
        samplers = self._journal.all("SELECT id FROM samplers WHERE session = ?", session)
        return {
            "training_run_ids": [each["id"] for each in runs],
            "sampler_ids": [each["id"] for each in samplers],
            "user_metadata": facts["user_metadata"],
            "display_name": facts["display_name"],
        }

    def _find_last_checkpoint(self, model: str, kind: str) -> dict[str, Any] | None:
        """Return the newest checkpoint of one ``kind`` of a model in the client's format; ``None`` if it has none."""
        query = "SELECT * FROM checkpoints WHERE model = ? AND kind = ? ORDER BY created_s DESC LIMIT 1"
        row = self._journal.one(query, model, kind)
        return None if row is None else _describe_checkpoint(row)


def _format_time(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as ISO 8601 text in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _describe_checkpoint(row: Any) -> dict[str, Any]:
    """Convert a checkpoint's row of the journal to the client's format."""
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    facts = decode_facts(row)
    return {
        "checkpoint_id": "/".join(row["path"].split("/")[-2:]),
        "checkpoint_type": kinds[row["kind"]],
        "time": _format_time(row["created_s"]),
        "tinker_path": row["path"],
        "size_bytes": row["size_bytes"],
        "public": False,
        "user_metadata": facts.get("user_metadata"),
        "expires_at": None if row["expires_s"] is None else _format_time(row["expires_s"]),
    }
