"""Compiled kernels for models in float32 on a CPU: batch-invariant, with torch's own operations as a fallback.

:mod:`.fuse` installs them in an engine's model, :mod:`.deterministic` in a learner's; :mod:`.ops` has the functions,
:mod:`.build` compiles them.
"""
