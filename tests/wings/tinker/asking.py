"""What tests ask a server for, in one line each."""

from tinker import types

from tests.wings.tinker.serving import NAME, datum

IDS = [5, 9, 11, 7, 30, 22, 8, 14, 6, 19, 33, 12]
ADAM = types.AdamParams(learning_rate=1e-2)


def create_model(service, **options):
    return service.create_lora_training_client(base_model=NAME, **{"rank": 4, "seed": 1, **options}).result()


def sample(sampler, ids=IDS, n=1, **options):
    params = types.SamplingParams(**{"max_tokens": 8, "seed": 3, **options})
    return sampler.sample(prompt=types.ModelInput.from_ints(ids), num_samples=n, sampling_params=params).result()


def step(trained, data=None):
    future = trained.forward_backward(data or [datum(IDS)], "cross_entropy")
    trained.optim_step(ADAM).result()
    return future.result()
