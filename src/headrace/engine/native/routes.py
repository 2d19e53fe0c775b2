"""The routing of cached tokens (the experts that each mixture-of-experts layer selected for them), stored beside their
keys and values.

The routing of a token is stored at its position in its block, so sequences that share a block (siblings with one
prompt, or a fork and its parent) share its routing, too. Requests that record their routing use another salt in their
digests, so they match only blocks whose routing is stored.

Shape legend: N tokens of a pass, P blocks, S positions of a block, L mixture-of-experts layers, K experts per token, R
tokens whose routing is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from headrace.base.types.recorded import Experts, Routing
from headrace.models.paged.base import BLOCK, Geometry
from headrace.models.routing import RoutingRecorder, find_routing


class RoutingStore:
    """The experts of all tokens in the cache's ``num_blocks`` blocks. No hook is installed in the model and no memory
    is allocated before :meth:`open`."""

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        """Prepare the store for ``model`` and a cache of ``num_blocks`` blocks."""
        self._model = model
        self._num_blocks = num_blocks
        self._recorder: RoutingRecorder | None = None
        """The hooks in the model that record its routing; ``None`` before :meth:`open`."""
        self._experts_PSLK: np.ndarray[tuple[int, ...], np.dtype[Any]] = np.zeros((0, BLOCK, 0, 0), np.uint8)
        """The K experts of every layer L, for each of the S places of each block P; empty before :meth:`open`."""

    @property
    def num_bytes(self) -> int:
        """The memory of the store, in bytes."""
        return self._experts_PSLK.nbytes

    def open(self) -> str:
        """Install the recorder and allocate the store, at the first call. Return the reason why the routing cannot be
        recorded; the empty string if it can.

        Raises :class:`~headrace.base.errors.ModelError` for a mixture of experts whose architecture is not supported.
        """
        if self._recorder is not None:
            return ""
        routed = find_routing(self._model)
        if routed is None:
            return "the model has no experts"
        self._recorder = RoutingRecorder(routed)
        self._experts_PSLK = np.zeros((self._num_blocks, BLOCK, routed.num_layers, routed.top_k), routed.dtype)
        return ""

    def record(self, enabled: bool) -> None:
        """Record the routing of the next pass if ``enabled``, and else not."""
        if self._recorder is not None:
            self._recorder.on = enabled

    def store(self, geometry: Geometry) -> None:
        """Store the experts of the pass that has just run, at the blocks and positions of its tokens, which are in
        ``geometry``."""
        if self._recorder is None or not self._recorder.on:
            return
        positions_N = geometry.positions_N()
        rows_N = np.repeat(np.arange(len(geometry.counts_R)), geometry.counts_R)
        blocks_N = geometry.tables_RB[rows_N, positions_N // BLOCK]
        self._experts_PSLK[blocks_N, positions_N % BLOCK] = self._recorder.take()

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the routing of the blocks ``sources`` to the blocks ``targets``, as the cache copies their keys and
        values."""
        if self._recorder is not None:
            self._experts_PSLK[targets] = self._experts_PSLK[sources]

    def read(self, table: list[int], span: slice, num_computed: int) -> Routing:
        """Return the routing of the tokens at the positions ``span`` of the sequence whose blocks are ``table``. Tokens
        from position ``num_computed`` on have not been computed, and are marked as unknown."""
        places = np.arange(span.start, min(span.stop, num_computed))
        experts_RLK: Experts = self._experts_PSLK[np.array(table, np.int64)[places // BLOCK], places % BLOCK]
        return Routing(known_T=np.arange(span.start, span.stop) < num_computed, experts_RLK=experts_RLK)
