"""A process's rank and devices from its environment, and errors in them."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from procpipe.job.devices import pci_addresses
from procpipe.job.transports import TransportChoice
from procpipe.job.world import World, _made, _raise_file_limit
from tests.test_forks import in_child

CPU = torch.device("cpu")


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


def test_without_a_launcher_the_job_is_this_process(environment):
    environment()

    world = World.from_environment()

    assert (world.rank, world.num_ranks, world.is_launched) == (0, 1, False)
    assert (world.device, world.devices) == (CPU, (CPU,))
    assert world.connect().peers == ()
    assert world.transports.open(TransportChoice("shm", "sockets", [""]), []) == {}
    world.give_up("without peers", ValueError())
    world.close()


def test_the_launcher_sets_the_rank(environment):
    environment(RANK=2, WORLD_SIZE=3, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)

    world = World.from_environment()

    assert (world.rank, world.num_ranks, world.is_launched) == (2, 3, True)
    assert world.devices == (CPU,) * 3


def test_each_process_takes_the_gpu_of_its_local_rank(environment):
    environment(num_gpus=2, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    world = World.from_environment()

    assert str(world.device) == "cuda:1"
    assert list(map(str, world.devices)) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_given_devices_have_priority_over_gpus(environment):
    environment(num_gpus=2, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    assert World.from_environment(["cpu", "cpu", "cpu"]).devices == (CPU, CPU)
    assert str(World.from_environment(["cuda:1", "cuda:0"]).device) == "cuda:0"


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        (["cpu"], IndexError, r"2 processes but 1 device \['cpu'\]"),
        (["cpu", "cuda:0"], ValueError, r"list one device a process, all CPUs"),
        (["meta", "meta"], ValueError, r"devices=\['meta', 'meta'\]: list one"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(environment, devices, error, words):
    environment(RANK=0, WORLD_SIZE=2)

    with pytest.raises(error, match=words):
        World.from_environment(devices)


def test_more_processes_than_gpus_are_refused(environment, monkeypatch):
    environment(num_gpus=2, RANK=2, WORLD_SIZE=3, LOCAL_RANK=2, LOCAL_WORLD_SIZE=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")

    with pytest.raises(IndexError, match="rank 2 is process 2 of this host, which ha") as caught:
        World.from_environment()
    assert "only 2 GPUs (CUDA_VISIBLE_DEVICES=4,5): start fewer processes" in str(caught.value)
    assert "devices=['cuda:0', 'cuda:0', …] to share GPUs" in str(caught.value)


def test_a_process_that_sees_one_gpu_takes_it(environment):
    """As in Slurm with --gpus-per-task=1; that ranks share it is detected when they connect."""
    environment(num_gpus=1, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    world = World.from_environment()

    assert str(world.device) == "cuda:0"


def test_the_addresses_of_other_ranks_gpus_are_not_guessed(environment, monkeypatch):
    """Each process that sees one GPU names it cuda:0: the wrong GPU would determine the cores."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    gpus = [torch.device("cuda", index) for index in (0, 1)]

    environment(num_gpus=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    local = [*gpus, torch.device("cuda:2"), CPU]
    addresses = ["0000:07:00.0", "0000:08:00.0", None, None]
    assert pci_addresses([CPU, *local, CPU], rank=2) == addresses
    environment(num_gpus=1, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    assert pci_addresses([gpus[0]] * 2, rank=1) == [None, None]
    environment(num_gpus=1)
    assert pci_addresses(gpus, rank=0) == ["0000:07:00.0"]


class Properties:
    def __init__(self, index):
        self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, 7 + index, 0


@pytest.mark.parametrize(
    ("num_gpus", "visible", "words"),
    [
        (1, "7", r"gives rank 1 cuda:1, but it sees only cuda:0 \(CUDA_VISIBLE_DEVICES=7\): leave"),
        (
            2,
            None,
            r"^devices gives rank 1 cuda:2, but it sees only cuda:0 to cuda:1: leave devices",
        ),
    ],
)
def test_a_gpu_that_a_process_does_not_see_is_refused(
    environment, monkeypatch, num_gpus, visible, words
):
    environment(num_gpus=num_gpus, RANK=1, WORLD_SIZE=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    with pytest.raises(IndexError, match=words):
        World.from_environment(["cuda:0", f"cuda:{num_gpus}"])


def test_several_ranks_may_share_a_gpu(environment):
    environment(num_gpus=1, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    world = World.from_environment(["cuda:0", 0])

    assert list(map(str, world.devices)) == ["cuda:0", "cuda:0"]


def test_hosts_of_different_sizes(environment):
    environment(num_gpus=4, RANK=2, WORLD_SIZE=6, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4)

    assert str(World.from_environment().device) == "cuda:0"


@pytest.mark.dist
def test_a_process_is_pinned_before_cuda_starts(environment, monkeypatch):
    """CUDA's context has threads, and memory on their node."""

    def started():
        environment(num_gpus=1, RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
        monkeypatch.delenv("PROCPIPE_PIN", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
        calls = []
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: calls.append("cores"))
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: calls.append("CUDA"))
        _made.clear()
        World.from_environment()
        return sorted(set(calls), key=calls.index)

    assert in_child(started) == "['cores', 'CUDA']"


def test_a_second_close_does_nothing(environment):
    """Symptom: it closed files that were opened after the first, such as a newer stage's."""
    environment()
    world = World.from_environment()
    world.close()
    newer = World.from_environment()
    before = os.listdir("/proc/self/fd")

    world.close()

    assert os.listdir("/proc/self/fd") == before
    newer.close()


@pytest.mark.dist
def test_the_file_limit_is_raised_to_what_is_allowed():
    def raised():
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
        _raise_file_limit()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert in_child(raised) == "(200, 200)"
