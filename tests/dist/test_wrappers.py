"""Data parallelism around or inside a stage is refused."""

from __future__ import annotations

import copy

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


WHERE = {
    each.__name__: each
    for each in (wrapped_before, wrapped_whole, wrapped_after, wrapped_after_a_step)
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


def wrap_the_pipeline(bare, name):
    """Wrap over the ranks of the pipeline, whose layers have equal shapes; return the error."""
    torch.manual_seed(bare.rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage = Stage(model, [1, 1], world=world_of(bare, "stage"))
    layer = next(stage.children())
    before = copy.deepcopy(layer.state_dict())
    with process_group(bare):
        for module in (stage, nn.Sequential(stage), layer):
            with pytest.raises(TypeError, match="the Stage, or a layer of it, was given to"):
                wrapper(name)(module)
    if name != "FSDP":  # which has made views of them
        for key, value in layer.state_dict().items():
            assert torch.equal(value, before[key])
    stage.close()
    nn.DataParallel(layer)  # no stage needs it any more


@pytest.mark.parametrize("name", ["DDP", "DataParallel", "FSDP"])
def test_wrappers_write_into_no_layer_of_a_stage(ranks, name):
    ranks(2).run(wrap_the_pipeline, name, world=False).values()


REPLICAS = "To train several replicas, give Stage"


@pytest.mark.parametrize(
    ("where", "name", "message"),
    [
        *((where, "DDP", REPLICAS) for where in WHERE),
        ("wrapped_before", "DataParallel", REPLICAS),
        ("wrapped_before", "FSDP", "FullyShardedDataParallel"),
        ("wrapped_whole", "FSDP", "was given to FullyShardedDataParallel"),
        ("wrapped_whole", "replicate", "the Stage was given to fully_shard or"),
        ("wrapped_after", "fully_shard", "each of which runs other layers"),
    ],
)
def test_wrapping_is_refused(ranks, where, name, message):
    for failure in ranks(2).run(try_to_wrap, where, name, world=False).errors():
        assert failure.type == "TypeError", failure.text
        assert message in failure.text
