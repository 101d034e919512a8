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
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from procpipe.hf.stack import Given, Stack, bare, no_mask
from procpipe.torch_internals import compile_in_place

#: The attribute of hidden states with what the blocks of this stage are called with.
_GIVEN = "_procpipe_given"

#: What a block's masks and rotary tables are made from; small, and travels.
_TRAVELS = ("attention_mask", "position_ids")

#: The output of one layer: the hidden states, and what travels with them, by name.
State = dict[str, Any]


class ModelLayer(nn.Module):
    """A layer of a model, which holds a part of its stack, under the model's own names.

    Attributes:
        stack: which all layers share.
        caches: while tokens are generated, what keeps keys and values of the next micro-batches;
            None where nothing is kept.
    """

    caches: Iterator[Any] | None = None
    _turn: str  # which of the stack's modules it holds

    def __init__(self, stack: Stack, model: nn.Module, **blocks: nn.Module) -> None:
        super().__init__()
        self.stack, self.training = stack, model.training
        self.add_module(stack.name, stack.part(model, self._turn, blocks))

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers as transformers does, inner modules first."""
        self.apply(partial(_initialise, self.stack.model))

    def compile(self, **options: Any) -> None:
        """Compile nothing: embeddings, and norm and head, are a few kernels."""

    def given(self, **inputs: Any) -> tuple[Tensor, list[Given]]:
        """Return the hidden states that the first block gets, and what all are called with."""
        if self.caches is not None and (cache := next(self.caches)) is not None:
            inputs |= {str(self.stack.cache_name): cache, "use_cache": True}
        _, states, given = self.stack.run(self.get_submodule(self.stack.name), **inputs)
        return states, given


class Embed(ModelLayer):
    """The first layer: everything before the blocks."""

    _turn = "before"

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        if inputs and isinstance(inputs[0], Mapping):  # all by name, as a sample is
            inputs, named = inputs[1:], {**inputs[0], **named}
        named.pop("labels", None)
        found = self.stack.inputs.bind_partial(*inputs, **named).arguments
        states, given = self.given(**found)
        setattr(states, _GIVEN, given)
        return {"hidden_states": states} | _travelling(found)


class Block(ModelLayer):
    """A block of the model.

    The first layer of a stage finds out what transformers would call all blocks with: masks, rotary
    tables. That is an attribute of the hidden states, so that it is of this micro-batch, and does
    not travel to other stages. The model's own block is then called directly.
    """

    _turn = "between"

    def __init__(self, stack: Stack, model: Any, k: int) -> None:
        self._k, self._path = k, f"{stack.path}.{k}"
        block = model.get_submodule(self._path)
        super().__init__(stack, model, **{str(k): block})
        self._routes: list[Tensor] = []
        recorder = (model.get_submodule(stack.name)._can_record_outputs or {}).get("router_logits")
        if recorder is not None and getattr(stack.config, "output_router_logits", False):
            for module in block.modules():
                if isinstance(module, recorder.target_class):
                    module.register_forward_hook(partial(self._note_route, recorder.index))

    def forward(self, state: State) -> State:
        """Return the state with the block's hidden states, and its routers' logits."""
        states = state["hidden_states"]
        given: list[Given] | None = getattr(states, _GIVEN, None)
        if given is None:
            _, given = self.given(inputs_embeds=states, **_travelling(state))
        args, named = given[self._k]
        self._routes.clear()
        result = self.get_submodule(self._path)(states, *args, **named)
        state = {**state, "hidden_states": result[0] if isinstance(result, tuple) else result}
        if self._routes and self.caches is None:
            state["router_logits"] = (*state.get("router_logits", ()), *self._routes)
        self._routes.clear()
        setattr(state["hidden_states"], _GIVEN, given)
        return state

    def _note_route(self, index: int, _: nn.Module, __: Any, result: Any) -> None:
        """A hook of a router, which notes its logits."""
        self._routes.append(result[index] if isinstance(result, tuple) else result)

    def compile(self, **options: Any) -> None:
        """Compile the model's own block in place, whose code equal blocks share."""
        compile_in_place(self.get_submodule(self._path), options, self.stack.num_blocks)


class Head(ModelLayer):
    """The last layer: everything after the blocks, by the forward of the whole model.

    While tokens are generated, it returns logits of the last position only.
    """

    _turn = "after"

    def __init__(self, stack: Stack, model: nn.Module) -> None:
        super().__init__(stack, model)
        names = [*model._modules]
        for name in names[names.index(stack.name) + 1 :]:
            self.add_module(name, model._modules[name])
        self._whole = (bare(model, self._modules),)  # in a tuple, so that it is not registered
        self._known = [*inspect.signature(type(model).forward).parameters]
        self.get_submodule(stack.name).register_forward_hook(self._add_router_logits)
        self._router_logits: tuple[Tensor, ...] = ()

    def forward(self, state: State) -> Any:
        """Return the logits, with the auxiliary loss if there is one."""
        (whole,) = self._whole
        whole.training = self.training
        self._router_logits = routes = state.get("router_logits", ())
        states = state["hidden_states"]
        # The stack holds only what is after the blocks here.
        named: dict[str, Any] = {"inputs_embeds": states, "return_dict": True}
        if self.stack.takes_mask:
            named["attention_mask"] = no_mask(states)
        if self.caches is not None and "logits_to_keep" in self._known:
            named["logits_to_keep"] = 1
        if "output_router_logits" in self._known:
            named["output_router_logits"] = bool(routes)
        if routes:
            named["attention_mask"] = state.get("attention_mask")
        result, _, _ = self.stack.run(whole, states, **named)
        self._router_logits = ()
        if routes:
            return result.logits, whole.router_aux_loss_coef * result.aux_loss
        return result.logits if self.caches is None else result.logits[:, -1:]

    def _add_router_logits(self, _: nn.Module, __: Any, result: Any) -> None:
        """A hook of the stack, in whose result are the logits of the routers of all blocks then."""
        if self._router_logits:
            result["router_logits"] = self._router_logits


def stack_of(stage: nn.Sequential) -> Stack:
    """Return what the layers of a stage share.

    Raises:
        TypeError: the stage was not made of ``hf.sequential``.
    """
    for layer in stage.children():
        if isinstance(layer, ModelLayer):
            return layer.stack
    raise TypeError(
        "the model of the stage was not made by hf.sequential: build Stage(hf.sequential(model), …)"
    )


def _travelling(values: Mapping[str, Any]) -> State:
    """Return what of these values travels with the hidden states."""
    return {name: values[name] for name in _TRAVELS if values.get(name) is not None}


def _initialise(model: Any, module: Any) -> None:
    """Initialise a module of a model, but for those in it, as transformers or peft does."""
    if hasattr(module, "reset_lora_parameters"):
        for adapter in module.r:
            init = model.peft_config[adapter].init_lora_weights
            module.reset_lora_parameters(adapter, init)
    elif not isinstance(module, ModelLayer | nn.ModuleList | nn.ModuleDict):
        model._init_weights(module)
