"""The copy of a model that is recorded, so that the model does not change; what is opened of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from procpipe.torch_internals import has_hooks, is_compiled, pytree

META = torch.device("meta")

#: The modules of torch that may be opened; its others use what is inside in ways of their own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OPENED = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


def copied(value: Any, device: torch.device = META) -> Any:
    """Copy a module, or nested values, with zeros for tensors: on meta they need no memory."""
    is_module = isinstance(value, nn.Module)
    found = (t for _, t in owned(value)) if is_module else pytree.tree_leaves(value)
    memo: dict[int, Any] = {}
    for tensor in found:
        if isinstance(tensor, Tensor):
            needs_grad = tensor.requires_grad
            made = torch.zeros_like(tensor, device=device).requires_grad_(needs_grad)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, needs_grad) if is_parameter else made
    return copy.deepcopy(value, memo)


def owned(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and plain tensors that a model's modules have, by name."""
    for name, module in model.named_modules(remove_duplicate=False):
        held = (module._parameters, module._buffers, vars(module))
        for key, tensor in chain.from_iterable(each.items() for each in held):
            if isinstance(tensor, Tensor):
                yield f"{name}.{key}".lstrip("."), tensor


def opened_names(
    model: nn.Module, largest: float, whole: Collection[type[nn.Module]]
) -> dict[str, None]:
    """Return the names of the modules whose forward is recorded; the others stay whole.

    ``largest`` is how many elements of parameters a module may have that is not opened.
    """
    kept = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    found: dict[str, None] = {}

    def visit(name: str, module: nn.Module) -> None:
        kind = type(module)
        is_whole = (
            sum(p.numel() for p in module.parameters()) <= largest
            or isinstance(module, tuple(whole))
            or kind.__qualname__ in kept
            or (kind.__module__.startswith("torch.") and kind not in _OPENED)
            or is_compiled(module)
            or has_hooks(module)
            or parametrize.is_parametrized(module)
            or module.training != model.training
            or not any(True for _ in module.children())
        )
        if module is model or kind in _CONTAINERS or not is_whole:
            found[name] = None
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}".lstrip("."), child)

    visit("", model)
    return found
