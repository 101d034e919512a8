"""Files of weights, read and written in pieces; the package safetensors is the truth."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from procpipe import state
from procpipe.errors import SavedStateError
from procpipe.state.pieces import _DTYPES, read_header, write_safetensors

#: Of no elements, of one, of odd numbers, and of more than a piece.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (1,), (3, 5), (2, 700_001))


def make_tensors():
    """Return a tensor of each dtype and shape; each byte has some value that the dtype has."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, dtype in _DTYPES.items():
        for shape in SHAPES if name in ("F32", "BF16", "U8") else SHAPES[:-1]:
            values = torch.randint(0, 100, shape, generator=generator)
            tensors[f"{name}.{shape}"] = (values % 2 if name == "BOOL" else values).to(dtype)
    return tensors


def read(path):
    return {key: place.read() for key, place in read_header(path).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].shape == value.shape, key
        as_bytes = [t.flatten().view(torch.uint8) for t in (found[key], value) if t.numel()]
        assert not as_bytes or torch.equal(*as_bytes), key


def test_files_are_those_of_the_package(tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = make_tensors()
    save_file(tensors, tmp_path / "theirs.safetensors")
    write_safetensors(tmp_path / "ours.safetensors", tensors)
    assert_equal(read(tmp_path / "theirs.safetensors"), tensors)
    assert_equal(read(tmp_path / "ours.safetensors"), tensors)
    assert_equal(load_file(tmp_path / "ours.safetensors"), tensors)


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    for value in (torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()):
        with pytest.raises(TypeError, match=r"x is a torch.* which safetensors cannot hold"):
            write_safetensors(tmp_path / "x", {"x": value})
    assert not (tmp_path / "x").exists()


def test_damaged_headers_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    entry: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    cases: tuple[tuple[Any, str], ...] = (
        ([1], "it is not a safetensors file"),
        ({"x": 7}, "no tensor 'x' known here"),
        ({"x": entry | {"dtype": "F7"}}, "no tensor 'x' known here: 'F7'"),
        ({"x": {"dtype": "F32"}}, "no tensor 'x' known here: 'shape'"),
        ({"x": entry | {"shape": [-2]}}, "no tensor 'x' known here: a size or an offset"),
        ({"x": entry | {"shape": [2.0]}}, "no tensor 'x' known here: a size or an offset"),
        ({"x": entry | {"shape": [True, 2]}}, "no tensor 'x' known here: a size or an offset"),
        ({"x": entry | {"shape": [3]}}, r"the bytes 0 to 8 of 8, which do not fit torch.float32"),
        ({"x": entry | {"data_offsets": [8, 16]}}, "the bytes 8 to 16 of 8, which do not fit"),
        ({"x": entry | {"data_offsets": [8, 0]}}, "the bytes 8 to 0 of 8, which do not fit"),
        ({"x": entry | {"shape": [2] + [1] * 64}}, "which do not fit"),
    )
    for header, match in cases:
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"12345678")
        with pytest.raises(SavedStateError, match=match):
            read_header(path)
    for data in (b"", b"1234567", (1 << 63).to_bytes(8, "little"), b"[" * 70000):
        path.write_bytes(data)
        with pytest.raises(SavedStateError, match="it is not a safetensors file"):
            read_header(path)
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert read_header(path) == {}


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"x": torch.ones(100)})
    place = read_header(path)["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SavedStateError, match="has become shorter"):
        place.read(torch.empty(100))


def test_dtypes_and_orders_in_memory_may_differ(tmp_path):
    torch.manual_seed(1)
    values = {"weight": torch.randn(3, 4, 5, 5), "bias": torch.randn(3)}
    turned = values["weight"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    sources: dict[str, dict[str, torch.Tensor]] = {
        "plain.pt": values,
        "turned.pt": values | {"weight": turned},
        "parameter.pt": {key: nn.Parameter(value) for key, value in values.items()},
        "half.pt": {key: value.bfloat16() for key, value in values.items()},
    }
    for name, tensors in sources.items():
        torch.save(tensors, tmp_path / name)
        as_safetensors = name.replace(".pt", ".safetensors")
        write_safetensors(tmp_path / as_safetensors, tensors)
        for file in (name, as_safetensors):
            for layout in (torch.contiguous_format, torch.channels_last):
                for dtype in (torch.float32, torch.float64):
                    module: Any = nn.Conv2d(4, 3, 5)
                    module.to(dtype=dtype, memory_format=layout)
                    state.load_weights(tmp_path / file, module)
                    for key, value in module.state_dict().items():
                        assert torch.equal(value, tensors[key].to(dtype)), (file, layout, dtype)


def test_several_files_of_torch_have_an_index_too(tmp_path):
    model = nn.Linear(3, 2)
    values = model.state_dict()
    for i, (key, value) in enumerate(values.items()):
        torch.save({key: value}, tmp_path / f"pytorch_model-{i}.bin")
    index = {key: f"pytorch_model-{i}.bin" for i, key in enumerate(values)}
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    for where in (tmp_path, path):
        loaded = nn.Linear(3, 2)
        state.load_weights(where, loaded)
        assert_equal(loaded.state_dict(), values)
