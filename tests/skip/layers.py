"""Layers that stash and pop, for the tests of skip tensors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from procpipe.skip import Namespace, pop, skippable, stash


def stasher(*names: str, times: int = 1) -> nn.Module:
    """Return a layer that stashes its input under each name, and passes on its double."""

    @skippable(stash=dict.fromkeys(names, times))
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
            for name in names:
                yield stash(name, input)
            return input * 2

    return Stash()


def popper(*names: str) -> nn.Module:
    """Return a layer that adds the tensor popped under each name to its input."""

    @skippable(pop=names)
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
            for name in names:
                skip = yield pop(name)
                input = input + skip
            return input

    return Pop()


def drawn(actions: str, namespace: Namespace | None = None) -> nn.Module:
    """Return a layer that declares actions such as ``+a -b``, for checks that run no forward.

    It stashes ``a`` and pops ``b``; ``+c*2`` is popped by two layers.
    """
    declarations = [action[1:].partition("*") for action in actions.split() if action[0] == "+"]

    @skippable(
        stash={name: int(times or 1) for name, _, times in declarations},
        pop=[action[1:] for action in actions.split() if action[0] == "-"],
    )
    class Drawn(nn.Module):
        pass

    return Drawn() if namespace is None else isolated(Drawn(), namespace)


def isolated(layer: nn.Module, namespace: Namespace, **options: Any) -> nn.Module:
    """Isolate a layer; type checkers do not see what a class decorator adds."""
    layer.isolate(namespace, **options)  # type: ignore[operator]
    return layer
