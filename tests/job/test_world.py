"""A process's rank and devices from its environment, and errors in them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from procpipe.job.world import World, _made
from tests.cases import for_each
from tests.forked import in_child


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets torchrun's variables, unsets the rest, and sets the GPUs."""

    def set_all(num_gpus=0, **variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, **variables}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return set_all


@for_each(
    ("num_gpus", "rank", "num_ranks", "local", "given", "device", "devices"),
    [
        (0, 2, 3, "0/1", None, "cpu", "cpu cpu cpu"),
        (2, 3, 4, "1/2", None, "cuda:1", "cuda:0 cuda:1 cuda:0 cuda:1"),
        (4, 2, 6, "0/4", None, "cuda:0", None),  # hosts of different sizes
        # As in Slurm with --gpus-per-task=1; that ranks share it shows when they connect.
        (1, 3, 4, "1/2", None, "cuda:0", None),
        # Given devices have priority over GPUs; several ranks may share one.
        (2, 1, 2, "1/2", ["cpu", "cpu", "cpu"], "cpu", "cpu cpu"),
        (2, 1, 2, "1/2", ["cuda:1", "cuda:0"], "cuda:0", "cuda:1 cuda:0"),
        (1, 1, 2, "1/2", ["cuda:0", 0], "cuda:0", "cuda:0 cuda:0"),
    ],
)
def test_the_devices_of_ranks(
    environment, num_gpus, rank, num_ranks, local, given, device, devices
):
    local_rank, num_local = local.split("/")
    environment(
        num_gpus, RANK=rank, WORLD_SIZE=num_ranks, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=num_local
    )

    world = World.from_environment(given)

    assert (world.rank, world.num_ranks, world.is_launched) == (rank, num_ranks, True)
    assert str(world.device) == device
    assert devices in (None, " ".join(map(str, world.devices)))


@for_each(
    ("num_gpus", "visible", "rank", "devices", "error", "words"),
    [
        (0, None, 0, ["cpu"], IndexError, r"3 processes but 1 device \['cpu'\]"),
        (2, None, 0, ["cpu", "cpu", 0], ValueError, r"list one device a process, all CPUs"),
        (2, None, 0, ["cuda"] * 3, ValueError, r"list one device a process, all CPUs"),
        (0, None, 0, "cuda", ValueError, r"devices='cuda': list one device .* or leave devices"),
        (0, None, 0, ["meta"] * 3, ValueError, r"devices=\['meta', 'meta', 'meta'\]: list one"),
        (
            *(2, "4,5", 2, None, IndexError),
            r"rank 2 would use cuda:2, but sees 2 GPUs \(CUDA_VISIBLE_DEVICES=4,5\): start fewer "
            r"processes.*devices=\['cuda:0', 'cuda:0', …\] to share GPUs",
        ),
        (
            *(1, "7", 1, [0, 1, 2], IndexError),
            r"rank 1 would use cuda:1, but sees 1 GPU \(CUDA_VISIBLE_DEVICES=7\): start",
        ),
        (
            *(2, None, 2, [0, 1, 2], IndexError),
            r"^rank 2 would use cuda:2, but sees 2 GPUs \(CUDA_VISIBLE_DEVICES=None\): start",
        ),
    ],
)
def test_devices_that_cannot_be_used_are_refused(
    environment, monkeypatch, num_gpus, visible, rank, devices, error, words
):
    environment(num_gpus, RANK=rank, WORLD_SIZE=3, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    with pytest.raises(error, match=words):
        World.from_environment(devices)


@pytest.mark.dist
@for_each(("chosen", "queues"), [({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1")])
def test_what_is_set_before_cuda_starts(environment, monkeypatch, chosen, queues):
    """The hardware queues; and the cores: CUDA's context has threads, and memory on their node."""

    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=7, pci_device_id=0)

    def started():
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        environment(2, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, **chosen)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
        monkeypatch.delenv("PROCPIPE_PIN", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        calls = []
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: calls.append("cores"))
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: calls.append("CUDA"))

        def count():
            calls.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""))
            return 2

        monkeypatch.setattr(torch.cuda, "device_count", count)
        _made.clear()
        World.from_environment()
        return sorted(set(calls), key=calls.index)

    assert in_child(started) == f"['{queues}', 'cores', 'CUDA']"
