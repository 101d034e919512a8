"""What a process reads of its environment: rank, devices, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from procpipe.run.transports import Choice
from procpipe.run.world import World

CPU = torch.device("cpu")


@pytest.fixture
def environment(monkeypatch):
    """Set torchrun's variables, all others unset; and a number of GPUs."""

    def set_all(num_gpus=0, **variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
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
    assert world.open_transports(Choice("gloo", [""]), []) == {}
    world.give_up("nobody hears it")
    world.close()


def test_pipelines_are_numbered_as_they_are_made(environment):
    environment()

    numbers = [World.from_environment().number for _ in range(3)]

    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]


def test_the_launcher_says_which_rank_this_is(environment):
    environment(RANK=2, WORLD_SIZE=3, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)

    world = World.from_environment()

    assert (world.rank, world.num_ranks, world.is_launched) == (2, 3, True)
    assert world.devices == (CPU,) * 3


def test_each_process_takes_the_gpu_of_its_local_rank(environment):
    environment(num_gpus=2, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    world = World.from_environment()

    assert str(world.device) == "cuda:1"
    assert list(map(str, world.devices)) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_given_devices_come_before_gpus(environment):
    environment(num_gpus=2, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    assert World.from_environment(["cpu", "cpu", "cpu"]).devices == (CPU, CPU)
    assert str(World.from_environment(["cuda:1", "cuda:0"]).device) == "cuda:0"


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        (["cpu"], IndexError, r"2 processes but 1 devices \['cpu'\]"),
        (["cpu", "cuda:0"], ValueError, r"list one device a process, all CPUs"),
        (["meta", "meta"], ValueError, r"devices=\['meta', 'meta'\]: list one"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(environment, devices, error, words):
    environment(RANK=0, WORLD_SIZE=2)

    with pytest.raises(error, match=words):
        World.from_environment(devices)


def test_a_job_without_an_address_says_so_at_once(environment, monkeypatch):
    environment(RANK=1, WORLD_SIZE=2)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")

    with pytest.raises(ValueError, match="are set, but not MASTER_ADDR: start the ranks with"):
        World.from_environment(timeout_s=60.0).connect()


def test_more_processes_than_gpus_are_refused(environment):
    environment(num_gpus=1, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    with pytest.raises(IndexError, match="process 1 of this host, which has only 1 GPUs") as caught:
        World.from_environment()
    assert "devices=['cuda:0', 'cuda:0', …] to share GPUs" in str(caught.value)


def test_several_ranks_may_share_a_gpu(environment):
    environment(num_gpus=1, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)

    world = World.from_environment(["cuda:0", 0])

    assert list(map(str, world.devices)) == ["cuda:0", "cuda:0"]


def test_hosts_of_different_sizes(environment):
    environment(num_gpus=4, RANK=2, WORLD_SIZE=6, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4)

    assert str(World.from_environment().device) == "cuda:0"
