"""States saved under each release of torch load under the one that runs, and in plain torch."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from procpipe import state
from procpipe.state.pickles import read_pickle
from tests.state.of_versions import (
    EXTRA,
    FOLDER,
    load_plain,
    save_ours,
    save_plain,
    trained,
)

RELEASES = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))


@pytest.fixture(params=[*RELEASES, "this"])
def saved(request, tmp_path):
    """Give a folder with "ours" and "plain", of a release or of the torch that runs."""
    if request.param == "this":
        save_plain(tmp_path / "plain")
        save_ours(tmp_path / "ours")
    else:
        shutil.unpack_archive(FOLDER / f"{request.param}.tar.xz", tmp_path, filter="data")
    return tmp_path


def test_there_are_states_of_each_release_that_is_tested():
    assert RELEASES == ["2.11", "2.13", "2.15"]


@pytest.mark.parametrize("writer", ["ours", "plain"])
def test_a_state_of_any_release_is_loaded(saved, writer):
    model, optimizer = untrained()
    extra: dict[str, Any] = {"more": None}

    state.load(saved / writer, model, optimizer, extra=extra if writer == "ours" else None)

    expected, expected_optimizer = trained()
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    ours, theirs = optimizer.state_dict(), expected_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for k, of_parameter in theirs["state"].items():
        assert torch.equal(ours["state"][k]["momentum_buffer"], of_parameter["momentum_buffer"])
    assert writer == "plain" or extra == EXTRA


def test_plain_torch_loads_a_state_saved_here_under_any_release(saved):
    [folder] = (saved / "ours").iterdir()

    found = load_plain(folder)

    for key, value in trained()[0].state_dict().items():
        assert torch.equal(found[key], value), key


def test_no_release_writes_what_an_earlier_one_cannot_read(saved):
    """Torch until 2.14 takes exactly five properties of a tensor; from 2.15 on also six."""
    [folder] = (saved / "ours").iterdir()
    index = read_pickle((folder / ".metadata").read_bytes(), AnyName())

    values = dict(dict(index.state.items)["state_dict_metadata"].items)
    tensors = [value for value in values.values() if value.of.name == "TensorStorageMetadata"]
    assert len(tensors) > 10
    assert {len(dict(tensor.state.items)["properties"].state) for tensor in tensors} == {5}


class AnyName:
    def __contains__(self, name: object) -> bool:
        return True


def untrained():
    """Return a model and its optimizer with other values than :func:`trained` gives."""
    model, _ = trained()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model, torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.1)
