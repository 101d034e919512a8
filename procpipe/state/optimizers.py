"""The state of optimizers under the names of parameters in the full model.

An optimizer numbers its parameters, and the numbers depend on the number of stages. So the form is
that of torch's ``StateDictOptions(flatten_optimizer_state_dict=True)``:

    optimizer.state.<parameter>.<name>              step, exp_avg, momentum_buffer, …
    optimizer.param_groups.<parameter>.<option>     lr, betas, initial_lr, …
    optimizer.groups.<optimizer>.<index>            all options of a group, once (groups.py)

torch's own function is not used: it runs a step of an optimizer without a state, and refuses the
parameter that stands in for those of a stage with none to train.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from procpipe.errors import SavedStateError
from procpipe.stage import Stage
from procpipe.state import sharded
from procpipe.state.files import Index

STATE, OPTIONS = "optimizer.state", "optimizer.param_groups"
GROUPS = "optimizer.groups"

#: Entries of a group that identify its parameters, so they are not options of each.
_NOT_OPTIONS = ("params", "param_names")


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
            stand_in = module._stand_in
            copies, stage = module._tied.parameters, module._grid.stage
            self.shared = tuple(copy.name for copy in copies)
            self.saved_elsewhere = {copy.name for copy in copies if copy.stages[0] != stage}
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


def values_of(names: Names) -> dict[str, Any]:
    """Return all state and options by key; tensors are the optimizer's own."""
    found: dict[str, Any] = {}
    for optimizer in names.optimizers:
        packed = optimizer.state_dict()
        for group, numbered in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            for number, name in zip(numbered["params"], names.in_group(group), strict=True):
                if name is None or name in names.saved_elsewhere:
                    continue
                found |= _flat(f"{STATE}.{name}", packed["state"].get(number, {}))
                options = options_of(numbered)
                found |= {f"{OPTIONS}.{name}.{option}": v for option, v in options.items()}
    return found


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


def saved_keys(
    parameters: Iterable[str], part: str, saved: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return the keys of a part of the saved state (STATE or OPTIONS), by parameter.

    Those of a parameter by what follows its name in them.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in parameters}
    for key in sorted(key for key in saved if key.startswith(f"{part}.")):
        name, _, rest = key.removeprefix(f"{part}.").rpartition(".")
        while name and name not in found:
            name, _, more = name.rpartition(".")
            rest = f"{more}.{rest}"
        if name:
            found[name][rest] = key
    return found


def read_options(parameters: Iterable[str], index: Index) -> dict[str, dict[str, Any]]:
    """Return the saved options of parameters, by name."""
    keys = saved_keys(parameters, OPTIONS, index.shapes)
    read = index.read(key for of_one in keys.values() for key in of_one.values())
    return {
        name: options_of({option: read[key] for option, key in of_one.items()})
        for name, of_one in keys.items()
    }


def state_faults(names: Names, index: Index, *, strict: bool) -> list[str]:
    """Find tensors of the saved state whose shape or dtype does not fit."""
    faults = []
    keys = saved_keys(names.all(), STATE, index.shapes)
    for optimizer, parameter, name in names.named():
        for part, key in keys[name].items():
            needed, found = _shape_of_state(optimizer, parameter, part), index.shapes[key]
            now = optimizer.state.get(parameter, {}).get(part)
            dtype = (now if isinstance(now, Tensor) else parameter).dtype
            if needed is None or (found is None and needed == ()):
                continue
            if found is None:
                if index.read([key])[key] is not None:
                    faults.append(f"{key} is not a tensor, but must be one")
            elif found[0] != needed and not (needed == () and found[0] == (1,)):
                faults.append(f"{key} has shape {found[0]} there, but must have {needed}")
            elif found[1] not in (None, dtype, parameter.dtype) and (
                (strict and needed != ()) or not torch.can_cast(found[1], dtype)
            ):
                faults.append(f"{key} has dtype {found[1]}, but must have {dtype}")
    return faults


def _shape_of_state(optimizer: Optimizer, parameter: Tensor, part: str) -> tuple[int, ...] | None:
    """Return the shape of a tensor of a parameter's state; None if it is unknown.

    Known are those of torch's own optimizers, and what any other holds already.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        now = optimizer.state.get(parameter, {}).get(part)
        return tuple(now.shape) if isinstance(now, Tensor) else None
    shape = tuple(parameter.shape)
    if isinstance(optimizer, torch.optim.LBFGS):  # the real numbers of all parameters together
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        num_numbers = sum((2 if p.is_complex() else 1) * p.numel() for p in parameters)
        return (num_numbers,) if part in ("d", "prev_flat_grad") else None
    if part == "row_var":
        return (*shape[:-1], 1)
    if part == "col_var":
        return (*shape[:-2], 1, *shape[-1:])
    return () if part in ("step", "eta", "mu", "mu_product") else shape


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
    index: Index,
    options: dict[str, dict[str, Any]],
    sources: Mapping[str, tuple[int, str | None]],
) -> None:
    """Load what :func:`values_of` returned, perhaps saved with other groups and another balance.

    ``options`` are those of :func:`read_options` for this rank's parameters; ``sources`` is the
    result of ``groups.match``.
    """
    keys = saved_keys(names.all(), STATE, index.shapes)
    read = index.read(key for of_one in keys.values() for key in of_one.values())
    for k, optimizer in enumerate(names.optimizers):
        packed = optimizer.state_dict()
        state: dict[int, Any] = {}
        groups = zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for g, (group, numbered) in enumerate(groups):
            members = names.in_group(group)
            numbers = zip(numbered["params"], members, group["params"], strict=True)
            for number, name, parameter in numbers:
                if name is not None and keys[name]:
                    state[number] = {
                        part: sharded.like(value, parameter)
                        for part, value in _nested(keys[name], read).items()
                    }
            saved = (options[name] for name in members if name is not None and options[name])
            numbered |= next(saved, None) or _of_other_ranks(index, f"{k}.{g}", sources)
        optimizer.load_state_dict({"state": state, "param_groups": packed["param_groups"]})


def _of_other_ranks(
    index: Index, place: str, sources: Mapping[str, tuple[int, str | None]]
) -> dict[str, Any]:
    """Return the options of a group that has no saved parameter on this rank."""
    _, name = sources[place]
    if name is not None:
        return read_options([name], index)[name]
    key = f"{GROUPS}.{place}"
    return dict(index.read([key])[key]) if key in index.shapes else {}


def _flat(prefix: str, state: dict[Any, Any]) -> dict[str, Any]:
    """Return a nested state by key."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str) or "." in name:
            raise TypeError(
                f"the optimizer calls a part of its state {name!r}: only names without a dot can "
                "be saved by parameter; save its state_dict() in extra instead"
            )
        key = f"{prefix}.{name}"
        found |= _flat(key, value) if isinstance(value, dict) else {key: value}
    return found


def _nested(keys: dict[str, str], read: dict[str, Any]) -> dict[str, Any]:
    """Return the state that :func:`_flat` made flat."""
    state: dict[str, Any] = {}
    for path, key in keys.items():
        *outer, last = path.split(".")
        inner = state
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise SavedStateError(f"{key} is a part of {name}, which is a value of its own")
        inner[last] = read[key]
    return state


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
