"""Data parallelism around a stage, or inside it, is refused; sharded parameters are clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from procpipe import Stage
from procpipe.run.world import World
from procpipe.skip import skippable  # noqa: F401 - so that this module's models may be built
from tests.dist.stages import world_of
from tests.dist.worker import BareWorld
