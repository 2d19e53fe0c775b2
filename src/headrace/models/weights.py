"""The tensors that travel from the learner to the engines."""

from __future__ import annotations

from torch import Tensor, nn


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of ``model`` once, by name, in the order of its modules; a tied one under its first name.

    The tensors are the parameters themselves: pointing one elsewhere (``tensor.data = view``) changes the model, in
    every place where the parameter is tied.

    >>> layer = nn.Linear(2, 3)
    >>> {name: tuple(tensor.shape) for name, tensor in weight_tensors(layer).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    return dict(model.named_parameters(remove_duplicate=True))
