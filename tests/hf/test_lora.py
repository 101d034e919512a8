"""LoRA of peft: trained as by peft, and adapters that peft reads and writes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer

from procpipe import Stage, hf
from tests.dist.stages import stage_of
from tests.hf.cases import batch_of, class_of, config_of, loss_of, model_of, output_of
from tests.hf.test_sequential import assert_gradients
from tests.hf.test_weights import TOLERANCE, logits_of, read_again, stage_logits_of

# peft itself calls what transformers is about to remove.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

#: By case, what gets an adapter.
TARGETS: dict[str, dict[str, Any]] = {
    "Llama": {"target_modules": ["q_proj", "v_proj"]},
    "GPT-2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "BERT": {"target_modules": ["query"], "modules_to_save": ["classifier"]},
}


def with_lora(name, is_random=True):
    """Return the model of a case with LoRA, which changes its output unless it is as at first."""
    torch.manual_seed(5)
    config = LoraConfig(r=2, init_lora_weights=not is_random, **TARGETS[name])
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = get_peft_model(model_of(name), config).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if is_random and "modules_to_save" in key:
                parameter.normal_()
    return model


def test_adapters_train_and_travel_as_with_peft(tmp_path):
    for name in TARGETS:
        plain = with_lora(name)
        layers = hf.sequential(with_lora(name))
        stage = Stage(layers, [len(layers)], chunks=2, loss_fn=loss_of(name))
        batch, labels = batch_of(name)
        expected = loss_of(name)(output_of(plain, batch), labels)
        expected.backward()

        loss = stage.step(**batch, labels=labels)
        for _ in range(2):  # replaces what is there
            hf.save_adapter(stage, tmp_path / name / "adapter")

        assert abs(loss - expected) <= TOLERANCE, name
        assert_gradients(
            name, stage, plain.base_model.model, lambda key: key.partition(".")[2], 1e-12
        )
        expected = logits_of(plain, name)
        again = PeftModel.from_pretrained(model_of(name), tmp_path / name / "adapter")
        assert (logits_of(again, name) - expected).abs().max() <= TOLERANCE, name


def test_adapters_load_into_models_built_on_the_meta_device(tmp_path):
    name = "Llama"
    plain = with_lora(name)
    plain.save_pretrained(tmp_path / "adapter")
    model_of(name).save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        base = class_of(name)._from_config(config_of(name), dtype=torch.float64)
        layers = hf.sequential(get_peft_model(base, LoraConfig(r=2, **TARGETS[name])).double())
    stage = Stage(layers, [len(layers)])

    hf.load_pretrained(stage, tmp_path / "base")
    before = stage_logits_of(stage, name)
    hf.load_adapter(stage, tmp_path / "adapter")

    assert (before - logits_of(model_of(name), name)).abs().max() <= TOLERANCE
    assert (stage_logits_of(stage, name) - logits_of(plain, name)).abs().max() <= TOLERANCE
    with pytest.raises(ValueError, match="no adapter 'other', but default"):
        hf.save_adapter(stage, tmp_path, name="other")
    with pytest.raises(FileNotFoundError, match=r"snapshot_download\('mine/adapter'\) returns"):
        hf.load_adapter(stage, "mine/adapter")


#: What adapters derive from the weights of the model.
DERIVED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("BERT", TARGETS["BERT"]),
    ("Llama", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    ("GPT-2", {**TARGETS["GPT-2"], "use_dora": True}),
)


def test_adapters_start_from_the_weights_of_the_folder(tmp_path):
    for name, options in DERIVED:
        model_of(name).save_pretrained(tmp_path / name)
        for device in ("meta", "cpu"):
            with torch.device(device), warnings.catch_warnings(action="ignore"):
                base = class_of(name)._from_config(config_of(name), dtype=torch.float64)
                model = get_peft_model(base, LoraConfig(r=2, **options)).double()
            layers = hf.sequential(model)
            stage = Stage(layers, [len(layers)])

            hf.load_pretrained(stage, tmp_path / name)

            error = stage_logits_of(stage, name) - logits_of(model_of(name), name)
            assert error.abs().max() <= TOLERANCE, (name, device)


def adapted(name, **options):
    """Return the model of a case with LoRA all of whose parameters are random."""
    torch.manual_seed(5)
    with warnings.catch_warnings(action="ignore"):  # of embeddings, and what transformers removes
        model = get_peft_model(model_of(name), LoraConfig(r=2, **options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


#: Whose adapters have more than matrices.
MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    ("Qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    ("BERT", {"target_modules": ["query"], "bias": "all", "modules_to_save": ["pooler"]}),
    ("Llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("Llama", {"target_modules": ["q_proj"], "use_dora": True}),
)


def test_adapters_with_biases_and_magnitudes_are_files_of_peft(tmp_path):
    for number, (name, options) in enumerate(MORE):
        plain = adapted(name, **options)
        ours, theirs = (tmp_path / f"{number}{kind}" for kind in ("ours", "theirs"))
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of embeddings
            plain.save_pretrained(theirs)
        layers = hf.sequential(adapted(name, **options))
        stage = Stage(layers, [len(layers)])

        hf.save_adapter(stage, ours)
        for parameter in stage.parameters():
            if parameter.requires_grad:
                torch.nn.init.zeros_(parameter)
        hf.load_adapter(stage, theirs)

        found, expected = (load_peft_weights(folder, device="cpu") for folder in (ours, theirs))
        lacking = {key for key in expected.keys() - found.keys() if not _is_twice(key)}
        assert (found.keys() - expected.keys(), lacking) == (set(), set()), options
        assert all(torch.equal(found[key], expected[key]) for key in found), options
        logits = logits_of(plain, name)
        assert (stage_logits_of(stage, name) - logits).abs().max() <= TOLERANCE, options


def _is_twice(key):
    return any(part in key for part in ("modules_to_save", "original_module", "base_layer.weight"))


def test_models_with_active_adapters_are_saved_only_once_these_are_merged(tmp_path):
    options = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    plain = adapted("Llama", **options)
    layers = hf.sequential(adapted("Llama", **options))
    stage = Stage(layers, [len(layers)])

    with pytest.raises(ValueError, match=r"(?s)hf\.save_adapter, or merge.*- lm_head.*q_proj"):
        hf.save_pretrained(stage, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model = adapted("Llama", target_modules=["q_proj"])
    stage = Stage(hf.sequential(model), [5])
    expected = stage_logits_of(stage, "Llama")
    for module in stage.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    hf.save_pretrained(stage, tmp_path / "out")
    merged = plain.merge_and_unload()
    stage = Stage(hf.sequential(merged), [5])
    hf.save_pretrained(stage, tmp_path / "all")

    again = read_again("Llama", tmp_path / "out")
    assert (logits_of(again, "Llama") - expected).abs().max() <= 1e-12
    again = read_again("Llama", tmp_path / "all")
    assert (logits_of(again, "Llama") - logits_of(merged, "Llama")).abs().max() <= TOLERANCE


def test_adapters_start_as_their_configuration_says(tmp_path):
    model_of("Llama").float().save_pretrained(tmp_path)
    for init in (True, False, "gaussian", "pissa"):
        with torch.device("meta"):
            base = class_of("Llama")(config_of("Llama"))
            options: dict[str, Any] = {"target_modules": ["q_proj"], "init_lora_weights": init}
            layers = hf.sequential(get_peft_model(base, LoraConfig(r=2, **options)))
        torch.manual_seed(0)
        stage = Stage(layers, [len(layers)])
        if init == "pissa":  # of the weights, which are not there before
            with pytest.raises(ValueError, match="init_lora_weights='pissa' was computed from"):
                hf.load_pretrained(stage, tmp_path)
            continue
        hf.load_pretrained(stage, tmp_path)
        a, b = (
            torch.cat([value for key, value in stage.state_dict().items() if part in key])
            for part in ("lora_A", "lora_B")
        )
        if init is not False:  # normal, by the rank; or uniform, by the 16 inputs
            expected = 1 / 2 if init == "gaussian" else 1 / 4 / 3**0.5
            assert 0.8 < a.std() / expected < 1.2, init
        assert b.any() == (init is False), init


def test_forms_that_cannot_be_saved_are_refused():
    model = adapted("Llama", target_modules=["q_proj"], trainable_token_indices=[1, 2])

    with pytest.raises(TypeError, match="trainable_token_indices of LoraConfig cannot be saved"):
        hf.sequential(model)


def test_stages_whose_parameters_are_all_frozen(ranks, tmp_path):
    name = "Llama"
    plain = with_lora(name, is_random=False)
    batch, labels = batch_of(name)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1)
    expected = []
    for _ in range(3):
        loss = loss_of(name)(output_of(plain, batch), labels)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    losses = ranks(3).run(trained, tmp_path / "adapter", world=False, timeout_s=60).values()

    for found in losses:
        assert found == pytest.approx(expected, abs=1e-12)
    weights = load_peft_weights(tmp_path / "adapter", device="cpu")
    assert len(weights) == 12
    again = PeftModel.from_pretrained(model_of(name), tmp_path / "adapter")
    assert (logits_of(again, name) - logits_of(plain, name)).abs().max() <= 1e-11


def trained(bare, folder):
    """Train three steps; the first and the last stage have no adapter."""
    layers = hf.sequential(with_lora("Llama", is_random=False))
    batch, labels = batch_of("Llama")
    options = {"chunks": 2, "loss_fn": loss_of("Llama")}
    losses = []
    with stage_of(bare, "LoRA", layers, [1, 3, 1], **options) as stage:
        optimizer = torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(float(stage.step(**batch, labels=labels)))
            optimizer.step()
        hf.save_adapter(stage, folder)
    return losses
