"""The weights of sampling sessions in memory: who is unloaded, and who is not."""

from functools import partial

import torch

from headrace.wings.tinker.samplers import AdapterPasses, SamplerWeights
from headrace.wings.tinker.weights import WholeTensors


def weights_of(value):
    return WholeTensors(tensors={"w": torch.tensor([float(value)])})


class NoPasses(AdapterPasses):
    def __init__(self):
        pass


def test_a_sampler_that_begins_while_all_others_sample_keeps_its_weights():
    held = SamplerWeights(NoPasses(), max_loaded=2)
    found = {name: weights_of(version) for version, name in enumerate("abc")}
    for version, name in enumerate(found):
        held.use(name, partial(lambda *each: each, found[name], version))
    assert {name: held.weights_of(name) for name in "abc"} == found
    held.release("b")
    assert (held.weights_of("b"), held.weights_of("c")) == (None, found["c"]), "one too many, and it is idle"


def test_weights_that_were_published_while_older_ones_were_read_stay():
    held, newer = SamplerWeights(NoPasses(), max_loaded=2), weights_of(2)

    def load():
        held.put("a", newer, 2)
        return weights_of(1), 1

    held.use("a", load)
    assert held.weights_of("a") is newer
