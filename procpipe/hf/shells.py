"""Shells: copies of a model's module tree that hold one layer's modules only.

    model               the shell of block 1
    ├─ embed_tokens     ├─ Passing          takes no part
    ├─ layers           ├─ layers
    │  ├─ 0             │
    │  └─ 1             │  └─ 1             the model's own module
    ├─ norm             ├─ Passing
    └─ rotary_emb       └─ rotary_emb       a copy; it has no parameters

Running the model's own forward on a shell makes masks and rotary tables as for the whole model, and
then runs that block alone. Keys of the state dict stay those of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.hf.families import Family

#: Which modules a shell holds: those ``"before"`` the blocks, one block, ``"after"``, or None.
Part = int | str | None


class Passing(nn.Module):
    """Stands in for a module that another layer runs, and returns the hidden states it gets."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return ``inputs_embeds``, or else the first positional value."""
        embeds = named.get("inputs_embeds")
        return embeds if embeds is not None else inputs[0] if inputs else None


class Zero(nn.Module):
    """Stands in for a module whose result is added to the hidden states."""

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return 0, 0-dim."""
        return torch.zeros((), dtype=torch.int64, device=input.device)


class Twice(nn.Module):
    """Stands in for a module that a forward calls twice, and is another one each time."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.is_second = False

    def begin(self, *_: Any) -> None:
        """Begin a forward of the module that calls it twice."""
        self.is_second = False

    def forward(self, input: Tensor) -> Tensor:
        """Run the module whose turn it is."""
        module = self.second if self.is_second else self.first
        self.is_second = not self.is_second
        result: Tensor = module(input)
        return result


class Blocks(nn.ModuleList):
    """The blocks of a shell, under their names in the model, in order.

    Attributes:
        given: what the shell has called the newest block with, besides the hidden states:
            positional and named values; None if the block returns more than hidden states.
    """

    given: tuple[Any, Any] | None = None

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)

    def __getitem__(self, index: Any) -> Any:
        """Return a block, or a list of them, by position; a forward calls those of a list."""
        if isinstance(index, slice):
            return self._called()[index]
        return list(self._modules.values())[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._called())

    def _called(self) -> list[Any]:
        blocks = list(self._modules.values())
        return blocks if torch.compiler.is_compiling() else [_Called(b, self) for b in blocks]


class _Called:
    """A block in a shell's forward: notes what it is called with."""

    def __init__(self, block: Any, blocks: Blocks) -> None:
        self._block, self._blocks = block, blocks

    def __call__(self, states: Tensor, *args: Any, **named: Any) -> Any:
        result = self._block(states, *args, **named)
        self._blocks.given = (args, named) if isinstance(result, Tensor) else None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def path_of_blocks(stack: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the path to a stack's only list of blocks, of the classes that must not be split.

    Raises:
        LookupError: there is none, or more than one.
    """
    found = [
        path
        for path, module in stack.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(block).__name__ in names for block in module)
    ]
    if len(found) != 1:
        raise LookupError(f"its base model has {len(found)} lists of blocks, not one")
    return tuple(found[0].split("."))


def shell_of(stack: nn.Module, path: Sequence[str], part: Part, family: Family) -> Any:
    """Return the shell of a stack, whose list of blocks is at a path, for one part."""
    shell = _pruned(stack, path, part, family)
    shell.config = _config_of(stack, part)
    return shell


def copied(module: nn.Module, children: dict[str, nn.Module | None]) -> Any:
    """Return a copy of a module with other children, and all else shared."""
    made = copy.copy(module)
    for name, value in vars(made).items():
        if isinstance(value, dict):  # hooks, too: what is registered in one is not in the other
            made.__dict__[name] = copy.copy(value)
    made._modules = children
    return made


def _pruned(module: nn.Module, path: Sequence[str], part: Part, family: Family) -> Any:
    children: dict[str, nn.Module | None] = {}
    made = copied(module, children)
    position = "before"
    for name, child in module._modules.items():
        if name == path[0]:
            position = "after"
            if len(path) > 1:
                assert child is not None, "it is on the path"
                children[name] = _pruned(child, path[1:], part, family)
            else:
                assert isinstance(child, nn.ModuleList), "the path leads to it"
                children[name] = Blocks({str(part): child[part]} if isinstance(part, int) else {})
        elif child is None:
            children[name] = None
        elif _is_table(child):
            children[name] = copy.deepcopy(child) if isinstance(part, int) else Passing()
        elif name in family.twice:
            turns = [child if part == when else Passing() for when in ("before", "after")]
            children[name] = twice = Twice(*turns)
            made.register_forward_pre_hook(twice.begin)
        elif part == position:
            children[name] = child
        else:
            children[name] = Zero() if name in family.adds else Passing()
    return made


def _is_table(module: nn.Module) -> bool:
    """Return whether a module is one of constants, as rotary embeddings are."""
    return any(True for _ in module.buffers()) and not any(True for _ in module.parameters())


def _config_of(stack: nn.Module, part: Part) -> Any:
    """Return a stack's configuration, cut to one block, or none."""
    old: Any = stack.config
    config = copy.copy(old)
    if isinstance(part, int):
        config.__dict__.update({name: [value] for name, value in of_block(old, part).items()})
    config.num_hidden_layers = int(isinstance(part, int))
    return config


def of_block(config: Any, k: int) -> dict[str, Any]:
    """Return what a configuration says for block ``k`` alone, by name: its type of attention."""
    return {
        name: value[k]
        for name, value in vars(config).items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and name != "architectures"
    }


def shared_module(blocks: Sequence[nn.Module], k: int, family: Family) -> Any:
    """Return block ``k``, which uses the first block's module where only that one has it.

    It is a copy of the modules on the path, then; the parameters are shared. Otherwise what the
    module returns would have to travel: a tensor (heads, length, length), for every micro-batch.
    """
    if family.shared is None or k == 0:
        return blocks[k]
    path, flag = family.shared
    owner, _, name = path.rpartition(".")
    return _with_module(blocks[k], owner.split("."), name, blocks[0].get_submodule(path), flag)


def _with_module(
    module: nn.Module, path: Sequence[str], name: str, shared: nn.Module, flag: str
) -> Any:
    children = dict(module._modules)
    if path:
        child = children[path[0]]
        assert child is not None, "it is on the path"
        children[path[0]] = _with_module(child, path[1:], name, shared, flag)
        return copied(module, children)
    made = copied(module, {**children, name: shared})
    made.__dict__[flag] = True
    return made
