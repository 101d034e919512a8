"""The parameters that layers of several stages use: one value, and one gradient, on all of them.

Each stage has a copy. In each call with a backward pass

    begin_gradients  what earlier calls have left in .grad is set aside
    B, W tasks       add what this stage's layers contribute
    message          goes to each other stage that has a copy, after the last of these tasks
    add_up           sums the contributions in the order of the stages, which is the same
                     everywhere, so that all copies get equal bits; adds what was set aside

So equal optimizers keep the copies equal. Partitions of one stage use the tensor itself.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.notes import warn
from procpipe.torch_internals import has_accumulation_hooks

#: What a stage contributes: a gradient, none, or ``_FROZEN`` if the parameter requires none.
Part = Tensor | bool | None

_FROZEN = False

#: How errors begin to name a buffer.
_BUFFER = "the buffer "


@dataclass(frozen=True)
class Copy:
    """This stage's copy of a parameter or buffer that other stages have, too."""

    all_names: tuple[str, ...]  # all its names in the full model, in order
    stages: tuple[int, ...]  # all that have it, ascending
    #: Where this stage has it: by its name in the full model, the module and its name there; at
    #: least one.
    places: Mapping[str, tuple[nn.Module, str]]

    @property
    def name(self) -> str:
        """Its first name in the full model."""
        return self.all_names[0]

    @property
    def tensor(self) -> Any:
        """The parameter or buffer, as it is now."""
        return getattr(*next(iter(self.places.values())))

    @property
    def part(self) -> Part:
        """What this stage contributes to its gradient; of a sparse one all elements."""
        gradient: Tensor | None = self.tensor.grad
        if not self.tensor.requires_grad:
            return _FROZEN
        return None if gradient is None else gradient.to_dense()


class Tied:
    """This stage's copies of parameters and buffers, in an order that all stages share."""

    def __init__(self, stage: int, copies: Sequence[Copy]) -> None:
        self.parameters = [copy for copy in copies if isinstance(copy.tensor, nn.Parameter)]
        self.buffers = [copy for copy in copies if not isinstance(copy.tensor, nn.Parameter)]
        #: Parameters, by name, that an earlier stage counts in a norm, and saves the state of.
        self.elsewhere = {c.name: c.tensor for c in self.parameters if c.stages[0] != stage}
        self._built = [copy.tensor for copy in self.parameters]
        self._stage = stage
        self._num_calls = 0
        self._set_aside: list[Tensor | None] = []  # gradients of earlier calls, during one

    def renamed(
        self, named: Iterable[tuple[str, nn.Parameter]], prefix: str
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield named parameters, and copies under their first names in the full model."""
        names = {copy.tensor: copy.name for copy in self.parameters}
        for name, parameter in named:
            own = names.get(parameter)
            yield (".".join(filter(None, (prefix, own))) if own else name), parameter

    # -- values ---------------------------------------------------------------------------------

    def make_equal(
        self, send: Callable[[int, list[Tensor]], None], take: Callable[[int], list[Tensor]]
    ) -> None:
        """Give all copies the values of the first stage that has one; all stages call it."""
        copies = self.parameters + self.buffers
        for other in sorted({stage for copy in copies for stage in copy.stages} - {self._stage}):
            first = min(other, self._stage)
            ours = [c.tensor for c in copies if c.stages[0] == first and other in c.stages]
            if ours and first == self._stage:  # after all takes, which are of stages before
                send(other, ours)
            elif ours:
                with torch.no_grad():
                    for tensor, value in zip(ours, take(other), strict=True):
                        tensor.copy_(value)

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load each copy under the last of its names there, which may be one on another stage.

        Plain PyTorch would leave that value in it; so all copies get the same, also where names are
        missing or have different values.
        """
        for copy in self.parameters + self.buffers:
            last = next((name for name in reversed(copy.all_names) if name in state_dict), None)
            value = None if last is None else state_dict[last]
            if isinstance(value, Tensor) and value.shape == copy.tensor.shape:
                with torch.no_grad():
                    copy.tensor.copy_(value)

    def check_equal(
        self, agree: Callable[[Any, Callable[[list[Any]], Any]], Any], *, always: bool
    ) -> None:
        """Check the copies here, and compare all; all stages call it before each training call.

        ``always`` compares each time, and raises; else this is before the calls 2, 4, 8, …, with a
        warning on stage 0 if parameters differ. ``agree`` is that of ``Coordinator``, in this call.

        Raises:
            RuntimeError: they differ; on every stage. Or :meth:`_check_parameters` raises it, here.
        """
        self._check_parameters()
        self._num_calls += 1
        is_due = self._num_calls > 1 and self._num_calls.bit_count() == 1
        if not (always or is_due):
            return
        hashes = {copy.name: _hash_of(copy.tensor) for copy in self.parameters}
        hashes |= {f"{_BUFFER}{copy.name}": _hash_of(copy.tensor) for copy in self.buffers}
        if not (faults := agree(hashes, _differences)):
            return
        message = (
            f"copies of one tensor differ: {'; '.join(faults)}: all its stages must have the same "
            "optimizer with the same options for it, and write into it alike, or not at all; a "
            "buffer that layers change must be on one stage (balance), or each layer's own"
        )
        if always or any(fault.startswith(_BUFFER) for fault in faults):
            raise RuntimeError(message)
        if self._stage == 0:
            warn(f"{message} (check_tied=True makes this an error)")

    def _check_parameters(self) -> None:
        """Check that each is what the Stage was built with, and that no hook needs its gradient.

        Raises:
            RuntimeError: your code has replaced it on this stage, or registered such a hook.
        """
        for copy, built in zip(self.parameters, self._built, strict=True):
            holders = f"stages {' and '.join(map(str, copy.stages))}"
            for name, (owner, key) in copy.places.items():
                if getattr(owner, key, None) is not built:
                    raise RuntimeError(
                        f"the parameter {name} on stage {self._stage} was replaced after the Stage "
                        f"had been built, but {holders} each have a copy of it: replace it "
                        "in the model before Stage(model, …), or write other values into it, on "
                        "all its stages alike"
                    )
            if built.requires_grad and has_accumulation_hooks(built):
                raise RuntimeError(
                    f"the parameter {copy.name} has a hook on stage {self._stage}, by "
                    f"register_post_accumulate_grad_hook, but {holders} each have a copy of "
                    "it, and the gradient there is only a part until the call returns: remove the "
                    "hook and do its work after step() or backward(), or choose a balance that "
                    "puts the layers that use it on one stage"
                )

    # -- gradients ------------------------------------------------------------------------------

    def begin_gradients(self) -> None:
        """Set aside the gradients of earlier calls, once a call."""
        self._set_aside = [copy.tensor.grad for copy in self.parameters]
        for copy in self.parameters:
            copy.tensor.grad = None

    def gradients_for(self, stage: int) -> list[Part]:
        """Return what this stage contributes to the parameters that another has, too."""
        return [copy.part for copy in self.parameters if stage in copy.stages]

    def add_up(self, received: Mapping[int, Sequence[Part]]) -> None:
        """Add the sums to what was set aside; ``received`` has what other stages contribute.

        Raises:
            RuntimeError: a parameter requires a gradient on some of its stages only.
        """
        others = {stage: iter(parts) for stage, parts in received.items()}
        for copy, before in zip(self.parameters, self._set_aside, strict=True):
            parts = {
                stage: copy.part if stage == self._stage else next(others[stage])
                for stage in copy.stages
            }
            frozen = [stage for stage, part in parts.items() if part is _FROZEN]
            free = [stage for stage in copy.stages if stage not in frozen]
            if frozen and free:
                raise RuntimeError(
                    f"the parameter {copy.name}, also named {', '.join(copy.all_names[1:])}, "
                    f"requires a gradient on stage {free[0]} but not on stage {frozen[0]}: freeze "
                    "it, or set it free, on all its stages; it has another name on each"
                )
            gradients = [part for part in parts.values() if isinstance(part, Tensor)]
            if len(gradients) == 1:  # received ones are not ours to keep
                gradients[0] = gradients[0].clone()
            gradient = reduce(torch.add, gradients) if gradients else None
            if before is not None and gradient is not None:
                gradient = before.add_(gradient)
            copy.tensor.grad = before if gradient is None else gradient
        self._set_aside = []


def _differences(of_stages: Sequence[Mapping[str, str]]) -> list[str]:
    """Describe copies that differ, given each stage's hashes by name."""
    first: dict[str, tuple[int, str]] = {}
    faults = []
    for stage, hashes in enumerate(of_stages):
        for name, digest in hashes.items():
            first_stage, expected = first.setdefault(name, (stage, digest))
            if digest != expected:
                faults.append(f"{name} on stages {first_stage} and {stage}")
    return faults


def _hash_of(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())  # numpy is not required
    return hashlib.blake2b(memory, digest_size=16).hexdigest()
