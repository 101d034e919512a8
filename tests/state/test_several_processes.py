"""Saved state on real processes: faults, the background, and memory.

That a run saved on n stages goes on as the plain model does on n': tests/fuzz; and where loaders
were: test_one_process.py.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from procpipe import state
from tests.dist.stages import assert_same, stage_of

pytestmark = pytest.mark.on_gpus


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    ).double()


def mini_batches():
    generator = torch.Generator().manual_seed(3)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(6, 5, **draw), torch.randn(6, 3, **draw)) for _ in range(5)]


def train(stage, optimizer, batches):
    for input, target in batches:
        optimizer.zero_grad()
        stage.step(input, target)
        optimizer.step()


def assert_same_as(found, expected, what):
    for key, value in found.items():
        assert_same(value, expected[key], f"{what}: {key}")


def save_trained(bare, folder):
    with stage_of(bare, "saved", make_model(), [1, 2, 2], loss_fn=F.mse_loss) as stage:
        optimizer = torch.optim.Adam(stage.parameters())
        train(stage, optimizer, mini_batches())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        state.save(folder, stage, optimizer, extra={"scheduler": scheduler}, step=3)
        expected = copy.deepcopy(stage.state_dict())
        state.export(f"{folder}/exported", stage)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.zero_()
        state.load_weights(f"{folder}/exported", stage)
        assert_same_as(stage.state_dict(), expected, "exported")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ranks(3).run(save_trained, str(folder), world=False).values()
    return folder


def test_a_user_opens_a_saved_state_with_torch(saved):
    names = set()
    for rank in range(3):
        found = torch.load(saved / f"000001-step-3/stage-{rank}-of-3.pt", weights_only=True)
        assert found["about"]["balance"] == [1, 2, 2]
        names |= found["model"].keys()
        for name, values in found["optimizer"]["state"].items():
            assert values["exp_avg"].shape == make_model().get_parameter(name).shape, name
    assert names == make_model().state_dict().keys()


def save_tied(bare, folder):
    model = small_model()
    model[2].weight = model[0].weight
    with stage_of(bare, "tied", model, [1, 2], loss_fn=F.mse_loss) as stage:
        optimizer = torch.optim.Adam(stage.parameters())
        train(stage, optimizer, [(torch.ones(2, 2), torch.ones(2, 2))])
        state.save(folder, stage, optimizer)
        state.export(f"{folder}/exported", stage, keys=lambda key: key.replace("2.w", "0.w"))


def test_a_shared_matrix_is_written_by_one_of_its_stages(ranks, tmp_path):
    """The optimizer's state of it; and its values, where its names become one key."""
    ranks(2).run(save_tied, str(tmp_path), world=False).values()
    states: list[str] = []
    keys: list[str] = []
    for rank in range(2):
        found = torch.load(tmp_path / f"000001/stage-{rank}-of-2.pt", weights_only=True)
        states += found["optimizer"]["state"]
        file = tmp_path / f"exported/model-{rank + 1:05d}-of-00002.safetensors"
        with safe_open(file, "pt") as weights:
            keys += weights.keys()
    each_once = ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias"]
    assert sorted(states) == sorted(keys) == each_once


# -- faults --------------------------------------------------------------------------------------


def load_badly(bare, folder):
    model = make_model()
    model[0] = nn.Linear(5, 9).double()
    model[4] = nn.Sequential(nn.Linear(8, 3)).double()
    errors = []
    with stage_of(bare, "bad", model, [3, 2], loss_fn=F.mse_loss) as stage:
        optimizer = torch.optim.Adam(stage.parameters())
        before = copy.deepcopy(stage.state_dict())
        for call in (
            lambda: state.load(folder, stage, optimizer, extra={"epoch": 1}),
            lambda: state.load_weights(f"{folder}/plain.pt", stage),
            lambda: state.load(f"{folder}/none", stage),
            lambda: state.load(folder, stage, step=4, missing_ok=True),
        ):
            with pytest.raises((ValueError, FileNotFoundError)) as caught:
                call()
            errors.append((caught.type.__name__, str(caught.value)))
        assert_same_as(stage.state_dict(), before, "nothing is changed")
        assert state.load(f"{folder}/none", stage, missing_ok=True) is None
        stage.report()  # the stage can still be used
    return errors


def test_every_rank_raises_all_faults_of_all_ranks(ranks, saved):
    torch.save(make_model().state_dict(), saved / "plain.pt")
    first, second = ranks(2).run(load_badly, str(saved), world=False).values()

    assert first == second
    (kind, load), (_, weights), (none_kind, none), (step_kind, step) = first
    assert kind == "ValueError"
    for fault in (
        "rank 0: layer '0' (Linear): 0.weight has shape (9, 5) but has shape (8, 5) there",
        "rank 0: layer '0' (Linear): 0.bias has shape (9,) but has shape (8,) there",
        "rank 1: layer '4' (Sequential): 4.0.weight is missing",
        "4.weight is there, but no layer of the model has it",
    ):
        assert fault in load
        assert fault in weights
    assert "rank 1: the optimizer's state of 4.0.weight is not in it" in load
    assert "rank 0: extra 'epoch' was not saved" in load
    assert "rank 0: extra 'scheduler' was saved, but not asked for" in load
    assert none_kind == step_kind == "FileNotFoundError"
    assert none == f"there is no saved state in {saved / 'none'}"
    assert step.endswith(f"no saved state in {saved} of step 4, but 000001-step-3")


def small_model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def with_own(stage, value):
    """Return an optimizer, and what may differ between ranks: a tensor, a number, a rate."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=value)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    extra = {"mean": torch.full((2,), value), "seconds": 2 * value, "scheduler": scheduler}
    return optimizer, extra


def save_and_load_own(bare, folder):
    with stage_of(bare, "own", small_model(), [1, 2]) as stage:
        optimizer, extra = with_own(stage, 1.5 + bare.rank)
        state.save(folder, stage, optimizer, extra=extra)
        optimizer, extra = with_own(stage, 0.5)
        state.load(folder, stage, optimizer, extra=extra)
        return extra["mean"].tolist(), extra["seconds"], extra["scheduler"].base_lrs


def refuse_those_of_other_layers(bare, folder, balance):
    with stage_of(bare, f"other {balance}", small_model(), balance) as stage:
        optimizer, extra = with_own(stage, 0.5)
        messages = []
        for strict in (True, False):
            with pytest.raises(ValueError, match="does not fit") as caught:
                state.load(folder, stage, optimizer, extra=extra, strict=strict)
            messages.append(str(caught.value))
        extra = {"seconds": 0.0}
        state.load(folder, stage, extra=extra, strict=False)
        return messages, extra["seconds"]


def test_each_rank_has_its_own_extra_values_and_other_stages_rank_0s_numbers(ranks, tmp_path):
    """A tensor may be of its own stage, and a scheduler's next step would set the rates there."""
    found = ranks(2).run(save_and_load_own, str(tmp_path), world=False).values()

    assert found == [([1.5, 1.5], 3.0, [1.5]), ([2.5, 2.5], 5.0, [2.5])]
    for balance in ([2, 1], [1, 1, 1]):
        job = ranks(len(balance)).run(
            refuse_those_of_other_layers, str(tmp_path), balance, world=False
        )
        for messages, seconds in job.values():
            assert seconds == 3.0
            for each in messages:
                assert "extra 'mean' has another form, or other tensors, on rank 1" in each
                assert "extra 'scheduler' has another form, or other learning rates, on r" in each
                assert "(at scheduler['base_lrs'][0])" in each


# -- in the background ---------------------------------------------------------------------------


@contextlib.contextmanager
def gate():
    """Block all writing of this process until the event is set."""
    opened, fsync = threading.Event(), os.fsync

    def wait(descriptor):
        assert opened.wait(60)
        fsync(descriptor)

    os.fsync = wait
    try:
        yield opened
    finally:
        opened.set()
        os.fsync = fsync


def save_while_training(bare, folder):
    batches = mini_batches()
    with stage_of(bare, "train", make_model(), [3, 2], chunks=2, loss_fn=F.mse_loss) as stage:
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.05)
        train(stage, optimizer, batches[:2])
        then = copy.deepcopy([stage.state_dict(), optimizer.state_dict()])
        with gate() as opened:
            saving = state.save(folder, stage, optimizer, step=2, asynchronous=True)
            train(stage, optimizer, batches[2:4])
            assert state.load(folder, stage, missing_ok=True) is None
            opened.set()
            saving.wait()
        saving.wait()  # again: nothing to wait for
        state.save(folder, stage, optimizer, step=4, asynchronous=True)
        two = state.save(folder, stage, optimizer, step=5)
        state.load(folder, stage, optimizer, step=2)
        assert_same_as(stage.state_dict(), then[0], "as when it was saved")
        for number, values in optimizer.state_dict()["state"].items():
            assert_same_as(values, then[1]["state"][number], f"optimizer {number}")
        return str(saving.path), str(two.path)


def test_a_state_is_saved_in_the_background_while_training_goes_on(ranks, tmp_path):
    first, second = ranks(2).run(save_while_training, str(tmp_path), world=False).values()

    assert first == second
    assert [Path(path).name for path in first] == ["000001-step-2", "000003-step-5"]
    assert len([*tmp_path.iterdir()]) == 3


# -- memory --------------------------------------------------------------------------------------

#: Layers of 4 MiB each; a quarter of the model is 8 MiB, of its moments 16 MiB.
WIDTH, NUM_LAYERS = 1024, 8


def big_model(device="meta"):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, device=device) for _ in range(NUM_LAYERS)])


class Peak(TorchDispatchMode):
    """Notes how much memory was in use after any operation, without that of mapped files."""

    def __init__(self):
        super().__init__()
        self.before = self.peak = self.resident()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.resident())
        return result

    def resident(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak_bytes(call):
    """Run a call, and return how much more memory was in use at its peak than before it."""
    with Peak() as peak:
        call()
    return peak.peak - peak.before


def stepped(module):
    """Return an optimizer after a step with gradients of 1, which changes no parameter."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save_big(bare, folder):
    torch.manual_seed(1)
    with stage_of(bare, "save", big_model("cpu"), [3, 5]) as stage:
        state.export(f"{folder}/exported", stage)
        state.save(f"{folder}/saved", stage, stepped(stage))


def load_big(bare, folder):
    """Return what each load adds to the memory at its peak, and the size of the moments."""
    small, warm = nn.Linear(1, 1), f"{folder}/warm{bare.rank}"  # for what is imported when used
    state.export(f"{warm}/exported", small)
    state.load_weights(f"{warm}/exported", small)
    state.save(f"{warm}/saved", small, stepped(small))
    state.load(f"{warm}/saved", small, torch.optim.AdamW(small.parameters()))
    torch.manual_seed(1)
    expected = big_model("cpu").state_dict()
    peaks, num_bytes = {}, 0
    for name in ("plain.pt", "exported", "saved"):
        share = [NUM_LAYERS // bare.num_ranks] * bare.num_ranks
        with stage_of(bare, name, big_model(), share) as stage:
            stage.report()
            load = state.load if name == "saved" else state.load_weights
            peaks[name] = peak_bytes(partial(load, f"{folder}/{name}", stage))
            assert_same_as(stage.state_dict(), expected, name)
            if name == "saved":
                optimizer = torch.optim.AdamW(stage.parameters())
                load = partial(state.load, f"{folder}/saved", stage, optimizer)
                peaks |= {which: peak_bytes(load) for which in ("new moments", "moments there")}
                assert folder not in Path("/proc/self/maps").read_text()
                of_all = (moment for each in optimizer.state.values() for moment in each.values())
                num_bytes = sum(moment.nbytes for moment in of_all)
    return peaks, num_bytes


@pytest.mark.only_on_cpus  # their memory is that of the processes
def test_a_process_holds_one_tensor_beside_its_own(ranks, tmp_path):
    torch.manual_seed(1)
    torch.save(big_model("cpu").state_dict(), tmp_path / "plain.pt")
    ranks(2).run(save_big, str(tmp_path), world=False).values()

    one_tensor = WIDTH * WIDTH * 4
    for peaks, of_moments in ranks(4).run(load_big, str(tmp_path), world=False).values():
        assert of_moments > 2 * NUM_LAYERS / 4 * one_tensor
        for name in ("plain.pt", "exported", "saved", "moments there"):
            assert peaks[name] < 1.6 * one_tensor, (name, peaks)
        assert peaks["new moments"] < of_moments + 1.6 * one_tensor, peaks
