"""Proposes how to run a model whose layers' costs are known, by simulating every way.

    for each number of replicas        what each of them gets of a mini-batch, see ``splits``
    for each number of chunks          the number and the size of its micro-batches
    for each checkpoint mode           which of them are recomputed
    for each placement                 one partition a device; two, looped or folded
    for each balance                   by seconds; if memory is short, increasingly by bytes
    for each schedule                  a plan: its seconds, and the bytes that each device holds

A device needs the bytes of parameters, gradients and optimizer (static), and of what it holds for
backward passes (held).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.planner.costs import Machine, Table
from procpipe.planner.divide import divide
from procpipe.planner.simulation import Timeline, simulate

#: The checkpoint modes; the first computes least.
MODES = ("never", "except_last", "always")

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
    num_replicas: int = 1  # pipelines of the same model

    @property
    def num_stages(self) -> int:
        """Stages of a replica."""
        return self.num_devices // self.num_replicas

    @property
    def share(self) -> int:
        """Samples of a mini-batch that a replica gets; the last replicas may get fewer."""
        return -(-self.batch // self.num_replicas)

    def splits(self) -> dict[int, int]:
        """Return each number of chunks to try, with the samples of a micro-batch."""
        most = min(self.share, _MOST_CHUNKS_A_DEVICE * self.num_stages)
        tried = self.chunks or tuple(2**k for k in range(most.bit_length()))
        return {chunks: -(-self.share // chunks) for chunks in tried if chunks <= self.share}

    def is_possible(self, num_layers: int) -> bool:
        """Say whether a model of so many layers can be divided so, and a mini-batch."""
        is_even = self.num_devices % self.num_replicas == 0
        has_samples = self.num_replicas <= self.batch and bool(self.splits())
        return is_even and self.num_stages <= num_layers and has_samples


@dataclass(frozen=True, eq=False)
class Proposal:
    """One way to run the model, with its predicted time and memory."""

    schedule: str
    balance: tuple[int, ...]  # the number of layers in each partition
    chunks: int
    micro_batch: int  # samples in each micro-batch; the last may have fewer
    checkpoint: str
    num_replicas: int  # pipelines of the same model
    timeline: Timeline = field(repr=False)  # of its plan
    held_bytes: tuple[int, ...]  # the most that each stage holds for backward passes
    static_bytes: tuple[int, ...]  # each stage's parameters, gradients and optimizer states

    @property
    def needed_bytes(self) -> tuple[int, ...]:
        """The bytes that each stage needs."""
        return tuple(map(sum, zip(self.static_bytes, self.held_bytes, strict=True)))

    def fits(self, memory_bytes: int | None) -> bool:
        """Say whether each stage has enough memory."""
        return memory_bytes is None or max(self.needed_bytes) <= memory_bytes

    def order(self, memory_bytes: int | None) -> tuple[object, ...]:
        """Return a key that puts the fastest that fits first, then what needs the least memory.

        Seconds with the same three digits are equal. Then the least memory counts, then the
        simplest.
        """
        needed, simple = max(self.needed_bytes), (list(SCHEDULES).index(self.schedule), self.chunks)
        if not self.fits(memory_bytes):
            return True, needed, self.timeline.total_s, *simple
        return False, float(f"{self.timeline.total_s:.3g}"), needed, *simple


def propose(tables: Mapping[int, Table], machine: Machine, question: Question) -> list[Proposal]:
    """Simulate all ways to run a model, including those that do not fit.

    Args:
        tables: the costs of its layers, for each size of micro-batch in ``question.splits()``.
        machine: what several processes add to them.
        question: a possible one.
    """
    found: list[Proposal] = []
    for chunks, micro_batch in question.splits().items():
        table = tables[micro_batch]
        for mode in MODES:
            for placement, schedules in _placements(question.num_stages, len(table.layers)).items():
                found += _of_setting(table, machine, question, chunks, mode, placement, schedules)
    return found


def alone_s(tables: Mapping[int, Table], machine: Machine, question: Question) -> float:
    """Return the seconds of a mini-batch on one device with enough memory."""
    return min(
        -(-question.batch // size) * (sum(tables[size].layer_seconds()) + 2 * machine.host_s)
        for size in question.splits().values()
    )


def best_of_each(proposals: Sequence[Proposal], memory_bytes: int | None) -> list[Proposal]:
    """Choose the best of each schedule, mode and number of replicas; the best of all first."""
    best: dict[tuple[str, str, int], Proposal] = {}
    for proposal in sorted(proposals, key=lambda proposal: proposal.order(memory_bytes)):
        kind = proposal.schedule, proposal.checkpoint, proposal.num_replicas
        best.setdefault(kind, proposal)
    return list(best.values())


def _placements(num_stages: int, num_layers: int) -> dict[tuple[int, ...], list[Schedule]]:
    """Return the placements for which there are layers enough, each with its schedules."""
    found: defaultdict[tuple[int, ...], list[Schedule]] = defaultdict(list)
    for name in SCHEDULES if num_stages > 1 else ("1f1b",):  # on one stage no other is faster
        placement = SCHEDULES[name].placement(2 * num_stages, num_stages)
        if len(placement) <= num_layers:
            found[placement].append(SCHEDULES[name])
    return found


def _of_setting(
    table: Table,
    machine: Machine,
    question: Question,
    chunks: int,
    mode: str,
    placement: tuple[int, ...],
    schedules: Sequence[Schedule],
) -> list[Proposal]:
    """Simulate the balance by seconds, and others unless it fits under every schedule."""
    m = -(-question.share // table.samples)
    if m == 1 and mode == "except_last":  # the same as never
        return []
    found: list[Proposal] = []
    balances: set[tuple[int, ...]] = set()
    for share in _SHARES_OF_BYTES:
        num_held = 1 if mode != "never" else min(m, question.num_stages)
        weights = _weights(table, mode, question.states, num_held, share)
        balance = tuple(divide(weights, len(placement)))
        if balance in balances:
            continue
        balances.add(balance)
        costs = table.costs(balance, machine, question.num_replicas)
        static = table.static_bytes(balance, placement, question.states)
        routes = Routes(question.num_stages, tuple(costs.skip_bytes), placement)
        for schedule in schedules:
            plan = schedule.plan(m, placement, recomputed(mode, m))
            timeline = simulate(plan, costs, routes)
            held = tuple(map(timeline.peak_bytes, range(question.num_stages)))
            found.append(
                Proposal(schedule.name, balance, chunks, table.samples, mode,
                         question.num_replicas, timeline, held, static)
            )  # fmt: skip
        if all(proposal.fits(question.memory_bytes) for proposal in found):
            break
    return found


def _weights(
    table: Table, mode: str, states: float, num_held: int, share_of_bytes: float
) -> list[float]:
    """Weight each layer by its share of all seconds and of all bytes."""
    seconds = table.layer_seconds(is_recomputed=mode != "never")
    num_bytes = [
        layer.parameter_bytes + (1 + states) * layer.trained_bytes + num_held * layer.held_bytes
        for layer in table.layers
    ]
    all_s, all_bytes = sum(seconds) or 1.0, sum(num_bytes) or 1.0
    return [
        (1 - share_of_bytes) * layer_s / all_s + share_of_bytes * layer_bytes / all_bytes
        for layer_s, layer_bytes in zip(seconds, num_bytes, strict=True)
    ]
