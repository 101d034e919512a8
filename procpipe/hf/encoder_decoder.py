"""The layers of a model with an encoder, whose output is a skip tensor for all decoder blocks.

encoder_embed, encoder0, …, encoder_norm ═══ one skip tensor ═══╗
embed ──────────────────────────── block0 <══╝ block1 <══╝ … head
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from procpipe.hf.layers import Block, Embed, Head, ShellLayer, Stack, State, by_name, no_mask
from procpipe.skip import pop, skippable, stash

_INPUTS, _MASK = "decoder_input_ids", "decoder_attention_mask"


def layers_of(encoder: Stack, decoder: Stack) -> dict[str, nn.Module]:
    """Return all layers by name, in order."""
    return {
        "encoder_embed": EncoderEmbed(encoder, decoder.inputs),
        **{f"encoder{k}": Block(encoder, k) for k in range(encoder.num_blocks)},
        "encoder_norm": _stashing(decoder.num_blocks)(encoder, "after"),
        "embed": DecoderEmbed(decoder, "before"),
        **{f"block{k}": CrossBlock(decoder, k) for k in range(decoder.num_blocks)},
        "head": Seq2SeqHead(decoder),
    }


class EncoderEmbed(Embed):
    """The first layer of a model with an encoder; what the decoder takes travels through it."""

    def __init__(self, stack: Stack, decoder_inputs: list[str]) -> None:
        super().__init__(stack)
        for name, module in stack.model._modules.items():
            if name == stack.name:
                break
            self.add_module(name, module)  # the matrix that is shared

    def forward(self, *inputs: Any, **named: Any) -> State:
        """Return the embeddings of a mini-batch, and what travels with them."""
        named = by_name(inputs, named, [*self._inputs, _INPUTS, _MASK])
        if named.get(_INPUTS) is None:
            raise TypeError(
                "the model needs decoder_input_ids: give them by "
                "model.prepare_decoder_input_ids_from_labels(labels), as DataCollatorForSeq2Seq("
                "tokenizer, model=model) does"
            )
        kept = {name: named.pop(name) for name in (_INPUTS, _MASK) if name in named}
        return {**super().forward(**named), **kept}


class EncoderNorm(ShellLayer):
    """The end of an encoder."""

    def forward(self, state: State) -> Any:
        """Stash the encoder's output for all blocks of the decoder."""
        yield stash("encoder", self.run(inputs_embeds=state["hidden_states"])[0])
        return {name: value for name, value in state.items() if name != "hidden_states"}


def _stashing(num_pops: int) -> type[EncoderNorm]:
    """Return a class whose tensor so many blocks pop."""
    return skippable(stash={"encoder": num_pops})(type("EncoderNorm", (EncoderNorm,), {}))


class DecoderEmbed(ShellLayer):
    """The embeddings of a decoder."""

    def forward(self, state: State) -> State:
        """Return the embeddings of the decoder's input, and what travels with them."""
        state = dict(state)
        return {"hidden_states": self.run(input_ids=state.pop(_INPUTS))[0], **state}


@skippable(pop=["encoder"])
class CrossBlock(ShellLayer):
    """A block of a decoder, with the encoder's output."""

    def forward(self, state: State) -> Any:
        """Return the state with the block's hidden states."""
        encoder = yield pop("encoder")
        result = self.run(
            inputs_embeds=state["hidden_states"],
            attention_mask=state.get(_MASK),
            encoder_hidden_states=encoder,
            encoder_attention_mask=state.get("attention_mask"),
        )
        return {**state, "hidden_states": result[0]}


class Seq2SeqHead(Head):
    """The last layer, of a model that takes the encoder's output, which its head does not use."""

    def inputs_of(self, states: Tensor) -> dict[str, Any]:
        """Return what the model is called with, whose stack holds only what is after the blocks."""
        mask = no_mask(states)
        given = {"decoder_inputs_embeds": states, "encoder_outputs": (states,)}
        return {**given, "attention_mask": mask, _MASK: mask}
