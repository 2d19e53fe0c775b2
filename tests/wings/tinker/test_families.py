"""Models of many architectures behind one server: what is sampled is what was trained."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from tinker import types

from tests.models.families import FAMILIES, FAST, by_transformers, family
from tests.wings.tinker.serving import NAME, client, datum, served

IDS = [5, 6, 7, 8, 9, 7]
NO_MLP = {"qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "granitemoehybrid", "nemotron_h", "jamba", "mamba2"} | {
    *("qwen3_vl_moe", "llama4", "llama4_text", "gemma4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss"),
    "qwen3_moe",
}
"""The families whose feed-forward parts get no adapter: there are none, or they are experts."""


def by_peft(base: Path, name: str, adapter: Path, ids: list[int]) -> np.ndarray:
    """Return the logprobs of ``ids[1:]`` as transformers and peft compute them in float64 from a downloaded adapter."""
    model = peft.PeftModel.from_pretrained(by_transformers(base, name), adapter).double().eval()
    model.set_experts_implementation("eager")  # the others do not know float64
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # merging is what it warns of
@pytest.mark.parametrize(
    "name", [name if name in FAST[1:2] else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_sampler_samples_from_the_adapter_that_was_trained(name, tmp_path):
    with served(family(tmp_path / "model", name), tmp_path / "state") as found, client(*found) as service:
        create = service.create_lora_training_client
        trained = create(base_model=NAME, rank=4, seed=1, train_mlp=name not in NO_MLP).result()
        if name in NO_MLP:
            with pytest.raises(Exception, match=r"train_mlp=True|no layer of mlp"):
                create(base_model=NAME, rank=4, seed=1).result()
        for _ in range(3):
            trained.forward_backward([datum(IDS)], "cross_entropy").result()
            trained.optim_step(types.AdamParams(learning_rate=0.1)).result()
        sampler = trained.save_weights_and_get_sampling_client().result()
        base = service.create_sampling_client(base_model=NAME).result()
        params = types.SamplingParams(max_tokens=12, seed=1)
        asked = [
            each.sample(prompt=types.ModelInput.from_ints(IDS), num_samples=2, sampling_params=params)
            for each in (sampler, base, sampler)
        ]  # rows of both in one pass
        sequence = asked[0].result().sequences[0]
        ids = [*IDS, *sequence.tokens]
        scored = trained.forward([datum(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        others = np.array(base.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])
        assert np.abs(scored - others).max() > 0.1
        trained.save_weights_external("end").result()
        (adapter,) = (tmp_path / "state").glob("runs/*/external_weights/end@*")
        exact = by_peft(tmp_path / "model", name, adapter, ids)
        assert np.abs(scored - exact).max() < 3e-5
        assert np.abs(scored[len(IDS) - 1 :] - np.array(sequence.logprobs)).max() < 3e-5
