"""Loops that end on a signal, and the state that is saved after them."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from procpipe import CallMismatchError, RemoteStageError, Stage, StageClosedError, state
from tests.dist.stages import stage_of, world_of
from tests.forked import in_child

ITEMS = [(torch.full((4, 3), float(k)), torch.zeros(4, 1)) for k in range(5)]
STOP_ON = (signal.SIGTERM, signal.SIGINT)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def open_stage(bare, name, num_stages, **options):
    balance = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[num_stages]
    return stage_of(bare, name, make_model(), balance, loss_fn=F.mse_loss, chunks=2, **options)


def signal_self(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def check_stop(bare, who, num_replicas):
    before = [signal.getsignal(number) for number in STOP_ON]
    options = {"replicas": num_replicas} if num_replicas > 1 else {}
    num_stages = bare.num_ranks // num_replicas
    with open_stage(bare, "stop", num_stages, **options) as stage:
        num_items = 0
        mine = [(input + stage.replica, target) for input, target in ITEMS]
        for input, target in stage.batches(mine, stop_on=STOP_ON):
            stage.step(input, target)
            num_items += 1
            if num_items == 2 and bare.rank == who:
                signal_self()
        assert num_items == 2
        assert stage.is_stopped
        signal_self()  # does nothing, in the middle of a save
        signal_self(signal.SIGINT)
        assert not list(stage.batches(ITEMS, stop_on=STOP_ON))  # the next epoch
        stage.step(torch.ones(4, 3), torch.ones(4, 1))  # other calls still work
    assert [signal.getsignal(number) for number in STOP_ON] == before  # once it is closed


@pytest.mark.parametrize(
    ("num_ranks", "who", "num_replicas"),
    [(1, 0, 1), (3, 2, 1), (4, 3, 2)],
)
def test_a_signal_to_any_rank_ends_the_loop_on_all(ranks, num_ranks, who, num_replicas):
    ranks(num_ranks).run(check_stop, who, num_replicas, world=False).values()


def check_stop_in_eval(bare):
    """A signal in eval mode, where each replica has its own loop, ends the next one that trains."""
    with open_stage(bare, "stop in eval", 2, replicas=2) as stage:
        stage.eval()
        mine = ITEMS[: 2 + 2 * stage.replica]
        for k, (input, target) in enumerate(stage.batches(mine, stop_on=STOP_ON)):
            stage.step(input, target)
            if k == 1 and bare.rank == 3:
                signal_self()
        assert k == len(mine) - 1
        assert not stage.is_stopped
        stage.train()
        assert not list(stage.batches(ITEMS, stop_on=STOP_ON))
        assert stage.is_stopped
        assert not list(stage.eval().batches(ITEMS, stop_on=STOP_ON))


def test_a_signal_in_eval_mode_ends_the_next_loop_that_trains(ranks):
    ranks(4).run(check_stop_in_eval, world=False).values()


def check_undisturbed(bare):
    before = [signal.getsignal(number) for number in STOP_ON]
    with open_stage(bare, "undisturbed", bare.num_ranks) as stage:
        for num_times in (1, 2):  # a signal that is given twice counts once
            loop = stage.batches(ITEMS, stop_on=STOP_ON * num_times)
            assert len([signal.getsignal(STOP_ON[0]) for _ in loop]) == len(ITEMS)
            assert [signal.getsignal(number) for number in STOP_ON] == before
        assert not stage.is_stopped
        # The signal comes after the ranks have agreed for the last time, on the last item.
        for k, _ in enumerate(stage.batches(ITEMS[:1], stop_on=STOP_ON)):
            if k == 0 and bare.rank == 0:
                assert in_child(signal_self) == "", "a process that is forked here ends"
                signal_self()
        assert stage.is_stopped


def test_handlers_are_restored_after_a_loop(ranks):
    ranks(2).run(check_undisturbed, world=False).values()


def _read_and_step(stage, stop_on):
    list(stage.batches(ITEMS, stop_on=stop_on))
    stage.step(*ITEMS[0])  # rank 0 may have read all items before it learns of that


def check_mismatch(bare, of_ranks):
    message = "give the same signals on every rank"
    with open_stage(bare, "mismatch", bare.num_ranks) as stage:
        error = RemoteStageError if bare.rank == 0 else CallMismatchError
        with pytest.raises(error, match=message):
            _read_and_step(stage, of_ranks[bare.rank])


def test_ranks_with_other_signals(ranks):
    for of_ranks in ([(), STOP_ON], [STOP_ON, ()], [STOP_ON, STOP_ON[:1]]):
        ranks(2).run(check_mismatch, of_ranks, world=False).values()


class Interrupting(Dataset[torch.Tensor]):
    """A dataset whose worker interrupts the whole group while an item is awaited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> torch.Tensor:
        if k == 4:
            os.kill(self.pid, signal.SIGINT)  # the rank first, as it is the older process
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4, 3), float(k))


def check_workers(bare, folder):
    loader = state.Resumable(
        DataLoader(Interrupting(os.getpid()), batch_size=None, num_workers=1, prefetch_factor=1)
        if bare.rank == 0
        else []
    )
    seen = []
    with open_stage(bare, "workers", bare.num_ranks) as stage:
        for input in stage.batches(loader, stop_on=STOP_ON):
            stage.step(input, ITEMS[0][1])
            seen.append(input)
        assert stage.is_stopped
        assert len(seen) <= 4
        if bare.rank == 0:
            assert loader.state_dict()["given"] == len(seen)
        state.save(folder, stage, extra={"loader": loader})
    # Until the loader's iterator is gone, torch raises its error at the end of any child.
    signal.raise_signal(signal.SIGCHLD)


def test_a_signal_that_ends_a_loaders_worker(ranks, tmp_path):
    ranks(2).run(check_workers, str(tmp_path), world=False).values()
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


# -- a save after a failure -----------------------------------------------------------------------


class Bad(nn.Module):
    def forward(self, x):
        raise KeyError("boom")


def save_after_a_failure(bare, folder):
    model = nn.Sequential(nn.Linear(3, 1), Bad())
    stage = Stage(model, [1, 1], loss_fn=F.mse_loss, world=world_of(bare, "fails"))
    with pytest.raises((KeyError, RemoteStageError)):
        stage.step(*ITEMS[0])
    message = f"nothing was saved in {folder}: state.save\\(\\) cannot run: .*KeyError: 'boom'"
    with pytest.raises(StageClosedError, match=message):
        state.save(folder, stage, step=9)


def test_a_save_after_a_failed_call_says_that_nothing_was_saved(ranks, tmp_path):
    """In a script that ends by it, as in a ``finally``: tests/faults."""
    ranks(2).run(save_after_a_failure, str(tmp_path), world=False).values()
    assert not [*tmp_path.iterdir()]
