"""From the arguments of a ``Stage`` to a connected pipeline.

    Settings.checked   what the user asks for               does not communicate
    Cut.of             this rank's layers, out of the full model
    connect            wires, runner, log                   every rank, in the first call

Balance profiles and recordings are optional: what they need is imported here,
and only where the user asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from procpipe.batchnorm import DeferredBatchNorm
from procpipe.compute.layers import Layers
from procpipe.compute.segment import Segment
from procpipe.compute.skips import SkipPorts
from procpipe.compute.tied import Copy, Tied
from procpipe.compute.wrappers import check_not_sharded, is_sharded
from procpipe.errors import BalanceError
from procpipe.job.grid import Grid
from procpipe.job.world import World
from procpipe.model.arguments import checked_replicas
from procpipe.model.cut import (
    check_enough_layers,
    check_model,
    cut,
    fit_balance,
    layer_facts,
    replicas_for,
)
from procpipe.model.materialize import materialize
from procpipe.model.ties import Tie, find_shared, find_ties
from procpipe.notes import write_note
from procpipe.optional import needed
from procpipe.plan.placement import partitions_of
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import Schedule, schedule_of
from procpipe.plan.task import Plan
from procpipe.run.coordinator import Coordinator
from procpipe.run.log import Log
from procpipe.run.order import Order
from procpipe.run.programs import Programs
from procpipe.run.replicas import Replicas
from procpipe.run.runner import Runner
from procpipe.run.statistics import StageStatistics
from procpipe.run.wiring import Wires
from procpipe.run.wiring import connect as connect_wires
from procpipe.skip.layout import SkipLayout
from procpipe.skip.skippable import verify_skippables
from procpipe.version import __version__


@dataclass(frozen=True)
class Settings:
    """What the user asks for besides model and balance, checked."""

    grid: Grid  # this rank's place among stages and replicas
    schedule: Schedule  # makes the plan of each step
    defers_batch_norm: bool  # whether batch normalisation is replaced
    trace: str | os.PathLike[str] | None  # where rank 0 writes a timeline; rank 0's counts

    @classmethod
    def checked(
        cls,
        world: World,
        *,
        replicas: int,
        balance: Iterable[int] | str | None,
        schedule: str | Callable[[int, int], Plan],
        defers_batch_norm: bool,
        trace: str | os.PathLike[str] | None,
    ) -> Settings:
        """Check the arguments of a ``Stage``, and that the optional parts they need are there."""
        chosen = schedule_of(schedule)
        num_stages = None
        if isinstance(balance, (list, tuple)) and chosen.partitions_per_stage is not None:
            num_stages = len(balance) // chosen.partitions_per_stage
        checked_replicas(replicas, world.num_ranks, num_stages, is_launched=world.is_launched)
        grid = world.divide(replicas) if world.is_launched else world.grid
        return cls(grid, chosen, bool(defers_batch_norm), trace)


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
    #: The names of each parameter that several layers of one of these partitions use.
    shared: list[tuple[str, ...]]
    facts: list[str]  # a line about each layer of the full model
    keys: Any = None  # the model's attribute ``keys``, a map of its keys to those in files, or None

    @classmethod
    def of(
        cls,
        module: nn.Sequential,
        balance: Iterable[int],
        settings: Settings,
        world: World,
    ) -> Cut:
        """Cut a checked model and bring this rank's layers to its device."""
        schedule, grid = settings.schedule, settings.grid
        entries = fit_balance(
            balance,
            len(module),
            grid.num_stages,
            is_launched=world.is_launched,
            num_replicas=grid.num_replicas,
            partitions_per_stage=schedule.partitions_per_stage,
            of_mesh=grid.numbers if grid.is_part else None,
        )
        placement = _placement(settings, len(entries))
        facts = layer_facts(module)
        parts = cut(module, entries)
        skips = SkipLayout.of(parts)
        ties = find_ties(parts)
        ours = {j: parts[j] for j in partitions_of(placement, grid.stage)}
        shared = [names for part in ours.values() for names in find_shared(part)]
        all_layers = dict(module.named_children())
        names = [name for part in ours.values() for name in part]
        materialize(all_layers, names, world.device, seed=torch.initial_seed())
        if settings.defers_batch_norm:
            for layers in ours.values():
                for name, layer in layers.items():
                    layers[name] = DeferredBatchNorm.convert_deferred_batch_norm(layer)
        elsewhere = all_layers.keys() - names
        keys = getattr(module, "keys", None)
        return cls(entries, placement, ours, elsewhere, skips, ties, shared, facts, keys)


def _placement(settings: Settings, num_partitions: int) -> tuple[int, ...]:
    """Return the stage of each partition; an error says which number of replicas would fit."""
    schedule, grid = settings.schedule, settings.grid
    try:
        return schedule.place(num_partitions, grid.num_stages)
    except BalanceError as error:
        fits = replicas_for(grid.num_ranks, num_partitions, schedule.partitions_per_stage)
        if fits is None or grid.is_part:
            raise
        raise BalanceError(f"{error}: give replicas={fits}, or another balance") from None


def check(module: nn.Sequential, world: World) -> None:
    """Check that a model can be cut, and its skip tensors match."""
    check_model(module)
    check_sharding(module, world)
    verify_skippables(module)


def check_sharding(module: nn.Module, world: World) -> None:
    """Check that no parameter is sharded over ranks that run other layers."""
    grid = world.grid
    if world.num_ranks > 1 or grid.is_part:
        check_not_sharded(module, grid.numbers if grid.is_part else None)


def found_balance(
    name: str | None,
    module: nn.Sequential,
    sample: Any,
    chunks: int,
    world: World,
    coordinator: Coordinator,
    settings: Settings,
) -> list[int]:
    """Find a balance.

    By name on rank 0: every rank calls it, and waits. Without a name each rank finds the same from
    the model's shapes, and rank 0 prints it; one partition has all layers.
    """
    schedule, grid = settings.schedule, settings.grid
    num_partitions = schedule.count(grid.num_stages)
    if name is None and (not world.is_launched or num_partitions == 1):
        return [len(module)] if len(module) else []
    with needed(
        "procpipe.balance", "Stage(…) without a balance" if name is None else f"balance={name!r}"
    ):
        from procpipe.balance.agreed import agreed_balance
        from procpipe.balance.estimated import estimated_balance
    if world.is_launched:
        numbers = grid.numbers if grid.is_part else None
        check_enough_layers(len(module), grid.num_ranks, grid.num_replicas, schedule.count, numbers)
    if name is not None:
        return agreed_balance(
            name, module, sample, chunks, world, coordinator.agree, num_partitions
        )
    balance, basis = estimated_balance(num_partitions, module, sample)
    if world.rank == 0:
        write_note(f"procpipe: {basis}")
    return balance


def claim_trace(trace: str | os.PathLike[str] | None, world: World) -> None:
    """Check before a long run that a timeline can be written; reserve its file for one stage."""
    if trace is not None:
        with needed("procpipe.timeline", "trace=…"):
            from procpipe.timeline.collect import claimed
        if world.rank == 0:
            claimed(trace)


def connect(
    world: World,
    coordinator: Coordinator,
    settings: Settings,
    cut: Cut,
    layers: Mapping[str, nn.Module],
    tied: Tied,
    *,
    checks_tied: bool,
    chunks: int,
    checkpoint: str,
) -> Runner:
    """Build this rank's part of the pipeline; every rank calls it, and it waits for all of them.

    ``layers`` are this rank's, as they are now, by name; ``chunks`` and ``checkpoint`` what the
    user has set now.
    """
    grid = settings.grid
    facts = {
        "procpipe": __version__,
        "torch": torch.__version__,
        "the number of processes": world.num_ranks,
        "replicas": grid.num_replicas,
        "balance": cut.balance,
        "chunks": chunks,
        "checkpoint": checkpoint,
        "check_tied": checks_tied,
        "schedule": settings.schedule.name,
        "placement": list(cut.placement),
        "deferred_batch_norm": settings.defers_batch_norm,
        "the type of devices": world.device.type,
        "trace": settings.trace is not None,
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
            )
        )
        for j, names in cut.layers.items()
    }
    routes = Routes(grid.num_stages, tuple(cut.skips.keys), cut.placement)
    coordinator.programs = Programs(routes, settings.schedule, grid.stage)
    ties = [tuple({cut.placement[j] for j in t.partitions}) for t in cut.ties if t.is_parameter]
    wires = connect_wires(world, coordinator, routes, ties, facts)
    log = log_of(world, settings, segments, wires, facts, coordinator.programs.plan)
    replicas = connect_replicas(world, settings, cut, wires, layers, log, coordinator.meet)
    runner = Runner(world, wires, coordinator, segments, cut.placement, tied, replicas, log)
    tied.make_equal(
        lambda stage, value: wires.send_value(grid.rank_of(stage), value),
        lambda stage: wires.take_value(grid.rank_of(stage)),
    )
    replicas.make_equal(layers.values())
    return runner


def log_of(
    world: World,
    settings: Settings,
    segments: Mapping[int, Segment],
    wires: Wires,
    facts: Mapping[str, Any],
    plan_of: Callable[[Order], Plan],
) -> Log:
    """Return what notes what this stage does, and with ``trace=…`` records it for rank 0."""
    if settings.trace is None:
        return Log(world.board, world.device, segments)
    with needed("procpipe.timeline", "trace=…"):
        from procpipe.timeline.clocks import Clocks
        from procpipe.timeline.collect import Tracing
        from procpipe.timeline.recorder import Recorder
    tracing = Tracing(settings.trace, wires.mesh, Clocks(wires.mesh), facts, plan_of)
    return Recorder(tracing, world.board, world.device, segments)


def connect_replicas(
    world: World,
    settings: Settings,
    cut: Cut,
    wires: Wires,
    layers: Mapping[str, nn.Module],
    log: Log,
    meet: Callable[[], object],
) -> Replicas:
    """Connect this stage to that of the other replicas; waits for them."""
    grid = settings.grid
    if any(map(is_sharded, layers.values())):
        if grid.num_replicas > 1:
            raise TypeError(
                f"replicas={grid.num_replicas} and sharded layers (fully_shard, "
                "parallelize_module): shard none, or give mesh= instead of replicas=, as "
                "docs/replicas.md shows"
            )
        with needed("procpipe.sharded", "sharding layers (fully_shard, parallelize_module)"):
            from procpipe.sharded.layers import Sharded
        # Those of one partition may still be shared, if a module of several layers is sharded.
        now = {
            key: parameter
            for name, layer in layers.items()
            for key, parameter in layer.named_parameters(name, remove_duplicate=False)
        }
        apart = [names for names in cut.shared if len({now.get(name) for name in names}) > 1]
        shared = [*(tie.all_names for tie in cut.ties), *apart]
        return Sharded(cut.layers, layers, shared)
    if grid.num_replicas == 1:
        return Replicas()
    with needed("procpipe.replicas", "replicas"):
        from procpipe.replicas.group import Group
        from procpipe.replicas.reduction import Reduction
    group = Group(world, grid, wires.choice, wires.mesh)
    return Reduction(group, world.device, log, meet)


def tied_of(cut: Cut, stage: int) -> Tied:
    """Return a stage's copies of tensors that other stages have, too; in the order of the ties."""
    layers = {name: layer for part in cut.layers.values() for name, layer in part.items()}
    copies: dict[bool, list[Copy]] = {True: [], False: []}
    for tie in cut.ties:
        stages = tuple(sorted({cut.placement[j] for j in tie.partitions}))
        if stage in stages and len(stages) > 1:
            places = {}
            for name in tie.all_names:
                layer, _, path = name.partition(".")
                if layer in layers:
                    module, _, key = path.rpartition(".")
                    places[name] = layers[layer].get_submodule(module), key
            copies[tie.is_parameter].append(Copy(tie.name, tie.all_names, stages, places))
    return Tied(stage, copies[True], copies[False])


def reporter() -> Callable[[Runner], list[StageStatistics]]:
    """Return what gathers the statistics of all stages; every rank calls that, and it waits."""
    with needed("procpipe.timeline", "report()"):
        from procpipe.timeline.reporting import report_of_all
    return report_of_all
