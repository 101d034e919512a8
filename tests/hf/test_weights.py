"""Folders of Hugging Face are read by procpipe and what it writes by transformers."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from procpipe import Stage, hf
from procpipe.state.sources import values_in
from tests.hf.cases import model_of
from tests.hf.compare import logits_of, on_meta, read_again

#: Parameters are at other addresses, where sums may be of another order.
TOLERANCE = 1e-13


def empty(name, **others):
    """Return all layers of a case, on the meta device, as one stage."""
    layers = on_meta(name, **others)
    return Stage(layers, [len(layers)])


def test_a_model_on_the_meta_device_is_initialised_as_transformers_does():
    layers = on_meta("GPT-2")
    torch.manual_seed(0)
    Stage(layers, [len(layers)])

    for key, value in layers.named_parameters():
        kind = key.rpartition(".")[2]
        if "ln_" in key:
            assert value.unique().tolist() == [1.0 if kind == "weight" else 0.0], key
        elif kind == "weight":
            expected = 0.02 / 6**0.5 if "c_proj" in key else 0.02  # by the number of blocks
            assert 0.75 < value.std() / expected < 1.25, key


def test_weights_of_the_base_model_alone_load(tmp_path):
    plain = model_of("GPT-2")
    plain.transformer.save_pretrained(tmp_path)
    stage = empty("GPT-2")

    hf.load_pretrained(stage, tmp_path)

    found = logits_of(stage, "GPT-2")
    assert (found - logits_of(plain, "GPT-2")).abs().max() <= TOLERANCE


def test_what_does_not_fit_is_one_error(tmp_path):
    model_of("Llama").save_pretrained(tmp_path / "Llama")
    stage = empty("Qwen2")

    with pytest.raises(ValueError, match=r"q_proj\.bias in the file\) is missing") as error:
        hf.load_pretrained(stage, tmp_path / "Llama")
    assert str(error.value).count("is missing") == 5
    assert "4 more like this" in str(error.value)
    hf.load_pretrained(stage, tmp_path / "Llama", strict=False)
    with pytest.raises(FileNotFoundError, match="holds none of"):
        hf.load_pretrained(empty("Llama"), tmp_path)
    stage = empty("Llama")
    with pytest.raises(FileNotFoundError, match=r"snapshot_download\('meta/Llama-9'\) returns"):
        hf.load_pretrained(stage, "meta/Llama-9")
    with pytest.raises(TypeError, match=r"was not made by hf\.sequential"):
        hf.load_pretrained(Stage(torch.nn.Sequential(torch.nn.Linear(1, 1)), [1]), tmp_path)


def test_experts_that_cannot_be_joined_are_named(tmp_path):
    model_of("Mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    values = load_file(file)
    last = max(key for key in values if "experts.3." in key)
    values[last] = values[last][1:].clone()
    save_file(values, file, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.gate_up_proj cannot be made"):
        hf.load_pretrained(empty("Mixtral"), tmp_path)


def test_a_folder_with_another_model_holds_only_the_new_one(tmp_path):
    """As by save_pretrained of transformers: one file, several, and other numbers of them."""
    stage = empty("Llama")
    hf.load_pretrained(stage, saved_by_transformers(tmp_path / "in", "Llama"))
    expected = logits_of(model_of("Llama"), "Llama")
    for before in ("1GB", "20KB"):
        folder = saved_by_transformers(tmp_path / before, "Qwen2", max_shard_size=before)
        (folder / "notes.txt").write_text("of the user")
        for name in ("model.safetensors.tmp", "model-00001-of-00009.safetensors.tmp"):
            (folder / name).write_bytes(b"x")  # of a save that was killed

        hf.save_pretrained(stage, folder)

        files = {"config.json", "generation_config.json", "model.safetensors", "notes.txt"}
        assert {file.name for file in folder.iterdir()} == files, before
        found = logits_of(read_again("Llama", folder), "Llama")
        assert (found - expected).abs().max() <= TOLERANCE, before


def saved_by_transformers(folder, name, **options):
    model_of(name).save_pretrained(folder, **options)
    return folder


def test_the_generation_config_of_a_folder_is_that_of_the_model(tmp_path):
    plain = model_of("Llama")
    plain.generation_config.eos_token_id = [*range(3, 20)]
    plain.generation_config.pad_token_id = 30
    plain.save_pretrained(tmp_path / "in")
    stage = empty("Llama")
    prompts = torch.tensor([[20, 21, 22], [23, 24, 25]])

    hf.load_pretrained(stage, tmp_path / "in")
    found = hf.generate(stage, prompts, max_new_tokens=8)
    hf.save_pretrained(stage, tmp_path / "out")

    mask = torch.ones_like(prompts)
    plain = read_again("Llama", tmp_path / "in")
    expected = plain.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert found.tolist() == expected.tolist()
    assert found.shape[1] < 11
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [*range(3, 20)]


def test_a_save_that_is_killed_leaves_no_mixed_model(tmp_path, monkeypatch):
    """Shards of two saves under one index would be read without an error."""
    folder = saved_by_transformers(tmp_path, "Llama", max_shard_size="20KB")
    assert len([*folder.glob("model-*.safetensors")]) > 1

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        hf.save_pretrained(empty("Llama"), folder)

    with pytest.raises(FileNotFoundError, match="holds none of"):
        values_in(folder)
