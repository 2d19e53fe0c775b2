"""Compiled kernels for models in float32 on a CPU: batch-invariant, with torch's own operations to fall back to.

:mod:`.fuse` puts them into an engine's model, :mod:`.deterministic` into a learner's; :mod:`.ops` holds the functions,
:mod:`.build` compiles them.
"""
