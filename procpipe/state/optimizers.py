"""The state of optimizers under the names of parameters in the full model.

An optimizer numbers its parameters, and the numbers depend on the number of stages. So a rank saves

    state      by parameter: step, exp_avg, momentum_buffer, …, nested as the optimizer has it
    groups     by optimizer and index: the group's options, and by parameter the names of its state

A group takes the options that its parameters were saved with: by this rank, if it had them, else by
the first that had. A group without a parameter takes those of the saved group with its index:

    group            saved on rank 0    on rank 1         loaded on rank 0    rank 1    rank 2
    0  decay         a, b               c                 a                   b         c
    1  no decay      -                  d                 as d                as d      d
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from procpipe.stage import Stage
from procpipe.state import sharded
from procpipe.state.keys import few
from procpipe.state.values import Stored, replaced

#: Entries of a group that identify its parameters, so they are not options of each.
_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class Parameter:
    """A parameter of an optimizer: its number there, and its state; tensors are those in use."""

    number: int
    tensor: Tensor
    state: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A group of an optimizer's parameters, by their names in the full model."""

    place: tuple[int, int]  # the index of its optimizer, and its own
    optimizer: Optimizer
    packed: dict[str, Any]  # as in the optimizer's state dict
    parameters: dict[str, Parameter]

    @property
    def options(self) -> dict[str, Any]:
        """What holds for each parameter."""
        return {key: value for key, value in self.packed.items() if key not in _NOT_OPTIONS}


def groups_of(module: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Group]:
    """Return the groups of one optimizer, of several or of none.

    Raises:
        ValueError: a parameter of the optimizers has no name, or several optimizers have it.
    """
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    stand_in = set(module._stand_in if isinstance(module, Stage) else ())
    several = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    found: list[Group] = []
    seen: set[Tensor] = set()
    for k, one in enumerate(several or ()):
        packed = one.state_dict()
        for g, of_group in enumerate(packed["param_groups"]):
            parameters = {}
            tensors = one.param_groups[g]["params"]
            for number, tensor in zip(of_group["params"], tensors, strict=True):
                if tensor not in stand_in:
                    _check(tensor, names, seen)
                    state = dict(packed["state"].get(number, {}))
                    parameters[names[tensor]] = Parameter(number, tensor, state)
            found.append(Group((k, g), one, of_group, parameters))
    return found


def _check(tensor: Tensor, names: Mapping[Tensor, str], seen: set[Tensor]) -> None:
    """Check that a parameter has a name, and one optimizer only."""
    if tensor not in names:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(tensor.shape)} that is not one of the "
            "model's layers, so it has no name to be saved under: give it an optimizer of its own, "
            "and save both in extra"
        )
    if tensor in seen:
        raise ValueError(
            f"two optimizers have the parameter {names[tensor]}: each can be saved for one "
            "optimizer only"
        )
    seen.add(tensor)


# -- to files ------------------------------------------------------------------------------------


def state_of(groups: Sequence[Group], module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter that no earlier stage has, too."""
    state = {name: each.state for group in groups for name, each in group.parameters.items()}
    if isinstance(module, Stage):
        elsewhere = module._tied.elsewhere
        state = {name: of_it for name, of_it in state.items() if name not in elsewhere}
    return state


def saved_groups(groups: Sequence[Group]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the options of each group, and of its parameters the names of their state."""
    return {
        group.place: {
            "params": {name: list(each.state) for name, each in group.parameters.items()},
            "options": group.options,
        }
        for group in groups
    }


# -- from files ----------------------------------------------------------------------------------


class SavedOptimizers:
    """What ranks have saved of their optimizers.

    Attributes:
        state: by parameter.
        groups: by parameter: the group that had it, on the first of these ranks that had it.
        of_place: groups by their places; with a parameter, if any rank had one there.
    """

    def __init__(self, contents: Sequence[Mapping[str, Any]]) -> None:
        self.state = sharded.merged(contents, "state")
        self.groups: dict[str, dict[str, Any]] = {}
        self.of_place: dict[tuple[int, int], dict[str, Any]] = {}
        of_ranks = replaced([of_rank["groups"] for of_rank in contents], Stored, Stored.copy)
        groups = [each for of_rank in of_ranks for each in of_rank.items()]
        for place, group in sorted(groups, key=lambda each: not each[1]["params"]):
            self.of_place.setdefault(place, group)
            self.groups = dict.fromkeys(group["params"], group) | self.groups


def faults_of(groups: Sequence[Group], saved: SavedOptimizers, *, strict: bool) -> list[str]:
    """Return what the saved state lacks, and what is of another kind."""
    if groups and not saved.of_place:
        return ["no optimizer was saved, so load without one"] if strict else []
    faults: list[str] = []
    for group in groups:
        faults += few(_options_faults(group, saved))
        for name, parameter in group.parameters.items() if strict else ():
            state, of_it = saved.state.get(name, {}), f"the optimizer's state of {name}"
            if name not in saved.groups:
                faults.append(f"{of_it} is not in it")
            elif missing := set(saved.groups[name]["params"][name]) - state.keys():
                faults.append(f"{of_it} lacks {', '.join(sorted(missing))}")
            # Torch gives tensors of more than one number the parameter's dtype.
            dtype = parameter.tensor.dtype
            is_torchs = type(group.optimizer).load_state_dict is Optimizer.load_state_dict
            faults += [
                f"{part} of {of_it} has dtype {value.dtype}, which torch would make {dtype}"
                for part, value in state.items()
                if is_torchs and isinstance(value, Stored) and value.shape and value.dtype != dtype
            ]
    return faults


def _options_faults(group: Group, saved: SavedOptimizers) -> Iterator[str]:
    """Yield how options differ that a group is to have, and whether its optimizer lacks them."""
    names = [name for name in group.parameters if name in saved.groups]
    if not names:
        return
    first, options = names[0], saved.groups[names[0]]["options"]
    # Either may have more: schedulers and newer versions of torch add options.
    unknown, missing = options.keys() - group.options, group.optimizer.defaults.keys() - options
    if unknown and missing:
        yield (
            f"the state of {first} was saved by another kind of optimizer than "
            f"{type(group.optimizer).__name__}: it has {', '.join(sorted(unknown))}, but not "
            f"{', '.join(sorted(missing))}"
        )
    ours = replaced(options, Tensor, Tensor.tolist)
    for name in names:
        theirs = replaced(saved.groups[name]["options"], Tensor, Tensor.tolist)
        others = [
            f"{option} ({ours.get(option)} and {theirs.get(option)})"
            for option in sorted(ours.keys() | theirs.keys())
            if ours.get(option) != theirs.get(option)
        ]
        if others:
            yield f"a group has {first} and {name}, saved with other {', '.join(others)}"


def load_into(groups: Sequence[Group], saved: SavedOptimizers) -> None:
    """Load what was saved, perhaps with other groups and another balance.

    Beside the state that the optimizers get, no more than one tensor is in memory.
    """
    for optimizer, its_groups in groupby(groups, lambda group: group.optimizer):
        state, packed = {}, []
        for group in its_groups:
            known = [saved.groups[name] for name in group.parameters if name in saved.groups]
            if not group.parameters and group.place in saved.of_place:
                known = [saved.of_place[group.place]]
            packed.append(group.packed | (known[0]["options"] if known else {}))
            for name, parameter in group.parameters.items():
                if name not in saved.groups:
                    state[parameter.number] = parameter.state
                elif values := saved.state.get(name):
                    state[parameter.number] = _own(values, parameter.tensor, parameter.state)
        optimizer.load_state_dict({"state": state, "param_groups": packed})


def _own(value: Any, parameter: Tensor, now: Any, part: str = "") -> Any:
    """Return a saved value, with copies of its tensors where the parameter is.

    ``now`` is what the optimizer has in its place; its memory is used where it fits.
    """
    if isinstance(value, Stored):
        if sharded.is_sharded(parameter) and value.shape == parameter.shape:
            return sharded.like(value.get(), parameter).clone()  # not the file's memory
        on = torch.device("cpu") if part == "step" else parameter.device  # as torch has it
        form = torch.Size(value.shape), value.dtype, on
        is_fit = type(now) is Tensor and (now.shape, now.dtype, now.device) == form
        return now.copy_(value.get()) if is_fit else value.get().to(on, copy=True)
    if isinstance(value, dict):
        now = now if isinstance(now, dict) else {}
        return {key: _own(item, parameter, now.get(key), key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(item, parameter, None) for item in value)
    return value
