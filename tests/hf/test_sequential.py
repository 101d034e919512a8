"""A model's nn.Sequential is the model: transformers' own forward and backward, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from procpipe import NoChunk, Stage, hf
from tests.cutting.compare import gradients_of
from tests.hf.cases import batch_of, loss_of, model_of, output_of
from tests.hf.compare import assert_same

TINY: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8)
TINY |= {"num_hidden_layers": 1, "num_attention_heads": 1}

#: By name, whether transformers recomputes inside of blocks.
CHECKPOINTED = {"GPT-2": False, "Gemma 3": True, "BERT": False, "Phi": True}


def test_dropout_and_checkpointing_inside_layers_are_exact():
    for name, is_checkpointed in CHECKPOINTED.items():
        plain = model_of(name, dropout=0.3)
        if is_checkpointed:
            plain.activation_checkpointing_enable()
        layers: Any = hf.sequential(copy.deepcopy(plain))
        batch, labels = batch_of(name)
        torch.manual_seed(3)
        expected = loss_of(name)(output_of(plain, batch), labels)
        expected.backward()
        torch.manual_seed(3)
        found = loss_of(name)(layers(**batch, labels=labels), labels)
        found.backward()

        assert torch.isfinite(expected), name
        assert found == expected, name
        ours, theirs = gradients_of(layers, layers.keys), gradients_of(plain)
        assert_same((found, ours, {}), (expected, theirs, {}), name, 1e-14)


def test_masks_and_rotary_tables_are_made_once_for_all_blocks():
    for name in ("GPT-2", "Gemma 3"):
        layers: Any = hf.sequential(model_of(name))
        batch, _ = batch_of(name)
        ran: list[None] = []
        for layer in layers:
            part = layer.get_submodule(layer.stack.name)
            part.register_forward_hook(lambda *_, ran=ran: ran.append(None))
        for _ in range(2):  # each micro-batch makes its own
            ran.clear()
            expected = layers(**batch)
            assert len(ran) == 2, (name, "in embed, and in head")
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        assert not torch.equal(layers(**batch), expected), name


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's compiler
def test_equal_blocks_share_one_compiled_graph():
    """Any number of them, where torch keeps 8 versions of one function."""
    config = transformers.LlamaConfig(**TINY | {"num_hidden_layers": 9})
    tokens = torch.arange(24).view(4, 6) % 8
    losses, graphs = [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for is_compiled in (False, True):
        torch.manual_seed(0)
        layers = hf.sequential(transformers.LlamaForCausalLM(config).train())
        stage = Stage(layers, [11], chunks=2, loss_fn=hf.causal_lm_loss)
        if is_compiled:
            stage.compile(backend=backend)
        losses.append([stage.step(input_ids=tokens, labels=tokens).item() for _ in range(2)])

    assert losses[0] == losses[1]
    assert len(graphs) == 1


def test_layers_hold_the_models_own_modules():
    model = model_of("Llama")
    layers: Any = hf.sequential(model)

    assert [*dict(layers.named_children())] == ["embed", "block0", "block1", "block2", "head"]
    assert layers.get_submodule("block1.model.layers.1") is model.model.layers[1]
    assert {layers.keys(key) for key in layers.state_dict()} == set(model.state_dict())
    assert sum(p.numel() for p in layers.parameters()) == sum(p.numel() for p in model.parameters())


def test_models_in_eval_mode_are_not_trained_silently():
    batch, labels = batch_of("GPT-2")
    model = model_of("GPT-2", dropout=0.3).eval()
    expected = hf.causal_lm_loss(model(**batch).logits, labels)

    with pytest.warns(UserWarning, match=r"eval mode, .* no gradients before stage\.train\(\)"):
        layers = hf.sequential(model)
    stage = Stage(layers, [len(layers)], loss_fn=hf.causal_lm_loss)

    assert stage.step(**batch, labels=labels) == expected
    assert all(parameter.grad is None for parameter in stage.parameters())
    stage.train().step(**batch, labels=labels)
    assert all(parameter.grad is not None for parameter in stage.parameters())


def test_what_is_not_supported_is_one_error():
    llama = transformers.LlamaConfig(**TINY)
    vit: dict[str, Any] = dict.fromkeys(
        ("hidden_size", "intermediate_size", "image_size", "patch_size"), 8
    )
    ones: dict[str, Any] = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    bart: dict[str, Any] = dict.fromkeys(("vocab_size", "d_model", "max_position_embeddings"), 16)
    cases = [
        (nn.Linear(1, 1), "a Linear: it is not a model of transformers"),
        (transformers.LlamaModel(llama), "a LlamaModel: it has no base model 'model'"),
        (transformers.ViTForImageClassification(transformers.ViTConfig(**vit, **ones)),
         "a ViTForImageClassification: the forward of its base model does not take inputs_embeds"),
        (transformers.BartForConditionalGeneration(transformers.BartConfig(**bart)),
         r"it has an encoder: cut it by procpipe\.sequential\(model, \*\*batch\)"),
        (transformers.BartForConditionalGeneration(
            transformers.BartConfig(**bart, is_encoder_decoder=False)),
         "a BartForConditionalGeneration: its base model has 2 lists of 12 blocks, not one"),
    ]  # fmt: skip
    for model, fault in cases:
        with pytest.raises(TypeError, match=fault) as error:
            hf.sequential(model)
        assert "listed in docs/language_models.md" in str(error.value)


class Between(transformers.LlamaModel):
    """Changes the hidden states between blocks."""

    def forward(self, input_ids=None, inputs_embeds=None, **_):
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = torch.arange(states.shape[1])[None]
        for block in self.layers:
            states = 2 * block(states, position_embeddings=self.rotary_emb(states, positions))
        return transformers.modeling_outputs.BaseModelOutput(self.norm(states))


class OtherGradient(transformers.LlamaForCausalLM):
    """Has equal logits, but no gradient of the embedding."""

    def forward(self, input_ids=None, inputs_embeds=None, **others):
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids).detach()
        output = self.model(inputs_embeds=inputs_embeds, **others)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(output[0]))


def test_other_classes_are_compared_at_the_start():
    config = transformers.LlamaConfig(**TINY | {"num_hidden_layers": 3})
    fault = r"a OtherGradient: a small copy of it has a gradient of model\.embed_tokens"
    with pytest.raises(TypeError, match=fault):
        hf.sequential(OtherGradient(config))
    model = transformers.LlamaForCausalLM(config)
    model.model = Between(config)
    with pytest.raises(TypeError, match="it changes the hidden states between them"):
        hf.sequential(model)

    values = {**TINY, "head_dim": 8, "num_key_value_heads": 1}
    experts: dict[str, Any] = {
        "num_local_experts": 2,
        "intermediate_size_mlp": 8,
        "pad_token_id": 0,
    }
    llama = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**values, **experts))
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8)
    )
    griffin = transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(**values, block_types=["attention"], lru_width=8)
    )
    state = torch.random.get_rng_state()
    # They read an attribute of the embedding's matrix, call a part of the base model, have buffers.
    for other in (llama, opt, griffin):
        assert len(hf.sequential(other)) == 3
    assert torch.equal(torch.random.get_rng_state(), state)


def test_models_of_any_size_are_compared_as_small_copies():
    """Such a model of 120 GB would not fit here."""
    values: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 40, "head_dim": 128}
    config = transformers.HeliumConfig(**values, num_attention_heads=32, num_key_value_heads=8)
    with torch.device("meta"):
        model = transformers.HeliumForCausalLM(config)
    assert len(hf.sequential(model)) == 42


def test_labels_that_are_missing_are_asked_for():
    batch, labels = batch_of("Llama")
    for given in (batch, {**batch, "labels": labels}):  # labels in one value are an input
        stage = Stage(hf.sequential(model_of("Llama")), [5], loss_fn=hf.causal_lm_loss)
        with pytest.raises(ValueError, match=r"needs a target.*step\(\*\*batch\) with labels"):
            stage.step(given)


def test_one_row_of_position_ids_is_for_all():
    batch, labels = batch_of("Llama")
    batch["position_ids"] = torch.arange(3, 12)[None]
    expected = hf.causal_lm_loss(model_of("Llama")(**batch).logits, labels)
    stage = Stage(hf.sequential(model_of("Llama")), [5], chunks=2, loss_fn=hf.causal_lm_loss)

    loss = stage.step(**{**batch, "position_ids": NoChunk(batch["position_ids"])}, labels=labels)

    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-13)


def test_the_loss_is_that_of_transformers():
    model, (batch, labels) = model_of("GPT-2").float(), batch_of("GPT-2")
    output = model(**batch, labels=labels)

    assert hf.causal_lm_loss.num_counted(labels) == (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(hf.causal_lm_loss(output.logits, labels), output.loss)
