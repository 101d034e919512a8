"""LoRA of peft: trained as by peft, and adapters that peft reads and writes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights

from procpipe import Stage, hf
from tests.cutting.compare import gradients_of
from tests.dist.stages import stage_of
from tests.hf.cases import batch_of, class_of, config_of, loss_of, model_of, output_of
from tests.hf.compare import assert_same, logits_of, read_again
from tests.hf.test_weights import TOLERANCE

# peft itself calls what transformers is about to remove, and warns of embeddings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(adapter|embed|tie|tied):UserWarning"),
]

QUERIES: dict[str, Any] = {"target_modules": ["q_proj"]}
FANS: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}

#: Matrices, and what else adapters can have: biases, whole modules, embeddings.
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("GPT-2", FANS),
    ("Qwen2", {**QUERIES, "bias": "lora_only"}),
    ("BERT", {"target_modules": ["query"], "bias": "all", "modules_to_save": ["classifier"]}),
    ("Llama", {"target_modules": ["q_proj", "embed_tokens"]}),
)


def adapted(name, **options):
    """Return the model of a case with LoRA, all of whose trained parameters are random."""
    torch.manual_seed(5)
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(model_of(name), LoraConfig(r=2, **options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def adapted_anew(name, **options):
    """Return the layers of a case with LoRA, on the meta device."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = class_of(name)(config_of(name))
        return hf.sequential(get_peft_model(model, LoraConfig(r=2, **options)).double())


def test_adapters_are_trained_as_by_peft_and_are_its_files(tmp_path):
    for number, (name, options) in enumerate(FORMS):
        plain, (batch, labels) = adapted(name, **options), batch_of(name)
        base, theirs, ours = (tmp_path / f"{number} {kind}" for kind in ("base", "theirs", "ours"))
        model_of(name).save_pretrained(base)
        plain.save_pretrained(theirs)
        layers = adapted_anew(name, **options)
        stage = Stage(layers, [len(layers)], chunks=2, loss_fn=loss_of(name))

        hf.load_pretrained(stage, base)
        at_first = logits_of(stage, name)
        hf.load_adapter(stage, theirs)
        loss = stage.train().step(**batch, labels=labels)
        for _ in range(2):  # replaces what is there
            hf.save_adapter(stage, ours)

        assert (at_first - logits_of(model_of(name), name)).abs().max() <= TOLERANCE, options
        expected = loss_of(name)(output_of(plain, batch), labels)
        expected.backward()
        gradients = gradients_of(stage, _key_of)
        peft: Any = expected, gradients_of(plain.base_model.model), {}
        assert_same((loss, gradients, {}), peft, options)
        found, weights = (load_peft_weights(folder, device="cpu") for folder in (ours, theirs))
        twice = ("modules_to_save", "original_module", "base_layer.weight")
        lacking = {k for k in weights.keys() - found.keys() if not any(part in k for part in twice)}
        assert (found.keys() - weights.keys(), lacking) == (set(), set()), options
        assert all(torch.equal(found[key], weights[key]) for key in found), options
        again = PeftModel.from_pretrained(model_of(name), ours)
        difference = logits_of(again, name) - logits_of(plain, name)
        assert difference.abs().max() <= TOLERANCE, options


def test_models_with_adapters_are_saved_only_once_these_are_merged(tmp_path):
    options = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    model = adapted("Llama", **options)
    with pytest.raises(ValueError, match=r"hf\.save_adapter, or have peft merge them"):
        hf.save_pretrained(Stage(hf.sequential(model), [5]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged = model.merge_and_unload()
    hf.save_pretrained(Stage(hf.sequential(merged), [5]), tmp_path / "out")

    again = read_again("Llama", tmp_path / "out")
    assert (logits_of(again, "Llama") - logits_of(merged, "Llama")).abs().max() <= TOLERANCE


def test_what_cannot_be_saved_or_is_not_there_is_refused(tmp_path):
    stage = Stage(hf.sequential(adapted("Llama", **QUERIES)), [5])
    with pytest.raises(ValueError, match="the model has 0 adapters, not one"):
        hf.save_adapter(Stage(hf.sequential(model_of("Llama")), [5]), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"snapshot_download\('mine/adapter'\) returns"):
        hf.load_adapter(stage, "mine/adapter")
    others = {"use_dora": True, "init_lora_weights": "orthogonal"}
    model = adapted("Llama", **QUERIES, trainable_token_indices=[1, 2], **others)
    fault = (
        "trainable_token_indices and use_dora and init_lora_weights of LoraConfig cannot be used"
    )
    with pytest.raises(TypeError, match=fault):
        hf.sequential(model)


def test_stages_whose_parameters_are_all_frozen(ranks, tmp_path):
    plain, (batch, labels) = adapted("Llama", **QUERIES), batch_of("Llama")
    loss = loss_of("Llama")(output_of(plain, batch), labels)
    loss.backward()
    expected: Any = loss, gradients_of(plain.base_model.model), {}

    for found in ranks(3).run(trained, tmp_path, world=False, timeout_s=60).values():
        assert_same((*found, {}), expected, "in the middle are adapters")
    again = PeftModel.from_pretrained(model_of("Llama"), tmp_path)
    assert (logits_of(again, "Llama") - logits_of(plain, "Llama")).abs().max() <= TOLERANCE


def trained(bare, folder):
    """Run a step; the first and the last stage have no adapter."""
    layers = hf.sequential(adapted("Llama", **QUERIES))
    batch, labels = batch_of("Llama")
    with stage_of(bare, "LoRA", layers, [1, 3, 1], chunks=2, loss_fn=loss_of("Llama")) as stage:
        hf.save_adapter(stage, folder)
        return stage.step(**batch, labels=labels), gradients_of(stage, _key_of)


def _key_of(key):
    return key.partition(".")[2]
