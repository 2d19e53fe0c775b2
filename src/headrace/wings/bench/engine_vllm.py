"""The vLLM side of the engine benchmark, executed by an interpreter that has vLLM for CPUs and no Headrace.

Requests and answers have the format of :mod:`headrace.wings.bench.engine_worker`.
"""

import json
import sys
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Load the model that ``spec`` names with vLLM, and answer the requests on the standard input until it ends."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=spec["model"], dtype="float32", max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False
    )  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0) for n in request["lengths"]]
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answer = {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}
        sys.stdout.write(json.dumps({"ok": answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
