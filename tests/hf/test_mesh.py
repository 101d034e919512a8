"""Models of Hugging Face in a DeviceMesh, sharded by FSDP2, against transformers in float64."""

from __future__ import annotations

import warnings
from functools import partial

from torch.distributed.fsdp import fully_shard

from procpipe import hf
from tests.dist.meshes import error_of, failing_all, mesh_of, stage_in, whole
from tests.hf.cases import loss_of, model_of
from tests.hf.compare import CHUNKS, assert_same, step_of, truth_of, tying


def train(bare, names):
    """Run a step of both pipelines on the same mini-batch; return how a tied model fails."""
    with mesh_of(bare, "dp", "pp") as mesh:
        for name, schedule in names.items():
            check(bare, mesh, name, schedule)
        return error_of(partial(check, bare, mesh, "Llama", "gpipe", tied=True))


def check(bare, mesh, name, schedule, tied=None):
    layers = hf.sequential(model_of(name, **tying(tied)))
    options = {"chunks": CHUNKS, "schedule": schedule, "loss_fn": loss_of(name)}
    balance = [3, len(layers) - 3]
    stage = stage_in(bare, mesh, name, layers, balance, **options)
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"])
    with failing_all(stage, name), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of torch, about views
        loss, gradients, buffers = step_of(stage, layers.keys, name)
        for key, gradient in gradients.items():
            gradients[key] = None if gradient is None else whole(gradient)
        assert_same((loss, gradients, buffers), truth_of(name), name)


def test_models_sharded_by_fsdp_have_the_gradients_of_transformers(ranks):
    names = {"Llama": "1f1b", "Mixtral": "gpipe", "Phi-3": "zb-h1"}
    for error in ranks(4).run(train, names, world=False).values():
        assert error.startswith("TypeError: "), error
        assert "is shared by layers" in error
