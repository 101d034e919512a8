"""Saved state in one process: positions in loaders, names of optimizer state, folders, weights."""

from __future__ import annotations

import json
import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from procpipe import SavedStateError, Stage, state
from procpipe.state.optimizers import SavedOptimizers
from procpipe.state.resumable import restore_generators, states_of_generators
from procpipe.state.values import copied, read_torch

# -- Resumable -----------------------------------------------------------------------------------


class Noisy(Dataset):
    """Draws from every generator, and counts what is read."""

    def __init__(self, size=10, generator=None):
        self.size = size
        self.generator = generator
        self.num_read = 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.num_read += 1
        drawn = torch.rand((), generator=self.generator)
        return torch.tensor([index, drawn, random.random(), np.random.rand()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.rand(10))


def shuffled():
    return DataLoader(Noisy(), batch_size=3, shuffle=True)


def with_generator():
    generator = torch.Generator().manual_seed(4)
    return DataLoader(Noisy(10, generator), batch_size=3, shuffle=True, generator=generator)


def with_sampler():
    data = Noisy()
    sampler = RandomSampler(data, replacement=True, num_samples=13, generator=torch.Generator())
    return DataLoader(data, batch_size=2, sampler=sampler)


LOADERS = {
    "shuffled": shuffled,
    "with a generator": with_generator,
    "with a sampler of its own": with_sampler,
    "one by one": lambda: DataLoader(Noisy(4), batch_size=None, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=3),
    "in a worker process": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    "a list": lambda: [torch.tensor(k) for k in range(4)],
}


def run_epochs(loader, num_epochs, stop, done=0):
    """Read epochs as a training loop does; stop after some mini-batches, and return the state."""
    given, saved, epoch = [], None, 0
    while epoch < num_epochs:
        for item in loader:
            generator = getattr(loader.loader, "generator", None)  # or, as dropout, the default
            given.append((item, torch.rand(1, generator=generator)))
            if done + len(given) == stop:
                state_now = loader.state_dict()
                saved = pickle.loads(pickle.dumps((epoch, state_now, states_of_generators())))
        epoch += 1
    return given, saved


@pytest.mark.dist
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_resumes_where_it_was(make):
    length = len(list(make()))
    stops = {1, length - 1, length, length + 1} if make is shuffled else {length + 1}
    for stop in sorted(stops):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        whole, (epoch, at, drawn) = run_epochs(state.Resumable(make()), 3, stop)
        assert len(whole) == 3 * length
        torch.manual_seed(2)
        loader = state.Resumable(make())
        loader.load_state_dict(at)
        restore_generators(drawn)
        rest, _ = run_epochs(loader, 3 - epoch, stop=None)
        assert len(rest) == 3 * length - stop
        for (ours, noise), (theirs, their_noise) in zip(rest, whole[stop:], strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(noise, their_noise)


def test_a_position_between_epochs():
    loader = state.Resumable(shuffled())
    assert len(list(loader)) == len(loader) == 4
    assert loader.state_dict() == {"given": 0, "start": None, "now": []}
    for _ in loader:
        break  # a new epoch begins next, so the position is between epochs again
    assert loader.state_dict()["given"] == 0


def test_a_position_in_another_loader_is_refused():
    loader = state.Resumable(shuffled())
    items = iter(loader)
    for _ in range(4):
        next(items)
    cases = {"after 4 .* but now the loader ends": [1, 2], "torch.Generators": with_generator()}
    for match, other in cases.items():
        resumed = state.Resumable(other)
        resumed.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match=match):
            list(resumed)


def test_an_older_loop_does_not_change_the_position():
    loader = state.Resumable([1, 2, 3])
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert [next(second), *first] == [1, 2, 3]
    assert loader.state_dict()["given"] == 1


# -- optimizers ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)

    def forward(self, input):
        return self.b(self.a(input))


def test_several_optimizers_and_groups_of_other_forms(tmp_path):
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5)
    two = torch.optim.Adam(model[1].parameters(), lr=0.2)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    two.step()
    state.save(tmp_path, model, [one, two])

    new_one = torch.optim.SGD(
        [{"params": [model[0].bias]}, {"params": [model[0].weight]}, {"params": []}], lr=9.0
    )
    new_two = torch.optim.Adam(model[1].parameters(), lr=9.0)
    state.load(tmp_path, model, [new_one, new_two])

    assert [group["lr"] for group in new_one.param_groups] == [0.1, 0.1, 9.0]
    assert new_two.param_groups[0]["lr"] == 0.2
    buffer = new_one.state[model[0].bias]["momentum_buffer"]
    assert torch.equal(buffer, one.state[model[0].bias]["momentum_buffer"])

    everything = torch.optim.SGD(model.parameters(), lr=9.0)
    with pytest.raises(ValueError, match=r"0.weight and 1.weight, saved with .*lr \(0.1 and 0.2\)"):
        state.load(tmp_path, model, everything)


def test_a_group_without_a_parameter_is_as_on_the_first_rank_that_had_one():
    groups = [{"params": {"a": []} if lr else {}, "options": {"lr": lr}} for lr in (0, 1, 2)]
    saved = SavedOptimizers([{"state": {}, "groups": {(0, 0): group}} for group in groups])
    assert saved.of_place[0, 0]["options"] == {"lr": 1}


def test_without_strict_an_optimizer_keeps_what_was_not_saved(tmp_path):
    def trained(*numbers):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parameters = [p for k in numbers for p in model[k].parameters()]
        optimizer = torch.optim.Adam(parameters)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0)
    state.save(tmp_path, model, optimizer)
    other, loaded = trained(0, 1)
    kept = loaded.state[other[1].weight]["exp_avg"].clone()

    state.load(tmp_path, other, loaded, strict=False)

    for ours, expected in (
        (loaded.state[other[1].weight], kept),
        (loaded.state[other[0].weight], optimizer.state[model[0].weight]["exp_avg"]),
    ):
        assert torch.equal(ours["exp_avg"], expected)


# -- folders -------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_whatever_their_step(tmp_path):
    model = nn.Linear(1, 1)
    for step in (100, 200, 50, 50):
        state.save(tmp_path, model, step=step, keep=3)
    assert names(tmp_path) == ["000002-step-200", "000003-step-50", "000004-step-50"]
    loaded: Any = state.load(tmp_path, model)
    assert loaded.path.name == "000004-step-50"
    loaded = state.load(tmp_path, model, step=200)
    assert loaded.step == 200
    loaded = state.load(tmp_path / "000003-step-50", model)
    assert loaded.path.name == "000003-step-50"
    state.save(tmp_path, model, keep=None)
    assert names(tmp_path)[-1] == "000005"
    assert len(names(tmp_path)) == 4
    loaded = state.load(tmp_path, model)
    assert loaded.step is None


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    of_no_model = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    both = [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())]
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"optimizer": of_no_model}, r"parameter of shape \(3,\) that is not one of the model"),
        ({"optimizer": both}, "two optimizers have the parameter 0.weight"),
        ({"keep": 0}, "keep is 0"),
        *(
            ({"step": step}, "but must be an int of 0 or more")
            for step in (10.0, -1, "7", torch.tensor(3))
        ),
    )
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            state.save(tmp_path / "run", model, **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # of torch's own, once imported
def test_a_stage_that_torch_compile_wraps_is_refused(tmp_path):
    """Symptom: state.export wrote one rank's part under ``_orig_mod.…``, without an error."""
    wrapped: Any = torch.compile(Stage(nn.Sequential(nn.Linear(2, 2))), backend="eager")
    calls: tuple[Any, ...] = state.export, state.save, state.load, state.load_weights
    for call in calls:
        with pytest.raises(TypeError, match=r"compile its layers by stage\.compile"):
            call(tmp_path / "folder", wrapped)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_another_kind_of_optimizer_is_refused(tmp_path, kind):
    model = nn.Linear(2, 2)
    state.save(tmp_path, model, torch.optim.AdamW(model.parameters()))

    with pytest.raises(
        ValueError, match=rf"another kind of optimizer than {kind.__name__}: it has"
    ):
        state.load(tmp_path, model, kind(model.parameters(), lr=0.1))
    state.load(tmp_path, model, torch.optim.Adam(model.parameters()))  # its options are the same


def test_folders_left_by_crashes_are_removed_and_no_number_is_used_twice(tmp_path):
    for name in ("000001-step-1", "000002-step-2"):
        state.save(tmp_path, nn.Linear(1, 1), step=int(name[-1]))
    (tmp_path / "000002-step-2/stage-0-of-1.pt").rename(tmp_path / "000002-step-2/x.tmp")
    (tmp_path / "notes").mkdir()

    state.save(tmp_path, nn.Linear(1, 1), step=2)

    assert names(tmp_path) == ["000001-step-1", "000003-step-2", "notes"]


def test_the_error_of_a_damaged_state_names_the_file(tmp_path):
    model = nn.Sequential(nn.Linear(50, 50))
    file = state.save(tmp_path, model).path / "stage-0-of-1.pt"
    whole = file.read_bytes()
    for data in (whole[:2000], b"", b"garbage" * 9, whole[:-1]):
        file.write_bytes(data)
        with pytest.raises(SavedStateError, match=f"{file}: it is no whole file of torch.save"):
            state.load(tmp_path, model)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_no_code_in_a_saved_state_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(1, 1)
    file = state.save(tmp_path / "run", model).path / "stage-0-of-1.pt"
    torch.save(Evil(), file)
    for load, path in ((state.load, tmp_path / "run"), (state.load_weights, file)):
        with pytest.raises(SavedStateError, match=r"posix.mkdir"):
            load(path, model)
    assert not (tmp_path / "pwned").exists()


def test_extra_values_are_replaced_and_objects_get_their_state(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    extra: dict[str, Any] = {
        "a": 1,
        "b": [torch.ones(2), ("x", None)],
        "c.d": scheduler,
        "e": torch.zeros(()),
    }
    optimizer.step()
    scheduler.step()
    state.save(tmp_path, model, optimizer, extra=extra)
    new_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    new: dict[str, Any] = {"a": 0, "b": None, "c.d": new_scheduler, "e": torch.ones(())}
    state.load(tmp_path, model, optimizer, extra=new)

    assert new["a"] == 1
    assert torch.equal(new["b"][0], torch.ones(2))
    assert new["b"][1] == ("x", None)
    assert new["c.d"] is new_scheduler
    assert new_scheduler.state_dict() == scheduler.state_dict()
    assert new["e"].item() == 0


class Counting(nn.Linear):
    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_the_extra_state_of_a_module_is_saved(tmp_path):
    model, loaded = Counting(1, 1), Counting(1, 1)
    model.count = 5
    state.save(tmp_path, model)
    state.load(tmp_path, loaded)

    assert loaded.count == 5
    assert torch.equal(loaded.weight, model.weight)


# -- weights -------------------------------------------------------------------------------------


def test_weights_are_loaded_from_every_kind_of_file(tmp_path):
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Tied())
    expected = model.state_dict()
    torch.save(expected, tmp_path / "plain.pt")
    save_file({key: value.clone() for key, value in expected.items()}, tmp_path / "x.safetensors")
    state.export(tmp_path / "exported", model)
    state.export(tmp_path / "exported.pt", model)
    assert torch.load(tmp_path / "exported.pt", weights_only=True).keys() == expected.keys()
    assert names(tmp_path / "exported") == ["model.safetensors"]
    (tmp_path / "bin").mkdir()
    index = "bin/pytorch_model.bin.index.json"
    for number, (key, value) in enumerate(expected.items()):
        torch.save({key: value}, tmp_path / f"bin/{number}.bin")
    weight_map = {key: f"{number}.bin" for number, key in enumerate(expected)}
    (tmp_path / index).write_text(json.dumps({"weight_map": weight_map}))

    for name in ("plain.pt", "x.safetensors", "exported", "exported.pt", "bin", index):
        loaded: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Tied())
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        state.load_weights(tmp_path / name, loaded)
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, expected[key]), (name, key)
        assert loaded[2].a.weight is loaded[2].b.weight


def test_weights_that_cannot_be_loaded_are_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weight": torch.ones(1, 1), "more": 1}, tmp_path / "more.pt")
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="holds a list, but no state dict"):
        state.load_weights(tmp_path / "list.pt", model)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        state.load_weights(tmp_path / "none.pt", model)
    state.save(tmp_path, model)
    with pytest.raises(FileNotFoundError, match=r"holds none of model.*state.load reads what"):
        state.load_weights(tmp_path, model)
    with pytest.raises(ValueError, match=r"bias is missing\n.*more is there, but no layer"):
        state.load_weights(tmp_path / "more.pt", model)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        state.load_weights(tmp_path / "more.pt", nn.Linear(1, 1, device="meta"), strict=False)
    state.load_weights(tmp_path / "more.pt", model, strict=False)
    assert model.weight.item() == 1
    for place in (tmp_path, tmp_path / "more.pt"):
        with pytest.raises(FileExistsError, match="is not empty: export to a new place"):
            state.export(place, model)


@pytest.mark.gpu
def test_a_copy_of_a_gpus_tensor_is_pinned():
    tensor = torch.arange(3.0, device="cuda")
    [copy] = copied({"a": [tensor]})["a"]
    assert copy.is_pinned()
    assert copy.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.gpu
def test_the_state_of_a_gpu_is_read_on_the_cpu(tmp_path):
    torch.save({"a": torch.ones(3, device="cuda")}, tmp_path / "x.pt")
    assert not read_torch(tmp_path / "x.pt")["a"].get().is_cuda
