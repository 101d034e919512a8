"""From the arguments of a ``Stage`` to a connected pipeline.

    cut_model       this rank's layers, out of the full model    when the Stage is built
    connect         wires, runner, log                           in the first call

What is optional, and what few models need, is imported here, and only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.compute.layers import Layers
from procpipe.compute.segment import Segment
from procpipe.compute.skips import SkipLayout, SkipPorts, layout_of
from procpipe.compute.tied import Copy, Tied
from procpipe.compute.wrappers import is_sharded
from procpipe.job.world import World
from procpipe.model.cut import check_balance, cut, layer_facts
from procpipe.model.ties import Tie, find_ties
from procpipe.plan.placement import partitions_of
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import Schedule
from procpipe.run.coordinator import Coordinator
from procpipe.run.log import Log
from procpipe.run.replicas import Replicas
from procpipe.run.runner import Runner
from procpipe.run.wiring import Wires
from procpipe.version import __version__


@dataclass(frozen=True)
class Cut:
    """The model, cut into partitions, and this rank's layers of it."""

    balance: list[int]  # number of layers in each partition
    placement: tuple[int, ...]  # the stage of each partition
    #: This rank's layers by partition and name, on its device.
    layers: dict[int, dict[str, nn.Module]]
    elsewhere: set[str]  # the names of all other layers
    skips: SkipLayout  # which skip tensors cross partitions
    ties: list[Tie]  # the parameters and buffers that several partitions use
    #: The names of each parameter that several layers of one partition use.
    shared: list[tuple[str, ...]]
    tied: Tied  # this stage's copies of those that other stages have, too
    facts: list[str]  # a line about each layer of the full model
    keys: Any  # the model's attribute ``keys``, a map of its keys to those in files, or None


def cut_model(
    module: nn.Sequential,
    balance: Iterable[int] | str | None,
    sample: Any,
    chunks: int,
    schedule: Schedule,
    coordinator: Coordinator,
    world: World,
    *,
    defers_batch_norm: bool,
) -> Cut:
    """Cut a checked model and bring this rank's layers to its device.

    Every rank calls it, and waits for rank 0 if that finds the balance.
    """
    grid = world.grid
    num_partitions = schedule.count(grid.num_stages)
    if balance is None and (not world.is_launched or num_partitions == 1):
        balance = [len(module)] if len(module) else []
    elif balance is None or isinstance(balance, str):
        from procpipe.balance.balances import found_balance

        agree = coordinator.agree
        balance = found_balance(balance, module, sample, chunks, world, agree, num_partitions)
    entries = check_balance(balance, len(module))
    if not world.is_launched:
        entries = [len(module)]  # one stage, whatever the balance
    placement = schedule.place(len(entries), grid.num_stages)
    facts, parts = layer_facts(module), cut(module, entries)
    found = find_ties(parts)
    ties = [tie for tie in found if len(tie.partitions) > 1]
    ours = {j: parts[j] for j in partitions_of(placement, grid.stage)}
    all_layers = dict(module.named_children())
    names = [name for part in ours.values() for name in part]
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        from procpipe.model.materialize import materialize

        materialize(all_layers, names, world.device, seed=torch.initial_seed())
    for name in names:
        all_layers[name].to(world.device)
    if defers_batch_norm:
        for layers in ours.values():
            for name, layer in layers.items():
                layers[name] = DeferredBatchNorm.convert_deferred_batch_norm(layer)
    return Cut(
        balance=entries,
        placement=placement,
        layers=ours,
        elsewhere=all_layers.keys() - names,
        skips=layout_of(parts),
        ties=ties,
        shared=[tie.all_names for tie in found if tie.is_parameter and tie not in ties],
        tied=_tied_of(ties, placement, ours, grid.stage),
        facts=facts,
        keys=getattr(module, "keys", None),
    )


def _tied_of(
    ties: Iterable[Tie],
    placement: Sequence[int],
    partitions: Mapping[int, Mapping[str, nn.Module]],
    stage: int,
) -> Tied:
    """Return a stage's copies of tensors that other stages have, too; in the order of the ties."""
    layers = {name: layer for part in partitions.values() for name, layer in part.items()}
    copies = []
    for tie in ties:
        stages = tuple(sorted({placement[j] for j in tie.partitions}))
        if stage in stages and len(stages) > 1:
            places = {}
            for name in tie.all_names:
                layer, _, path = name.partition(".")
                if layer in layers:
                    module, _, key = path.rpartition(".")
                    places[name] = layers[layer].get_submodule(module), key
            copies.append(Copy(tie.all_names, stages, places))
    return Tied(stage, copies)


def connect(
    world: World,
    coordinator: Coordinator,
    schedule: Schedule,
    cut: Cut,
    layers: Mapping[str, nn.Module],
    settings: Mapping[str, Any],
    trace: Path | None,
) -> Runner:
    """Build this rank's part of the pipeline; every rank calls it, and it waits for all of them.

    ``layers`` are this rank's, as they are now, by name; ``settings`` what else the user has set,
    which is the same on all ranks; ``trace`` this rank's file of a recording.
    """
    grid = world.grid
    facts = {
        "procpipe": __version__,
        "torch": torch.__version__,
        "the number of processes": world.num_ranks,
        "replicas": grid.num_replicas,
        "balance": cut.balance,
        "schedule": schedule.name,
        "placement": list(cut.placement),
        **settings,
        "the type of devices": world.device.type,
        "trace": trace is not None,
        "layers": cut.facts,
        "shared by partitions": [str(tie) for tie in cut.ties],
    }
    segments = {
        j: Segment(
            Layers(
                {name: layers[name] for name in names},
                world.device,
                is_first=j == 0,
                is_last=j == len(cut.balance) - 1,
                skips=SkipPorts(cut.skips, j),
                board=world.board,
            )
        )
        for j, names in cut.layers.items()
    }
    routes = Routes(grid.num_stages, tuple(cut.skips), cut.placement)
    coordinator.use(routes, schedule)
    ties = [tuple({cut.placement[j] for j in t.partitions}) for t in cut.ties if t.is_parameter]
    wires = Wires(world, coordinator, routes, ties, facts)
    if trace is None:
        log = Log(world.board, world.device)
    else:
        from procpipe.timeline.recorder import Recorder

        log = Recorder(trace, grid.rank, facts, world.board, world.device)
    replicas = _connect_replicas(world, cut, wires, layers, log, coordinator.meet)
    runner = Runner(world, wires, coordinator, segments, cut.placement, cut.tied, replicas, log)
    cut.tied.make_equal(
        lambda stage, value: wires.send_value(grid.rank_of(stage), value),
        lambda stage: wires.take_value(grid.rank_of(stage)),
    )
    replicas.make_equal(layers.values())
    if world.device.type == "cuda":
        _start_autograd(world.device)
    return runner


def _start_autograd(device: torch.device) -> None:
    """Run a kernel in the thread in which autograd runs backward on this GPU.

    A stage's backward begins with the gradient that it has received. If its first operation is a
    matrix product, torch would warn that this thread has no CUDA context (torch 2.11).
    """
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), device=device, requires_grad=True)
        torch.autograd.grad(one.exp(), one)


def _connect_replicas(
    world: World,
    cut: Cut,
    wires: Wires,
    layers: Mapping[str, nn.Module],
    log: Log,
    meet: Callable[[], object],
) -> Replicas:
    """Connect this stage to that of the other replicas; waits for them."""
    grid = world.grid
    if any(map(is_sharded, layers.values())):
        if grid.num_replicas > 1:
            raise TypeError(
                f"replicas={grid.num_replicas} and sharded layers (fully_shard, "
                "parallelize_module): shard none, or give mesh= instead of replicas=, as "
                "docs/replicas.md shows"
            )
        from procpipe.sharded.layers import Sharded

        # Those of one partition may still be shared, if a module of several layers is sharded.
        now = {
            key: parameter
            for name, layer in layers.items()
            for key, parameter in layer.named_parameters(name, remove_duplicate=False)
        }
        apart = [names for names in cut.shared if len({now.get(name) for name in names}) > 1]
        return Sharded(cut.layers, layers, [*(tie.all_names for tie in cut.ties), *apart])
    if grid.num_replicas == 1:
        return Replicas()
    from procpipe.replicas.group import Group
    from procpipe.replicas.reduction import Reduction

    group = Group(world, grid, wires.choice, wires.mesh)
    return Reduction(group, world.device, log, meet)
