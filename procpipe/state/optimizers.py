"""The state of optimizers under the names of parameters in the full model.

An optimizer numbers its parameters, and the numbers depend on the number of stages. So a rank saves

    state      by parameter: step, exp_avg, momentum_buffer, …, nested as the optimizer has it
    groups     by optimizer and index: the group's options, and by parameter the names of its state

and loads for each parameter the options of the group that had it (groups.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from procpipe.stage import Stage
from procpipe.state import sharded
from procpipe.state.stored import Stored
from procpipe.state.values import replaced

#: Entries of a group that identify its parameters, so they are not options of each.
_NOT_OPTIONS = ("params", "param_names")

#: An entry of a parameter's state that torch leaves on the CPU, but where it must be elsewhere.
_STEP = "step"

#: The index of an optimizer, and of a group in it.
Place = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """A group of an optimizer's parameters, and what they are called in the full model."""

    place: Place
    optimizer: Optimizer
    own: dict[str, Any]  # as the optimizer has it
    names: list[str | None]  # None for a stage's stand-in

    @property
    def members(self) -> dict[str, Tensor]:
        """The parameters that have a name."""
        named = zip(self.names, self.own["params"], strict=True)
        return {name: parameter for name, parameter in named if name is not None}


class Names:
    """One optimizer, several or none, and what their parameters are called in the full model.

    Attributes:
        optimizers: each with its groups.
        shared: of each parameter that other stages have, too, the first of these stages.

    Raises:
        ValueError: a parameter of the optimizers has no name, or several optimizers have it.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None
    ) -> None:
        names: dict[Tensor, str | None] = {p: name for name, p in module.named_parameters()}
        self.shared: Mapping[str, int] = {}
        self._stage = 0
        if isinstance(module, Stage):
            record = module._record()
            self.shared, self._stage = record.shared, record.stage
            names |= dict.fromkeys(record.stand_in)
        several = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.optimizers: list[tuple[Optimizer, list[Group]]] = []
        seen: set[Tensor] = set()
        for k, one in enumerate(several or ()):
            groups = []
            for g, own in enumerate(one.param_groups):
                _check_parameters(own["params"], names, seen)
                groups.append(Group((k, g), one, own, [names[p] for p in own["params"]]))
            self.optimizers.append((one, groups))

    def groups(self) -> Iterator[Group]:
        """Yield the groups of all optimizers."""
        for _, groups in self.optimizers:
            yield from groups

    def is_saved_here(self, name: str) -> bool:
        """Return whether this stage is the first that has a parameter."""
        return self.shared.get(name, self._stage) == self._stage


def _check_parameters(
    parameters: Sequence[Tensor], names: Mapping[Tensor, str | None], seen: set[Tensor]
) -> None:
    """Check that each parameter of a group has a name, and one optimizer only."""
    for parameter in parameters:
        if parameter not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one "
                "of the model's layers, so it has no name to be saved under: give it an optimizer "
                "of its own, and save both in extra"
            )
        if parameter in seen:
            raise ValueError(
                f"two optimizers have the parameter {names[parameter]}: each can be saved for one "
                "optimizer only"
            )
        seen.add(parameter)


# -- to files ------------------------------------------------------------------------------------


def state_of(names: Names) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter that this stage saves; tensors are the optimizer's own."""
    found = {}
    for optimizer, groups in names.optimizers:
        packed = optimizer.state_dict()
        for group, numbered in zip(groups, packed["param_groups"], strict=True):
            for number, name in zip(numbered["params"], group.names, strict=True):
                if name is not None and names.is_saved_here(name):
                    found[name] = dict(packed["state"].get(number, {}))
    return found


def groups_of(names: Names, state: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the groups of each optimizer: ``params``, with their parts in ``state``; options."""
    found: list[list[dict[str, Any]]] = [[] for _ in names.optimizers]
    for group in names.groups():
        options = {key: value for key, value in group.own.items() if key not in _NOT_OPTIONS}
        params = {name: list(state.get(name, ())) for name in group.members}
        found[group.place[0]].append({"params": params, "options": options})
    return found


# -- from files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedOptimizers:
    """What ranks have saved of their optimizers."""

    state: dict[str, dict[str, Any]]  # by parameter
    parts: dict[str, set[str]]  # by parameter: what of its state was saved
    options: dict[str, dict[str, Any]]  # by parameter; one object for all of a group
    of_groups: dict[Place, dict[str, Any]]  # also of groups without a parameter

    @classmethod
    def of(cls, contents: Sequence[Mapping[str, Any]]) -> SavedOptimizers:
        """Merge what the files of all ranks hold as ``optimizer``."""
        found = cls(sharded.merged(contents, "state"), {}, {}, {})
        of_ranks = [
            ((k, g), group)
            for of_rank in contents
            for k, groups in enumerate(replaced(of_rank["groups"], Stored, Stored.read))
            for g, group in enumerate(groups)
        ]
        for place, group in sorted(of_ranks, key=lambda each: not each[1]["params"]):
            found.of_groups.setdefault(place, group["options"])  # first of one with a parameter
            for name, parts in group["params"].items():
                found.options[name] = group["options"]
                found.parts.setdefault(name, set()).update(parts)
        return found


def faults_of(names: Names, saved: SavedOptimizers, *, strict: bool) -> list[str]:
    """Return what the saved state lacks, and what is of another kind or dtype."""
    if not saved.of_groups:
        return ["no optimizer was saved, so load without one"] if strict else []
    faults = []
    for group in names.groups():
        faults += list(_kind_fault(group, saved))
        for name, parameter in group.members.items():
            state, of_it = saved.state.get(name, {}), f"the optimizer's state of {name}"
            missing = saved.parts.get(name, set()) - state.keys()
            if strict and name not in saved.options:
                faults.append(f"{of_it} is not in it")
            elif strict and missing:
                faults.append(f"{of_it} lacks {', '.join(sorted(missing))}")
            for part, value in state.items():
                dtype = _required_dtype(group.optimizer, parameter, part, value, strict=strict)
                if dtype is not None:
                    now = f"{part} of {of_it} has dtype {value.dtype}"
                    faults.append(f"{now}, but must have {dtype}")
    return faults


def _kind_fault(group: Group, saved: SavedOptimizers) -> Iterator[str]:
    """Yield how saved options show another kind of optimizer, if they do."""
    name = next(filter(saved.options.get, group.members), "")
    options = saved.options.get(name, {})
    # Either may have more: schedulers and newer versions of torch add options.
    unknown = [option for option in options if option not in group.own]
    missing = [option for option in group.optimizer.defaults if option not in options]
    if unknown and missing:
        yield (
            f"the state of {name} was saved by another kind of optimizer than "
            f"{type(group.optimizer).__name__}: it has {', '.join(sorted(unknown))}, but not "
            f"{', '.join(sorted(missing))}"
        )


def _required_dtype(
    optimizer: Optimizer, parameter: Tensor, part: str, value: Any, *, strict: bool
) -> torch.dtype | None:
    """Return the dtype to which an optimizer would convert a tensor, where that is refused."""
    now = optimizer.state.get(parameter, {}).get(part)
    is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    if not isinstance(value, Stored) or not (is_torchs or isinstance(now, Tensor)):
        return None
    dtype = (now if isinstance(now, Tensor) else parameter).dtype
    is_exact = strict and len(value.shape) > 0
    is_fit = not is_exact and torch.can_cast(value.dtype, dtype)
    return None if is_fit or value.dtype in (dtype, parameter.dtype) else dtype


def load_into(names: Names, saved: SavedOptimizers, sources: Sequence[Sequence[Any]]) -> None:
    """Load what was saved, perhaps with other groups and another balance.

    ``sources`` is the result of ``groups.match``. Beside the state that the optimizers get, no more
    than one tensor is in memory.
    """
    source_of = {(k, g): name for k, g, name in sources}
    for optimizer, groups in names.optimizers:
        numbers = optimizer.state_dict()["param_groups"]
        state: dict[int, Any] = {}
        for group, numbered in zip(groups, numbers, strict=True):
            members = zip(numbered["params"], group.names, group.own["params"], strict=True)
            for number, name, parameter in members:
                if name is not None and (values := saved.state.get(name)):
                    now = optimizer.state.get(parameter, {})
                    state[number] = _own(values, parameter, now)
            known = next(filter(saved.options.get, group.members), source_of[group.place])
            of_group = saved.of_groups.get(group.place, {})
            numbered |= of_group if known is None else saved.options.get(known, {})
        optimizer.load_state_dict({"state": state, "param_groups": numbers})


def _own(value: Any, parameter: Tensor, now: Any, part: str = "") -> Any:
    """Return a saved value, with copies of its tensors where the parameter is.

    ``now`` is what the optimizer has in its place; its memory is used where it fits.
    """
    if isinstance(value, Stored):
        on = torch.device("cpu") if part == _STEP else parameter.device
        form = torch.Size(value.shape), value.dtype, on
        is_fit = type(now) is Tensor and (now.shape, now.dtype, now.device) == form
        return sharded.like(value.read(now if is_fit else None, device=on), parameter)
    if isinstance(value, dict):
        now = now if isinstance(now, dict) else {}
        return {key: _own(item, parameter, now.get(key), key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(item, parameter, None) for item in value)
    return value
