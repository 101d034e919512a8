"""Pipelines in a DeviceMesh, with FSDP2 or tensor parallelism along another dimension.

Truth is the plain model in float64, on the mini-batches of all pipelines together. FSDP and tensor
parallelism add up in another order than autograd, so gradients may differ in their last digits.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from procpipe import RemoteStageError, Stage, state
from tests.dist.meshes import (
    Block,
    assert_same_gradients,
    error_of,
    make_model,
    mesh_of,
    sharded,
    stage_in,
    whole,
)
from tests.dist.stages import assert_same, failing_all, world_of
from tests.dist.test_replicas import TOLERANCE, counting_loss, make_batch, mean_loss, weighted_loss

#: By the number of partitions a stage.
BALANCES = {1: [2, 4], 2: [1, 1, 2, 2]}

#: Schedule, what is recomputed, loss, and whether layers are sharded again after each forward.
FSDP_CASES = [
    ("gpipe", "except_last", "counting", None),
    ("1f1b", "always", "mean", True),
    ("zb-h1", "never", "mean", None),
    ("zb-v", "except_last", "mean", None),
]


def train_sharded(bare):
    with mesh_of(bare, "dp", "pp") as mesh:
        for schedule, mode, loss, reshards in FSDP_CASES:
            plain, name = make_model(), f"{schedule} {mode} {loss} {reshards}"
            balance = BALANCES[2 if schedule == "zb-v" else 1]
            options = {"chunks": 3, "checkpoint": mode, "schedule": schedule}
            options["loss_fn"] = mean_loss if loss == "mean" else counting_loss
            fsdp = {"reshard_after_forward": reshards}
            with sharded(bare, mesh, name, plain, balance, fsdp, **options) as stage:
                train(stage, plain, mean_loss if loss == "mean" else weighted_loss, mesh["dp"])
                assert all(isinstance(parameter, DTensor) for parameter in stage.parameters())


def train(stage, plain, plain_loss, dp=None):
    """Train over mini-batches of each pipeline; the gradients of the second and third add up."""
    size, here = (dp.size(), dp.get_local_rank()) if dp is not None else (1, 0)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (stage, plain)]
    for step, num_samples in enumerate((4, 1, 5)):
        parts = [make_batch(num_samples, 2 * step + k) for k in range(size)]
        losses = [plain_loss(plain(input), target) for input, target in parts]
        torch.stack(losses).mean().backward()
        assert_same(stage.step(*parts[here]), losses[here].detach(), f"loss {step}", TOLERANCE)
        assert_same_gradients(stage, plain, f"step {step}")
        if step == 1:
            continue
        norm = stage.clip_grad_norm_(0.3)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        assert_same(norm, expected, f"norm {step}", TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        stage.eval()
        expected = plain_loss(plain(parts[here][0]), parts[here][1])
        assert_same(stage.step(*parts[here]), expected, "evaluation", TOLERANCE)


def check_own_losses(bare, mesh):
    """Accumulate in ``no_sync()``, by losses of the user's own, with blocks sharded inside."""
    plain = make_model()
    plain[1].up.weight.requires_grad_(False)
    stage = stage_in(bare, mesh, "own loss", plain, [2, 4], chunks=2, schedule="1f1b")
    for layer in stage:
        if isinstance(layer, Block):
            fully_shard(layer.up, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh["dp"])
    dp = mesh["dp"].get_local_rank()
    with failing_all(stage, "own loss"):
        for k in range(3):
            parts = [make_batch(4, 10 * k + d) for d in range(2)]
            losses = [mean_loss(plain(input), target) for input, target in parts]
            torch.stack(losses).mean().backward()
            with stage.no_sync() if k < 2 else nullcontext():
                mean_loss(stage(parts[dp][0]), parts[dp][1]).backward()
            if k < 2:
                stage.zero_grad()  # drops nothing: FSDP holds these gradients apart
        assert_same_gradients(stage, plain, "own loss")
        with stage.no_sync():
            mean_loss(stage(parts[dp][0]), parts[dp][1]).backward()
        words = r"clip_grad_norm_ after calls in no_sync\(\)"
        with pytest.raises((RuntimeError, RemoteStageError), match=words):
            stage.clip_grad_norm_(1.0)


def check_nothing_counts(bare, mesh):
    """Train where the mini-batch of one pipeline counts nothing, so that it runs no backward."""
    plain, dp = make_model(), mesh["dp"].get_local_rank()
    options = {"chunks": 2, "schedule": "zb-h1", "loss_fn": weighted_loss}
    options["loss_weight"] = lambda target: float((target > 0).sum())
    with (
        sharded(bare, mesh, "nothing counts", plain, [1, 5], **options) as stage,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # that one pipeline's mini-batch counts 0
        input, target = make_batch(4, 1)
        (weighted_loss(plain(input), target) / 2).backward()
        stage.step(input, target if dp == 0 else torch.zeros_like(target))
        assert_same_gradients(stage, plain, "nothing counts")


def check_ignored(bare, mesh):
    """The gradients of a parameter that FSDP ignores are those of the pipeline."""
    plain = make_model()
    options = {"chunks": 3, "schedule": "1f1b", "loss_fn": counting_loss}
    stage = stage_in(bare, mesh, "ignored", plain, [2, 4], **options)
    for layer in stage:
        ignored = {layer.down.bias} if isinstance(layer, Block) else None
        fully_shard(layer, mesh=mesh["dp"], ignored_params=ignored)
    with failing_all(stage, "ignored"):
        input, target = make_batch(5, 3 + mesh["dp"].get_local_rank())
        weighted_loss(plain(input), target).backward()
        stage.step(input, target)
        expected = dict(plain.named_parameters())
        for name, parameter in stage.named_parameters():
            if not isinstance(parameter, DTensor):
                assert_same(parameter.grad, expected[name].grad, f"ignored {name}", TOLERANCE)


def check_mixed_precision(bare, mesh, schedule):
    """Compute in bfloat16, and add up in float32."""
    plain, name = make_model().float(), f"mixed precision {schedule}"
    options = {"chunks": 4, "schedule": schedule, "loss_fn": mean_loss, "checkpoint": "never"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = [make_batch(4, k) for k in range(2)]
    with sharded(bare, mesh, name, plain, [3, 3], {"mp_policy": policy}, **options) as stage:
        for input, target in parts:
            for i in range(4):
                low = {name: p.bfloat16() for name, p in plain.named_parameters()}
                output = torch.func.functional_call(plain, low, (input[i : i + 1],))
                (mean_loss(output, target[i : i + 1]) / 8).backward()
        loss = stage.step(*parts[mesh["dp"].get_local_rank()])
        assert loss.dtype == torch.bfloat16
        # Each micro-batch's gradients are rounded alike, but for the factor of 2.
        assert_same_gradients(stage, plain, name, tolerance=1e-6)
        assert {p.dtype for p in stage.parameters()} == {torch.float32}


def train_in_other_ways(bare):
    with mesh_of(bare, "dp", "pp") as mesh:
        check_own_losses(bare, mesh)
        check_nothing_counts(bare, mesh)
        check_ignored(bare, mesh)
        for schedule in ("gpipe", "zb-h1"):
            check_mixed_precision(bare, mesh, schedule)


def train_parallel(bare):
    with mesh_of(bare, "tp", "pp") as mesh:
        plain = make_model()
        options = {"chunks": 3, "schedule": "zb-v", "loss_fn": mean_loss}
        stage = stage_in(bare, mesh, "tensor parallel", plain, BALANCES[2], **options)
        for layer in stage:
            if isinstance(layer, Block):
                styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, mesh["tp"], styles)
        with failing_all(stage, "tensor parallel"):
            train(stage, plain, mean_loss)


@pytest.mark.parametrize("train", [train_sharded, train_in_other_ways, train_parallel])
def test_gradients_are_those_of_the_plain_model(ranks, train):
    ranks(4).run(train, world=False).values()


def make_optimizer(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


def trained_plain():
    """Train the plain model for two steps on the mini-batches of two pipelines."""
    plain = make_model()
    optimizer = make_optimizer(plain)
    for step in range(2):
        train_plain(plain, optimizer, step)
    return plain, optimizer


def train_plain(plain, optimizer, step):
    parts = [make_batch(4, 10 * step + k) for k in range(2)]
    torch.stack([mean_loss(plain(input), target) for input, target in parts]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(bare, folder):
    """Save from FSDP and from plain PyTorch; load each in FSDP, go on, and compare."""
    with mesh_of(bare, "dp", "pp") as mesh:
        options = {"loss_fn": mean_loss, "chunks": 2}
        with sharded(bare, mesh, "saves", make_model(), [3, 3], **options) as stage:
            optimizer = make_optimizer(stage)
            for step in range(2):
                train_sharded_once(stage, optimizer, step, mesh)
            state.save(f"{folder}/sharded", stage, optimizer, step=2)
            state.save(f"{folder}/later", stage, optimizer, step=2, asynchronous=True).wait()
            state.export(f"{folder}/exported", stage)
            state.load_weights(f"{folder}/exported", stage)
        for kind in ("sharded", "plain"):
            with sharded(bare, mesh, kind, make_model(), [1, 5], **options) as stage:
                optimizer = make_optimizer(stage)
                saved = state.load(f"{folder}/{kind}", stage, optimizer)
                assert saved is not None
                assert saved.step == 2
                train_sharded_once(stage, optimizer, 2, mesh)
                plain, of_plain = trained_plain()
                train_plain(plain, of_plain, 2)
                expected = dict(plain.named_parameters())
                for key, parameter in stage.named_parameters():
                    ours, theirs = whole(parameter).detach(), expected[key].detach()
                    assert_same(ours, theirs, f"{kind}: {key}", TOLERANCE)


def train_sharded_once(stage, optimizer, step, mesh):
    stage.step(*make_batch(4, 10 * step + mesh["dp"].get_local_rank()))
    optimizer.step()
    optimizer.zero_grad()


def test_saved_state_does_not_depend_on_sharding(ranks, tmp_path):
    plain, optimizer = trained_plain()
    state.save(tmp_path / "plain", plain, optimizer, step=2)

    ranks(4).run(save_and_load, str(tmp_path), world=False).values()

    files = (tmp_path / "sharded/000001-step-2").glob("stage-*-of-4.pt")
    found = [torch.load(file, weights_only=True)["model"] for file in files]
    for name, parameter in plain.named_parameters():
        shards = [values[name] for values in found if name in values]
        assert len(shards) == 2, "each process saves its own"
        assert sum(shard["procpipe.shard"].numel() for shard in shards) == parameter.numel()
        assert {tuple(shard["shape"]) for shard in shards} == {tuple(parameter.shape)}
    for name in ("sharded", "later"):
        loaded = make_model()
        of_loaded = make_optimizer(loaded)
        state.load(tmp_path / name, loaded, of_loaded)
        train_plain(loaded, of_loaded, 2)
        again, of_again = trained_plain()
        train_plain(again, of_again, 2)
        for one, other in zip(loaded.parameters(), again.parameters(), strict=True):
            assert_same(one, other, name, TOLERANCE)


def save_badly(bare, folder):
    """Save where one rank of one of two pipelines gives other names, or has no room."""
    found = []
    with mesh_of(bare, "dp", "pp") as mesh:
        for what in ("names", "disk"):
            stage = stage_in(bare, mesh, what, make_model(), [3, 3], loss_fn=mean_loss)
            for layer in stage:
                fully_shard(layer, mesh=mesh["dp"])
            is_here = bare.rank == 3
            extra = {"epochs" if is_here and what == "names" else "epoch": 1}
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if is_here and what == "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
            try:
                call = partial(state.save, f"{folder}/{what}", stage, extra=extra)
                found.append(error_of(call))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


def test_all_ranks_of_all_pipelines_raise_what_fails_on_one(ranks, tmp_path):
    found = ranks(4).run(save_badly, str(tmp_path), world=False, timeout_s=60).values()
    names, disk = zip(*found, strict=True)

    assert all("on rank 3 than on rank 0: with asynchronous=False, 0 opt" in each for each in names)
    assert all("File too large" in each for each in disk), disk
    assert [each.startswith("RemoteStageError") for each in disk] == [True] * 3 + [False]


class Counting(TorchDispatchMode):
    """Counts the collectives of torch.distributed."""

    def __init__(self):
        super().__init__()
        self.num_calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.num_calls[str(func)] += 1
        return func(*args, **kwargs or {})


def count_collectives(bare):
    """Count what FSDP sends in a step, by how a layer is sharded."""
    found = {}
    options = {"chunks": 3, "loss_fn": mean_loss, "checkpoint": "never", "schedule": "1f1b"}
    with mesh_of(bare, "dp", "pp") as mesh:
        for reshards in (None, True):
            name, fsdp = f"counts {reshards}", {"reshard_after_forward": reshards}
            with sharded(bare, mesh, name, make_model(), [2, 4], fsdp, **options) as stage:
                for k in range(2):
                    with Counting() as counting:
                        stage.step(*make_batch(6, k))
            found[reshards] = dict(counting.num_calls)
    return found


def test_layers_are_gathered_and_reduced_once_a_step(ranks):
    for rank, found in enumerate(ranks(4).run(count_collectives, world=False).values()):
        num_layers = 2 if rank % 2 == 0 else 3  # with parameters
        gathers, reductions = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"
        assert found[None] == {gathers: num_layers, reductions: num_layers}
        assert found[True][reductions] == num_layers
        assert found[True][gathers] >= 2 * 3 * num_layers  # F and B of each micro-batch


def ask_for_what_cannot_be(bare):
    found = {}
    with mesh_of(bare, "dp", "pp") as mesh:
        os.environ["RANK"] = str(bare.rank)  # as a launcher sets it
        wrong = {
            "two dimensions": {"mesh": mesh},
            "replicas": {"mesh": mesh["pp"], "replicas": 2},
            "another rank": {"mesh": DeviceMesh("cpu", [(bare.rank + 1) % 4])},
        }
        for name, options in wrong.items():
            found[name] = error_of(lambda options=options: Stage(make_model(), **options))
        del os.environ["RANK"]
        found["environment"] = error_of(lambda: Stage(make_model(), mesh=mesh["pp"]))
        found["beside replicas"] = error_of(lambda: beside(bare))
        found["balance"] = error_of(
            lambda: stage_in(bare, mesh, "balance", make_model(), [1, 2, 3], loss_fn=mean_loss)
        )
        found["along the pipeline"] = error_of(lambda: shard(bare, mesh, "pp", "gpipe"))
        found["whole stage"] = error_of(lambda: shard(bare, mesh, "dp", "1f1b", is_whole=True))
        found["late"] = error_of(lambda: shard(bare, mesh, "dp", "gpipe", is_late=True))
        found["tied"] = error_of(lambda: shard(bare, mesh, "dp", "zb-h1", is_tied=True))
        found["tied in a stage"] = error_of(lambda: shard(bare, mesh, "dp", "1f1b", is_tied=True))
        stage = stage_in(bare, mesh, "scaler", make_model(), [2, 4])
        found["scaler"] = error_of(lambda: stage.scaler(GradScaler("cpu", 2.0**bare.rank)))
    return found


def shard(bare, mesh, dimension, schedule, *, is_whole=False, is_tied=False, is_late=False):
    model = make_model()
    if is_tied:
        model[5].weight = model[0].weight
    if is_tied and schedule == "1f1b":  # within each stage
        model[1].up.bias, model[5].weight = model[0].weight, model[3].up.weight
    name = f"{dimension} {schedule} {is_late}"
    stage = stage_in(bare, mesh, name, model, [2, 4], schedule=schedule)
    if is_late:
        stage(torch.zeros(2, 3, dtype=torch.long))
    for layer in [stage] if is_whole else stage:
        fully_shard(layer, mesh=mesh[dimension])
    with failing_all(stage, schedule):
        stage(torch.zeros(2, 3, dtype=torch.long))


def beside(bare):
    """Shard the layers of replicas, over each rank's own process."""
    world = world_of(bare, "beside")
    stage = Stage(make_model(), [2, 4], loss_fn=mean_loss, replicas=2, world=world)
    mesh = DeviceMesh("cpu", [bare.rank])
    for layer in stage:
        fully_shard(layer, mesh=mesh)
    with failing_all(stage, "beside replicas"):
        stage.step(*make_batch(4, 1))


def test_what_cannot_be_is_a_clear_error(ranks):
    for rank, found in enumerate(ranks(4).run(ask_for_what_cannot_be, world=False).values()):
        a, b = pipeline = [0, 1] if rank < 2 else [2, 3]
        for name, words in {
            "two dimensions": "ValueError: mesh has 2 dimensions, ('dp', 'pp')",
            "replicas": "ValueError: replicas=2 and mesh are given",
            "another rank": f"ValueError: rank {rank} is not in the mesh of ranks",
            "beside replicas": "TypeError: replicas=2 and sharded layers (fully_shard, p",
            "environment": f"ValueError: torch.distributed says that this is rank {rank}",
            "balance": "BalanceError: the balance makes 3 partitions, but schedule='gpipe' runs 2",
            "along the pipeline": f"is a DTensor, sharded over ranks {pipeline} of this pipeline",
            "whole stage": "TypeError: the Stage was given to fully_shard or replicate",
            "late": "RuntimeError: fully_shard was called after the stage's first call",
            "tied": "TypeError: 0.weight is shared by layers 0.weight, 5.weight",
            "tied in a stage": (
                "TypeError: 0.weight is shared by layers 0.weight, 1.up.bias, and one is sharded",
                "TypeError: 3.up.weight is shared by layers 3.up.weight, 5.weight, and one is",
            )[rank % 2],
            "scaler": f"the scaler's scale is {2.0**a} on rank {a} and {2.0**b} on rank {b}: give",
        }.items():
            assert words in found[name], (rank, name, found[name])
        assert not any("give replicas=" in words for words in found.values()), found


def fail_on_one_rank(bare):
    """Raise in layers of rank 3, which shares them with no other rank."""
    with mesh_of(bare, "dp", "pp") as mesh:
        stage = stage_in(bare, mesh, "failure", make_model(), [2, 4], loss_fn=mean_loss)
        if bare.rank == 3:
            stage[0].register_forward_hook(raise_boom)
        return error_of(lambda: stage.step(*make_batch(4, 1)))


def raise_boom(module, input, output):
    raise dist.DistNetworkError("boom")


def test_messages_name_the_ranks_of_the_job_and_other_pipelines_go_on(ranks):
    first, second, third, fourth = ranks(4).run(fail_on_one_rank, world=False).values()

    assert (first, second) == ("", "")
    assert third.startswith("RemoteStageError: rank 3 failed:\nstage 1 (rank 3), in step()")
    assert fourth == "DistNetworkError: boom"


def fail_in_torch_distributed(bare):
    """Raise what a collective raises, within sharded layers; return the notes on it."""
    with mesh_of(bare, "dp", "pp") as mesh:
        stage = stage_in(bare, mesh, "collective", make_model(), [2, 4], loss_fn=mean_loss)
        for layer in stage:
            fully_shard(layer, mesh=mesh["dp"])
            layer.register_forward_hook(raise_boom)
        try:
            stage.step(*make_batch(4, 1))
        except dist.DistNetworkError as error:
            return error.__notes__
        except RemoteStageError:
            return []


def test_an_error_of_fsdp_names_the_ranks_that_share_layers(ranks):
    first, second, third, fourth = ranks(4).run(fail_in_torch_distributed, world=False).values()

    note = "procpipe: the layers are sharded over ranks [0, 2]: another of these ranks has ended"
    for notes in (first, third):
        assert sum(each.startswith(note) for each in notes) == 1, notes
    assert second == fourth == []
