"""Data parallelism around or inside a stage is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from procpipe import Stage
from tests.dist.meshes import process_group
from tests.dist.stages import world_of


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 2)))


def wrapped_before(stage_of, wrap):
    model = make_model()
    model[0][0] = wrap(model[0][0])
    stage_of(model)


def wrapped_whole(stage_of, wrap):
    wrap(stage_of(make_model()))


def wrapped_after(stage_of, wrap):
    stage = stage_of(make_model())
    name, layer = next(iter(stage.named_children()))
    stage._modules[name] = nn.Sequential(wrap(layer))
    stage.step(*batch())


def wrapped_after_a_step(stage_of, wrap):
    stage = stage_of(make_model())
    stage.step(*batch())
    stage[0][0] = wrap(stage[0][0])
    stage.step(*batch())


def set_as_a_layer(stage_of, wrap):
    stage = stage_of(make_model())
    stage[0] = wrap(stage[0])


WHERE = {
    each.__name__: each
    for each in (wrapped_before, wrapped_whole, wrapped_after, wrapped_after_a_step, set_as_a_layer)
}


def wrapper(name):
    if name == "DDP":
        return nn.parallel.DistributedDataParallel
    if name == "DataParallel":
        return nn.DataParallel
    if name == "FSDP":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    if name == "replicate":
        from torch.distributed._composable import replicate

        return replicate
    from torch.distributed.fsdp import fully_shard

    return lambda module: fully_shard(
        module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    )


def try_to_wrap(bare, where, name):
    """Wrap a model, a stage or a layer; DDP with one rank, since it waits for equal layers."""

    def stage_of(model):
        return Stage(model, [1, 1], chunks=2, loss_fn=F.mse_loss, world=world_of(bare, "stage"))

    with process_group(bare):
        WHERE[where](stage_of, in_its_own_group(wrapper(name)))


def in_its_own_group(wrap):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if wrap is nn.parallel.DistributedDataParallel:
        return lambda module: wrap(module, process_group=groups[dist.get_rank()])
    return wrap


# DataParallel around the whole stage without GPUs only forwards the input, which is correct.
@pytest.mark.parametrize(
    ("where", "name"), [*((where, "DDP") for where in WHERE), ("wrapped_before", "DataParallel")]
)
def test_data_parallelism_of_torch_is_refused(ranks, where, name):
    for failure in ranks(2).run(try_to_wrap, where, name, world=False).errors():
        assert failure.type == "TypeError", failure.text
        assert "To train several replicas, give Stage" in failure.text


def test_data_parallel_on_gpus_makes_no_copies_of_a_stage():
    stage = Stage(make_model(), [2], loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="To train several replicas, give Stage"):
        stage._replicate_for_data_parallel()  # as torch.nn.parallel.replicate does
    stage.close()


@pytest.mark.parametrize(
    ("where", "name", "message"),
    [
        ("wrapped_before", "FSDP", "FullyShardedDataParallel"),
        ("wrapped_whole", "FSDP", "the Stage was given to"),
        ("wrapped_whole", "fully_shard", "the Stage was given to"),
        ("wrapped_whole", "replicate", "the Stage was given to replicate"),
        ("wrapped_before", "fully_shard", "only one process runs a layer"),
        ("wrapped_after", "fully_shard", "only one process runs a layer"),
    ],
)
def test_sharding_and_replication_are_refused(ranks, where, name, message):
    for failure in ranks(2).run(try_to_wrap, where, name, world=False).errors():
        assert failure.type == "TypeError", failure.text
        assert message in failure.text
