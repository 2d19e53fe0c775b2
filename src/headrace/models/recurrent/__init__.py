"""Recurrent layers, which pass a state from token to token instead of storing keys and values: convolutions, linear
attention, state spaces.

A *mixer* is the module of such a layer: linear attention with the gated delta rule (Yang et al. 2024), the state space
of Mamba-2 (Dao and Gu 2024), a short convolution. transformers computes whole sequences of one length with it, or one
token per sequence over its own cache. Headrace computes flattened tokens of many sequences. So in a call with a plan
(:mod:`headrace.models.attention`), the functions of a mixer that use more than one token are replaced by *recurrences*
(:mod:`.base`), which keep the sequences separate. Everything else, such as projections, gates and norms, is the mixer's
own code (:mod:`.mixers`).
"""

from headrace.models.recurrent.base import Key, Recurrence, StateShape, Tensors
from headrace.models.recurrent.mixers import GIVEN, RecurrentForward, foreign_mixer, install, recurrent_layers
from headrace.models.recurrent.states import StatePass, StatePool, state_shapes

__all__ = [
    "GIVEN",
    "Key",
    "Recurrence",
    "RecurrentForward",
    "StatePass",
    "StatePool",
    "StateShape",
    "Tensors",
    "foreign_mixer",
    "install",
    "recurrent_layers",
    "state_shapes",
]
