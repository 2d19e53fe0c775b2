"""What a GPU would refuse or have to wait for, on a claimed device."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from headrace.testing.claimed.device import WORK


def refused(act: Callable[[], object]) -> str:
    """The error of an operation; empty if there is none."""
    try:
        act()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    told = {
        "mixed": refused(lambda: here + there),
        "product": refused(lambda: torch.ones(2, 3, device="cuda") @ there),
        "numpy": refused(here.numpy),
        "data": refused(lambda: setattr(here, "data", there)),
    }
    layer = torch.nn.Linear(3, 2).to("cuda")
    layer(here).sum().backward()
    told["gradient"] = str(layer.weight.grad.device)  # type: ignore[union-attr]
    pair, turn = torch.ones(1, 2, device="cuda", requires_grad=True), torch.tensor([1j], device="cuda")
    torch.view_as_real(torch.view_as_complex(pair) * turn)[0, 0].backward()  # whose gradient is conjugated
    told["complex"] = str(pair.grad.tolist())  # type: ignore[union-attr]
    before = torch.cuda.memory_allocated()
    held = torch.zeros(1000, device="cuda")
    view = held[10:].view(9, 110)
    memory = [torch.cuda.memory_allocated() - before]
    del held, view
    memory.append(torch.cuda.memory_allocated() - before)
    counts = {}
    acts = {
        "item": here.sum().item, "cpu": here.cpu, "list": lambda: here[[0, 2]], "mask": lambda: here[here > 0],
        "upload": lambda: there.to("cuda"),
        "several": lambda: torch._foreach_copy_([here, here], [there, here]),
        "nothing": lambda: (here * 2).view(3, 1), "wait": torch.cuda.synchronize,
    }  # fmt: skip
    for name, act in acts.items():
        WORK.reset()
        act()
        counts[name] = {kind: count for kind, count in WORK.counts.items() if kind in ("upload", "download", "wait")}
    print(json.dumps({"told": told, "memory": memory, "counts": counts, "line": next(iter(WORK.places))[1]}))
