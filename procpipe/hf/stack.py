"""A stack of a model of transformers (its base model), of which each layer holds a part.

    model               in embed            in a block          in head
    ├─ embed_tokens     ├─ embed_tokens     ├─ (passes)         ├─ (passes)
    ├─ layers           ├─ layers           ├─ layers           ├─ layers
    │  ├─ 0             │  ├─ (notes)       │  ├─ (notes)       │  ├─ (notes)
    │  └─ 1             │  └─ (notes)       │  └─ 1, (notes)    │  └─ (notes)
    ├─ norm             ├─ (passes)         ├─ (passes)         ├─ norm
    └─ rotary_emb       └─ rotary_emb       └─ rotary_emb       └─ (passes)

A part runs transformers' own forward, with stand-ins for what it lacks. That of a block notes what
the block is called with: masks and rotary tables. In ``embed``, the first one also gets the hidden
states for the first block. In ``head``, it returns those of the last one. The stand-in of another
module passes hidden states on.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

#: How a forward names the caches of keys, values and other states.
CACHES = ("cache", "past_key_values", "cache_params")  # the first from transformers 5.24 on

#: Parameters of a forward that are not inputs of a mini-batch.
_NO_INPUTS = {"self", *CACHES, "use_cache", "kwargs", "encoder_hidden_states"}

#: What one block is called with besides the hidden states: positional and named values.
Given = tuple[tuple[Any, ...], dict[str, Any]]


class _Blocks(nn.Module):
    """A list of stand-ins for blocks, which also holds some of the blocks under their names."""

    def __init__(self, stand_ins: list[nn.Module], own: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._modules.update(own)

    def __getitem__(self, index: Any) -> Any:
        return self._stand_ins[index]

    def __len__(self) -> int:
        return len(self._stand_ins)


class Stack:
    """What all layers of a model share: how its stack is called, without parameters.

    Attributes:
        name: of the stack in the model.
        path: to its blocks, in the model.
        num_blocks: how many these are.
        config: of the stack.
        model: the whole model without its modules: class and configuration.
        names: of all values of the model, as in files.
        inputs: the signature of what the stack takes of a mini-batch.
        cache_name: how its forward names its caches; None if it takes none.
        takes_mask: whether it takes a mask of four dimensions as it is.

    Raises:
        LookupError: there is none, or its forward does more between blocks than calling them.
    """

    def __init__(self, model: Any, name: str) -> None:
        stack = getattr(model, name, None)
        if stack is None or stack is model:
            raise LookupError(f"it has no base model {name!r}")
        self.name, self.config, self.model = name, stack.config, bare(model, {})
        self.names = dict.fromkeys(map(name_in_files, model.state_dict()), True)
        self.path = f"{name}.{_path_of_blocks(stack)}"
        self._left: Tensor | None = None
        self._given: list[Given] = []
        self._stand_ins = [_stand_in(each, self._note) for each in model.get_submodule(self.path)]
        self.num_blocks = len(self._stand_ins)
        parameters = inspect.signature(type(stack).forward).parameters
        if "inputs_embeds" not in parameters:
            raise LookupError("the forward of its base model does not take inputs_embeds")
        taken = [each for each in parameters.values() if each.name not in _NO_INPUTS]
        self.inputs = inspect.Signature(taken)
        self.cache_name = next((name for name in CACHES if name in parameters), None)
        #: Of modules beside the way to the blocks, by name; others embed, before, or are not used.
        self._turns: dict[str, str] = {}
        self.takes_mask = self._probe(self.part(model, "no turn", {}))

    def part(self, model: nn.Module, turn: str, own: Mapping[str, nn.Module]) -> Any:
        """Return a copy of the stack that holds its modules of one turn, and some blocks by name.

        The turns are ``"before"``, ``"between"`` and ``"after"`` blocks. The first two have copies
        of the modules of constants, as rotary embeddings are.
        """

        def copied(module: nn.Module, prefix: str) -> Any:
            made = bare(module, {})
            made._buffers = copy.deepcopy(module._buffers)  # constants, like those of its modules
            vars(made)["_output_capturing_hooks_installed"] = True  # none of transformers in blocks
            for name, child in module._modules.items():
                full = f"{prefix}.{name}"
                if full == self.path:
                    made._modules[name] = _Blocks(self._stand_ins, own)
                elif child is None or self.path.startswith(f"{full}."):
                    made._modules[name] = child and copied(child, full)
                elif _is_constant(child) and turn in ("before", "between"):
                    made._modules[name] = copy.deepcopy(child)
                elif _is_constant(child):
                    made.__dict__[name] = _stand_in(child, self._pass_on)  # found first
                elif self._turns.get(full, "before") == turn:
                    made._modules[name] = child
                else:
                    made.__dict__[name] = _stand_in(child, partial(self._note_turn, full))
            return made

        return copied(model.get_submodule(self.name), self.name)

    def run(
        self, forward: Callable[..., Any], left: Tensor | None = None, **inputs: Any
    ) -> tuple[Any, Any, list[Given]]:
        """Call a part, or a model that holds one, in which the last block returns ``left``.

        By default that is what the first block gets. Returns the result, what the last block
        returns, and what each block is called with.
        """
        self._left, self._given = left, []
        try:
            result = forward(**{"use_cache": False, **inputs})
            return result, self._left, self._given
        finally:
            self._left, self._given = None, []  # keeps no tensors

    def _note(self, *args: Any, **named: Any) -> Any:
        """Note the call of a block, and return what it returns."""
        states, args = (args[0], args[1:]) if args else (named.pop("hidden_states"), ())
        if not self._given:
            self._left = states if self._left is None else self._left
        elif states is not self._left:
            raise LookupError("it changes the hidden states between them")
        self._given.append((args, named))
        return (self._left, *[None] * (self._num_results - 1)) if self._num_results else self._left

    def _note_turn(self, name: str, /, *inputs: Any, **named: Any) -> Any:
        """Note the turn of a module, and pass on hidden states."""
        turn = "after" if self._given else "before"
        if self._turns.setdefault(name, turn) != turn:
            raise LookupError(f"{name} runs before and after its blocks")
        return self._pass_on(*inputs, **named)

    def _pass_on(self, *inputs: Any, **named: Any) -> Any:
        """Return the hidden states that a module is called with.

        An embedding is called without, and added to hidden states, so 0 takes its place.
        """
        for value in (*inputs, *named.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
                return value
        return torch.zeros((), dtype=torch.int64)

    def _probe(self, shell: Any) -> bool:
        """Run the forward without any modules; return whether it takes a mask as it is.

        That also shows how many values blocks return, and when modules are called.
        """
        takes_masks = (True, False) if "attention_mask" in self.inputs.parameters else (False,)
        fault = "it does not call all of them"
        with torch.no_grad(), torch.device("cpu"):  # also within torch.device("meta")
            states = torch.zeros(2, 3, self.config.hidden_size)
            # As many values are in a tuple that blocks return; 0 stands for hidden states alone.
            for self._num_results, takes_mask in product(range(5), takes_masks):
                mask = {"attention_mask": no_mask(states)} if takes_mask else {}
                try:
                    _, _, given = self.run(shell, inputs_embeds=states, **mask)
                except Exception as error:  # of transformers, which expects other results or masks
                    fault = str(error).partition("\n")[0] or type(error).__name__
                    continue
                if len(given) == self.num_blocks:
                    return takes_mask
        raise LookupError(f"the forward of its base model does not run with other blocks: {fault}")


def name_in_files(name: str) -> str:
    """Return the name of a value without what peft puts into it for modules that it wraps."""
    return re.sub(r"\.(base_layer|original_module)\.", ".", name)


def no_mask(like: Tensor) -> Tensor:
    """Return a mask that no block uses.

    transformers takes it as it is. Of none, or of another shape, it would make one, and for that
    read values, for which the host waits for a GPU.
    """
    return like.new_ones((1, 1, 1, 1), dtype=torch.bool)


def bare(module: nn.Module, children: dict[str, nn.Module | None] | None = None) -> Any:
    """Return a copy of a module without parameters and buffers; by default also of its children."""
    made: Any = copy.copy(module)
    vars(made).update({k: copy.copy(v) for k, v in vars(made).items() if isinstance(v, dict)})
    if children is None:
        children = {name: child and bare(child) for name, child in module._modules.items()}
    made._modules = children
    made._parameters = dict.fromkeys(module._parameters)
    made._buffers = dict.fromkeys(module._buffers)
    made.gradient_checkpointing = False  # that of a block is within it
    return made


def _stand_in(module: nn.Module, function: Callable[..., Any]) -> Any:
    """Return a bare copy of a module that calls a function, and no hooks."""
    made = bare(module)
    vars(made).update(forward=function, _forward_hooks={}, _forward_pre_hooks={})
    return made


def _is_constant(module: nn.Module) -> bool:
    has_parameters = any(True for _ in module.parameters())
    return any(True for _ in module.buffers()) and not has_parameters


def _path_of_blocks(stack: Any) -> str:
    """Return the path to a stack's only list of as many modules as it has blocks.

    Raises:
        LookupError: there is none, or more than one.
    """
    number = getattr(stack.config, "num_hidden_layers", 0)  # 0 of a model of images and text
    lists = [path for path, each in stack.named_modules() if isinstance(each, nn.ModuleList)]
    lists = [path for path in lists if not re.search(r"\.\d", path)]  # within another list
    found: list[str] = [path for path in lists if len(stack.get_submodule(path)) == number]
    if len(found) != 1:
        raise LookupError(f"its base model has {len(found)} lists of {number} blocks, not one")
    return found[0]
