"""The copy of a model that is recorded, so that the model itself does not change.

On the meta device it needs no memory. Where the forward cannot run there, it shares the model's
parameters, and has copies of what a forward may change.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from procpipe.torch_internals import has_hooks, is_compiled

META = torch.device("meta")

#: The modules of torch that may be opened; its others use what is inside in ways of their own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OPENED = (
    *_CONTAINERS,
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def copied(model: nn.Module, device: torch.device | None) -> nn.Module:
    """Copy a model onto the meta device; without a device, with its parameters themselves."""
    return copy.deepcopy(
        model, {id(tensor): stand_in(tensor, device) for _, tensor in owned(model)}
    )


def stand_in(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a tensor without values on a device; without a device a copy, or the parameter."""
    is_parameter = isinstance(tensor, nn.Parameter)
    if device is None:
        return (
            tensor if is_parameter else tensor.detach().clone().requires_grad_(tensor.requires_grad)
        )
    made = torch.empty_like(tensor, device=device).requires_grad_(tensor.requires_grad)
    return nn.Parameter(made, tensor.requires_grad) if is_parameter else made


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

    ``largest`` is the largest share of the parameters that a module has which is not opened.
    """
    total = sum(p.numel() for p in model.parameters()) or 1
    kept = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    found: dict[str, None] = {}

    def visit(name: str, module: nn.Module) -> None:
        is_large = sum(p.numel() for p in module.parameters()) > largest * total
        is_named = isinstance(module, tuple(whole)) or type(module).__qualname__ in kept
        is_opened = is_large and not is_named and _can_be_opened(module)
        if module is model or type(module) in _CONTAINERS or is_opened:
            found[name] = None
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}".lstrip("."), child)

    visit("", model)
    return found


def _can_be_opened(module: nn.Module) -> bool:
    is_torchs = type(module).__module__.startswith("torch.")
    return not (
        (is_torchs and type(module) not in _OPENED)
        or is_compiled(module)
        or has_hooks(module)
        or parametrize.is_parametrized(module)
        or not any(True for _ in module.children())
    )
