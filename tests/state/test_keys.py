"""Maps from a model's keys to those in files: reading, writing, and what the errors advise.

On several stages, which share a parameter: tests/hf/test_pipelines.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from procpipe import Stage, state
from tests.dist.stages import assert_same, assert_same_state

#: What a language model's keys may be in files; lm_head may share the embedding's weight.
IN_FILE = {
    "0.weight": "model.embed.weight",
    "1.weight": "model.layers.1.weight",
    "1.bias": "model.layers.1.bias",
    "2.weight": "model.layers.2.weight",
    "2.bias": "model.layers.2.bias",
    "2.running_mean": "model.layers.2.running_mean",
    "2.running_var": "model.layers.2.running_var",
    "2.num_batches_tracked": "model.layers.2.num_batches_tracked",
    "3.weight": "lm_head.weight",
}


def in_file(key):
    return IN_FILE[key]


def to_one(key):
    return IN_FILE[key].replace("lm_head", "model.embed")


def make_model(seed, *, is_tied=False):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
    ).double()
    for tensor in model[2].state_dict().values():
        tensor.add_(seed)
    if is_tied:
        model[3].weight = model[0].weight
    return model


def write(path, model, *, without=()):
    """Write a model's weights under the keys of files, with the package safetensors."""
    from safetensors.torch import save_file

    values = {IN_FILE[key]: value.clone() for key, value in model.state_dict().items()}
    save_file({key: value for key, value in values.items() if key not in without}, path)


def read_all(folder):
    """Read an exported folder with the package safetensors."""
    from safetensors.torch import load_file

    return {
        key: value
        for path in Path(folder).glob("*.safetensors")
        for key, value in load_file(path).items()
    }


def test_a_map_serves_reading_and_writing(tmp_path):
    model = make_model(1)
    write(tmp_path / "x.safetensors", model)
    with_attribute = make_model(2)
    with_attribute.keys = in_file
    cases: dict[str, tuple[nn.Module, Any]] = {
        "function": (make_model(2), IN_FILE.__getitem__),
        "the model's": (with_attribute, None),
        "a stage's": (Stage(with_attribute, [4]), None),
    }
    for name, (module, keys) in cases.items():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        state.load_weights(tmp_path / "x.safetensors", module, keys=keys)
        assert_same_state(module, model, name)
        state.export(tmp_path / name, module, keys=keys)
        exported = read_all(tmp_path / name)
        assert exported.keys() == set(IN_FILE.values()), name
        for key, value in model.state_dict().items():
            assert_same(exported[IN_FILE[key]], value, f"{name}, {key}")


def test_a_map_of_the_model_can_be_left_out(tmp_path):
    model = make_model(1)
    model.keys = in_file
    state.save(tmp_path / "saved", model)  # always under the model's own keys
    state.export(tmp_path / "own", model, keys=str)
    assert read_all(tmp_path / "own").keys() == model.state_dict().keys()
    for folder, load in (("saved", state.load), ("own", partial(state.load_weights, keys=str))):
        loaded = make_model(2)
        loaded.keys = in_file
        load(tmp_path / folder, loaded)
        assert_same_state(loaded, model, folder)


def test_a_layer_named_keys_is_no_map(tmp_path):
    model = nn.Sequential()
    model.add_module("keys", nn.Linear(2, 2))
    state.export(tmp_path / "plain", model)
    state.load_weights(tmp_path / "plain", Stage(model, [1]))
    assert read_all(tmp_path / "plain").keys() == {"keys.weight", "keys.bias"}


def test_a_shared_parameter_may_have_one_key_or_several(tmp_path):
    model = make_model(1, is_tied=True)
    names = {"model.embed.weight", "lm_head.weight"}
    for case, without in enumerate(({"lm_head.weight"}, {"model.embed.weight"})):
        write(tmp_path / f"{case}.safetensors", model, without=without)
        loaded = make_model(2, is_tied=True)
        state.load_weights(tmp_path / f"{case}.safetensors", loaded, keys=in_file)
        assert_same_state(loaded, model, f"{case}")
    write(tmp_path / "none.safetensors", model, without=names)
    with pytest.raises(ValueError, match=r"0.weight \(model.embed.weight in the file\) is missing"):
        state.load_weights(tmp_path / "none.safetensors", loaded, keys=in_file)

    state.export(tmp_path / "one", model, keys=to_one)
    assert read_all(tmp_path / "one").keys() == set(IN_FILE.values()) - {"lm_head.weight"}
    loaded = make_model(2, is_tied=True)
    state.load_weights(tmp_path / "one", loaded, keys=to_one)
    assert_same_state(loaded, model, "one key")
    text = r"0.weight and 3.weight are different tensors, but keys= gives each the key 'model.embed"
    with pytest.raises(ValueError, match=text):
        state.load_weights(tmp_path / "one", make_model(2), keys=to_one)
    with pytest.raises(ValueError, match=text):
        state.export(tmp_path / "two", make_model(2), keys=to_one)
    assert not (tmp_path / "two").exists()


def test_a_map_that_is_none_is_refused(tmp_path):
    stage = Stage(make_model(1))
    write(tmp_path / "x.safetensors", stage)
    cases: tuple[tuple[Any, str], ...] = (
        (lambda key: None, "keys= returned None for '0.weight'"),
        (lambda key: "__metadata__", "keys= returned '__metadata__' for '0.weight'"),
        ({"^": "model."}, "not callable"),
    )
    for keys, match in cases:
        for call in (state.load_weights, state.export):
            with pytest.raises(TypeError, match=match):
                call(tmp_path / "x.safetensors", stage, keys=keys)
    state.export(tmp_path / "out", stage)  # it can still be used
