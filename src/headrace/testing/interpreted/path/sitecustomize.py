"""On the path of a vLLM whose kernels are interpreted: Triton's interpreter cannot run one of them (the counter of a
``tl.range`` is a plain number there), for which vLLM has the same in torch."""

import importlib.abc
import importlib.util
import sys
from typing import Any

TOP_K = "vllm.v1.sample.ops.topk_topp_sampler"


class WithoutTriton(importlib.abc.MetaPathFinder):
    """Loads that module as where there is no Triton."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Of that module alone."""
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


if __name__ == "sitecustomize":  # where Python looks for it by itself
    sys.meta_path.insert(0, WithoutTriton())
