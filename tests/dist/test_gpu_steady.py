"""In a steady step the host does not wait for its device, until the user reads a value.

The first two steps do wait: they check that recomputation repeats the forward pass, and allocate
memory that is kept. Later steps wait only when a CUDA IPC channel makes a slot, whose numbers must
be set before another process reads them. The number of slots depends on how far each host is
ahead, and is bounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage
from procpipe.channel.cuda_ipc import CudaIpcTransport
from tests.dist.devices import is_emulated
from tests.dist.stages import assert_same, plain_step
from tests.held import hold_for

#: Recomputation is checked (``compute.digests``) in mini-batches 1, 2, 4 and 8.
NUM_CHECKED, NUM_STEPS = 8, 17

#: A sender's host is at most this many steps ahead of a receiver's (``run.runner``), so slots
#: hold messages of at most this many steps.
NUM_STEPS_IN_SLOTS = 2


@contextlib.contextmanager
def synchronizations() -> Iterator[list[int]]:
    """Count how often this process's host waits for a device; for a real one, as torch counts."""
    found = [0]
    if is_emulated():
        count = ctypes.CDLL(None).emulated_gpu_synchronizations
        count.restype = ctypes.c_long
        before = count()
        yield found
        found[0] = count() - before
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found[0] = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def data(place: str, device: torch.device, replicas: int) -> tuple[Any, Any]:
    size = 11 * replicas
    input, target = torch.randn(size, 8), torch.randint(-1, 4, (size,))
    target[:3] = -1  # the first micro-batch counts nothing
    if place == "pinned":
        return input.pin_memory(), target.pin_memory()
    if place == "gpu":  # no loss weight is used there, so all samples are valid
        return input.to(device), target.clamp(min=0).to(device)
    return input, target


def slots_of(stage: Stage) -> list[list[int]]:
    """Return how often each slot was used, for each CUDA IPC channel that this rank sends on."""
    transports = stage._world.transports.opened
    ours = [each for each in transports if isinstance(each, CudaIpcTransport)]
    channels = [slots for each in ours for slots in each._slots.values()]
    return [[slot.serial for slot in slots] for slots in channels]


def count_in_steps(
    world: Any, schedule: str, checkpoint: str, place: str, is_whole: bool, replicas: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Count how often this rank's host waits for the device in some training.

    Returns:
        The waits of each step; the slots that each step made; and at the end, for each channel, how
        often each slot was used.
    """
    torch.manual_seed(world.rank if is_whole else 0)  # in stage(input) inputs are compared
    n = world.num_ranks // replicas
    num_partitions = 2 * n if schedule in ("interleaved", "zb-v") else n
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))]
    layers += [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(num_partitions - 1)]

    def loss_fn(output: Any, target: Any) -> Any:
        return F.cross_entropy(output, target, ignore_index=-1)

    is_weighted = place != "gpu"  # computing the weight of a target on a GPU would wait for it
    stage = Stage(
        nn.Sequential(*layers),
        [1] * num_partitions,
        chunks=4,
        schedule=schedule,
        checkpoint=checkpoint,
        loss_fn=loss_fn,
        loss_weight=(lambda target: float((target >= 0).sum())) if is_weighted else None,
        replicas=replicas,
        world=world,
    )
    optimizer = torch.optim.AdamW(stage.parameters())
    input, target = data(place, stage.device, replicas)
    counts, num_slots = [], [0]
    for _ in range(NUM_STEPS):
        with synchronizations() as found:
            optimizer.zero_grad()
            if place == "batches":
                for item in stage.batches([(input, target)]):
                    loss = stage.step(*item)
            elif is_whole:
                loss = stage.step(input, target)
            else:
                loss = stage(input).square().mean()
                loss.backward()
            optimizer.step()
        counts.append(found[0])
        num_slots.append(sum(map(len, slots_of(stage))))
    if is_whole:
        with synchronizations() as found:
            assert loss.isfinite()[None].tolist() == [True]
        assert found[0] > 0, "reading the loss waits, so the counting works"
        with synchronizations() as clipped:
            stage.clip_grad_norm_(1.0)
        assert clipped[0] in (0, found[0]), "it reads all norms at once, or none of a replica's"
    made, slots = [after - before for before, after in pairwise(num_slots)], slots_of(stage)
    stage.close()
    return counts, made, slots


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "schedule", "checkpoint", "place", "is_whole", "replicas"),
    [
        (2, "gpipe", "except_last", "pageable", True, 1),
        (2, "gpipe", "always", "pageable", False, 1),
        (2, "1f1b", "always", "pinned", True, 1),
        (3, "1f1b", "except_last", "gpu", True, 1),
        (2, "interleaved", "never", "pageable", True, 1),
        (2, "zb-h1", "always", "pinned", True, 1),
        (2, "zb-v", "never", "gpu", True, 1),
        pytest.param(4, "1f1b", "always", "pageable", True, 2, marks=pytest.mark.gpu(4)),
        pytest.param(4, "zb-v", "never", "pinned", True, 2, marks=pytest.mark.gpu(4)),
    ],
)
def test_no_host_waits_for_its_device(
    ranks: Any, n: int, schedule: str, checkpoint: str, place: str, is_whole: bool, replicas: int
) -> None:
    """Neither in transfers, nor to add up over replicas."""
    outcomes = ranks(n).run(count_in_steps, schedule, checkpoint, place, is_whole, replicas)

    for rank, (counts, made, slots) in enumerate(outcomes.values()):
        message = f"rank {rank} waited {counts} times, and made {made} slots"
        assert counts[NUM_CHECKED:] == made[NUM_CHECKED:], message
        for uses in slots:
            assert len(uses) <= NUM_STEPS_IN_SLOTS * sum(uses) / NUM_STEPS, f"rank {rank}: {slots}"


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def mini_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(7, 6).double(), torch.randn(7, 3).double()) for _ in range(6)]


def train_and_overwrite(world: Any, place: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Change input, target and loss in place as soon as each step has returned.

    The device has then done nothing of the step. Returns losses and parameters.
    """
    stage = Stage(three_layers(), [1, 2], chunks=3, loss_fn=F.mse_loss, world=world)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    is_on_gpu, losses = stage.device.type == "cuda", []
    for k, (input, target) in enumerate(mini_batches()):
        tensors = [input, target]
        if place == "pinned" and is_on_gpu:
            tensors = [tensor.pin_memory() for tensor in tensors]
        if place == "device":
            tensors = [tensor.to(stage.device) for tensor in tensors]
        if is_on_gpu and k >= NUM_CHECKED:
            hold_for(torch.cuda.current_stream(stage.device), 0.2)
        optimizer.zero_grad()
        losses.append(stage.step(*tensors))
        for tensor in tensors:
            tensor.fill_(torch.nan)
        losses[-1].mul_(2)
        optimizer.step()
    parameters = {name: tensor.detach().cpu() for name, tensor in stage.named_parameters()}
    losses = [loss.cpu() for loss in losses]
    stage.close()
    return losses, parameters


@pytest.mark.on_gpus
@pytest.mark.parametrize(
    "place",
    [
        "pageable",
        pytest.param("pinned", marks=pytest.mark.gpu),
        pytest.param("device", marks=pytest.mark.gpu),
    ],
)
def test_input_target_and_loss_may_be_changed_in_place_after_the_step(
    ranks: Any, place: str
) -> None:
    plain = three_layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for input, target in mini_batches():
        optimizer.zero_grad()
        expected.append(2 * plain_step(plain, (input,), target, 3, F.mse_loss))
        optimizer.step()

    outcomes = ranks(2).run(train_and_overwrite, place).values()

    found: dict[str, Tensor] = {}
    for losses, parameters in outcomes:
        assert_same(losses, expected, "losses")
        found |= parameters
    truth = {name: tensor.detach() for name, tensor in plain.named_parameters()}
    assert_same(found, truth, "parameters")


def most_steps_ahead(world: Any) -> int:
    """Return how many steps the host was ahead of a device that does nothing at first."""
    layers = [nn.Linear(8, 8) for _ in range(world.num_ranks)]
    stage = Stage(
        nn.Sequential(*layers), [1] * world.num_ranks, chunks=2, loss_fn=torch.mean, world=world
    )
    input, stream = torch.randn(4, 8), torch.cuda.current_stream(stage.device)
    for _ in range(NUM_CHECKED):
        stage.step(input)
    hold_for(stream, 2.0)
    ends, most = [], 0
    for _ in range(6):
        stage.step(input)
        ends.append(stream.record_event())
        most = max(most, sum(not end.query() for end in ends))
    stage.close()
    return most


@pytest.mark.gpu
def test_a_host_is_few_steps_ahead_of_its_device(ranks: Any) -> None:
    """Sent tensors are kept until the device has sent them: memory would grow with each step."""
    assert max(ranks(2).run(most_steps_ahead).values()) <= 3


class Captures(nn.Module):
    """Captures a graph for longer than the thread that watches for failures needs to look."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        stream, graph = torch.cuda.Stream(x.device), ctypes.c_void_p()
        cuda = ctypes.CDLL(None)
        handle = ctypes.c_void_p(stream.cuda_stream)
        assert cuda.cudaStreamBeginCapture(handle, 0) == 0
        time.sleep(0.5)
        assert cuda.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        return y


def capture_in_a_layer(world: Any) -> list[int]:
    stage = Stage(
        nn.Sequential(Captures(), Captures()), [1, 1], chunks=2, loss_fn=torch.mean, world=world
    )
    stage.eval()
    loss = stage.step(torch.ones(2, 4))
    assert loss.item() == 4.0
    transports: list[Any] = stage._world.transports.opened
    queued: set[int] = transports[0].queued_with()
    stage.close()
    return sorted(queued - {world.rank})


@pytest.mark.gpu
@pytest.mark.skipif(not is_emulated(), reason="calls the runtime by ctypes, as only emulated")
def test_a_layer_may_capture_a_graph(ranks: Any) -> None:
    """No other thread queries the device, which would break the capture."""
    for rank, queued in enumerate(ranks(2).run(capture_in_a_layer).values()):
        assert queued == [1 - rank], "a thread that queries would have had a reason to"
