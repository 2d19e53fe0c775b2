"""A module on the path of a vLLM whose kernels are interpreted. Triton's interpreter cannot run one of them (the
counter of a ``tl.range`` is a plain number there), so vLLM's version of it in torch is used."""

import importlib.abc
import importlib.util
import sys
from typing import Any

TOP_K = "vllm.v1.sample.ops.topk_topp_sampler"


class WithoutTriton(importlib.abc.MetaPathFinder):
    """An import hook that loads that module as if Triton were missing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of that module; ``None`` for all others."""
        if name != TOP_K:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            module.HAS_TRITON = False

        spec.loader.exec_module = loaded
        return spec


if __name__ == "sitecustomize":  # only when Python itself imports it at start-up
    sys.meta_path.insert(0, WithoutTriton())
