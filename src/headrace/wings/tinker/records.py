"""A reader of the state directory of a server of the Tinker protocol, for another process, while the server runs or
afterwards. ``headrace view`` shows the data as pages. The dictionaries that methods return are rows of its tables.

This module does not import torch. Every method opens a new read-only connection to the journal.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import DataError
from headrace.wings.tinker.data import ADVANTAGES, LOGPROBS, WEIGHTS
from headrace.wings.tinker.journal import DONE, FAILED, JOURNAL_FILE, WAITING
from headrace.wings.tinker.wire import read_metrics, read_train_request

MOST_ROWS = 100
"""The largest number of rows in a list."""


def is_state(directory: Path) -> bool:
    """Return whether ``directory`` is the state directory of a server of the Tinker protocol."""
    return (directory / JOURNAL_FILE).is_file()


class ServerRecords:
    """A reader of the state directory of a server. Any thread may call its methods."""

    def __init__(self, directory: Path) -> None:
        """Create a reader of the state in ``directory``, without opening a file."""
        self.directory = directory

    def bases(self) -> dict[str, str]:
        """Return the directories of the base models, by each name under which clients may request them."""
        with self._reading() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'bases'").fetchone()
        return {} if row is None else dict(json.loads(row["value"]))

    def tenants(self, now_s: float) -> list[dict[str, Any]]:
        """Return the models in training in the order of their last use, the latest first, each with the number of its
        requests by status. ``now_s`` is the current time in seconds since 1970, from which ages are computed."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT m.*, s.facts, s.finished FROM models m LEFT JOIN sessions s ON s.id = m.session "
                "ORDER BY m.used_s DESC, m.id LIMIT ?", (MOST_ROWS,),
            ).fetchall()  # fmt: skip
            return [self._tenant(db, row, now_s) for row in rows]

    def _tenant(self, db: sqlite3.Connection, row: sqlite3.Row, now_s: float) -> dict[str, Any]:
        """Return the model in the journal's ``row`` as a row of the page: its base, rank and parts, the name of its
        session, the number of its requests by status, the seconds since its last use, the waiting time of its oldest
        request, the number of its optimizer steps, and its last loss (``None`` before the first). ``db`` is the
        connection to the journal, and ``now_s`` the current time in seconds since 1970."""
        model, spec = row["id"], json.loads(row["spec"] or "{}")
        counts = dict.fromkeys((WAITING, DONE, FAILED), 0)
        query = "SELECT status, count(*) AS n FROM requests WHERE model = ? GROUP BY status"
        counts |= {each["status"]: each["n"] for each in db.execute(query, (model,))}
        oldest = "SELECT min(created_s) AS s FROM requests WHERE model = ? AND status = ?"
        since_s = db.execute(oldest, (model, WAITING)).fetchone()["s"]
        steps = "SELECT count(*) AS n FROM requests WHERE model = ? AND kind = 'optim_step' AND status = ?"
        last = (
            "SELECT result FROM requests WHERE model = ? AND kind = 'forward_backward' AND status = ? "
            "AND result IS NOT NULL ORDER BY seq DESC LIMIT 1"
        )
        trained = db.execute(last, (model, DONE)).fetchone()
        return {
            "model": model,
            "base": spec.get("base", ""),
            "rank": spec.get("rank"),
            "parts": spec.get("parts", []),
            "who": str(json.loads(row["facts"] or "{}").get("display_name") or ""),
            "finished": bool(row["finished"]),
            "idle_s": max(0.0, now_s - row["used_s"]),
            **counts,
            "waiting_s": 0.0 if since_s is None else max(0.0, now_s - since_s),
            "steps": db.execute(steps, (model, DONE)).fetchone()["n"],
            "loss": None if trained is None else read_metrics(trained["result"]).get("loss:sum"),
        }

    def queue(self, now_s: float) -> list[dict[str, Any]]:
        """Return the requests that wait to be computed, the oldest first, each with its waiting time in seconds at
        ``now_s``."""
        query = (
            "SELECT model, seq, kind, length(body) AS bytes, created_s FROM requests WHERE status = ? "
            "ORDER BY created_s, seq LIMIT ?"
        )
        with self._reading() as db:
            rows = db.execute(query, (WAITING, MOST_ROWS)).fetchall()
        return [{**dict(row), "waiting_s": max(0.0, now_s - row["created_s"])} for row in rows]

    def samples(self) -> list[dict[str, Any]]:
        """Return the last sampled sequences, the newest first, with their numbers of tokens but without the tokens."""
        query = (
            "SELECT a.number, a.sampler, s.base, s.kind, s.model, a.stop, a.created_s, length(a.prompt) / 4 AS prompt, "
            "length(a.ids) / 4 AS tokens FROM samples a LEFT JOIN samplers s ON s.id = a.sampler "
            "ORDER BY a.number DESC LIMIT ?"
        )
        with self._reading() as db:
            return [dict(row) for row in db.execute(query, (MOST_ROWS,))]

    def sample(self, number: int) -> dict[str, Any]:
        """Return the sampled sequence with the given number: its prompt, tokens, logprobs and the version that sampled
        each token, as lists. Raises :class:`~headrace.base.errors.DataError` if there is no such sequence."""
        query = "SELECT a.*, s.base, s.model FROM samples a LEFT JOIN samplers s ON s.id = a.sampler WHERE a.number = ?"
        with self._reading() as db:
            row = db.execute(query, (number,)).fetchone()
        if row is None:
            raise DataError(
                f"there is no sampled sequence {number}", remedy="choose one of the list: old ones are gone"
            )
        columns = {name: np.frombuffer(row[name], np.int32).tolist() for name in ("prompt", "ids", "versions")}
        logprobs = np.frombuffer(row["logprobs"], np.float32).tolist()
        return {**{name: row[name] for name in ("name", "base", "model", "stop")}, **columns, "logprobs": logprobs}

    def last_training_data(self, model: str) -> list[dict[str, Any]]:
        """Return the data of the last forward_backward requests of a model, the newest request first: the tokens, the
        targets, and the loss inputs of each position. The data of requests before the model's last copy on the disk
        have been deleted."""
        query = (
            "SELECT seq, status, body FROM requests WHERE model = ? AND kind = 'forward_backward' AND length(body) > 0 "
            "ORDER BY seq DESC LIMIT 8"
        )
        with self._reading() as db:
            rows = db.execute(query, (model,)).fetchall()
        return [one for row in rows for one in _read_datum_rows(row)][:MOST_ROWS]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Return a context with a read-only connection to the journal. Raises :class:`~headrace.base.errors.DataError`
        if it cannot be read."""
        file = self.directory / JOURNAL_FILE
        try:
            with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=5.0)) as db:
                db.row_factory = sqlite3.Row
                yield db
        except sqlite3.Error as error:
            raise DataError(f"{file} cannot be read: {error}", remedy="give the state of a headrace tinker") from None


def _read_datum_rows(request_row: sqlite3.Row) -> Iterator[dict[str, Any]]:
    """Decode the training request in a row of the journal's table of requests, and yield a row of the page for each of
    its data, with tokens, targets and loss inputs. Yield nothing if the request cannot be decoded."""
    try:
        request = read_train_request(request_row["body"])
    except DataError:  # the client that sent it received the error
        return
    for place, datum in enumerate(request.data):
        targets = datum.inputs.get("target_tokens", datum.ids_N)
        columns = {
            name: datum.inputs[name].tolist() for name in (WEIGHTS, ADVANTAGES, LOGPROBS) if name in datum.inputs
        }
        yield {
            "seq": request_row["seq"],
            "status": request_row["status"],
            "place": place,
            "loss": request.loss_fn,
            "ids": datum.ids_N.tolist(),
            "targets": targets.tolist(),
            **columns,
        }
