"""A stack of a model of transformers (its base model), which runs without its blocks.

    model               in embed            in a block          in head
    ├─ embed_tokens     ├─ embed_tokens     ├─ passes           ├─ passes
    ├─ layers           ├─ layers           ├─ layers           ├─ layers
    │  ├─ 0             │  ├─ notes         │  ├─ notes         │  ├─ notes
    │  └─ 1             │  └─ notes         │  └─ notes         │  └─ notes
    ├─ norm             ├─ passes           ├─ passes           ├─ norm
    └─ rotary_emb       └─ rotary_emb       └─ rotary_emb       └─ passes

Each is transformers' own forward on a copy of the module tree, whose modules are stand-ins. That of
a block notes what the block is called with: masks and rotary tables. In ``embed``, the first one
also gets the hidden states for the first block. In ``head``, it returns those of the last one. The
stand-in of another module runs the module, or passes hidden states on if another layer runs it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
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


class StandIn:
    """Calls a function in place of a module, and has the module's attributes.

    Tensors are among these only where ``find`` returns the module itself.
    """

    def __init__(
        self,
        bare: Any,
        function: Callable[..., Any],
        find: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        self._bare, self._function, self._find = bare, function, find

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the function."""
        return self._function(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_bare", "_find"):  # not there yet, in a copy
            raise AttributeError(name)
        module = self._find()
        return getattr(self._bare if module is None else module, name)


class Stack:
    """A stack without parameters, which all layers of a model share.

    Attributes:
        name: of the stack in the model.
        path: to its blocks, in the model.
        num_blocks: how many these are.
        config: of the stack.
        model: the whole model without its modules: class and configuration.
        inputs: the names of what the stack takes.
        travels: those that are needed on all stages.
        cache_name: how its forward names its caches; None if it takes none.
        takes_mask: whether it takes a mask of four dimensions as it is.
        shell: the copy of the stack that runs.

    Raises:
        LookupError: there is none, or its forward does more between blocks than calling them.
    """

    def __init__(self, model: Any, name: str) -> None:
        stack = getattr(model, name, None)
        if stack is None or stack is model:
            raise LookupError(f"it has no base model {name!r}")
        self.name, self.config, self.model = name, stack.config, copied(model, {})
        self.path = f"{name}.{_path_of_blocks(stack)}"
        self.num_blocks = len(model.get_submodule(self.path))
        parameters = inspect.signature(type(stack).forward).parameters
        if "inputs_embeds" not in parameters:
            raise LookupError("the forward of its base model does not take inputs_embeds")
        self.inputs = [name for name in parameters if name not in _NO_INPUTS]
        self.travels = [name for name in _TRAVELS if name in self.inputs]
        self.cache_name = next((name for name in CACHES if name in parameters), None)
        self._begin()
        self._called: dict[str, set[str]] = {}  # by name of modules beside the way to the blocks
        self.shell = self._without_modules(stack, name)
        self.takes_mask = self._probe()
        self._turns = self._turns_of(model)

    def modules(self, model: nn.Module, when: str) -> dict[str, nn.Module]:
        """Return what a layer holds ``"before"``, ``"between"`` or ``"after"`` blocks, by name.

        The first two have copies of the modules of constants, as rotary embeddings are.
        """
        found = {}
        for name, turns in self._turns.items():
            if when in turns:
                module = model.get_submodule(name)
                found[name] = copy.deepcopy(module) if "between" in turns else module
        return found

    def run(
        self,
        layer: nn.Module,
        forward: Callable[..., Any] | None = None,
        left: Tensor | None = None,
        *,
        training: bool = False,
        **inputs: Any,
    ) -> tuple[Any, Any, list[Given]]:
        """Call a forward that calls this stack, by default this one alone.

        Args:
            layer: holds the modules that run, under the model's own names.
            forward: of a model that has the shell in the place of its stack.
            left: what the last block returns; by default what the first one gets. With it, only
                modules after the blocks run; without it, only those before them.
            training: the mode of the stack itself.
            inputs: of the forward, by name.

        Returns:
            Its result, the hidden states that the first block gets, and what each is called with.
        """
        self._begin(layer, left)
        self.shell.train(training)
        try:
            result = (forward or self.shell)(**{"use_cache": False, **inputs})
            return result, self._entered, self._given
        finally:
            self._begin()  # keeps no tensors

    def _begin(self, layer: nn.Module | None = None, left: Tensor | None = None) -> None:
        self._layer, self._entered, self._left = layer, None, left
        self._runs_after = left is not None
        self._given: list[Given] = []

    def _note(self, *args: Any, **named: Any) -> Any:
        """Note the call of a block, and return what it returns."""
        states, args = (args[0], args[1:]) if args else (named.pop("hidden_states"), ())
        if not self._given:
            self._entered = states
            self._left = states if self._left is None else self._left
        elif states is not self._left:
            raise LookupError("it changes the hidden states between them")
        self._given.append((args, named))
        return (self._left, *[None] * (self._num_results - 1)) if self._num_results else self._left

    def _call(self, name: str, is_added: bool, /, *inputs: Any, **named: Any) -> Any:
        """Call a module if the layer has it and it is its turn; else return the hidden states.

        The result of an embedding is added to hidden states, so 0 takes its place.
        """
        is_after = bool(self._given)
        self._called[name].add("after" if is_after else "before")
        module = self._find(name) if is_after == self._runs_after else None
        if module is not None:
            return module(*inputs, **named)
        value = named.get("inputs_embeds")
        if value is None:
            value = next(iter((*inputs, *named.values())), None)
        if is_added and isinstance(value, Tensor):
            return torch.zeros((), dtype=torch.int64, device=value.device)
        return value

    def _find(self, name: str) -> nn.Module | None:
        """Return a module that the layer holds; None if it does not."""
        try:
            return self._layer and self._layer.get_submodule(name)
        except AttributeError:
            return None

    def _without_modules(self, module: Any, prefix: str) -> Any:
        """Return a copy of a module on the way to the blocks, with stand-ins for all others."""
        made = copied(module, {})
        if hasattr(made, "gradient_checkpointing"):  # that of a block is within it
            made.__dict__["gradient_checkpointing"] = False
        for name, child in module._modules.items():
            full = f"{prefix}.{name}"
            if full == self.path:
                made.__dict__[name] = [StandIn(_bare(block), self._note) for block in child]
            elif self.path.startswith(f"{full}."):
                made._modules[name] = self._without_modules(child, full)
            elif child is None:
                made._modules[name] = None
            else:
                is_added = isinstance(getattr(child, "base_layer", child), nn.Embedding)
                call, find = partial(self._call, full, is_added), partial(self._find, full)
                made.__dict__[name] = StandIn(_bare(child), call, find)
                self._called[full] = set()
        return made

    def _probe(self) -> bool:
        """Run the forward without any modules; return whether it takes a mask as it is.

        That also shows how many values blocks return, and when modules are called.
        """
        takes_masks = (True, False) if "attention_mask" in self.inputs else (False,)
        fault = "it does not call all of them"
        with torch.no_grad(), torch.device("cpu"):  # also within torch.device("meta")
            states = torch.zeros(2, 3, self.config.hidden_size)
            for self._num_results, takes_mask in product(_NUMS_RESULTS, takes_masks):
                for when in self._called.values():
                    when.clear()
                inputs: dict[str, Any] = {"inputs_embeds": states}
                inputs |= {"attention_mask": no_mask(states)} if takes_mask else {}
                try:
                    _, _, given = self.run(nn.Module(), **inputs)
                except Exception as error:  # of transformers, which expects other results or masks
                    fault = str(error).partition("\n")[0] or type(error).__name__
                    continue
                if len(given) == self.num_blocks:
                    return takes_mask
        raise LookupError(f"the forward of its base model does not run with other blocks: {fault}")

    def _turns_of(self, model: nn.Module) -> dict[str, set[str]]:
        """Return between which blocks the modules of the stack are held, by name, after a run.

        What is not called where there are ``inputs_embeds`` comes in the order of registration.
        """
        names = [name for name, _ in model.named_modules()]
        turns = {}
        for name, called in self._called.items():
            module = model.get_submodule(name)
            is_later = names.index(name) > names.index(self.path)
            turns[name] = {*called} or {"after" if is_later else "before"}
            has_parameters = any(True for _ in module.parameters())
            if any(True for _ in module.buffers()) and not has_parameters:
                turns[name] = {"before", "between"}  # constants
            elif len(turns[name]) > 1 and has_parameters:
                raise LookupError(f"{name} runs before and after its blocks")
        return turns


def no_mask(like: Tensor) -> Tensor:
    """Return a mask that no block uses.

    transformers takes it as it is. Of none, or of another shape, it would make one, and for that
    read values, for which the host waits for a GPU.
    """
    return like.new_ones((1, 1, 1, 1), dtype=torch.bool)


def copied(module: nn.Module, children: dict[str, nn.Module | None]) -> Any:
    """Return a copy of a module with other children, and all else shared."""
    made = copy.copy(module)
    made._modules = children
    return made


def _bare(module: nn.Module) -> Any:
    """Return a copy of a module without parameters and buffers."""
    made = copied(module, {name: child and _bare(child) for name, child in module._modules.items()})
    made._parameters = dict.fromkeys(module._parameters)
    made._buffers = dict.fromkeys(module._buffers)
    return made


def _path_of_blocks(stack: Any) -> str:
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
    return found[0]
