"""Data parallelism around or inside a stage is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from procpipe import Stage
from tests.dist.meshes import process_group
from tests.dist.stages import world_of

#: Calls with a module; DDP waits for equal layers, so it gets a group of this rank alone.
WRAPPERS: dict[str, Any] = {
    "DDP": lambda module: nn.parallel.DistributedDataParallel(module, process_group=alone()),
    "DDP of all": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "FSDP": lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
    "replicate": replicate,
    "fully_shard": lambda module: fully_shard(
        module, mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    ),
}


def alone():
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def wrap_a_layer(bare, when, name):
    """Wrap a layer of the model, or of the stage before or after a step; then do a step."""
    wrap, batch = WRAPPERS[name], (torch.ones(4, 2), torch.zeros(4, 2))
    layers = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    with process_group(bare):
        if when == "before":
            layers[0] = wrap(layers[0])
        stage = Stage(nn.Sequential(*layers), [1, 1], loss_fn=F.mse_loss, world=world_of(bare, ""))
        if when == "later":
            stage.step(*batch)
        stage[0][0] = wrap(stage[0][0])
        stage.step(*batch)


REPLICAS = "To train several replicas, give Stage"


@pytest.mark.parametrize(
    ("when", "name", "message"),
    [
        *(("before", "DDP", REPLICAS), ("after", "DDP", REPLICAS), ("later", "DDP", REPLICAS)),
        ("before", "DataParallel", REPLICAS),
        ("before", "FSDP", "FullyShardedDataParallel"),
        ("after", "fully_shard", "each of which runs other layers"),
    ],
)
def test_wrapping_a_layer_is_refused(ranks, when, name, message):
    for failure in ranks(2).run(wrap_a_layer, when, name, world=False).errors():
        assert failure.type == "TypeError", failure.text
        assert message in failure.text


def wrap_the_pipeline(bare, name):
    """Wrap over the ranks of the pipeline, whose layers have equal shapes, but other values."""
    torch.manual_seed(bare.rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage = Stage(model, [1, 1], world=world_of(bare, "stage"))
    layer = next(stage.children())
    before = copy.deepcopy(layer.state_dict())
    modules = [stage] if name == "replicate" else [stage, nn.Sequential(stage), layer]
    with process_group(bare):
        for module in modules:
            with pytest.raises(TypeError, match=r"the Stage(, or a layer of it,)? was given to"):
                WRAPPERS[name](module)
    if name != "FSDP":  # which has made views of them
        for key, value in layer.state_dict().items():
            assert torch.equal(value, before[key])
    stage.close()
    nn.DataParallel(layer)  # no stage needs it any more


@pytest.mark.parametrize("name", ["DDP of all", "DataParallel", "FSDP", "replicate"])
def test_wrappers_write_into_no_layer_of_a_stage(ranks, name):
    ranks(2).run(wrap_the_pipeline, name, world=False).values()
