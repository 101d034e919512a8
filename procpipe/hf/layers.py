"""The layers of a model of transformers, which hold its own modules.

    embed     input_ids, … ──> hidden states, attention mask, position ids
    block0    hidden states, … ──> hidden states, …
    …
    head      hidden states, … ──> logits

So masks and rotary tables are made on every stage by transformers (``stack.py``), once for each
micro-batch, and only what is small travels with the hidden states.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.hf.stack import Given, Stack, no_mask
from procpipe.torch_internals import compile_in_place

#: The attribute of hidden states with what the blocks of this stage are called with.
_GIVEN = "_procpipe_given"

#: The output of one layer: the hidden states, and what travels with them, by name.
State = dict[str, Any]


class ModelLayer(nn.Module):
    """A layer of a model, which holds some of its modules under the model's own names."""

    def __init__(self, stack: Stack, modules: dict[str, nn.Module | None]) -> None:
        super().__init__()
        self.training = stack.model.training
        self._model = (stack.skeleton,)  # in a tuple, so that nn.Module does not register it
        self._modules = modules
        self._num_blocks = len(stack.blocks)

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers, as transformers does."""
        _initialise(self, self._model[0])

    def compile(self, **options: Any) -> None:
        """Compile the model's own modules in place, and not what calls them."""
        for module in self.to_compile():
            compile_in_place(module, options, self._num_blocks)

    def to_compile(self) -> list[nn.Module]:
        """Return the modules that are compiled: those that hold parameters themselves."""
        return [m for m in self.modules() if any(True for _ in m.parameters(recurse=False))]


class Embed(ModelLayer):
    """The first layer: everything before the blocks.

    Attributes:
        inputs: the names of what it takes.
        cache_name: how the model's forward names its caches; None if it takes none.
    """

    def __init__(self, stack: Stack) -> None:
        before = stack.part("before")
        super().__init__(stack, {stack.name: before.shell})
        self._before = (before,)
        self.inputs, self.cache_name = stack.inputs, stack.cache
        self._travels, self._takes_mask = stack.travels, stack.takes_mask

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        named = by_name(inputs, named, self.inputs)
        travels = {key: named[key] for key in self._travels if named.get(key) is not None}
        return {"hidden_states": self.embedded(**named), **travels}

    def embedded(self, **named: Any) -> Tensor:
        """Return the hidden states that the first block gets."""
        if self._takes_mask:
            named["attention_mask"] = no_mask(next(iter(named.values())))
        return self._before[0].entered(**named)


class Routes:
    """A hook of the routers of a block that collects their logits, where they are asked for."""

    def __init__(self, index: int) -> None:
        self._index = index  # of the logits in what a router returns
        self.found: list[Tensor] | None = None

    def __call__(self, router: nn.Module, inputs: Any, result: Any) -> None:
        """Collect the logits of a router."""
        if self.found is not None:
            self.found.append(result[self._index] if isinstance(result, tuple) else result)


class Block(ModelLayer):
    """A block of the model.

    The first block of a stage finds out what transformers would call all blocks with: masks, rotary
    tables. That is an attribute of the hidden states, so that it is of this micro-batch, and does
    not travel to other stages. The model's own block is then called directly.

    Attributes:
        caches: where keys and values are kept while tokens are generated.
    """

    caches: Any = None

    def __init__(self, stack: Stack, k: int, block: nn.Module | None = None) -> None:
        block = stack.blocks[k] if block is None else block
        tables = stack.tables()
        super().__init__(stack, {stack.name: stack.holder(k, block, tables)})
        # In tuples, so that nn.Module does not register them.
        self._calls, self._block = (stack.calls(tables),), (block,)
        self._k, self._travels, self._cache_name = k, stack.travels, stack.cache
        self.config = stack.config
        self._routes = _routes_of(stack, block)

    def forward(self, state: State) -> State:
        """Return the state with the block's hidden states."""
        states = state["hidden_states"]
        given: list[Given] | None = getattr(states, _GIVEN, None)
        if given is None:
            given = self.given(states, state)
        state = self.run(state, given)
        setattr(state["hidden_states"], _GIVEN, given)
        return state

    def run(self, state: State, given: list[Given]) -> State:
        """Call the block; return the state with its hidden states, and its routers' logits."""
        args, named = given[self._k]
        routes = self._routes
        if routes is not None and self.caches is None:
            routes.found = []
        result = self._block[0](state["hidden_states"], *args, **named)
        state = {**state, "hidden_states": result[0] if isinstance(result, tuple) else result}
        if routes is not None and routes.found is not None:
            state["router_logits"] = (*state.get("router_logits", ()), *routes.found)
            routes.found = None
        return state

    def given(self, states: Tensor, state: State, **named: Any) -> list[Given]:
        """Return what transformers calls each block with besides the hidden states."""
        named |= {name: state[name] for name in self._travels if name in state}
        if self.caches is not None and self._cache_name is not None:
            named |= {self._cache_name: self.caches.next(), "use_cache": True}
        return self._calls[0].given(inputs_embeds=states, **named)

    def to_compile(self) -> list[nn.Module]:
        """Return the model's own block, whose code equal blocks share."""
        return [self._block[0]]


class Head(ModelLayer):
    """The last layer: everything after the blocks, by the forward of the whole model.

    Attributes:
        num_logits: of how many of the last positions it returns logits; 0 for all.
    """

    num_logits = 0

    def __init__(self, stack: Stack) -> None:
        after = stack.part("after")
        whole = stack.whole(after)
        super().__init__(stack, whole._modules)  # one dict: what replaces a module does so in both
        self._after, self._whole = (after,), (whole,)  # not registered either
        self._takes_mask = stack.takes_mask
        parameters = inspect.signature(type(whole).forward).parameters
        self._has_routers = "output_router_logits" in parameters
        self._keeps = "logits_to_keep" in parameters
        self._router_logits: tuple[Tensor, ...] = ()
        after.shell.register_forward_hook(self._add_router_logits)

    def forward(self, state: State) -> Any:
        """Return the logits, with the auxiliary loss if there is one."""
        states = state["hidden_states"]
        named = {**self.inputs_of(states), "return_dict": True, "use_cache": False}
        if self.num_logits and self._keeps:
            named["logits_to_keep"] = self.num_logits
        self._router_logits = state.get("router_logits", ())
        if self._has_routers:
            named["output_router_logits"] = bool(self._router_logits)
        if self._router_logits:
            named["attention_mask"] = state.get("attention_mask")
        (whole,) = self._whole
        whole.training = self.training
        result = self._after[0].left(states, whole, **named)
        if not self._router_logits:
            return result.logits[:, -self.num_logits :] if self.num_logits else result.logits
        self._router_logits = ()
        return result.logits, whole.router_aux_loss_coef * result.aux_loss

    def inputs_of(self, states: Tensor) -> dict[str, Any]:
        """Return what the model is called with, whose stack holds only what is after the blocks."""
        mask = {"attention_mask": no_mask(states)} if self._takes_mask else {}
        return {"inputs_embeds": states, **mask}

    def _add_router_logits(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self._router_logits:
            result["router_logits"] = self._router_logits


def _routes_of(stack: Stack, block: nn.Module) -> Routes | None:
    """Have the routers of a block collect their logits, if the model's loss is to have them."""
    recorder = (getattr(stack.module, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None or not getattr(stack.config, "output_router_logits", False):
        return None
    target = getattr(recorder, "target_class", recorder)
    routes = Routes(getattr(recorder, "index", 1))
    part = getattr(recorder, "layer_name", None) or ""
    for name, module in block.named_modules():
        if isinstance(module, target) and part in name:
            module.register_forward_hook(routes)
    return routes


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


def _initialise(module: Any, model: Any) -> None:
    """Initialise what is in a module as transformers does, inner modules first."""
    for child in module.children():
        _initialise(child, model)
        if hasattr(child, "reset_lora_parameters"):
            for adapter in child.r:
                init = model.peft_config[adapter].init_lora_weights
                child.reset_lora_parameters(adapter, init if init in (False, "gaussian") else True)
            set_magnitudes(child)
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            model._init_weights(child)
