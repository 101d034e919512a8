"""``sequential(model)``: a model of transformers as an ``nn.Sequential`` over its own modules.

    embed     input_ids, … ──> hidden states, attention mask, position ids
    block0    hidden states, … ──> hidden states, …
    …
    head      hidden states, … ──> logits

Each layer is a shell (``shells.py``) and runs the model's own forward: so masks and rotary tables
are made on every stage by transformers, and only what is small travels with the hidden states.

    encoder_embed, encoder0, …, encoder_norm ═══ one skip tensor ═══╗
    embed ──────────────────────────── block0 <══╝ block1 <══╝ … head
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.hf.families import Family, family_of, unsupported
from procpipe.hf.shells import Twice, copied, of_block, path_of_blocks, shared_module, shell_of
from procpipe.skip import pop, skippable, stash

#: What a block's masks and rotary tables are made from; small, and travels.
_TRAVELS = ("attention_mask", "position_ids")

#: The attribute of hidden states with what blocks on this stage are called with, by kind of block.
_GIVEN = "_procpipe_given"

#: Parameters of a forward that are no inputs of a mini-batch.
_NO_INPUTS = ("self", "past_key_values", "use_cache", "kwargs", "encoder_hidden_states")

#: What peft puts into the keys of what it wraps.
_WRAPPED = re.compile(r"\.(base_layer|original_module)\.")

#: The size of the input of which a balance is estimated.
_NUM_SAMPLES, _LENGTH = 2, 128

#: The output of one layer: the hidden states, and what travels with them, by name.
State = dict[str, Any]


def sequential(model: nn.Module) -> nn.Sequential:
    """Make an ``nn.Sequential`` of a model of transformers, one layer a block.

    The layers hold the model's own modules, so the model and the result share parameters; build
    the optimizer from the stage. Change the model (LoRA, gradient checkpointing, dtype) before.
    Does not communicate.

    The first layer takes what the model takes, by name: ``input_ids``, ``attention_mask`` and so
    on, ``(batch, …)`` each. ``labels`` are ignored, as losses are for ``loss_fn``. The last returns
    the logits; of a mixture of experts with ``config.output_router_logits`` the logits and the
    auxiliary loss, 0-dim, multiplied by its coefficient.

    Models whose ``rope_type`` is "dynamic" change their rotary frequencies in a forward pass, which
    recomputation finds: give the stage ``checkpoint="never"``.

    Args:
        model: of a class in the table of ``families.py``; also one with LoRA of peft, without
            ``trainable_token_indices`` and ``target_parameters``. It may be on the meta device.

    Returns:
        layers ``embed``, ``block0``, …, ``head``. Its attribute ``keys`` is a function that makes
        the key of the model's state dict from one of its own.

    Raises:
        TypeError: the model is not supported; says why, and which classes are.
    """
    plain = _without_adapter(model)
    family = family_of(plain)
    name = family.stack or plain.base_model_prefix
    try:
        decoder = _Stack.of(plain, name, family)
        encoder = _Stack.of(plain, family.encoder, family) if family.encoder else None
    except LookupError as error:
        raise unsupported(plain, str(error)) from None
    layers: dict[str, nn.Module] = {}
    if encoder is not None:
        layers["encoder_embed"] = EncoderEmbed(encoder, decoder.inputs)
        for k in range(encoder.num_blocks):
            layers[f"encoder{k}"] = Block(encoder, k)
        layers["encoder_norm"] = _stashing(decoder.num_blocks)(encoder)
        layers["embed"] = DecoderEmbed(decoder)
    else:
        layers["embed"] = Embed(decoder)
    block_type = Block if encoder is None else CrossBlock
    layers |= {f"block{k}": block_type(decoder, k) for k in range(decoder.num_blocks)}
    layers["head"] = Head(decoder)
    made = HFSequential(OrderedDict(layers))
    made.training = plain.training
    made.sample = _sample(decoder, has_encoder=encoder is not None)
    made.config = plain.config
    made.keys = keys_of(family)
    _check_complete(made, plain)
    return made


def keys_of(family: Family) -> Callable[[str], str]:
    """Return what makes Hugging Face's key from a key of the ``nn.Sequential``."""
    owner = re.escape(family.shared[0]) if family.shared else "(?!)"
    copies = re.compile(rf"\.\d+(?=\.{owner}\.)")
    return lambda key: copies.sub(".0", _WRAPPED.sub(".", key.partition(".")[2]))


class HFSequential(nn.Sequential):
    """An ``nn.Sequential`` whose first layer takes keyword arguments, as the model does."""

    config: Any
    sample: dict[str, Tensor]
    keys: Callable[[str], str]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the last layer returns."""
        first, *others = self
        value = first(*inputs, **named)
        for layer in others:
            value = layer(value)
        return value


class _Stack:
    """A stack of a model, of which shells are made."""

    def __init__(
        self, model: Any, name: str, stack: Any, path: tuple[str, ...], family: Family
    ) -> None:
        self.model, self.name, self.path, self.family = model, name, path, family
        self.skeleton = copied(model, {})  # does not keep the parameters of other stages alive
        self._stack, self.config = stack, stack.config
        self._blocks = [*stack.get_submodule(".".join(path))]
        self.num_blocks = len(self._blocks)
        parameters = inspect.signature(type(stack).forward).parameters
        self.inputs = [name for name in parameters if name not in _NO_INPUTS]
        self.travels = [name for name in _TRAVELS if name in self.inputs]

    @classmethod
    def of(cls, model: Any, name: str, family: Family) -> _Stack:
        """Find the stack of a model, and check that its own forward leaves hidden states alone."""
        stack = getattr(model, name, None)
        if stack is None or stack is model:
            raise LookupError(f"it has no base model {name!r}")
        names = [*(stack._no_split_modules or ()), *(model._no_split_modules or ())]
        self = cls(model, name, stack, path_of_blocks(stack, names), family)
        with torch.no_grad(), torch.device("cpu"):  # also within torch.device("meta")
            states = torch.linspace(-1, 1, 6 * stack.config.hidden_size).view(2, 3, -1)
            result = self.shell(None)(inputs_embeds=states, use_cache=False)[0]
        if not torch.equal(states, result):
            raise LookupError("its forward changes the hidden states outside of its modules")
        return self

    def shell(self, part: int | str | None) -> Any:
        """Return the shell of a part of this stack."""
        shell = shell_of(self._stack, self.path, part, self.family)
        if isinstance(part, int):
            block = shared_module(self._blocks, part, self.family)
            shell.get_submodule(".".join(self.path))._modules[str(part)] = block
        return shell

    def whole(self, shell: nn.Module) -> Any:
        """Return a copy of the model with a shell in the place of this stack, without others."""
        children = dict(self.model._modules)
        before_stack = [*children][: [*children].index(self.name)]
        return copied(self.model, {**children, self.name: shell} | dict.fromkeys(before_stack))


class _Layer(nn.Module):
    """One layer: a shell, under its stack's name."""

    def __init__(self, stack: _Stack, part: int | str) -> None:
        super().__init__()
        self.training = stack.model.training
        self._name, self._travels = stack.name, stack.travels
        self._model = (stack.skeleton,)  # in a tuple, so that nn.Module does not register it
        self.add_module(stack.name, stack.shell(part))
        self._turns = [module for module in self.modules() if isinstance(module, Twice)]
        self._needs_no_mask = isinstance(part, str) and "attention_mask" in stack.inputs

    def run(self, **inputs: Any) -> Any:
        """Run the shell."""
        for module in self._turns:
            module.is_second = False
        if self._needs_no_mask:
            inputs["attention_mask"] = _no_mask(next(iter(inputs.values())))
        return self._modules[self._name](**{"use_cache": False, **inputs})  # type: ignore[misc]

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers, as transformers does."""
        _initialise(self, self._model[0])


class Embed(_Layer):
    """The first layer: everything before the blocks."""

    def __init__(self, stack: _Stack) -> None:
        super().__init__(stack, "before")
        self._inputs = stack.inputs

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        named = _by_name(inputs, named, self._inputs)
        states = self.run(**named)[0]
        return {"hidden_states": states} | {
            name: named[name] for name in self._travels if named.get(name) is not None
        }


class Block(_Layer):
    """A block of the model.

    Among consecutive blocks of a stage only the first runs its shell, which makes masks and rotary
    tables. The others are called with the same ones, as by transformers. These are an attribute of
    the hidden states, so that they are of this micro-batch, and do not travel to other stages.

    Attributes:
        caches: where keys and values are kept while tokens are generated.
    """

    caches: Any = None

    def __init__(self, stack: _Stack, part: int) -> None:
        super().__init__(stack, part)
        shell: Any = self._modules[self._name]
        self._blocks = (shell.get_submodule(".".join(stack.path)),)
        self._kind = repr(of_block(stack.config, part))

    def forward(self, state: State) -> State:
        """Return the state with the block's hidden states."""
        if self.caches is not None or torch.compiler.is_compiling():
            return self._by_shell(state)
        states = state["hidden_states"]
        all_given = getattr(states, _GIVEN, {})
        (blocks,) = self._blocks
        if (given := all_given.get(self._kind)) is not None:
            (block,) = blocks.children()
            state = {**state, "hidden_states": block(states, *given[0], **given[1])}
        else:
            state = self._by_shell(state)
            if blocks.given is None or "router_logits" in state:
                return state
            all_given = {**all_given, self._kind: blocks.given}
            blocks.given = None
        setattr(state["hidden_states"], _GIVEN, all_given)
        return state

    def _by_shell(self, state: State) -> State:
        given = {name: state[name] for name in self._travels if name in state}
        if self.caches is not None:
            config = self._modules[self._name].config  # type: ignore[union-attr]
            given |= {"past_key_values": self.caches.next(config), "use_cache": True}
        result = self.run(inputs_embeds=state["hidden_states"], **given)
        state = {**state, "hidden_states": result[0]}
        logits = getattr(result, "router_logits", None)
        if logits and self.caches is None:
            state["router_logits"] = (*state.get("router_logits", ()), *logits)
        return state


class Head(nn.Module):
    """The last layer: everything after the blocks, by the forward of the whole model.

    Attributes:
        num_logits: of how many of the last positions it returns logits; 0 for all.
    """

    num_logits = 0

    def __init__(self, stack: _Stack) -> None:
        super().__init__()
        shell = stack.shell("after")
        whole = stack.whole(shell)
        self.training = stack.model.training
        self._model, self._whole = (stack.skeleton,), (whole,)
        self._is_seq2seq = bool(stack.family.encoder)
        self._modules = whole._modules  # one dict: what replaces a module replaces it in both
        self._turns = [module for module in self.modules() if isinstance(module, Twice)]
        parameters = inspect.signature(type(whole).forward).parameters
        self._has_routers = "output_router_logits" in parameters
        self._router_logits: tuple[Tensor, ...] = ()
        shell.register_forward_hook(self._add_router_logits)

    def forward(self, state: State) -> Any:
        """Return the logits, with the auxiliary loss if there is one."""
        states = state["hidden_states"]
        for module in self._turns:
            module.is_second = False
        named: dict[str, Any] = {"inputs_embeds": states, "attention_mask": _no_mask(states)}
        if self._is_seq2seq:
            named = {"decoder_inputs_embeds": states, "encoder_outputs": (states,)}
            named |= {"attention_mask": _no_mask(states), _DECODERS_MASK: _no_mask(states)}
        if self.num_logits:
            named["logits_to_keep"] = self.num_logits
        self._router_logits = state.get("router_logits", ())
        if self._has_routers:
            named["output_router_logits"] = bool(self._router_logits)
        if self._router_logits:
            named["attention_mask"] = state.get("attention_mask")
        (whole,) = self._whole
        result = whole(**named, use_cache=False)
        if not self._router_logits:
            return result.logits
        self._router_logits = ()
        return result.logits, whole.router_aux_loss_coef * result.aux_loss

    def _add_router_logits(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self._router_logits:
            result["router_logits"] = self._router_logits

    def train(self, mode: bool = True) -> Head:
        """Set the mode of the copy of the model too."""
        self.whole.training = mode
        return super().train(mode)

    @property
    def whole(self) -> Any:
        """The copy of the model, which is no submodule."""
        return self._whole[0]

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers, as transformers does."""
        _initialise(self, self._model[0])


# -- encoder and decoder -------------------------------------------------------------------------

_DECODERS_MASK = "decoder_attention_mask"


class EncoderEmbed(Embed):
    """The first layer of a model with an encoder; what the decoder takes travels through it."""

    def __init__(self, stack: _Stack, decoder_inputs: list[str]) -> None:
        super().__init__(stack)
        for name, module in stack.model._modules.items():
            if name == stack.name:
                break
            self.add_module(name, module)  # the matrix that is shared

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        decoders = ("decoder_input_ids", _DECODERS_MASK)
        named = _by_name(inputs, named, [*self._inputs, *decoders])
        if named.get("decoder_input_ids") is None:
            raise TypeError(
                "the model needs decoder_input_ids: give them by "
                "model.prepare_decoder_input_ids_from_labels(labels), as DataCollatorForSeq2Seq("
                "tokenizer, model=model) does"
            )
        kept = {name: named.pop(name) for name in decoders if named.get(name) is not None}
        return {**super().forward(**named), **kept}


class EncoderNorm(_Layer):
    """The end of an encoder."""

    def __init__(self, stack: _Stack) -> None:
        super().__init__(stack, "after")

    def forward(self, state: State) -> Any:
        """Stash the encoder's output for all blocks of the decoder."""
        yield stash("encoder", self.run(inputs_embeds=state["hidden_states"])[0])
        return {name: value for name, value in state.items() if name != "hidden_states"}


def _stashing(num_pops: int) -> type[EncoderNorm]:
    """Return a class whose tensor so many blocks pop."""
    return skippable(stash={"encoder": num_pops})(type("EncoderNorm", (EncoderNorm,), {}))


class DecoderEmbed(_Layer):
    """The embeddings of a decoder."""

    def __init__(self, stack: _Stack) -> None:
        super().__init__(stack, "before")

    def forward(self, state: State) -> State:
        """Return the embeddings of the decoder's input, and what travels with them."""
        state = dict(state)
        return {"hidden_states": self.run(input_ids=state.pop("decoder_input_ids"))[0], **state}


@skippable(pop=["encoder"])
class CrossBlock(_Layer):
    """A block of a decoder, with the encoder's output."""

    def forward(self, state: State) -> Any:
        """Return the state with the block's hidden states."""
        encoder = yield pop("encoder")
        result = self.run(
            inputs_embeds=state["hidden_states"],
            attention_mask=state.get(_DECODERS_MASK),
            encoder_hidden_states=encoder,
            encoder_attention_mask=state.get("attention_mask"),
        )
        return {**state, "hidden_states": result[0]}


# -- helpers -------------------------------------------------------------------------------------


def model_of(stage: nn.Sequential) -> Any:
    """Return the model of the layers of a stage without its modules: class and configuration.

    Raises:
        TypeError: the stage was not made of ``hf.sequential``.
    """
    for layer in stage.children():
        if isinstance(layer, _Layer | Head):
            return layer._model[0]
    raise TypeError("the model of the stage was not made by hf.sequential: make it so")


@torch.no_grad()
def set_magnitudes(layer: Any) -> None:
    """Set the magnitudes that DoRA has in a layer, if any, to those of its weights."""
    for adapter, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
        weight, change = layer.get_base_layer().weight, layer.get_delta_weight(adapter)
        change = change.T if magnitude.fan_in_fan_out else change
        magnitude.weight.copy_(magnitude.get_weight_norm(weight, change, scaling=1))


def _by_name(inputs: tuple[Any, ...], named: dict[str, Any], known: list[str]) -> dict[str, Any]:
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


def _no_mask(like: Tensor) -> Tensor:
    """Return a mask that no block uses.

    transformers takes it as it is. Of none, or of another shape, it would make one, and for that
    read values, for which the host waits for a GPU.
    """
    return like.new_ones((1, 1, 1, 1), dtype=torch.bool)


def _sample(stack: _Stack, *, has_encoder: bool) -> dict[str, Tensor]:
    """Return an input without values, from which a balance is estimated.

    Its masks are those that transformers would make, and so it takes them as they are.
    """
    longest = getattr(stack.model.config, "max_position_embeddings", _LENGTH)
    length = min(_LENGTH, longest)
    tokens = torch.empty(_NUM_SAMPLES, length, dtype=torch.long, device="meta")
    mask = tokens.new_empty((_NUM_SAMPLES, 1, length, length), dtype=torch.bool)
    sample = {"input_ids": tokens, "attention_mask": mask}
    return sample | ({"decoder_input_ids": tokens, _DECODERS_MASK: mask} if has_encoder else {})


def _without_adapter(model: Any) -> Any:
    """Return the model that peft has put LoRA into."""
    if not type(model).__module__.startswith("peft."):
        return model
    if not hasattr(model, "get_base_model") or any(
        config.peft_type != "LORA" for config in model.peft_config.values()
    ):
        raise unsupported(model, "of peft, only LoRA")
    for option in ("trainable_token_indices", "target_parameters"):
        if any(getattr(config, option, None) for config in model.peft_config.values()):
            raise unsupported(model, f"{option} of LoraConfig cannot be saved")
    return model.get_base_model()


def _initialise(module: Any, model: Any) -> None:
    """Initialise what is in a module as transformers does, inner modules first."""
    for child in module.children():
        _initialise(child, child if hasattr(child, "_init_weights") else model)
        if hasattr(child, "reset_lora_parameters"):
            for adapter in child.r:
                child.reset_lora_parameters(adapter, True)
            set_magnitudes(child)
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            (child if hasattr(child, "_init_weights") else model)._init_weights(child)


def _check_complete(made: HFSequential, model: nn.Module) -> None:
    """Check that the layers hold all of the model."""
    of_layers = {made.keys(key) for key in made.state_dict()}
    of_model = {_WRAPPED.sub(".", key) for key in model.state_dict()}
    if lost := sorted(of_layers ^ of_model):
        raise unsupported(model, f"{', '.join(lost)} would be in no layer, or in no model")
