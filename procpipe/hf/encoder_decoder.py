"""The layers of a model with an encoder, whose output is a skip tensor for all decoder blocks.

encoder_embed, encoder0, …, encoder_norm ═══ one skip tensor ═══╗
embed ──────────────────────────── block0 <══╝ block1 <══╝ … head
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from procpipe.hf.families import Family
from procpipe.hf.layers import Block, Embed, Head, ModelLayer, State, by_name
from procpipe.hf.stack import Stack, copied, no_mask
from procpipe.skip import pop, skippable, stash

_INPUTS, _MASK = "decoder_input_ids", "decoder_attention_mask"


def layers_of(encoder: Stack, decoder: Stack, family: Family) -> dict[str, nn.Module]:
    """Return all layers by name, in order."""
    with_encoder = _stashing(len(decoder.blocks))

    def block(kind: type[Block], stack: Stack, k: int) -> Block:
        return kind(stack, k, _with_shared(stack.blocks, k, family))

    return {
        "encoder_embed": EncoderEmbed(encoder, decoder.inputs),
        **{f"encoder{k}": block(Block, encoder, k) for k in range(len(encoder.blocks))},
        "encoder_norm": with_encoder(encoder),
        "embed": DecoderEmbed(decoder),
        **{f"block{k}": block(CrossBlock, decoder, k) for k in range(len(decoder.blocks))},
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
        named = by_name(inputs, named, [*self.inputs, _INPUTS, _MASK])
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

    def __init__(self, stack: Stack) -> None:
        after = stack.part("after")
        super().__init__(stack, {stack.name: after.shell})
        self._after = (after,)

    def forward(self, state: State) -> Any:
        """Stash the encoder's output for all blocks of the decoder."""
        states, (after,) = state["hidden_states"], self._after
        named = {"inputs_embeds": states, "attention_mask": no_mask(states)}
        yield stash("encoder", after.left(states, after.shell, **named)[0])
        return {name: value for name, value in state.items() if name != "hidden_states"}


def _stashing(num_pops: int) -> type[EncoderNorm]:
    """Return a class whose tensor so many blocks pop."""
    return skippable(stash={"encoder": num_pops})(type("EncoderNorm", (EncoderNorm,), {}))


class DecoderEmbed(Embed):
    """The embeddings of a decoder."""

    def forward(self, state: State) -> State:
        """Return the embeddings of the decoder's input, and what travels with them."""
        state = dict(state)
        return {"hidden_states": self.embedded(input_ids=state.pop(_INPUTS)), **state}


@skippable(pop=["encoder"])
class CrossBlock(Block):
    """A block of a decoder, with the encoder's output, which each block gets by itself."""

    def forward(self, state: State) -> Any:
        """Return the state with the block's hidden states."""
        encoder = yield pop("encoder")
        given = self.given(
            state["hidden_states"],
            {"attention_mask": state[_MASK]} if _MASK in state else {},
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


def _with_shared(blocks: Sequence[nn.Module], k: int, family: Family) -> Any:
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
