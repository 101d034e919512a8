"""What can be saved and loaded: types of values, all optimizers, damaged and edited files."""

from __future__ import annotations

import collections
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from procpipe import SavedStateError, state
from procpipe.state.values import saved_form
from tests.dist.stages import assert_same, stage_of

# -- types of values -----------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


class Own(torch.Tensor):
    pass


#: What is saved, and how it is loaded.
SAVED: tuple[tuple[Any, Any], ...] = (
    *((value, value) for value in (None, True, 3, 1 << 70, -1.5, 1j, "x", b"x", bytearray(b"x"))),
    *((value, value) for value in (torch.float16, torch.device("cpu"), torch.Size([1, 2]))),
    ([1, (2, {3}), {"a": [None], (1, 2): 0}], [1, (2, {3}), {"a": [None], (1, 2): 0}]),
    (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=1, a=2)),
    (collections.Counter("aab"), collections.Counter("aab")),
    (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64)),
    (nn.Parameter(torch.ones(2)), torch.ones(2)),
    ((np.float64(0.1), np.float32(0.1)), (0.1, float(np.float32(0.1)))),
    ([np.int64(3), np.bool_(True), np.complex64(1j)], [3, True, 1j]),
)

ITSELF: list[Any] = []
ITSELF.append(ITSELF)

#: What is refused, and what the error says of it.
REFUSED: tuple[tuple[Any, str], ...] = (
    (np.ones(2), r"\['it'\]\[1\] is a numpy.ndarray"),
    (np.longdouble(1), "is a numpy.longdouble"),
    (ITSELF, "it holds itself"),
    (Path("x"), "is a pathlib.*Path"),
    (collections.deque([1]), "is a collections.deque"),
    (Own(2), "is a Own of torch.strided: only ordinary dense tensors"),
    (torch.empty(2, device="meta"), "is on the meta device"),
    ({Path("x"): 1}, "the key .* is a pathlib"),
)


def test_what_torch_loads_is_saved(tmp_path):
    model = nn.Linear(1, 1)
    for number, (value, expected) in enumerate(SAVED):
        extra = {"it": value}
        path = state.save(tmp_path / str(number), model, extra=extra).path
        found = torch.load(path / "stage-0-of-1.pt", weights_only=True)["extra"]["it"]
        loaded: dict[str, Any] = {"it": None}
        state.load(path, model, extra=loaded)
        assert_same([found, loaded["it"]], [expected] * 2, f"{value}")


def test_what_torch_would_refuse_is_not_saved(tmp_path):
    model = nn.Linear(1, 1)
    for number, (value, message) in enumerate(REFUSED):
        with pytest.raises(TypeError, match=rf"extra\['it'\] cannot be saved.*{message}"):
            state.save(tmp_path, model, extra={"it": [1, value]}, asynchronous=number % 2 == 0)
    assert not list(tmp_path.iterdir())


def test_all_that_cannot_be_saved_is_named_in_one_error(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"path": Path("x")}

        def set_extra_state(self, state):
            pass

    model = Odd(1, 1)
    model.register_buffer("table", torch.ones(2).to_sparse())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["momentum_buffer"] = Path("y")
    optimizer.param_groups[0]["mode"] = Color.RED
    with pytest.raises(TypeError) as caught:
        state.save(tmp_path, model, optimizer, extra={"a": Path("z")})
    for message in (
        "model._extra_state cannot be saved so that it can be loaded again",
        "model.table is a Tensor of torch.sparse_coo: only ordinary dense tensors",
        "the optimizer's state of weight['momentum_buffer'] is a pathlib",
        "optimizer.groups[(0, 0)]['options']['mode'] is a",
        "extra['a'] is a pathlib",
    ):
        assert message in str(caught.value)


def save_what_cannot_be(bare, folder):
    with stage_of(bare, "odd", nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1]) as stage:
        extra = {"it": Path("x") if bare.rank == 1 else 1}
        with pytest.raises(TypeError) as caught:
            state.save(folder, stage, extra=extra)
        saved = state.save(folder, stage, extra={"it": 2})  # the stage can still be used
        return str(caught.value), saved.path.name


def test_every_rank_refuses_what_one_rank_cannot_save(ranks, tmp_path):
    first, second = ranks(2).run(save_what_cannot_be, str(tmp_path), world=False).values()

    assert first == second
    assert "rank 1: extra['it'] cannot be saved so that it can be loaded again: extra" in first[0]
    assert first[1] == "000001", "nothing was written before"


def test_views_are_written_without_their_whole_storage(tmp_path):
    table = torch.arange(1_000_000.0)
    extra = {"view": table[3:6], "turned": torch.arange(6.0).view(2, 3).t()}
    path = state.save(tmp_path, nn.Linear(1, 1), extra=extra).path
    assert (path / "stage-0-of-1.pt").stat().st_size < 30_000
    loaded: dict[str, Any] = dict.fromkeys(extra)
    state.load(tmp_path, nn.Linear(1, 1), extra=loaded)
    assert_same(loaded, extra, "views")
    assert saved_form("x", table, []).data_ptr() == table.data_ptr(), "it is not copied"


# -- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in ("Optimizer", "SparseAdam")
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
    "Adam": {"amsgrad": True, "lr": torch.tensor(0.1)},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_as_it_was(tmp_path, name):
    options = {"lr": 0.01} | OPTIONS.get(name, {})
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False))
    optimizer = OPTIMIZERS[name](model.parameters(), **options)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        value.backward()
        return value

    loaded = OPTIMIZERS[name](model.parameters(), **options)
    for _ in range(3):  # without a state, into none, and into another
        state.save(tmp_path, model, optimizer)
        state.load(tmp_path, model, loaded)
        assert_same(loaded.state_dict(), optimizer.state_dict(), name)
        optimizer.step(loss)


def trained():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_missing_moments_are_refused(tmp_path):
    model, optimizer = trained()
    file = state.save(tmp_path, model, optimizer).path / "stage-0-of-1.pt"
    contents = torch.load(file, weights_only=True)
    del contents["optimizer"]["state"]["weight"]["exp_avg_sq"]
    del contents["optimizer"]["state"]["bias"]
    torch.save(contents, file)
    with pytest.raises(ValueError, match="state of weight lacks exp_avg_sq") as caught:
        state.load(tmp_path, *trained())
    assert "the optimizer's state of bias lacks exp_avg, exp_avg_sq, step" in str(caught.value)
    state.load(tmp_path, *trained(), strict=False)


def test_a_moment_that_torch_would_convert_is_refused(tmp_path):
    model, optimizer = trained()
    of_weight = optimizer.state[model.weight]
    of_weight["exp_avg"] = of_weight["exp_avg"].double()
    state.save(tmp_path, model, optimizer)
    model, loaded = trained()
    with pytest.raises(ValueError, match=r"exp_avg of .* weight has dtype torch.float64, which"):
        state.load(tmp_path, model, loaded)
    state.load(tmp_path, model, loaded, strict=False)
    assert loaded.state[model.weight]["exp_avg"].dtype == torch.float32


def test_another_dtype_than_the_models_is_refused_or_converted(tmp_path):
    model = nn.Linear(2, 2)
    state.save(tmp_path, model)
    with pytest.raises(ValueError, match=r"weight has dtype torch.float64 but torch.float32 there"):
        state.load(tmp_path, nn.Linear(2, 2).double())
    target = nn.Linear(2, 2).double()
    state.load(tmp_path, target, strict=False)
    assert torch.equal(target.weight, model.weight.double())
    module = nn.Module()
    module.register_buffer("weight", torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"weight has dtype torch.int32 but torch.float32 there"):
        state.load(tmp_path, module, strict=False)


# -- files of weights ----------------------------------------------------------------------------


def test_an_index_of_safetensors_names_files_beside_it(tmp_path):
    model = nn.Linear(1, 1)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for names, error, message in (
        ({"weight": "a.safetensors"}, ValueError, "bias is missing"),  # where the index has it not
        ({"weight": "b.safetensors"}, FileNotFoundError, r"b.safetensors"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(error, match=message):
            state.load_weights(tmp_path, model)


def test_weights_in_files_of_other_kinds_are_refused(tmp_path):
    for name in ("b.pt", "b.safetensors", "b.json"):
        for data in (b"", b"garbage" * 9):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(SavedStateError, match=f"{tmp_path / name}: it is no "):
                state.load_weights(tmp_path / name, nn.Linear(1, 1))


@pytest.mark.parametrize("values", [{"weight": torch.ones(1)}, torch.ones(1), [1]])
def test_a_folder_of_other_files_is_no_saved_state(tmp_path, values):
    folder = tmp_path / "000001"
    folder.mkdir()
    torch.save(values, folder / "stage-0-of-1.pt")
    with pytest.raises(SavedStateError, match=r"stage-0-of-1\.pt was not written by"):
        state.load(tmp_path, nn.Linear(1, 1))


def test_what_safetensors_cannot_hold_is_refused(tmp_path):
    module = nn.Module()
    for value in (torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()):
        module.register_buffer("x", value)
        with pytest.raises(TypeError, match=r"x is a torch.* which safetensors cannot hold"):
            state.export(tmp_path / "x", module)


@pytest.mark.parametrize("name", ["x.pt", "old.pt", "x.safetensors"])
def test_dtypes_and_orders_in_memory_may_differ(tmp_path, name):
    weight, path = torch.randn(3, 4, 5, 5), tmp_path / name
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)
    for value in (weight, turned, weight.bfloat16()):
        tensors = {"weight": value, "bias": torch.randn(3)}
        if path.suffix == ".pt":
            torch.save(tensors, path, _use_new_zipfile_serialization=name == "x.pt")
        else:
            save_file({key: value.contiguous() for key, value in tensors.items()}, path)
        for layout in (torch.contiguous_format, torch.channels_last):
            for dtype in (torch.float32, torch.float64):
                module: Any = nn.Conv2d(4, 3, 5)
                module.to(dtype=dtype, memory_format=layout)
                state.load_weights(path, module)
                for key, loaded in module.state_dict().items():
                    assert torch.equal(loaded, tensors[key].to(dtype)), (layout, dtype)
