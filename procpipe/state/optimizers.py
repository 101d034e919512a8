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
from procpipe.state.mapped import Mapped
from procpipe.state.sharded import Shards

#: Entries of a group that identify its parameters, so they are not options of each.
_NOT_OPTIONS = ("params", "param_names")

#: An entry of a parameter's state that torch leaves on the CPU, but where it must be elsewhere.
_STEP = "step"


class Names:
    """One optimizer, several or none, and what their parameters are called in the full model.

    Attributes:
        shared: the names of parameters that other stages have, too.
        saved_elsewhere: those of them whose state an earlier stage saves.

    Raises:
        ValueError: a parameter of the optimizers has no name, or several optimizers have it.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None
    ) -> None:
        several = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.optimizers: list[Optimizer] = list(several or ())
        self._of = {parameter: name for name, parameter in module.named_parameters()}
        self.shared: tuple[str, ...] = ()
        self.saved_elsewhere: set[str] = set()
        stand_in: Sequence[Tensor] = ()
        if isinstance(module, Stage):
            record = module._record()
            stand_in, self.shared = record.stand_in, tuple(record.shared)
            firsts = record.shared.items()
            self.saved_elsewhere = {name for name, first in firsts if first != record.stage}
        self._check_parameters(stand_in)

    def _check_parameters(self, stand_in: Sequence[Tensor]) -> None:
        """Check that each parameter of an optimizer has a name, and one optimizer only."""
        seen: set[Tensor] = set()
        for parameter in (p for _, _, group in self.groups() for p in group["params"]):
            if parameter not in self._of and not any(parameter is one for one in stand_in):
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "one of the model's layers, so it has no name to be saved under: give it an "
                    "optimizer of its own, and save both in extra"
                )
            if parameter in seen:
                raise ValueError(
                    f"two optimizers have the parameter {self._of.get(parameter)}: each can be "
                    "saved for one optimizer only"
                )
            seen.add(parameter)

    def groups(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield each group after the index of its optimizer and its own."""
        for k, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                yield k, g, group

    def named(self) -> Iterator[tuple[Optimizer, Tensor, str]]:
        """Yield the parameters that have names, each after its optimizer."""
        for k, _, group in self.groups():
            for parameter, name in zip(group["params"], self.in_group(group), strict=True):
                if name is not None:
                    yield self.optimizers[k], parameter, name

    def all(self) -> list[str]:
        """Return the names of all parameters that have one."""
        return [name for *_, name in self.named()]

    def in_group(self, group: dict[str, Any]) -> list[str | None]:
        """Return the names of a group's parameters; None for a stage's stand-in."""
        return [self._of.get(parameter) for parameter in group["params"]]


# -- to files ------------------------------------------------------------------------------------


def state_of(names: Names) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter that this stage saves; tensors are the optimizer's own."""
    found = {}
    for optimizer in names.optimizers:
        packed = optimizer.state_dict()
        for group, numbered in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            for number, name in zip(numbered["params"], names.in_group(group), strict=True):
                if name is not None and name not in names.saved_elsewhere:
                    found[name] = dict(packed["state"].get(number, {}))
    return found


def groups_of(names: Names, state: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the groups of each optimizer: ``params``, with their parts in ``state``; options."""
    groups: list[list[dict[str, Any]]] = [[] for _ in names.optimizers]
    for k, _, group in names.groups():
        members = [name for name in names.in_group(group) if name is not None]
        params = {name: list(state.get(name, ())) for name in members}
        groups[k].append({"params": params, "options": options_of(group)})
    return groups


def shared_options(names: Names) -> dict[str, dict[str, str]]:
    """Return the options, as text, of each parameter that other stages have, too."""
    found: dict[str, dict[str, str]] = {name: {} for name in names.shared if names.optimizers}
    for k, _, group in names.groups():
        options = texts_of(group)
        options["class"] = type(names.optimizers[k]).__qualname__
        found |= {name: options for name in names.in_group(group) if name in found}
    return found


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without what identifies its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def texts_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a group as texts that do not depend on the rank."""
    return {option: _text(value) for option, value in options_of(group).items()}


def _text(option: Any) -> str:
    """Return an option as text; of an object, its class."""
    value = option.tolist() if isinstance(option, Tensor) else option
    is_plain = isinstance(value, (bool, int, float, str, tuple, list, type(None)))
    return repr(value) if is_plain else type(value).__qualname__


def check_shared(of_ranks: Sequence[dict[str, dict[str, str]]]) -> None:
    """Check that all stages that share a parameter have the same options for it.

    Raises:
        ValueError: they do not, so that its copies differ.
    """
    first: dict[str, tuple[int, dict[str, str]]] = {}
    for rank, shared in enumerate(of_ranks):
        for name, options in shared.items():
            other, theirs = first.setdefault(name, (rank, options))
            for option in sorted(options.keys() | theirs.keys()):
                if options.get(option) != theirs.get(option):
                    raise ValueError(
                        f"the optimizer has {name} with {option} = {theirs.get(option)} on rank "
                        f"{other} and {options.get(option)} on rank {rank}, where it has another "
                        "name: the ranks share it, so put it in a group with the same options"
                    )


# -- from files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedOptimizers:
    """What all ranks have saved of their optimizers."""

    state: dict[str, dict[str, Any]]  # by parameter
    parts: dict[str, set[str]]  # by parameter: what of its state was saved
    options: dict[str, dict[str, Any]]  # by parameter
    of_groups: dict[str, dict[str, Any]]  # by place ("<optimizer>.<index>"), of empty groups, too

    @classmethod
    def of(cls, contents: Sequence[Mapping[str, Any]]) -> SavedOptimizers:
        """Merge what the files of all ranks hold as ``optimizer``."""
        found = cls(sharded.merged(of_rank["state"] for of_rank in contents), {}, {}, {})
        having: set[str] = set()
        for of_rank in contents:
            for k, groups in enumerate(of_rank["groups"]):
                for g, group in enumerate(groups):
                    place, options = f"{k}.{g}", group["options"]
                    if place not in found.of_groups or (group["params"] and place not in having):
                        found.of_groups[place] = options
                    if group["params"]:
                        having.add(place)
                    for name, parts in group["params"].items():
                        found.options[name] = options
                        found.parts.setdefault(name, set()).update(parts)
        return found

    def options_by_name(self, names: Names) -> dict[str, dict[str, Any]]:
        """Return the options of this rank's parameters; none of those that were not saved."""
        return {name: self.options.get(name, {}) for name in names.all()}


def faults_of(names: Names, saved: SavedOptimizers, *, strict: bool) -> list[str]:
    """Return what the saved state lacks, contradicts, and has of another dtype."""
    if not saved.of_groups:
        return ["no optimizer was saved, so load without one"] if strict else []
    faults = conflicts(names, saved.options_by_name(names)) + _dtype_faults(names, saved, strict)
    for name in names.all() if strict else ():
        missing = saved.parts.get(name, set()) - saved.state.get(name, {}).keys()
        if name not in saved.options:
            faults.append(f"the optimizer's state of {name} is not in it")
        elif missing:
            faults.append(f"the optimizer's state of {name} lacks {', '.join(sorted(missing))}")
    return faults


def _dtype_faults(names: Names, saved: SavedOptimizers, strict: bool) -> list[str]:
    """Find tensors that the optimizer would convert to another dtype."""
    faults = []
    for optimizer, parameter, name in names.named():
        is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        for part, value in saved.state.get(name, {}).items():
            now = optimizer.state.get(parameter, {}).get(part)
            is_known = is_torchs or isinstance(now, Tensor)
            if not is_known or not isinstance(value, (Tensor, Shards)):
                continue
            dtype = (now if isinstance(now, Tensor) else parameter).dtype
            is_exact = strict and len(value.shape) > 0
            if value.dtype not in (dtype, parameter.dtype) and (
                is_exact or not torch.can_cast(value.dtype, dtype)
            ):
                faults.append(
                    f"{part} of the optimizer's state of {name} has dtype {value.dtype}, but must "
                    f"have {dtype}"
                )
    return faults


def conflicts(names: Names, saved: dict[str, dict[str, Any]]) -> list[str]:
    """Return conflicts: saved options of another optimizer, or different ones in one group."""
    faults = []
    for k, g, group in names.groups():
        optimizer = names.optimizers[k]
        # Of a parameter that is not in the saved state there is nothing to compare.
        members = [name for name in names.in_group(group) if name is not None and saved[name]]
        first = saved[members[0]] if members else {}
        # Either may have more: schedulers and newer versions of torch add options.
        unknown = [option for option in first if option not in group]
        missing = [option for option in optimizer.defaults if option not in first]
        if unknown and missing:
            faults.append(
                f"the state of {members[0]} was saved by another kind of optimizer than "
                f"{type(optimizer).__name__}: it has {', '.join(sorted(unknown))}, but not "
                f"{', '.join(sorted(missing))}"
            )
            continue
        for name in members:
            for option in first.keys() | saved[name].keys():
                one, other = first.get(option), saved[name].get(option)
                if not _is_same(one, other):
                    faults.append(
                        f"group {g} of the optimizer holds {members[0]}, saved with {option} = "
                        f"{one}, and {name}, saved with {option} = {other}"
                    )
    return faults


def load_into(
    names: Names,
    saved: SavedOptimizers,
    sources: Mapping[str, tuple[int, str | None]],
    mapped: Mapped,
) -> None:
    """Load what was saved, perhaps with other groups and another balance.

    ``sources`` is the result of ``groups.match``. Beside the state that the optimizers get, no more
    than one tensor is in memory.
    """
    for k, optimizer in enumerate(names.optimizers):
        groups = optimizer.state_dict()["param_groups"]
        state: dict[int, Any] = {}
        for g, (group, numbered) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            members = names.in_group(group)
            numbers = zip(numbered["params"], members, group["params"], strict=True)
            for number, name, parameter in numbers:
                if name is not None and (values := saved.state.get(name)):
                    now = optimizer.state.get(parameter, {})
                    state[number] = _own(values, parameter, mapped, now)
            known = (saved.options[name] for name in members if name in saved.options)
            numbered |= next(known, None) or _of_other_ranks(saved, f"{k}.{g}", sources)
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _of_other_ranks(
    saved: SavedOptimizers, place: str, sources: Mapping[str, tuple[int, str | None]]
) -> dict[str, Any]:
    """Return the options of a group that has no saved parameter on this rank."""
    _, name = sources[place]
    found = saved.of_groups.get(place, {}) if name is None else saved.options.get(name, {})
    return dict(found)


def _own(value: Any, parameter: Tensor, mapped: Mapped, now: Any, part: str = "") -> Any:
    """Return a saved value, with copies of its tensors where the parameter is.

    ``now`` is what the optimizer has in its place; its memory is used where it fits.
    """
    if isinstance(value, (Tensor, Shards)):
        on = torch.device("cpu") if part == _STEP else parameter.device
        form = torch.Size(value.shape), value.dtype, on
        is_fit = type(now) is Tensor and (now.shape, now.dtype, now.device) == form
        own = now if is_fit else torch.empty(value.shape, dtype=value.dtype, device=on)
        if isinstance(value, Shards):
            value.copy_into(own, mapped)
        else:
            mapped.copy(value, own)
        return sharded.like(own, parameter)
    if isinstance(value, dict):
        now = now if isinstance(now, dict) else {}
        return {k: _own(item, parameter, mapped, now.get(k), k) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(item, parameter, mapped, None) for item in value)
    return value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
