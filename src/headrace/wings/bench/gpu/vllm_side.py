"""The program that measures vLLM for ``headrace bench gpu``. An interpreter that has vLLM, and needs no Headrace, runs
it; it prints its figures as one JSON object on a line of its own."""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Sample answers to the prompts of ``spec`` twice with vLLM, and print the tokens per second of the second time."""
    import vllm  # type: ignore[import-not-found]

    model = vllm.LLM(
        model=spec["model"], dtype=spec["dtype"], max_model_len=spec["context"], max_num_seqs=spec["sequences"],
        enable_prefix_caching=False, gpu_memory_utilization=0.8,
    )  # fmt: skip
    params = vllm.SamplingParams(max_tokens=spec["new"], ignore_eos=True, temperature=1.0)
    prompts = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    seconds = tokens = 0.0
    for _ in range(2):  # the first time captures graphs
        start_s = time.perf_counter()  # noqa: TID251 - this interpreter has no headrace.base.clock
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s  # noqa: TID251 - as above
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    sys.stdout.write("\n" + json.dumps({"tok_s": tokens / seconds, "vllm": vllm.__version__}) + "\n")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
