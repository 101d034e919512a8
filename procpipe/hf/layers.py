"""The layers of a model of transformers: each runs the model's own forward on a shell of it.

    embed     input_ids, … ──> hidden states, attention mask, position ids
    block0    hidden states, … ──> hidden states, …
    …
    head      hidden states, … ──> logits

So masks and rotary tables are made on every stage by transformers (``shells.py``), and only what is
small travels with the hidden states.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.hf.families import Family
from procpipe.hf.shells import copied, of_block, path_of_blocks, shared_module, shell_of
from procpipe.torch_internals import compile_in_place

#: What a block's masks and rotary tables are made from; small, and travels.
_TRAVELS = ("attention_mask", "position_ids")

#: The attribute of hidden states with what blocks on this stage are called with, by kind of block.
_GIVEN = "_procpipe_given"

#: Parameters of a forward that are not inputs of a mini-batch.
_NO_INPUTS = ("self", "past_key_values", "use_cache", "kwargs", "encoder_hidden_states")

#: The output of one layer: the hidden states, and what travels with them, by name.
State = dict[str, Any]


class Stack:
    """A stack of a model, of which shells are made.

    Raises:
        LookupError: there is none, or its own forward does not leave hidden states alone.
    """

    def __init__(self, model: Any, name: str, family: Family) -> None:
        stack = getattr(model, name, None)
        if stack is None or stack is model:
            raise LookupError(f"it has no base model {name!r}")
        names = [*(stack._no_split_modules or ()), *(model._no_split_modules or ())]
        self.model, self.name, self._stack, self._family = model, name, stack, family
        self.skeleton = copied(model, {})  # does not keep the parameters of other stages alive
        self.path = path_of_blocks(stack, names)
        self._blocks = [*stack.get_submodule(".".join(self.path))]
        self.num_blocks, self.config = len(self._blocks), stack.config
        parameters = inspect.signature(type(stack).forward).parameters
        self.inputs = [name for name in parameters if name not in _NO_INPUTS]
        self.travels = [name for name in _TRAVELS if name in self.inputs]
        with torch.no_grad(), torch.device("cpu"):  # also within torch.device("meta")
            states = torch.linspace(-1, 1, 6 * stack.config.hidden_size).view(2, 3, -1)
            result = self.shell(None)(inputs_embeds=states, use_cache=False)[0]
        if not torch.equal(states, result):
            raise LookupError("its forward changes the hidden states outside of its modules")

    def shell(self, part: int | str | None) -> Any:
        """Return the shell of a part of this stack."""
        shell = shell_of(self._stack, self.path, part, self._family)
        if isinstance(part, int):
            block = shared_module(self._blocks, part, self._family)
            shell.get_submodule(".".join(self.path))._modules[str(part)] = block
        return shell

    def whole(self, shell: nn.Module) -> Any:
        """Return a copy of the model with a shell in the place of this stack, without others."""
        children = dict(self.model._modules)
        before_stack = [*children][: [*children].index(self.name)]
        return copied(self.model, {**children, self.name: shell} | dict.fromkeys(before_stack))


class ModelLayer(nn.Module):
    """A layer of a model, which holds some of its modules under the model's own names."""

    def __init__(self, stack: Stack, modules: dict[str, nn.Module | None]) -> None:
        super().__init__()
        self.training = stack.model.training
        self._model = (stack.skeleton,)  # in a tuple, so that nn.Module does not register it
        self._modules = modules

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers, as transformers does."""
        _initialise(self, self._model[0])


class ShellLayer(ModelLayer):
    """A layer that runs the shell of one part of a stack."""

    def __init__(self, stack: Stack, part: int | str) -> None:
        super().__init__(stack, {stack.name: stack.shell(part)})
        self._name, self._travels, self._config = stack.name, stack.travels, stack.config
        self._needs_no_mask = isinstance(part, str) and "attention_mask" in stack.inputs

    @property
    def shell(self) -> Any:
        """The shell."""
        return self._modules[self._name]

    def run(self, **inputs: Any) -> Any:
        """Run the shell."""
        if self._needs_no_mask:
            inputs["attention_mask"] = no_mask(next(iter(inputs.values())))
        # The block's may have been changed since; masks must be made for the same one.
        self.shell.config._attn_implementation = self._config._attn_implementation
        return self.shell(**{"use_cache": False, **inputs})


class Embed(ShellLayer):
    """The first layer: everything before the blocks."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack, "before")
        self._inputs = stack.inputs

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        named = by_name(inputs, named, self._inputs)
        states = self.run(**named)[0]
        return {"hidden_states": states} | {
            name: named[name] for name in self._travels if named.get(name) is not None
        }


class Block(ShellLayer):
    """A block of the model.

    Among consecutive blocks of a stage only the first runs its shell, which makes masks and rotary
    tables. The others are called with the same ones, as by transformers. These are an attribute of
    the hidden states, so that they are of this micro-batch, and do not travel to other stages.

    Attributes:
        caches: where keys and values are kept while tokens are generated.
    """

    caches: Any = None

    def __init__(self, stack: Stack, part: int) -> None:
        super().__init__(stack, part)
        self._blocks = (self.shell.get_submodule(".".join(stack.path)),)
        self._kind = repr(of_block(stack.config, part))

    def forward(self, state: State) -> State:
        """Return the state with the block's hidden states."""
        routes = getattr(self.shell.config, "output_router_logits", False)  # collected by the shell
        if self.caches is not None or routes or torch.compiler.is_compiling():
            return self._by_shell(state)
        states = state["hidden_states"]
        all_given = getattr(states, _GIVEN, {})
        (blocks,) = self._blocks
        if (given := all_given.get(self._kind)) is not None:
            (block,) = blocks.children()
            state = {**state, "hidden_states": block(states, *given[0], **given[1])}
        else:
            state = self._by_shell(state)
            if blocks.given is None:
                return state
            all_given = {**all_given, self._kind: blocks.given}
            blocks.given = None
        setattr(state["hidden_states"], _GIVEN, all_given)
        return state

    def compile(self, **options: Any) -> None:
        """Compile the model's own block, whose code equal blocks share, and not the shell's."""
        (block,) = self._blocks[0].children()
        compile_in_place(block, options, self._config.num_hidden_layers)

    def _by_shell(self, state: State) -> State:
        given = {name: state[name] for name in self._travels if name in state}
        if self.caches is not None:
            cache = self.caches.next(self.shell.config, self._config.num_hidden_layers)
            given |= {"past_key_values": cache, "use_cache": True}
        result = self.run(inputs_embeds=state["hidden_states"], **given)
        state = {**state, "hidden_states": result[0]}
        logits = getattr(result, "router_logits", None)
        if logits and self.caches is None:
            state["router_logits"] = (*state.get("router_logits", ()), *logits)
        return state


class Head(ModelLayer):
    """The last layer: everything after the blocks, by the forward of the whole model.

    Attributes:
        num_logits: of how many of the last positions it returns logits; 0 for all.
    """

    num_logits = 0

    def __init__(self, stack: Stack) -> None:
        shell = stack.shell("after")
        whole = stack.whole(shell)
        super().__init__(stack, whole._modules)  # one dict: what replaces a module does so in both
        self._whole = (whole,)  # not registered either
        parameters = inspect.signature(type(whole).forward).parameters
        self._has_routers = "output_router_logits" in parameters
        self._router_logits: tuple[Tensor, ...] = ()
        shell.register_forward_hook(self._add_router_logits)

    def forward(self, state: State) -> Any:
        """Return the logits, with the auxiliary loss if there is one."""
        states = state["hidden_states"]
        named = {**self.inputs_of(states), "return_dict": True}
        if self.num_logits:
            named["logits_to_keep"] = self.num_logits
        self._router_logits = state.get("router_logits", ())
        if self._has_routers:
            named["output_router_logits"] = bool(self._router_logits)
        if self._router_logits:
            named["attention_mask"] = state.get("attention_mask")
        (whole,) = self._whole
        whole.training = self.training
        result = whole(**named, use_cache=False)
        if not self._router_logits:
            return result.logits
        self._router_logits = ()
        return result.logits, whole.router_aux_loss_coef * result.aux_loss

    def inputs_of(self, states: Tensor) -> dict[str, Any]:
        """Return what the model is called with, whose stack holds only what is after the blocks."""
        return {"inputs_embeds": states, "attention_mask": no_mask(states)}

    def _add_router_logits(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self._router_logits:
            result["router_logits"] = self._router_logits


def model_of(stage: nn.Sequential) -> Any:
    """Return the model of the layers of a stage without its modules: class and configuration.

    Raises:
        TypeError: the stage was not made of ``hf.sequential``.
    """
    for layer in stage.children():
        if isinstance(layer, ModelLayer):
            return layer._model[0]
    raise TypeError(
        "the model of the stage was not made by hf.sequential: build Stage(hf.sequential(model), …)"
    )


@torch.no_grad()
def set_magnitudes(layer: Any) -> None:
    """Set the magnitudes that DoRA has in a layer, if any, to those of its weights."""
    for adapter, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
        weight, change = layer.get_base_layer().weight, layer.get_delta_weight(adapter)
        change = change.T if magnitude.fan_in_fan_out else change
        magnitude.weight.copy_(magnitude.get_weight_norm(weight, change, scaling=1))


def by_name(inputs: tuple[Any, ...], named: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """Return what a first layer was given, by name, without labels."""
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        named = {**inputs[0], **named}
    else:
        named = {**dict(zip(known, inputs, strict=False)), **named}
    named.pop("labels", None)
    if unknown := [name for name in named if name not in known]:
        raise TypeError(
            f"the model was given {', '.join(unknown)}, but takes {', '.join(known)} in a pipeline"
        )
    return named


def no_mask(like: Tensor) -> Tensor:
    """Return a mask that no block uses.

    transformers takes it as it is. Of none, or of another shape, it would make one, and for that
    read values, for which the host waits for a GPU.
    """
    return like.new_ones((1, 1, 1, 1), dtype=torch.bool)


def _initialise(module: Any, model: Any) -> None:
    """Initialise what is in a module as transformers does, inner modules first.

    By the model, as a shell's configuration has another number of blocks, on which values depend.
    """
    for child in module.children():
        _initialise(child, model)
        if hasattr(child, "reset_lora_parameters"):
            for adapter in child.r:
                init = model.peft_config[adapter].init_lora_weights
                child.reset_lora_parameters(adapter, init if init in (False, "gaussian") else True)
            set_magnitudes(child)
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            model._init_weights(child)
