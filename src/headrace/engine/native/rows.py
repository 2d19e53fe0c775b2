"""What is known of each running sequence: columns of numbers, one row per sequence, no gaps between rows.

A sequence that joins takes the first row after the last; when sequences leave, the last ones move into their rows. So
every pass over the running sequences is one operation on plain slices ``[:count]``.

Shape legend: R rows, C columns (the longest context), S stop ids of one request, J rows that join, L rows that leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.native.sampler import seed_key
from headrace.types.episode import StopReason
from headrace.types.messages.controller import Chunk
from headrace.types.messages.engine import GenerateRequest

Index = npt.NDArray[np.int64]
_NO_ID = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Rows that took the places of rows that left."""

    sources: Index
    targets: Index
    length: int
    """Columns of the cache that are in use in any of them."""


class Rows:
    """The columns. ``count`` rows are in use."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.count = 0
        self.request_ids: list[int] = []
        self.last_ids_R = np.zeros(num_rows, np.int64)
        """The newest token of each: what the next pass decodes."""
        self.positions_R = np.zeros(num_rows, np.int64)
        """Where that token stands in its sequence."""
        self.temperatures_R = np.zeros(num_rows, np.float32)
        self.keys_R = np.zeros(num_rows, np.uint64)
        self._sampled_R = np.zeros(num_rows, np.int64)
        self._flushed_R = np.zeros(num_rows, np.int64)
        self._limit_R = np.zeros(num_rows, np.int64)
        self._stops_RS = np.full((num_rows, 1), _NO_ID, np.int64)
        self._ids_RC = np.zeros((num_rows, num_columns), np.int32)
        self._logprobs_RC = np.zeros((num_rows, num_columns), np.float32)
        self._versions_RC = np.zeros((num_rows, num_columns), np.int32)

    def join(self, requests: Sequence[GenerateRequest]) -> None:
        """Give each request the next row; its prompt's last token counts as its newest."""
        for row, request in enumerate(requests, self.count):
            sampling = request.sampling
            self.request_ids.append(request.request_id)
            self.last_ids_R[row] = request.prompt_ids_T[-1]
            self.positions_R[row] = len(request.prompt_ids_T) - 1
            self.temperatures_R[row] = sampling.temperature
            self.keys_R[row] = seed_key(sampling.seed)
            self._sampled_R[row] = self._flushed_R[row] = 0
            self._limit_R[row] = sampling.max_new_tokens
            self._set_stops(row, sampling.stop_ids)
        self.count += len(requests)

    def record(self, ids_R: Index, logprobs_R: npt.NDArray[np.float32], version: int) -> None:
        """Append one sampled token to every row."""
        rows = np.arange(self.count)
        column = self._sampled_R[: self.count]
        self._ids_RC[rows, column] = ids_R
        self._logprobs_RC[rows, column] = logprobs_R
        self._versions_RC[rows, column] = version
        self.last_ids_R[: self.count] = ids_R
        self.positions_R[: self.count] += 1
        column += 1

    def stopped(self) -> npt.NDArray[np.bool_]:
        """Rows whose newest token ends them."""
        stops = self._stops_RS[: self.count]
        ended: npt.NDArray[np.bool_] = (self.last_ids_R[: self.count, None] == stops).any(axis=1)
        return ended

    def full(self) -> npt.NDArray[np.bool_]:
        """Rows that may grow no further."""
        return self._sampled_R[: self.count] >= self._limit_R[: self.count]

    def due(self, flush_tokens: int) -> npt.NDArray[np.bool_]:
        """Rows that hold ``flush_tokens`` tokens that have not left."""
        return (self._sampled_R - self._flushed_R)[: self.count] >= flush_tokens

    def chunk(self, row: int, stop_reason: StopReason | None = None, error: str = "") -> Chunk:
        """The row's tokens since its last chunk."""
        span = slice(self._flushed_R[row], self._sampled_R[row])
        self._flushed_R[row] = self._sampled_R[row]
        return Chunk(
            request_id=self.request_ids[row],
            ids_T=self._ids_RC[row, span].copy(),
            logprobs_T=self._logprobs_RC[row, span].copy(),
            versions_T=self._versions_RC[row, span].copy(),
            stop_reason=stop_reason,
            error=error,
        )

    def forget_last(self, row: int) -> None:
        """Take back the newest token of ``row``."""
        self._sampled_R[row] -= 1

    def leave(self, leaving_L: Index) -> Moves:
        """Free these rows; the last rows move into the gaps."""
        left = self.count - len(leaving_L)
        stays = np.ones(self.count, bool)
        stays[leaving_L] = False
        targets = np.flatnonzero(~stays[:left])
        sources = left + np.flatnonzero(stays[left:])
        for column in self._columns():
            column[targets] = column[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.request_ids[target] = self.request_ids[source]
        del self.request_ids[left:]
        self.count = left
        return Moves(sources=sources, targets=targets, length=int(self.positions_R[sources].max(initial=0)))

    def _columns(self) -> list[npt.NDArray[np.generic]]:
        return [
            self.last_ids_R, self.positions_R, self.temperatures_R, self.keys_R, self._sampled_R, self._flushed_R,
            self._limit_R, self._stops_RS, self._ids_RC, self._logprobs_RC, self._versions_RC,
        ]  # fmt: skip

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stops_RS.shape[1]
        if missing > 0:
            self._stops_RS = np.pad(self._stops_RS, ((0, 0), (0, missing)), constant_values=_NO_ID)
        self._stops_RS[row] = _NO_ID
        self._stops_RS[row, : len(stop_ids)] = stop_ids
