"""Compiled kernels for models in float32 or bfloat16 on a CPU. They are batch-invariant: the result for a token does
not depend on the rest of the batch. Torch's own operations replace them where they are not available.

:mod:`.fuse` installs them in an engine's model, :mod:`.deterministic` in a learner's model; :mod:`.ops` has the Python
functions, and :mod:`.build` compiles them.
"""
