"""Proposes how to run a model whose layers' costs are known, by simulating every way.

    for each number of replicas        what each of them gets of a mini-batch, see ``splits``
    for each number of chunks          the number and the size of its micro-batches
    for each checkpoint mode           which of them are recomputed
    for each placement                 one partition a device; two, looped or folded
    for each balance                   by seconds; if memory is short, increasingly by bytes
    for each schedule                  a plan: its seconds, and the bytes that each device holds

The fastest proposal that fits into memory is chosen. Predictions within 2% count as equal: then the
one that needs the least memory.

    bytes of a device = parameters, gradients, optimizer     static
                      + what it holds for backward passes    held
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from procpipe.plan.placement import folded, looped
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Plan
from procpipe.planner.all_reduce import in_a_row
from procpipe.planner.costs import Costs
from procpipe.planner.memory import all_peak_bytes
from procpipe.planner.model import Link, Model
from procpipe.planner.simulation import Timeline, simulate
from procpipe.words import counted

#: Divides costs of layers into parts: ``procpipe.balance.blocks``.
Divide = Callable[[Sequence[float], int], list[int]]

#: The checkpoint modes; the first computes least.
MODES = ("never", "except_last", "always")

#: Predictions that differ by less are equal.
_MARGIN = 0.02

#: The weights of bytes in a balance; seconds have the rest.
_SHARES_OF_BYTES = (0.0, 0.25, 0.5, 0.75, 1.0)

#: More micro-batches a device hardly shorten the bubble.
_MOST_CHUNKS_A_DEVICE = 8


@dataclass(frozen=True)
class Question:
    """What to plan for."""

    num_devices: int  # the number of devices, one stage of one replica each
    batch: int  # samples in a mini-batch, of all replicas
    memory_bytes: int | None = None  # of each device; None for no limit
    states: float = 2.0  # bytes of optimizer states for each byte of trained parameters
    #: The numbers of chunks of a replica to try; by default powers of two.
    chunks: tuple[int, ...] = ()
    link: Link = field(default_factory=Link)  # between devices
    num_replicas: int = 1  # pipelines of the same model
    replica_link: Link | None = None  # between replicas; by default as between devices
    least_samples: int = 1  # of a micro-batch

    def __post_init__(self) -> None:
        for name, count in (("devices", self.num_devices), ("samples", self.batch)):
            if count < 1:
                raise ValueError(f"{count} {name} are asked for: give at least 1")
        for chunks in self.chunks:
            if not 1 <= chunks <= self.batch:
                raise ValueError(
                    f"{chunks} chunks are asked for, but a mini-batch of {self.batch} samples "
                    f"makes 1 to {self.batch} micro-batches"
                )
        if not 1 <= self.num_replicas or self.num_devices % self.num_replicas:
            raise ValueError(
                f"{counted(self.num_replicas, 'replica')} are asked for on {self.num_devices} "
                "devices, but each has the same number of stages: give a divisor"
            )

    @property
    def num_stages(self) -> int:
        """Stages of a replica."""
        return self.num_devices // self.num_replicas

    @property
    def share(self) -> int:
        """Samples of a mini-batch that a replica gets; the last replicas may get fewer."""
        return -(-self.batch // self.num_replicas)

    def splits(self) -> Iterator[tuple[int, int]]:
        """Yield each number of chunks to try, with the samples of a micro-batch."""
        for chunks in self.chunks or default_chunks(self.share, self.num_stages):
            micro_batch = -(-self.share // chunks)
            if chunks <= self.share and micro_batch >= self.least_samples:
                yield chunks, micro_batch


@dataclass(frozen=True, eq=False)
class Proposal:
    """One way to run the model, with its predicted time and memory."""

    schedule: str
    balance: tuple[int, ...]  # the number of layers in each partition
    chunks: int
    micro_batch: int  # samples in each micro-batch; the last may have fewer
    checkpoint: str
    plan: Plan = field(repr=False)
    costs: Costs = field(repr=False)
    routes: Routes = field(repr=False)
    total_s: float
    held_bytes: tuple[int, ...]  # the most that each stage holds for backward passes
    static_bytes: tuple[int, ...]  # each stage's parameters, gradients and optimizer states
    num_replicas: int = 1

    @property
    def needed_bytes(self) -> tuple[int, ...]:
        """The bytes that each stage needs."""
        return tuple(map(sum, zip(self.static_bytes, self.held_bytes, strict=True)))

    def fits(self, memory_bytes: int | None) -> bool:
        """Say whether each stage has enough memory."""
        return memory_bytes is None or max(self.needed_bytes) <= memory_bytes

    def order(self, memory_bytes: int | None) -> tuple[bool, float]:
        """Return a key that puts the fastest that fits first, then what needs the least memory."""
        fits = self.fits(memory_bytes)
        return not fits, self.total_s if fits else max(self.needed_bytes)

    @cached_property
    def timeline(self) -> Timeline:
        """When each task runs."""
        return simulate(self.plan, self.costs, self.routes)


def propose(model: Model, question: Question, divide: Divide) -> list[Proposal]:
    """Simulate all ways to run a model, including those that do not fit.

    Raises:
        ValueError: there are more stages than layers, or than groups of layers that must be in one
            partition; or there are more replicas than samples, or chunks than samples of each.
    """
    n = question.num_stages
    what = "devices" if question.num_replicas == 1 else "stages"
    if n > len(model.layers):
        raise ValueError(
            f"{n} {what} are asked for, but the model has {counted(len(model.layers), 'layer')}: "
            "ask for at most that many, or divide the model into more layers"
        )
    if n > len(model.groups):
        (first, last), *_ = model.shared
        names = [model.layers[k].name for k in (first, last)]
        raise ValueError(
            f'{n} {what} are asked for, but in the costs "shared" has layers that must be in one '
            f"partition, {names[0]!r} and {names[1]!r} for instance, with all between: that makes "
            f"{counted(len(model.groups), 'partition')} at most; ask for no more, or measure the "
            'model again, which lists what layers share in "ties"'
        )
    if question.num_replicas > question.batch:
        raise ValueError(
            f"{question.num_replicas} replicas are asked for, but a mini-batch has "
            f"{counted(question.batch, 'sample')}, and each replica needs one"
        )
    if not any(question.splits()):
        raise ValueError(
            f"a replica has {counted(question.share, 'sample')} of a mini-batch, too few for "
            "each number of chunks that is asked for"
        )
    return [
        proposal
        for setting in _settings(model, question)
        for proposal in _of_setting(model, question, setting, divide)
    ]


def default_chunks(batch: int, num_devices: int) -> tuple[int, ...]:
    """List the default numbers of chunks: powers of two."""
    most = min(batch, _MOST_CHUNKS_A_DEVICE * num_devices)
    return tuple(2**k for k in range(most.bit_length()))


def alone_s(model: Model, question: Question) -> float:
    """Return the seconds of a mini-batch on one device with enough memory."""
    sizes = {size for _, size in replace(question, num_replicas=1).splits()}
    return min(
        -(-question.batch // size) * (sum(model.layer_seconds(size)) + sum(model.start_s))
        for size in sizes
    )


def choose(proposals: Sequence[Proposal], memory_bytes: int | None) -> Proposal | None:
    """Return the fastest that fits, or None; if equal, with the least memory, then the simplest."""
    fitting = [proposal for proposal in proposals if proposal.fits(memory_bytes)]
    if not fitting:
        return None
    fastest_s = min(proposal.total_s for proposal in fitting)
    as_fast = [p for p in fitting if p.total_s <= (1 + _MARGIN) * fastest_s]
    names = list(SCHEDULES)  # the simplest first
    return min(as_fast, key=lambda p: (max(p.needed_bytes), names.index(p.schedule), p.chunks))


def leanest(proposals: Sequence[Proposal]) -> Proposal:
    """Return what needs the least memory on its largest stage; if equal, the fastest."""
    return min(proposals, key=lambda p: (max(p.needed_bytes), p.total_s))


@dataclass(frozen=True)
class _Setting:
    """What is decided before a balance."""

    chunks: int
    micro_batch: int
    num_micro_batches: int
    checkpoint: str
    placement: tuple[int, ...]


def _settings(model: Model, question: Question) -> Iterator[_Setting]:
    n = question.num_stages
    placements = [looped(n, n)]
    if 1 < n and 2 * n <= len(model.groups):
        placements += [looped(2 * n, n), folded(2 * n, n)]
    seen = set()
    for chunks, micro_batch in question.splits():
        m = -(-question.share // micro_batch)
        if m in seen:
            continue
        seen.add(m)
        for mode in MODES:
            if m == 1 and mode == "except_last":  # the same as never
                continue
            for placement in placements:
                yield _Setting(chunks, micro_batch, m, mode, placement)


def _of_setting(
    model: Model, question: Question, setting: _Setting, divide: Divide
) -> list[Proposal]:
    """Simulate the balance by seconds, and others unless it fits under every schedule."""
    found: list[Proposal] = []
    balances: set[tuple[int, ...]] = set()
    for share in _SHARES_OF_BYTES:
        weights = _weights(model, question, setting, share)
        balance = _balance(model.groups, weights, len(setting.placement), divide)
        if balance in balances:
            continue
        balances.add(balance)
        found += _of_balance(model, question, setting, balance)
        if all(proposal.fits(question.memory_bytes) for proposal in found):
            break
    return found


def _balance(
    groups: Sequence[int], weights: Sequence[float], num_partitions: int, divide: Divide
) -> tuple[int, ...]:
    """Divide layers, but not within groups."""
    layers_left, groups_left = iter(weights), iter(groups)
    of_groups = [sum(islice(layers_left, count)) for count in groups]
    return tuple(sum(islice(groups_left, count)) for count in divide(of_groups, num_partitions))


def _weights(
    model: Model, question: Question, setting: _Setting, share_of_bytes: float
) -> list[float]:
    """Weight each layer by its share of all seconds and of all bytes."""
    is_recomputed = setting.checkpoint != "never"
    seconds = model.layer_seconds(setting.micro_batch, is_recomputed=is_recomputed)
    num_held = 1 if is_recomputed else min(setting.num_micro_batches, question.num_stages)
    num_bytes = model.layer_bytes(setting.micro_batch, question.states, num_held)
    all_s, all_bytes = sum(seconds) or 1.0, sum(num_bytes) or 1.0
    return [
        (1 - share_of_bytes) * layer_s / all_s + share_of_bytes * layer_bytes / all_bytes
        for layer_s, layer_bytes in zip(seconds, num_bytes, strict=True)
    ]


def _of_balance(
    model: Model, question: Question, setting: _Setting, balance: tuple[int, ...]
) -> Iterator[Proposal]:
    """Simulate every schedule for a balance."""
    n, placement = question.num_stages, setting.placement
    costs = model.costs(balance, setting.micro_batch, question.link)
    if (num_replicas := question.num_replicas) > 1:
        link = question.replica_link or question.link
        buckets = model.buckets(balance, placement, setting.micro_batch, link, num_replicas)
        costs = replace(costs, buckets=tuple(map(in_a_row, buckets)))
    routes = Routes(n, tuple(costs.skip_bytes), placement)
    static = model.static_bytes(balance, placement, question.states)
    m = setting.num_micro_batches
    for schedule, plan in _fixed_plans(m, routes, recomputed(setting.checkpoint, m)):
        if schedule == "interleaved" and len(placement) == n:  # the same as 1F1B
            continue
        held = all_peak_bytes(plan, costs, routes)
        yield Proposal(
            schedule, balance, setting.chunks, setting.micro_batch, setting.checkpoint,
            plan, costs, routes, simulate(plan, costs, routes).total_s, held, static, num_replicas,
        )  # fmt: skip


def _fixed_plans(m: int, routes: Routes, recompute: Collection[int]) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of the schedules that support the placement, by name."""
    placement, n = routes.placement, routes.num_stages
    v = len(placement) // n
    for schedule in SCHEDULES.values():
        if schedule.partitions_per_stage not in (None, v):
            continue
        if schedule.place(len(placement), n) == placement:
            yield schedule.name, schedule.plan(m, placement, recompute)
