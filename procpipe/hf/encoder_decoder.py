"""The layers of a model with an encoder, whose output is a skip tensor for all decoder blocks.

encoder_embed, encoder0, …, encoder_norm ═══ one skip tensor ═══╗
embed ──────────────────────────── block0 <══╝ block1 <══╝ … head
"""

from __future__ import annotations

import copy
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from procpipe.hf.layers import Block, Embed, Head, ModelLayer, State, by_name
from procpipe.hf.stack import Stack, no_mask
from procpipe.skip import pop, skippable, stash

#: The classes of models that have these layers.
CLASSES = ("T5ForConditionalGeneration",)

#: A module that only the first block of a stack has, whose result the forward passes to the others.
SHARED = "layer.0.SelfAttention.relative_attention_bias"

_INPUTS, _MASK = "decoder_input_ids", "decoder_attention_mask"


def layers_of(model: Any, encoder: Stack, decoder: Stack) -> dict[str, nn.Module]:
    """Return all layers by name, in order."""

    def blocks(kind: type[Block], stack: Stack) -> list[Block]:
        numbers = range(stack.num_blocks)
        return [kind(stack, model, k, _with_shared(stack, model, k)) for k in numbers]

    stashing = skippable(stash={"encoder": decoder.num_blocks})
    norm: type[EncoderNorm] = stashing(type("EncoderNorm", (EncoderNorm,), {}))
    return {
        "encoder_embed": EncoderEmbed(encoder, model),
        **{f"encoder{k}": block for k, block in enumerate(blocks(Block, encoder))},
        "encoder_norm": norm(encoder, model),
        "embed": DecoderEmbed(decoder, model),
        **{f"block{k}": block for k, block in enumerate(blocks(CrossBlock, decoder))},
        "head": Seq2SeqHead(decoder, model),
    }


class EncoderEmbed(Embed):
    """The first layer of a model with an encoder; what the decoder takes travels through it."""

    def __init__(self, stack: Stack, model: nn.Module) -> None:
        super().__init__(stack, model)
        for name, module in takewhile(lambda each: each[0] != stack.name, model.named_children()):
            self.add_module(name, module)  # the matrix that is shared

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        named = by_name(inputs, named, [*self.stack.inputs, _INPUTS, _MASK])
        if named.get(_INPUTS) is None:
            raise TypeError(
                "the model needs decoder_input_ids: give them by "
                "model.prepare_decoder_input_ids_from_labels(labels), as DataCollatorForSeq2Seq("
                "tokenizer, model=model) does"
            )
        kept = {name: named.pop(name) for name in (_INPUTS, _MASK) if name in named}
        return {**super().forward(**named), **kept}


class EncoderNorm(ModelLayer):
    """The end of an encoder."""

    def __init__(self, stack: Stack, model: nn.Module) -> None:
        super().__init__(stack, model, stack.modules(model, "after"))

    def forward(self, state: State) -> Any:
        """Stash the encoder's output for all blocks of the decoder."""
        states = state["hidden_states"]
        named = {"inputs_embeds": states, "attention_mask": no_mask(states)}
        result, _, _ = self.stack.run(self, left=states, training=self.training, **named)
        yield stash("encoder", result[0])
        return {name: value for name, value in state.items() if name != "hidden_states"}


class DecoderEmbed(Embed):
    """The embeddings of a decoder."""

    def forward(self, state: State) -> State:
        """Return the embeddings of the decoder's input, and what travels with them."""
        state = dict(state)
        return {**super().forward(input_ids=state.pop(_INPUTS)), **state}


@skippable(pop=["encoder"])
class CrossBlock(Block):
    """A block of a decoder, with the encoder's output, which each block gets by itself."""

    def forward(self, state: State) -> Any:
        """Return the state with the block's hidden states."""
        encoder = yield pop("encoder")
        _, given = self.given(
            inputs_embeds=state["hidden_states"],
            attention_mask=state.get(_MASK),
            encoder_hidden_states=encoder,
            encoder_attention_mask=state.get("attention_mask"),
        )
        return self.run(state, given)


class Seq2SeqHead(Head):
    """The last layer, of a model that takes the encoder's output, which its head does not use."""

    def inputs_of(self, states: Tensor) -> dict[str, Any]:
        """Return what the model is called with, whose stack holds only what is after the blocks."""
        mask = no_mask(states)
        given = {"decoder_inputs_embeds": states, "encoder_outputs": (states,)}
        return {**given, "attention_mask": mask, _MASK: mask}


def _with_shared(stack: Stack, model: nn.Module, k: int) -> Any:
    """Return block ``k``, which has the first block's shared module itself.

    It is a copy of the modules then; parameters are shared. Otherwise what the shared module
    returns would have to travel: a tensor (heads, length, length), for every micro-batch.
    """
    block = model.get_submodule(f"{stack.path}.{k}")
    if k == 0:
        return block
    made = copy.deepcopy(block, {id(each): each for each in (*block.parameters(), stack.config)})
    owner, _, name = SHARED.rpartition(".")
    attention: Any = made.get_submodule(owner)
    setattr(attention, name, model.get_submodule(f"{stack.path}.0.{SHARED}"))
    attention.has_relative_attention_bias = True
    return made
