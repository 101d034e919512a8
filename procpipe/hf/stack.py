"""A stack of a model of transformers (its base model), which runs without its blocks.

    model               before              calls             after
    ├─ embed_tokens     ├─ embed_tokens     ├─ Passing        ├─ Passing
    ├─ layers           ├─ layers           ├─ layers         ├─ layers
    │  ├─ 0             │  ├─ Note          │  ├─ Note        │  ├─ Note
    │  └─ 1             │  └─ Note          │  └─ Note        │  └─ Note
    ├─ norm             ├─ Passing          ├─ Passing        ├─ norm
    └─ rotary_emb       └─ Passing          └─ rotary_emb     └─ Passing

Each is transformers' own forward on a copy of the model's module tree, with notes in place of the
blocks. ``before`` gives the hidden states that the first block gets. ``calls`` gives what all are
called with, masks and rotary tables, and has no parameters. In ``after`` the first note returns
the hidden states of the last block.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

#: What a block's masks and rotary tables are made from; small, and travels.
_TRAVELS = ("attention_mask", "position_ids")

#: How a forward names the caches of keys, values and other states.
CACHES = ("past_key_values", "cache_params")

#: Parameters of a forward that are not inputs of a mini-batch.
_NO_INPUTS = {"self", *CACHES, "use_cache", "kwargs", "encoder_hidden_states"}

#: How many values blocks return in a tuple, 0 for hidden states alone, in the order of trial.
_NUMS_RESULTS = (0, 1, 2, 3, 4)

#: What one block is called with besides the hidden states: positional and named values.
Given = tuple[tuple[Any, ...], dict[str, Any]]

Modules = dict[str, nn.Module | None]


class Note:
    """Stands in for a block: notes what it is called with. It has the block's other attributes."""

    def __init__(self, block: nn.Module, part: Part) -> None:
        self._block, self._part = _bare(block), part

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Note the call, and return hidden states as the block does."""
        states, args = (args[0], args[1:]) if args else (named.pop("hidden_states"), ())
        return self._part.note(states, (args, named))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_block":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._block, name)


class Passing(nn.Module):
    """Stands in for a module that another layer runs, and returns the hidden states it gets.

    In place of an embedding, whose result is added to hidden states, it returns 0.

    Attributes:
        called: when it was called: before the blocks, after them.
    """

    def __init__(self, part: Part, module: Any) -> None:
        super().__init__()
        self._part, self.called = part, set[str]()
        module = getattr(module, "base_layer", getattr(module, "original_module", module))
        self._is_added = isinstance(module, nn.Embedding)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return ``inputs_embeds``, or else the first value."""
        self.called.add("after" if self._part.is_after else "before")
        value = named.get("inputs_embeds")
        if value is None:
            value = next(iter((*inputs, *named.values())), None)
        if self._is_added and isinstance(value, Tensor):
            return torch.zeros((), dtype=torch.int64, device=value.device)
        return value


class During(nn.Module):
    """A module without state that a forward calls before and after the blocks; runs once."""

    def __init__(self, part: Part, module: nn.Module, when: str) -> None:
        super().__init__()
        self.module, self._part, self._is_after = module, part, when == "after"

    def forward(self, input: Tensor) -> Tensor:
        """Run the module where it is this part's turn."""
        return self.module(input) if self._part.is_after == self._is_after else input


class Part:
    """A forward of a stack without its blocks; see the top of this file.

    Attributes:
        shell: the copy of the stack that runs.
        num_results: how many values a block returns in a tuple; 0 for hidden states alone.
    """

    shell: Any

    def __init__(self, num_results: int) -> None:
        self.num_results = num_results
        self._begin()

    def _begin(self, left: Tensor | None = None) -> None:
        """Begin a forward, in which the first note returns ``left``, or else what it gets."""
        self._given: list[Given] = []
        self._entered: Any = None
        self._left: Any = left

    @property
    def is_after(self) -> bool:
        """Whether the forward has reached the blocks."""
        return bool(self._given)

    def note(self, states: Any, given: Given) -> Any:
        """Note the call of a block, and return what it returns.

        Raises:
            LookupError: it is not called with the result of the block before.
        """
        if not self._given:
            self._entered = states
            self._left = states if self._left is None else self._left
        elif states is not self._left:
            raise LookupError("it changes the hidden states between them")
        self._given.append(given)
        return (self._left, *[None] * (self.num_results - 1)) if self.num_results else self._left

    def entered(self, **inputs: Any) -> Tensor:
        """Return the hidden states that the first block is called with."""
        states: Tensor = self._run(inputs)[0]
        return states

    def given(self, **inputs: Any) -> list[Given]:
        """Return what each block is called with."""
        return self._run(inputs)[1]

    def left(self, states: Tensor, forward: Callable[..., Any], **inputs: Any) -> Any:
        """Call a forward that runs this one, whose last block returns these hidden states."""
        self._begin(states)
        try:
            return forward(**inputs)
        finally:
            self._begin()

    def _run(self, inputs: dict[str, Any]) -> tuple[Any, list[Given]]:
        self._begin()
        try:
            self.shell(**{"use_cache": False, **inputs})
            return self._entered, self._given
        finally:
            self._begin()  # keeps no tensors


class Stack:
    """A stack of a model, taken apart.

    Raises:
        LookupError: there is none, or its forward does more between blocks than calling them.
    """

    def __init__(self, model: Any, name: str) -> None:
        stack = getattr(model, name, None)
        if stack is None or stack is model:
            raise LookupError(f"it has no base model {name!r}")
        self.model, self.name, self.module, self.config = model, name, stack, stack.config
        self.skeleton = copied(model, {})  # does not keep the parameters of other stages alive
        self.path = _path_of_blocks(stack)
        self.blocks: list[Any] = [*stack.get_submodule(".".join(self.path))]
        parameters = inspect.signature(type(stack).forward).parameters
        if "inputs_embeds" not in parameters:
            raise LookupError("the forward of its base model does not take inputs_embeds")
        self.inputs = [name for name in parameters if name not in _NO_INPUTS]
        self.travels = [name for name in _TRAVELS if name in self.inputs]
        self.cache = next((name for name in CACHES if name in parameters), None)
        self._num_results, self.takes_mask, self._when = self._probed()

    def part(self, when: str) -> Part:
        """Return the forward with the modules that run ``"before"`` or ``"after"`` the blocks."""

        def pick(part: Part, name: str, module: nn.Module) -> nn.Module:
            if when not in self._when[name]:
                return Passing(part, module)
            return module if len(self._when[name]) == 1 else During(part, module, when)

        return self._without_blocks(pick)

    def calls(self, tables: Mapping[str, nn.Module]) -> Part:
        """Return the forward without parameters; it uses these modules, by name."""
        part = self._without_blocks(
            lambda part, name, module: tables[name] if name in tables else Passing(part, module)
        )
        part.shell.eval()
        return part

    def tables(self) -> dict[str, nn.Module]:
        """Return copies of the modules of constants, as rotary embeddings are, by name."""
        return {name: copy.deepcopy(each) for name, each in self._off_path() if _is_table(each)}

    def holder(self, k: int, block: nn.Module, tables: Mapping[str, nn.Module]) -> nn.Module:
        """Return a module that holds block ``k`` and tables, under the stack's own names."""
        made = nn.Module()
        for name, module in {".".join((*self.path, str(k))): block, **tables}.items():
            at, (*path, last) = made, name.split(".")
            for each in path:
                at = at._modules.setdefault(each, nn.Module()) or at
            at._modules[last] = module
        return made

    def whole(self, part: Part) -> Any:
        """Return a copy of the model with a part in the place of this stack, without others."""
        children = dict(self.model._modules)
        before_stack = [*children][: [*children].index(self.name)]
        return copied(self.model, {**children, self.name: part.shell} | dict.fromkeys(before_stack))

    def _probed(self) -> tuple[int, bool, dict[str, set[str]]]:
        """Run the forward without any modules, and return what that shows.

        That is how many values its blocks return; whether it takes a mask as it is; and, by name,
        when modules are called: before the blocks, after them. What is not called where there are
        ``inputs_embeds`` comes in the order in which it is registered.
        """
        takes_masks = (True, False) if "attention_mask" in self.inputs else (False,)
        fault = "it does not call all of them"
        with torch.no_grad(), torch.device("cpu"):  # also within torch.device("meta")
            states = torch.zeros(2, 3, self.config.hidden_size)
            for num, takes_mask in product(_NUMS_RESULTS, takes_masks):
                self._num_results = num
                part = self._without_blocks(lambda part, _, module: Passing(part, module))
                mask = {"attention_mask": no_mask(states)} if takes_mask else {}
                try:
                    num_called = len(part.given(inputs_embeds=states, **mask))
                except Exception as error:  # of transformers, which expects other results or masks
                    fault = str(error).partition("\n")[0] or type(error).__name__
                    continue
                if num_called == len(self.blocks):
                    return num, takes_mask, self._order(part.shell)
        raise LookupError(f"the forward of its base model does not run with other blocks: {fault}")

    def _order(self, shell: Any) -> dict[str, set[str]]:
        """Return when each module off the path is called, by name, after a run of stand-ins."""
        found: dict[str, set[str]] = {}
        names = [name for name, _ in self.module.named_modules()]
        start = names.index(".".join(self.path))
        for name, module in self._off_path():
            called = shell.get_submodule(name).called
            found[name] = called or {"after" if names.index(name) > start else "before"}
            if len(called) > 1 and _has_state(module):
                raise LookupError(f"{name} runs before and after its blocks")
            if _is_table(module):
                found[name] = set()
        return found

    def _off_path(self) -> list[tuple[str, nn.Module]]:
        """Return the modules beside the way to the blocks, by name."""
        found, at, prefix = [], self.module, ""
        for part in self.path:
            children = at._modules.items()
            found += [(prefix + name, each) for name, each in children if each and name != part]
            at, prefix = at.get_submodule(part), f"{prefix}{part}."
        return found

    def _without_blocks(self, pick: Callable[[Part, str, nn.Module], nn.Module]) -> Part:
        """Return the forward on notes, and for every other module what ``pick`` returns."""
        part = Part(self._num_results)

        def level(module: nn.Module, depth: int) -> Any:
            children: Modules = {}
            made = copied(module, children)
            if hasattr(made, "gradient_checkpointing"):  # that of a block is within it
                made.__dict__["gradient_checkpointing"] = False
            for name, child in module._modules.items():
                if name != self.path[depth]:
                    full = ".".join((*self.path[:depth], name))
                    children[name] = child and pick(part, full, child)
                elif depth + 1 < len(self.path):
                    assert child is not None, "it is on the path"
                    children[name] = level(child, depth + 1)
                else:
                    made.__dict__[name] = [Note(block, part) for block in self.blocks]
            return made

        part.shell = level(self.module, 0)
        return part


def no_mask(like: Tensor) -> Tensor:
    """Return a mask that no block uses.

    transformers takes it as it is. Of none, or of another shape, it would make one, and for that
    read values, for which the host waits for a GPU.
    """
    return like.new_ones((1, 1, 1, 1), dtype=torch.bool)


def copied(module: nn.Module, children: Modules) -> Any:
    """Return a copy of a module with other children, and all else shared."""
    made = copy.copy(module)
    for name, value in vars(made).items():
        if isinstance(value, dict):  # hooks, too: what is registered in one is not in the other
            made.__dict__[name] = copy.copy(value)
    made._modules = children
    return made


def _bare(module: nn.Module) -> Any:
    """Return a copy of a module without parameters and buffers."""
    children = {name: child and _bare(child) for name, child in module._modules.items()}
    made = copied(module, children)
    made._parameters = dict.fromkeys(module._parameters)
    made._buffers = dict.fromkeys(module._buffers)
    return made


def _path_of_blocks(stack: Any) -> tuple[str, ...]:
    """Return the path to a stack's only list of as many modules as it has blocks.

    Raises:
        LookupError: there is none, or more than one.
    """
    number = stack.config.num_hidden_layers
    found: list[str] = []
    for path, module in stack.named_modules():
        is_inside = any(path.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) == number and not is_inside:
            found.append(path)
    if len(found) != 1:
        raise LookupError(f"its base model has {len(found)} lists of {number} blocks, not one")
    return tuple(found[0].split("."))


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _is_table(module: nn.Module) -> bool:
    """Return whether a module is one of constants, as rotary embeddings are."""
    return any(True for _ in module.buffers()) and not any(True for _ in module.parameters())
