"""Saved state on real processes: saved on n stages, resumed on n', bit for bit, in float64.

Truth is an undisturbed run of the plain ``nn.Sequential``. A run that was saved is loaded into
models and optimizers with other values and options, so that an unrestored value makes a test fail.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from procpipe import RemoteStageError, Stage, state
from tests.dist.stages import assert_same, plain_step, stage_of

pytestmark = pytest.mark.on_gpus

KINDS = ("sgd", "adam", "adamw")
#: Some stages have no parameters, some no matrices, one has all of both.
BALANCES = {1: [7], 2: [4, 3], 3: [1, 4, 2], 4: [2, 1, 2, 2]}
CHUNKS = 2


class Tied(nn.Module):
    """Uses one matrix twice, under two names."""

    def __init__(self, size):
        super().__init__()
        self.down, self.up = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.up.weight = self.down.weight

    def forward(self, input):
        return self.up(torch.tanh(self.down(input)))


def make_model(seed=1):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        Tied(8),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    ).double()
    model[5].weight.requires_grad_(False)
    return model


def make_optimizer(kind, module, lr=0.05):
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, nesterov=True)
    if kind == "adam":
        return torch.optim.Adam(module.parameters(), lr=lr, amsgrad=True)
    named = list(module.named_parameters())
    matrices = [parameter for _, parameter in named if parameter.ndim > 1]
    vectors = [parameter for _, parameter in named if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": vectors, "weight_decay": 0.0, "lr": 2 * lr},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def wrong_optimizer(kind, module):
    optimizer = make_optimizer(kind, module, lr=7.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
    return optimizer


def mini_batches():
    generator = torch.Generator().manual_seed(3)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(6, 5, **draw), torch.randn(6, 3, **draw)) for _ in range(5)]


def train(module, optimizer, scheduler, batches):
    for input, target in batches:
        optimizer.zero_grad()
        if isinstance(module, Stage):
            module.step(input, target)
        else:
            plain_step(module, (input,), target, CHUNKS, F.mse_loss)
        optimizer.step()
        scheduler.step()


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def undisturbed(bare=None):
    weights = {}
    for kind in KINDS:
        model = make_model()
        optimizer = make_optimizer(kind, model)
        train(model, optimizer, scheduler_of(optimizer), mini_batches())
        weights[kind] = model.state_dict()
    return weights


@pytest.fixture(scope="module")
def truth(ranks):
    """Return the weights of undisturbed runs, trained in one thread as the others are."""
    return ranks(1).run(undisturbed, world=False).values()[0]


@pytest.fixture
def one_thread():
    """Make this process add numbers in the same order as the stages' processes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def assert_same_as(found, expected, what):
    for key, value in found.items():
        assert_same(value, expected[key], f"{what}: {key}")


# -- any number of stages to any other -----------------------------------------------------------


def save_some(bare, folder):
    for kind in KINDS:
        balance = BALANCES[bare.num_ranks]
        with stage_of(bare, kind, make_model(), balance, chunks=CHUNKS, loss_fn=F.mse_loss) as s:
            optimizer = make_optimizer(kind, s)
            scheduler = scheduler_of(optimizer)
            train(s, optimizer, scheduler, mini_batches()[:3])
            # As between two steps of a script: there are gradients, which are not saved.
            where = f"{folder}/{bare.num_ranks}-{kind}"
            saving = state.save(where, s, optimizer, extra={"scheduler": scheduler}, step=3)
            assert saving.is_done()
            assert saving.path.is_dir()


def go_on_from_all(bare, folder, truth):
    for num_saved in BALANCES:
        for kind in KINDS:
            name, balance = f"{num_saved}-{kind}", BALANCES[bare.num_ranks]
            model = make_model(seed=2)
            with stage_of(bare, name, model, balance, chunks=CHUNKS, loss_fn=F.mse_loss) as stage:
                optimizer = wrong_optimizer(kind, stage)
                scheduler = scheduler_of(optimizer)
                resumed = state.load(
                    f"{folder}/{name}", stage, optimizer, extra={"scheduler": scheduler}
                )
                assert resumed is not None
                assert (resumed.step, resumed.num_stages) == (3, num_saved)
                train(stage, optimizer, scheduler, mini_batches()[3:])
                assert_same_as(stage.state_dict(), truth[kind], name)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for num_ranks in BALANCES:
        ranks(num_ranks).run(save_some, str(folder), world=False).values()
    return folder


@pytest.mark.parametrize("num_ranks", BALANCES)
def test_from_any_number_of_stages_to_any_other(ranks, saved, truth, num_ranks):
    ranks(num_ranks).run(go_on_from_all, str(saved), truth, world=False).values()


def go_on_in_turn(bare, folder, truth):
    """Train one step with folded partitions, the others with the same partitions looped."""
    balance = BALANCES[4]
    options: Any = {"chunks": CHUNKS, "loss_fn": F.mse_loss}
    for before, schedule, steps in (
        ("3-adamw", "zb-v", slice(3, 4)),
        ("in turn", "interleaved", slice(4, 9)),
    ):
        with stage_of(
            bare, schedule, make_model(2), balance, schedule=schedule, **options
        ) as stage:
            optimizer = wrong_optimizer("adamw", stage)
            scheduler = scheduler_of(optimizer)
            resumed = state.load(
                f"{folder}/{before}", stage, optimizer, extra={"scheduler": scheduler}
            )
            assert resumed is not None
            assert resumed.num_stages == (3 if before == "3-adamw" else 2)
            train(stage, optimizer, scheduler, mini_batches()[steps])
            state.save(f"{folder}/in turn", stage, optimizer, extra={"scheduler": scheduler})
    assert_same_as(stage.state_dict(), truth["adamw"], "in turn")


def test_from_one_placement_of_partitions_to_another(ranks, saved, truth):
    ranks(2).run(go_on_in_turn, str(saved), truth, world=False).values()


def train_what_is_not_frozen(bare, folder, truth):
    """Save after two steps, and load before the others, with a stage of frozen layers."""
    model = make_model()
    model[:4].requires_grad_(False)
    num_steps = len(mini_batches())
    steps = slice(0, 2) if bare.num_ranks == 2 else slice(2, num_steps)
    balance = {1: [7], 2: [4, 3], 3: [1, 3, 3]}[bare.num_ranks]
    options: Any = {"chunks": CHUNKS, "loss_fn": F.mse_loss}
    with stage_of(bare, "frozen", model, balance, **options) as stage:
        optimizer = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=0.05)
        scheduler = scheduler_of(optimizer)
        if bare.num_ranks != 2:
            state.load(folder, stage, optimizer, extra={"scheduler": scheduler})
        train(stage, optimizer, scheduler, mini_batches()[steps])
        if bare.num_ranks == 2:
            state.save(folder, stage, optimizer, extra={"scheduler": scheduler})
        else:
            assert_same_as(stage.state_dict(), truth, "frozen")


def frozen_truth(bare):
    model = make_model()
    model[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(model, optimizer, scheduler_of(optimizer), mini_batches())
    return model.state_dict()


def test_a_stage_with_nothing_to_train(ranks, tmp_path):
    (truth,) = ranks(1).run(frozen_truth, world=False).values()
    for num_ranks in (2, 1, 3):
        ranks(num_ranks).run(train_what_is_not_frozen, str(tmp_path), truth, world=False).values()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_saved", BALANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_into_a_plain_module_and_optimizer(saved, truth, num_saved, kind):
    model = make_model(seed=2)
    optimizer = wrong_optimizer(kind, model)
    scheduler = scheduler_of(optimizer)

    state.load(saved / f"{num_saved}-{kind}", model, optimizer, extra={"scheduler": scheduler})

    train(model, optimizer, scheduler, mini_batches()[3:])
    assert_same_as(model.state_dict(), truth[kind], kind)


def test_a_user_opens_a_saved_state_with_torch(saved):
    folder = saved / "3-adam/000001-step-3"
    names: set[str] = set()
    for rank in range(3):
        found = torch.load(folder / f"stage-{rank}-of-3.pt", weights_only=True)
        assert found["about"]["balance"] == BALANCES[3]
        names |= found["model"].keys()
        for name, values in found["optimizer"]["state"].items():
            parameter = make_model().get_parameter(name)
            assert name == "5.weight" or values["exp_avg"].shape == parameter.shape, name
    assert names == make_model().state_dict().keys()


# -- bit by bit as if never stopped --------------------------------------------------------------


def noisy_run(bare, name, folder, *, seed, stop=None, asynchronous=False):
    """Train for three epochs of five mini-batches; return the weights.

    Dropout on every stage, deferred batch normalisation, a scheduler, a shuffled loader.
    """
    torch.manual_seed(1)
    layers = [(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*[layer for group in layers for layer in group])
    data = TensorDataset(torch.randn(40, 6), torch.randn(40, 6))
    torch.manual_seed(seed)
    options: dict[str, Any] = {"chunks": 2, "deferred_batch_norm": True, "loss_fn": F.mse_loss}
    balance = [4 * (3 - bare.num_ranks) + 4, *[4] * (bare.num_ranks - 1)]
    with stage_of(bare, name, model, balance, **options) as stage:
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        loader = state.Resumable(DataLoader(data, batch_size=8, shuffle=True))
        progress: dict[str, Any] = {
            "epoch": 0,
            "scheduler": scheduler,
            "loader": loader,
            "seen": torch.zeros(2),
        }
        resumed = state.load(folder, stage, optimizer, extra=progress, missing_ok=True)
        step = resumed.step or 0 if resumed else 0
        for epoch in range(progress["epoch"], 3):
            progress["epoch"] = epoch
            for input, target in stage.batches(loader):
                optimizer.zero_grad()
                stage.step(input, target)
                optimizer.step()
                scheduler.step()
                progress["seen"] += 1
                step += 1
                if step == stop:
                    state.save(
                        folder,
                        stage,
                        optimizer,
                        extra=progress,
                        step=step,
                        asynchronous=asynchronous,
                    )
        assert progress["seen"].tolist() == [15.0, 15.0]
        state.background.wait_unfinished(stage)
        return stage.state_dict()


def stop_and_go_on(bare, folder):
    # In the middle of an epoch, after its last mini-batch, after the first of one; in background.
    for k, (stop, asynchronous) in enumerate([(7, False), (10, True), (11, True)]):
        where = f"{folder}/{k}"
        whole = noisy_run(bare, f"{k}", where, seed=5, stop=stop, asynchronous=asynchronous)
        rest = noisy_run(bare, f"{k} resumed", where, seed=6)
        assert_same_as(rest, whole, f"stopped after {stop} steps")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_resumed_run_is_the_same_bit_by_bit(ranks, tmp_path, num_ranks):
    ranks(num_ranks).run(stop_and_go_on, str(tmp_path), world=False).values()


# -- faults --------------------------------------------------------------------------------------


def load_badly(bare, folder):
    model = make_model()
    model[0] = nn.Linear(5, 9).double()
    model[6] = nn.Sequential(nn.Linear(8, 3)).double()
    errors = []
    with stage_of(bare, "bad", model, [4, 3], loss_fn=F.mse_loss) as stage:
        optimizer = make_optimizer("adam", stage)
        before = copy.deepcopy(stage.state_dict())
        for call in (
            lambda: state.load(folder, stage, optimizer, extra={"epoch": 1}),
            lambda: state.load_weights(folder, stage),
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
    first, second = ranks(2).run(load_badly, str(saved / "3-adam"), world=False).values()

    assert first == second
    (kind, load), (_, weights), (none_kind, none), (step_kind, step) = first
    assert kind == "ValueError"
    for fault in (
        "rank 0: layer '0' (Linear): 0.weight has shape (9, 5) but has shape (8, 5) there",
        "rank 0: layer '0' (Linear): 0.bias has shape (9,) but has shape (8,) there",
        "rank 1: layer '6' (Sequential): 6.0.weight is missing",
        "6.weight is there, but no layer of the model has it",
    ):
        assert fault in load
        assert fault in weights
    assert "rank 1: the optimizer's state of 6.0.weight is not in it" in load
    assert "rank 0: extra 'epoch' was not saved" in load
    assert "rank 0: extra 'scheduler' was saved, but not asked for" in load
    assert (none_kind, none) == ("FileNotFoundError", f"there is no folder {saved / '3-adam/none'}")
    assert step_kind == "FileNotFoundError"
    assert step.endswith("holds no saved state of step 4, but of 3")


def save_differently(bare, folder):
    with stage_of(bare, "other", make_model(), [4, 3], loss_fn=F.mse_loss) as stage:
        extra = {"epoch": 1} if bare.rank == 0 else {"epochs": 1}
        state.save(folder, stage, extra=extra)


def test_other_arguments_than_on_rank_0_are_refused(ranks, tmp_path):
    errors = ranks(2).run(save_differently, str(tmp_path), world=False).errors()

    assert errors[0].is_a("ValueError")
    assert errors[1].is_a("RemoteStageError")
    for error in errors:
        assert "on rank 1 than on rank 0: the names in extra: ['epochs'], not ['epoch']" in (
            error.text
        )


def save_own_extra(bare, folder):
    with stage_of(bare, "own", make_model(), [4, 3], loss_fn=F.mse_loss) as stage:
        extra = {"mean": torch.full((2,), float(bare.rank)), "seconds": 1.5 + bare.rank}
        state.save(folder, stage, extra=extra)
        extra = {"mean": torch.zeros(2), "seconds": 0.0}
        state.load(folder, stage, extra=extra)
        return extra["mean"].tolist(), extra["seconds"]


def test_each_rank_saves_its_own_extra_values(ranks, tmp_path):
    """On as many stages each rank gets its own; on others all get rank 0's numbers, no tensors."""
    found = ranks(2).run(save_own_extra, str(tmp_path), world=False).values()

    assert found == [([0.0, 0.0], 1.5), ([1.0, 1.0], 2.5)]
    model = make_model()
    with pytest.raises(ValueError, match="extra 'mean' has another form, or other tensors, on ra"):
        state.load(tmp_path, model, extra={"mean": None, "seconds": None})
    extra = {"seconds": None}
    state.load(tmp_path, model, extra=extra, strict=False)
    assert extra == {"seconds": 1.5}


def save_own_rates(bare, folder):
    """Save a group a rank, each with a rate of its own, which its scheduler holds."""
    with stage_of(bare, "rates", small_model(), [1, 2]) as stage:
        optimizer, scheduler = scheduled(stage, 0.1 * (bare.rank + 1))
        state.save(folder, stage, optimizer, extra={"scheduler": scheduler})


def load_own_rates(bare, folder, balance):
    with stage_of(bare, f"rates {balance}", small_model(), balance) as stage:
        optimizer, scheduler = scheduled(stage, 0.3)
        extra = {"scheduler": scheduler}
        if balance == [1, 2]:
            state.load(folder, stage, optimizer, extra=extra)
            assert scheduler.base_lrs == [0.1 * (bare.rank + 1)]
        else:
            with pytest.raises(
                ValueError,
                match=r"rank 1 .* \(base_lrs of group 0 is 0\.1 on rank 0 and 0\.2 on rank 1\)",
            ):
                state.load(folder, stage, optimizer, extra=extra)


def small_model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def scheduled(stage, lr):
    optimizer = torch.optim.SGD(stage.parameters(), lr=lr)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_a_schedulers_rates_are_not_taken_to_other_layers(ranks, tmp_path):
    """The scheduler's next step would set the rates of rank 0's groups on every stage."""
    two, three = ranks(2), ranks(3)
    two.run(save_own_rates, str(tmp_path), world=False).values()
    two.run(load_own_rates, str(tmp_path), [1, 2], world=False).values()
    two.run(load_own_rates, str(tmp_path), [2, 1], world=False).values()
    three.run(load_own_rates, str(tmp_path), [1, 1, 1], world=False).values()


# -- in the background ---------------------------------------------------------------------------


class Gate:
    """Blocks all writing of this process until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        self._fsync = os.fsync

    def __enter__(self):
        os.fsync = self._wait
        return self

    def __exit__(self, *_):
        self.opened.set()
        os.fsync = self._fsync

    def _wait(self, descriptor):
        assert self.opened.wait(60)
        self._fsync(descriptor)


def save_while_training(bare, folder):
    batches = mini_batches()
    with stage_of(bare, "train", make_model(), [4, 3], chunks=2, loss_fn=F.mse_loss) as stage:
        optimizer = make_optimizer("adam", stage)
        scheduler = scheduler_of(optimizer)
        train(stage, optimizer, scheduler, batches[:2])
        then = copy.deepcopy([stage.state_dict(), optimizer.state_dict()])
        with Gate() as gate:
            saving = state.save(folder, stage, optimizer, step=2, asynchronous=True)
            train(stage, optimizer, scheduler, batches[2:4])
            assert not saving.is_done()
            assert state.load(folder, stage, missing_ok=True) is None
            gate.opened.set()
            saving.wait()
        saving.wait()  # again: nothing to wait for
        one = state.save(folder, stage, optimizer, step=4, asynchronous=True)
        two = state.save(folder, stage, optimizer, step=5)
        assert one.is_done()
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


@contextlib.contextmanager
def full_disk(is_full):
    """Limit the files that this process writes to a mebibyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_to_full_disk(bare, folder, full_rank, asynchronous):
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    with stage_of(bare, "full", model, [1, 1], loss_fn=F.mse_loss) as stage:
        state.save(folder, stage, step=1)
        with full_disk(bare.rank == full_rank):
            saving = state.save(folder, stage, step=2, asynchronous=asynchronous)
            saving.wait()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at-once", "background"])
@pytest.mark.parametrize("full_rank", [0, 1])
def test_every_rank_reports_a_full_disk(ranks, tmp_path, full_rank, asynchronous):
    job = ranks(2).run(
        save_to_full_disk, str(tmp_path), full_rank, asynchronous, world=False, timeout_s=60
    )

    errors = job.errors()
    assert os.strerror(errno.EFBIG) in errors[full_rank].traceback
    assert errors[1 - full_rank].is_a(RemoteStageError.__name__)
    assert os.strerror(errno.EFBIG) in errors[1 - full_rank].text
    assert f"rank {full_rank} failed" in errors[1 - full_rank].text
    found = state.load(tmp_path, nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)))
    assert found is not None
    assert found.step == 1


# -- weights alone -------------------------------------------------------------------------------

#: Layers of 4 MiB each; a quarter of the model is 16 MiB.
WIDTH, NUM_LAYERS = 1024, 16


def big_model(device="meta"):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, device=device) for _ in range(NUM_LAYERS)])


def peak_bytes(call):
    """Run a call, and return how much more memory was in use at its peak than before it."""

    def resident(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def load_own_weights(bare, folder):
    share = [NUM_LAYERS // bare.num_ranks] * (bare.num_ranks - 1)
    balance = [*share, NUM_LAYERS - sum(share)]
    torch.manual_seed(1)
    expected = big_model("cpu").state_dict()
    peaks = {}
    for name in ("plain.pt", "exported", "saved"):
        with stage_of(bare, f"{name}{bare.num_ranks}", big_model(), balance) as stage:
            stage.report()
            state.load_weights(f"{folder}/warm/{name}", nn.Linear(1, 1))  # for its imports
            peaks[name] = peak_bytes(lambda n=name, s=stage: state.load_weights(f"{folder}/{n}", s))
            assert_same_as(stage.state_dict(), expected, name)
    return peaks


def export_own_weights(bare, folder):
    torch.manual_seed(1)
    with stage_of(bare, "export", big_model("cpu"), [6, 10]) as stage:
        state.export(f"{folder}/exported", stage)
        state.save(f"{folder}/saved", stage)
    if bare.rank == 0:
        warm = Path(folder, "warm")
        state.export(warm / "exported", nn.Linear(1, 1))
        state.save(warm / "saved", nn.Linear(1, 1))
        torch.save(nn.Linear(1, 1).state_dict(), warm / "plain.pt")


@pytest.mark.only_on_cpus  # their memory is that of the processes
def test_no_process_holds_the_whole_model(ranks, tmp_path):
    torch.manual_seed(1)
    torch.save(big_model("cpu").state_dict(), tmp_path / "plain.pt")
    ranks(2).run(export_own_weights, str(tmp_path), world=False).values()
    exported = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert exported == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "exported/model.safetensors.index.json").read_text())
    assert index["weight_map"]["5.bias"] == exported[0]
    assert index["weight_map"]["6.bias"] == exported[1]
    num_bytes = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    assert index["metadata"]["total_size"] == num_bytes

    for peaks in ranks(4).run(load_own_weights, str(tmp_path), world=False).values():
        for name, peak in peaks.items():
            # Beside its quarter of the model, which is there: one tensor.
            assert peak < 0.15 * num_bytes / 4 + WIDTH * WIDTH * 4, (name, peak, num_bytes)


def save_moments(bare, folder):
    for name, model in (("warm", nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))), ("big", big())):
        half = len(model) // 2
        with stage_of(bare, name, model, [half, half]) as stage:
            optimizer = stepped(stage)
            state.save(f"{folder}/{name}", stage, optimizer)


def big():
    return big_model("cpu")


def stepped(module):
    """Return an optimizer after a step with gradients of 1."""
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def load_moments(bare, folder):
    """Return what the first load and the next add to the memory, and the size of the state."""
    small = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with stage_of(bare, "warm moments", small, [1, 1]) as stage:
        state.load(f"{folder}/warm", stage, torch.optim.AdamW(stage.parameters()))
    with stage_of(bare, "moments", big(), [NUM_LAYERS // 2] * 2) as stage:
        stage.report()
        optimizer = torch.optim.AdamW(stage.parameters())
        peaks = [
            peak_bytes(lambda: state.load(f"{folder}/big", stage, optimizer)) for _ in range(2)
        ]
        of_all = (value for values in optimizer.state.values() for value in values.values())
        return *peaks, sum(value.nbytes for value in of_all)


@pytest.mark.only_on_cpus  # their memory is that of the processes
def test_a_loaded_optimizer_state_is_held_once(ranks, tmp_path):
    """Beside its own state a process holds one tensor, also if it had a state before."""
    two = ranks(2)
    two.run(save_moments, str(tmp_path), world=False).values()

    for first, next_one, own in two.run(load_moments, str(tmp_path), world=False).values():
        one_tensor = WIDTH * WIDTH * 4
        assert own > 2 * 0.45 * NUM_LAYERS * one_tensor
        assert first < own + 1.5 * one_tensor, (first, own)
        assert next_one < 1.5 * one_tensor, (next_one, own)
