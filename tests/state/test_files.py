"""Saved states that are damaged or contradict themselves: an error names the file."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import random
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from procpipe import SavedStateError, state
from procpipe.state import generators
from procpipe.state.files import open_inside, read_index
from procpipe.state.index import IndexEntry, _check_tiled, from_json, to_json


def make(seed=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def values_of(model, optimizer, extra):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), extra["more"]])


def is_same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(is_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    return ours == theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a saved state, with checksums, and its values."""
    model, optimizer = make()
    extra: dict[str, Any] = {"more": [torch.arange(5), ("text", 1.5)]}
    path = state.save(tmp_path_factory.mktemp("saved"), model, optimizer, extra=extra).path
    return path, values_of(model, optimizer, extra)


def save_plain(folder):
    """Save as plain PyTorch does, without checksums."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, optimizer = make()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = get_optimizer_state_dict(model, optimizer, options=options)
    values = {"model": model.state_dict(), "optimizer": theirs}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(values, checkpoint_id=folder, no_dist=True)
    return values_of(model, optimizer, {"more": None})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "state"
    return folder, save_plain(folder)


def load(path, extra=True):
    model, optimizer = make(seed=2)
    got: dict[str, Any] = {"more": None}
    state.load(path, model, optimizer, extra=got if extra else None)
    return values_of(model, optimizer, got)


def copied(path, tmp_path):
    return shutil.copytree(path, tmp_path / "copy")


# -- any change of any file ----------------------------------------------------------------------


def damaged(draw, files):
    """Make a random change to one of the files; return the change."""
    file = draw.choice(files)
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    kind = draw.choice(["bit", "bit", "bit", "cut", "zeros", "more", "swap"])
    match kind:
        case "bit":
            data[at] ^= 1 << draw.randrange(8)
        case "cut":
            del data[at:]
        case "zeros":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case "more":
            data[at:at] = draw.randbytes(3)
        case _:
            data = bytearray(draw.choice(files).read_bytes())
    changes = bytes(data) != file.read_bytes()
    file.write_bytes(data)
    return (kind, file, at), changes


def fuzz(path, expected, folder, *, num_rounds, extra):
    """Return how many of the changed states were refused, loaded rightly, and loaded wrongly."""
    draw, counts = random.Random(3), {"refused": 0, "right": 0, "wrong": 0, "unchanged": 0}
    for k in range(num_rounds):
        copied = shutil.copytree(path, folder / str(k))
        files = [file for file in sorted(copied.rglob("*")) if file.is_file()]
        files = [
            f for f in files if f.parent == copied or f.name != "procpipe.json"
        ]  # read to merge
        what, changes = damaged(draw, files)
        try:
            found = load(copied, extra)
        except ValueError as error:
            message = str(error)
            assert str(copied) in message, (what, message)
            counts["refused"] += 1
        else:
            result = "right" if is_same(found, expected) else "wrong"
            counts[result if changes else "unchanged"] += 1
        shutil.rmtree(copied)
    return counts


def test_every_change_of_a_file_is_detected(saved, tmp_path):
    counts = fuzz(saved[0], saved[1], tmp_path, num_rounds=60, extra=True)

    assert counts["wrong"] == 0
    assert counts["right"] == 0, "a change went unnoticed"
    assert counts["refused"] > 40


def test_without_checksums_a_change_is_an_error_or_harmless_or_in_a_value(plain, tmp_path):
    counts = fuzz(plain[0], plain[1], tmp_path, num_rounds=60, extra=False)

    assert counts["refused"] > 10


def test_a_changed_bit_of_a_weight_is_detected(saved, tmp_path):
    path = copied(saved[0], tmp_path)
    [chunk] = read_index(path).entries["model.0.weight"].chunks
    file = path / chunk.file
    whole = file.read_bytes()
    for at in range(chunk.offset, chunk.offset + chunk.length, 97):
        data = bytearray(whole)
        data[at] ^= 1
        file.write_bytes(data)
        with pytest.raises(
            SavedStateError, match=f"{file}: model.0.weight: bytes .* are not those"
        ):
            load(path)
        with pytest.raises(
            SavedStateError, match=f"{file}: model.0.weight: bytes .* are not those"
        ):
            state.load_weights(path, make()[0])


def test_a_state_without_checksums_loads(saved, plain, tmp_path):
    assert is_same(load(saved[0]), saved[1])
    assert is_same(load(plain[0], extra=False), plain[1])
    path = copied(saved[0], tmp_path)
    (path / "procpipe.json").unlink()
    assert is_same(load(path), saved[1])


# -- files elsewhere, and of other kinds ---------------------------------------------------------


def edited(path, change):
    """Change torch's index, as an attacker might."""
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(path / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    return path


def move_to(name):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name.format(info.relative_path)

    return change


@pytest.mark.parametrize(
    "name", ["../state/{}", "x/../../other/{}", "/etc/passwd", "", ".", "a\0b"]
)
def test_files_outside_of_the_folder_are_refused(plain, tmp_path, name):
    copied(plain[0], tmp_path / "state")
    path = edited(shutil.move(tmp_path / "state/copy", tmp_path / "other"), move_to(name))
    (path / "x").mkdir()
    with pytest.raises(SavedStateError, match=r"which is outside of it"):
        load(path, extra=False)


def test_files_outside_of_the_folder_in_procpipes_index_are_refused(saved, tmp_path):
    path = copied(saved[0], tmp_path)
    shutil.move(path / "stage-0", tmp_path / "elsewhere")
    text = (path / "procpipe.json").read_text().replace("stage-0/", "../elsewhere/")
    rest = b"{" + text[text.index("\n") + 1 :].encode()
    (path / "procpipe.json").write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest[1:])
    with pytest.raises(SavedStateError, match=r"'../elsewhere/__0_0.distcp', which is outside"):
        load(path)


@pytest.mark.parametrize("name", ["\ud800", "x" * 5000, "stage-0/__0_0.distcp/x", "loop"])
def test_names_of_no_file_are_refused(saved, tmp_path, name):
    folder = copied(saved[0], tmp_path)
    os.symlink("loop", folder / "loop")
    rewritten(folder, "model.0.weight", file=name)
    with pytest.raises(SavedStateError, match=r"is missing|outside of it"):
        load(folder)


@pytest.mark.parametrize("shape", [(1 << 61,), (1 << 45,), (0, 1 << 61, 1 << 61)])
def test_sizes_that_do_not_fit_into_memory_are_refused(saved, tmp_path, shape):
    folder = copied(saved[0], tmp_path)
    rewritten(folder, "procpipe", sizes=shape)
    with pytest.raises(SavedStateError, match=r"procpipe: (the index says|.* cannot be made)"):
        load(folder)


def test_a_part_of_a_value_without_parts_is_refused(saved, tmp_path):
    folder = copied(saved[0], tmp_path)
    entries, crc32 = from_json((folder / "procpipe.json").read_bytes())
    key = "optimizer.state.0.weight.exp_avg"
    entries[f"{key}.x"] = entries[key]
    (folder / "procpipe.json").write_bytes(to_json(entries, crc32))
    with pytest.raises(SavedStateError, match=r"exp_avg\.x is a part of exp_avg"):
        load(folder)


def rewritten(folder, key, sizes=None, **where):
    """Change the place of a value in procpipe's index; or make it a tensor of other sizes."""
    entries, crc32 = from_json((folder / "procpipe.json").read_bytes())
    entry = entries[key]
    [chunk] = entry.chunks
    if sizes is not None:
        where["sizes"] = sizes
        entry = IndexEntry(torch.float32, sizes, ())
    chunk = dataclasses.replace(chunk, **where)
    entries[key] = dataclasses.replace(entry, chunks=(chunk,))
    (folder / "procpipe.json").write_bytes(to_json(entries, crc32))


def test_links_are_followed_inside_of_the_folder_only(plain, tmp_path):
    path = copied(plain[0], tmp_path)
    shutil.move(path / "__0_0.distcp", path / "moved")
    (path / "__0_0.distcp").symlink_to("moved")
    assert is_same(load(path, extra=False), plain[1])  # inside of the folder
    shutil.move(path / "moved", tmp_path / "moved")
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").symlink_to(tmp_path / "moved")
    with pytest.raises(SavedStateError, match="which is outside of it"):
        load(path, extra=False)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["stage-0/__0_0.distcp", "procpipe.json"])
def test_a_fifo_does_not_hang(saved, tmp_path, name):
    path = copied(saved[0], tmp_path)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(SavedStateError, match=f"{path / name} is not a regular file"):
        load(path)
    with pytest.raises(SavedStateError, match=f"{path / name} is not a regular file"):
        state.load_weights(path, make()[0])


@pytest.mark.timeout(30)
def test_weights_in_files_of_other_kinds_are_refused(tmp_path):
    for name in ("a.pt", "a.safetensors", "a.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(SavedStateError, match=f"{tmp_path / name} is not a regular file"):
            state.load_weights(tmp_path / name, nn.Linear(1, 1))
    for name in ("b.pt", "b.safetensors", "b.json"):
        for data in (b"", b"garbage" * 9):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(SavedStateError, match=f"{tmp_path / name}: it is "):
                state.load_weights(tmp_path / name, nn.Linear(1, 1))
    with pytest.raises(SavedStateError, match="which is outside of it"):
        open_inside(tmp_path / "a", "../b.pt")


def test_an_index_of_safetensors_names_files_beside_it(tmp_path):
    model = nn.Linear(1, 1)
    state.export(tmp_path / "elsewhere", model)
    folder = tmp_path / "folder"
    folder.mkdir()
    file = tmp_path / "elsewhere/model.safetensors"
    index = folder / "model.safetensors.index.json"
    for name in ("../elsewhere/model.safetensors", str(file), 3):
        index.write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
        with pytest.raises(SavedStateError, match="which is not in the index's folder"):
            state.load_weights(folder, model)
    (folder / "a.safetensors").symlink_to(file)  # as a cache of Hugging Face has it
    index.write_text(json.dumps({"weight_map": dict.fromkeys(("weight", "bias"), "a.safetensors")}))
    state.load_weights(folder, model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(("weight", "no"), "a.safetensors")}))
    with pytest.raises(SavedStateError, match="no is not in it, where the index says it is"):
        state.load_weights(folder, model)


# -- contradictions ------------------------------------------------------------------------------

WEIGHT, MOMENT = "model.0.weight", "optimizer.state.0.weight.exp_avg"


def without_chunks(metadata):
    metadata.state_dict_metadata[WEIGHT].chunks.clear()


def half_a_chunk(metadata):
    [chunk] = metadata.state_dict_metadata[WEIGHT].chunks
    chunk.sizes = torch.Size([2, 3])


def two_chunks(metadata):
    chunks = metadata.state_dict_metadata[WEIGHT].chunks
    chunks += chunks


def another_dtype(metadata):
    metadata.state_dict_metadata[WEIGHT].properties.dtype = torch.int32


def another_shape(metadata):
    entry = metadata.state_dict_metadata[WEIGHT]
    entry.size = entry.chunks[0].sizes = torch.Size([3, 4])


def beyond_the_file(metadata):
    next(iter(metadata.storage_data.values())).length = 1 << 40


def nowhere(metadata):
    for index in [index for index in metadata.storage_data if index.fqn == WEIGHT]:
        del metadata.storage_data[index]


def of_another_key(metadata):
    """Swap the places of two values, of which one is larger."""
    places = {index.fqn: index for index in metadata.storage_data}
    first, second = places[WEIGHT], places["model.2.weight"]
    data = metadata.storage_data
    data[first], data[second] = data[second], data[first]


def of_another_version(metadata):
    metadata.version = "2.0.0"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_chunks, r"model.0.weight: its 0 chunks do not cover a tensor of \(4, 3\) exactly"),
        (half_a_chunk, r"its 1 chunks do not cover .*: they leave some of it out \(6 of 12 elem"),
        (two_chunks, r"its 2 chunks do not cover .*: they overlap \(24 of 12 elements\)"),
        (another_dtype, r"0.weight has dtype torch.float32 but torch.int32 there"),
        (another_shape, r"0.weight has shape \(4, 3\) but has shape \(3, 4\) there"),
        (beyond_the_file, r"__0_0.distcp: .*the index says bytes 0 to 1099511627776, but the file"),
        (nowhere, r"model.0.weight: the index does not say where the bytes of its chunk"),
        (
            of_another_key,
            r"the file holds torch.float32 .*, but the index says torch.float32 \(",
        ),
        (of_another_version, r"\.metadata: it is of version '2.0.0'"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(plain, tmp_path, change, expected):
    path = edited(copied(plain[0], tmp_path), change)
    with pytest.raises(ValueError, match=expected) as caught:
        load(path, extra=False)
    assert str(path) in str(caught.value)


def test_a_file_with_another_dtype_than_its_index_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    path = state.save(tmp_path, model).path
    (path / "procpipe.json").unlink()

    def change(metadata):
        metadata.state_dict_metadata["model.weight"].properties.dtype = torch.int32

    edited(path, change)
    with pytest.raises(SavedStateError, match=r"holds torch.float32 \(2, 2\), but the index says"):
        state.load_weights(path, model)


def test_another_dtype_than_the_models_is_refused_or_converted(tmp_path):
    model = nn.Linear(2, 2)
    state.save(tmp_path, model)
    with pytest.raises(ValueError, match=r"weight has dtype torch.float64 but torch.float32 there"):
        state.load(tmp_path, nn.Linear(2, 2).double())
    for load_into in (
        lambda target: state.load(tmp_path, target, strict=False),
        lambda target: state.load_weights(tmp_path, target),
    ):
        target = nn.Linear(2, 2).double()
        load_into(target)
        assert torch.equal(target.weight, model.weight.double())
    module = nn.Module()
    module.register_buffer("weight", torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"weight has dtype torch.int32 but torch.float32 there"):
        state.load_weights(tmp_path, module, strict=False)


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_moments_have_the_parameters_shape(tmp_path, name):
    """All of torch's optimizers are loaded; no tensor of their state with another shape."""
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}.get(name, {})
    options |= {"Adam": {"amsgrad": True}}.get(name, {})
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False))
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01, **options)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    path = state.save(tmp_path, model, optimizer).path
    (path / "procpipe.json").unlink()
    loaded = OPTIMIZERS[name](model.parameters(), lr=0.01, **options)
    for _ in range(2):  # without a state, and with one
        state.load(path, model, loaded)
        assert is_same(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    keys = [
        key for key, shape in read_index(path).shapes.items() if key.startswith("optimizer.state")
    ]
    assert keys
    for key in keys:
        if read_index(path).shapes[key] is None or key.endswith("H_diag"):
            continue
        changed = edited(shutil.copytree(path, tmp_path / key), lambda m, k=key: reshape(m, k))
        fresh = OPTIMIZERS[name](model.parameters(), lr=0.01, **options)
        with pytest.raises(ValueError, match=rf"{key} has shape \(7,\) there, but must have"):
            state.load(changed, model, fresh)
        with pytest.raises(ValueError, match=rf"{key} has shape \(7,\) there, but must have"):
            state.load(changed, model, optimizer)


@pytest.mark.parametrize("part", ["step", "exp_avg"])
def test_complex_state_is_not_made_real(tmp_path, part):
    """Also with ``strict=False``: torch would drop the imaginary part."""
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state_of = optimizer.state[model.weight]
    state_of[part] = state_of[part].to(torch.complex64)
    state.save(tmp_path, model, optimizer)
    loaded = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=rf"{part} has dtype torch.complex64, but must have"):
        state.load(tmp_path, model, loaded, strict=False)


def test_an_optimizer_may_hold_none_or_a_number_where_a_tensor_is_loaded(tmp_path):
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state.save(tmp_path, model, optimizer)
    buffer = optimizer.state[model.weight]["momentum_buffer"]
    for held in (None, 1):
        loaded = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loaded.state[model.weight]["momentum_buffer"] = held
        state.load(tmp_path, model, loaded)
        assert torch.equal(loaded.state[model.weight]["momentum_buffer"], buffer)


@pytest.mark.parametrize("position", [-1, 625, 1 << 40, None])
def test_a_position_at_which_numpy_would_read_foreign_memory_is_refused(position):
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_state()[2]
    found = generators.states()
    found["numpy"] = ("MT19937", [1] * 624, position, 0, 0.0)
    with pytest.raises(SavedStateError, match="numpy's generator is at none of its 624 words"):
        generators.restore(found)
    assert numpy.random.get_state()[2] == before


def reshape(metadata, key):
    entry = metadata.state_dict_metadata[key]
    [chunk] = entry.chunks
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        info = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)(key, torch.Size([0]))] = info
    chunk.offsets = torch.Size([0])
    chunk.sizes = entry.size = torch.Size([7])


def test_values_that_could_not_be_loaded_are_not_saved(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"path": Path("x")}

        def set_extra_state(self, state):
            pass

    for asynchronous in (False, True):  # at once, also in the background
        with pytest.raises(TypeError, match=r"model._extra_state cannot be saved so that it can b"):
            state.save(tmp_path, Odd(1, 1), asynchronous=asynchronous)
    sparse = nn.Module()
    sparse.register_buffer("table", torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match=r"model.table is a Tensor of torch.sparse_coo: only ordin"):
        state.save(tmp_path, sparse)


# -- chunks --------------------------------------------------------------------------------------


def covers(shape, boxes):
    try:
        _check_tiled(shape, boxes)
    except SavedStateError:
        return False
    return True


def covers_by_counting(shape, boxes):
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        if any(at + size > of for at, size, of in zip(offsets, sizes, shape, strict=True)):
            return False
        counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    return bool((counts == 1).all())


def test_chunks_cover_a_tensor_exactly_once():
    """Compared with counting each element, over random divisions with random faults."""
    draw, num_covered = random.Random(1), 0

    def divided(box, times):
        offsets, sizes = box
        if not times or not sizes:
            return [box]
        d = draw.randrange(len(sizes))
        at = draw.randrange(sizes[d] + 1)
        left = (offsets, (*sizes[:d], at, *sizes[d + 1 :]))
        moved = (*offsets[:d], offsets[d] + at, *offsets[d + 1 :])
        right = (moved, (*sizes[:d], sizes[d] - at, *sizes[d + 1 :]))
        return divided(left, times - 1) + divided(right, times - 1)

    for _ in range(3000):
        shape = tuple(draw.randrange(5) for _ in range(draw.randrange(4)))
        boxes = divided(((0,) * len(shape), shape), draw.randrange(4))
        fault = draw.choice(["none", "lost", "twice", "moved"])
        k = draw.randrange(len(boxes))
        if fault == "lost":
            del boxes[k]
        elif fault == "twice":
            boxes.append(boxes[k])
        elif fault == "moved" and shape:
            boxes[k] = tuple(draw.randrange(3) for _ in shape), boxes[k][1]
        assert covers(shape, boxes) == covers_by_counting(shape, boxes), (shape, boxes)
        num_covered += covers(shape, boxes)
    assert 500 < num_covered < 2500


@pytest.mark.timeout(20)
def test_many_chunks_are_checked_quickly():
    boxes = [((3 * k, 5 * j), (3, 5)) for k in range(100) for j in range(100)]
    assert covers((300, 500), boxes)
    assert not covers((300, 500), [*boxes[:777], *boxes[778:]])
    assert not covers((1 << 40,), [((0,), (1 << 39,))])
    assert covers((), [((), ())])
    assert not covers((), [])
    assert covers((0, 3), [])
    with pytest.raises(SavedStateError, match="cut along 30 dimensions"):
        _check_tiled((2,) * 30, [((0,) * 30, (1,) * 30)])


def test_a_tensor_in_many_chunks_is_put_together(tmp_path):
    """As saved by a job that had a part of the tensor on every rank."""
    from procpipe.state.files import Index
    from procpipe.state.index import Chunk

    whole = torch.arange(24.0).reshape(4, 6)
    chunks, at = [], 0
    with open(tmp_path / "f", "wb") as file:
        for i in (0, 2):
            for j in (0, 2, 4):
                torch.save(whole[i : i + 2, j : j + 2].clone(), file)
                chunks.append(Chunk((i, j), (2, 2), "f", at, file.tell() - at))
                at = file.tell()
    index = Index(tmp_path, {"w": IndexEntry(torch.float32, (4, 6), tuple(chunks[::-1]))})
    assert torch.equal(index.read(["w"])["w"], whole)
