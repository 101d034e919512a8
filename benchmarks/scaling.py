"""What the simulator predicts for up to 1,024 stages, from costs that are measured here.

Weak scaling: each stage has one transformer layer and a machine of its own, so n stages train a
model n times as large. Measured on two stages that run side by side:

    host_s                   time of neither tasks nor waiting: mostly copying messages
    forward_s, backward_s    tasks of stage.last_step(), each with host_s
    transfer_s               half of what two stages add to a step of one message down and one up,
                             of a boundary's size, between layers that do nothing; less host_s

and then, for n stages and m micro-batches, ``procpipe.planner.simulate`` of fill and drain. The
same costs predict other runs of this machine, which are measured to check the predictions.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from benchmarks.boundary import measure_size
from benchmarks.report import Report, Table
from benchmarks.rounds import Step, Times, launch, measure
from benchmarks.workloads import WORKLOADS, Job
from procpipe import Stage, StageStatistics, TimedTask
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.verify import verify
from procpipe.planner import Costs, simulate

_WORKLOAD = "transformer"

#: Stages of the launch in which the costs are measured.
_NUM_STAGES = 2

#: Micro-batches of the run in which the costs are measured, and of the predicted runs.
_M_OF_COSTS, _MS_OF_CHECK = 12, (2, 4, 12)

#: A plan of more tasks is not verified: some in the table have a hundred times as many.
_MAX_TASKS_TO_VERIFY = 1 << 16

#: The number of micro-batches for n stages, by its text in the table.
_NUM_MICRO_BATCHES: dict[str, Callable[[int], int]] = {
    "m = 4n": lambda n: 4 * n,
    "m = 32": lambda n: 32,
}


@dataclass(frozen=True)
class Measured:
    """Seconds of one micro-batch.

    Attributes:
        forward_s: a forward task of one stage.
        backward_s: a backward task of one stage.
        host_s: the host's work for a task besides the task; in both of the above.
        transfer_s: from the end of a task until the next stage has its result.
    """

    forward_s: float
    backward_s: float
    host_s: float
    transfer_s: float

    def costs(self, n: int) -> Costs:
        """Return the costs of ``n`` such stages."""
        return Costs.uniform(
            n,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            transfer_s=self.transfer_s,
        )


@dataclass(frozen=True)
class Prediction:
    """The simulated step of n stages and m micro-batches; seconds that the simulation took.

    Attributes:
        m: number of micro-batches.
        n: number of stages.
        step_s: seconds a step.
        throughput: work done in a second, relative to one stage with the same micro-batches.
        bubble: share of its time that a stage is idle.
        simulate_s: seconds of making and simulating the plan.
        verify_s: seconds of making the plan and verifying it; None if not tried.
    """

    m: int
    n: int
    step_s: float
    throughput: float
    bubble: float
    simulate_s: float
    verify_s: float | None


def configure(parser: argparse.ArgumentParser) -> None:
    powers = [1 << k for k in range(11)]
    parser.add_argument("--stages", type=int, nargs="+", default=powers)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> Report:
    found = {
        n: launch("benchmarks.scaling:measure_runs", n, rounds=options.rounds)
        for n in (1, _NUM_STAGES)
    }
    measured = {n: Measured(**of_n["measured"]) for n, of_n in found.items()}
    runs = {n: of_n["times"] for n, of_n in found.items()}
    curves = {
        name: [predict(measured[_NUM_STAGES], number(n), n) for n in options.stages]
        for name, number in _NUM_MICRO_BATCHES.items()
    }
    tables = [tabulate_costs(measured), tabulate_check(measured, runs)]
    tables += [tabulate_curve(name, curve) for name, curve in curves.items()]
    figures = {
        "runs": found,
        "curves": {name: [asdict(point) for point in curve] for name, curve in curves.items()},
    }
    settings = vars(options) | {"out": str(options.out)}
    return Report("scaling", tables, figures, settings, lambda figure: _draw(figure, curves))


def predict(measured: Measured, m: int, n: int) -> Prediction:
    """Simulate n stages, and verify their plan unless that takes long."""
    costs = measured.costs(n)
    start_s = time.perf_counter()
    timeline = simulate(gpipe(m, n), costs)
    simulate_s = time.perf_counter() - start_s
    verify_s = None
    if 2 * m * n <= _MAX_TASKS_TO_VERIFY:
        start_s = time.perf_counter()
        verify(gpipe(m, n), Routes(n))
        verify_s = time.perf_counter() - start_s
    one_s = m * (costs.forward_s[0] + costs.backward_s[0])
    throughput = n * one_s / timeline.total_s
    return Prediction(m, n, timeline.total_s, throughput, timeline.bubble, simulate_s, verify_s)


def tabulate_costs(measured: Mapping[int, Measured]) -> Table:
    """Lay out the measured costs, by number of stages."""
    layer = WORKLOADS[_WORKLOAD].sizes.replace("8 layers", "1 layer a stage")
    rows: list[list[Any]] = [
        [what, *(vars(of_n)[name] * 1e3 for of_n in measured.values())]
        for name, what in (
            ("forward_s", "forward task"),
            ("backward_s", "backward task"),
            ("host_s", "of each, the host's work beside the task"),
            ("transfer_s", "transfer to the next stage"),
        )
    ]
    return Table(
        f"scaling: costs of one micro-batch, m = {_M_OF_COSTS}: {layer}",
        ["", *(f"n = {n}, ms" for n in measured)],
        rows,
        [".3f"] * len(measured),
        [f"the curves below have those of n = {_NUM_STAGES}, where stages share this machine"],
    )


def tabulate_check(measured: Mapping[int, Measured], runs: Mapping[int, Times]) -> Table:
    """Lay out measured steps beside simulated ones."""
    rows: list[list[Any]] = []
    for n, times in runs.items():
        for m, seconds in times.items():
            step_s = statistics.median(seconds)
            simulated_s = simulate(gpipe(int(m), n), measured[n].costs(n)).total_s
            rows.append([f"n = {n}, m = {m}", step_s * 1e3, simulated_s * 1e3])
            rows[-1].append(step_s / simulated_s)
    return Table(
        "scaling: real steps beside simulated ones",
        ["", "measured ms", "simulated ms", "measured / simulated"],
        rows,
        [".1f", ".1f", ".3f"],
        [
            f"costs are of the run with the same n and m = {_M_OF_COSTS}: what is predicted is "
            "other m"
        ],
    )


def tabulate_curve(name: str, curve: Sequence[Prediction]) -> Table:
    """Lay out the predictions."""
    rows = [
        [
            *(str(point.n), point.m, point.step_s, point.throughput, point.throughput / point.n),
            *(point.m / (point.m + point.n - 1), point.bubble, point.simulate_s, point.verify_s),
        ]
        for point in curve
    ]
    return Table(
        f"scaling, simulated: {name}, one layer a stage, fill and drain, no recomputation",
        [
            *("n", "m", "s a step", "throughput", "efficiency", "m / (m + n - 1)", "bubble"),
            *("simulate, s", "verify, s"),
        ],
        rows,
        ["d", ".3f", ".2f", ".3f", ".3f", ".3f", ".3f", ".3f"],
        [
            "throughput: relative to one stage; efficiency: throughput / n; m / (m + n - 1): if "
            "messages took no time",
            "simulate, verify: with making the plan; a plan is verified once a job, on rank 0",
            f"-: more than {_MAX_TASKS_TO_VERIFY} tasks; verify's time grows with their number",
        ],
    )


def measure_runs(rounds: int) -> dict[str, Any]:
    """Measure steps of this many stages, and the costs in them; every rank calls it."""
    import torch.distributed as dist

    from benchmarks.peers.ours import stage_of, step_of

    n = dist.get_world_size()
    jobs = {m: _job(m, n) for m in _MS_OF_CHECK}
    stages = {m: stage_of(job) for m, job in jobs.items()}
    steps = {m: step_of(stages[m], job) for m, job in jobs.items()}
    noted: list[list[TimedTask]] = []
    steps[_M_OF_COSTS] = _noting_tasks(stages[_M_OF_COSTS], steps[_M_OF_COSTS], noted)
    times = measure({str(m): step for m, step in steps.items()}, num_rounds=rounds, num_steps=1)
    noted = noted[1:]  # the first turn is not counted
    ours = [task_s(noted, "F"), task_s(noted, "B"), _host_s(stages[_M_OF_COSTS].statistics())]
    for stage in stages.values():
        stage.close()
    ranks: list[Any] = [None] * n
    dist.all_gather_object(ranks, ours)
    forward_s, backward_s, host_s = (statistics.fmean(s) for s in zip(*ranks, strict=True))
    hop_s = _hop_s(_boundary_kib(), rounds) if n == _NUM_STAGES else 0.0
    transfer_s = max(0.0, hop_s - host_s)
    measured = Measured(forward_s + host_s, backward_s + host_s, host_s, transfer_s)
    return {"times": times, "measured": asdict(measured)}


def task_s(steps: Sequence[Sequence[TimedTask]], kind: str) -> float:
    """Return the median over steps of the mean task of a kind: a step's time is their sum."""
    return statistics.median(
        statistics.fmean(timed.end_s - timed.start_s for timed in step if timed.task.kind == kind)
        for step in steps
    )


def _noting_tasks(stage: Stage, step: Step, noted: list[list[TimedTask]]) -> Step:
    """Note the tasks of every step."""

    def noting() -> None:
        step()
        noted.append(stage.last_step())

    return noting


def _host_s(used: StageStatistics) -> float:
    """Return the seconds a task in which a stage neither ran it nor waited."""
    return (used.step_s - used.busy_s - used.waiting_s) / sum(used.num_tasks.values())


def _hop_s(kib: int, rounds: int) -> float:
    """Return the time of a message: a step of two stages has two more than one of one process."""
    times = measure_size(kib, 1, rounds)
    two, one = (statistics.median(times[name]) for name in ("procpipe", "one process"))
    return (two - one) / 2


def _boundary_kib() -> int:
    """Return the size of a message: a layer's output is as large as its input."""
    return 4 * math.prod(WORKLOADS[_WORKLOAD].input_shape) >> 10


def _job(m: int, n: int) -> Job:
    """Cut the workload's model to one layer a stage."""
    whole = WORKLOADS[_WORKLOAD]
    return Job(replace(whole, model=lambda: nn.Sequential(*list(whole.model())[:n])), n, m)


def _draw(figure: Any, curves: dict[str, list[Prediction]]) -> None:
    """Draw throughput and efficiency by number of stages."""
    left, right = figure.subplots(1, 2)
    stages = [point.n for point in next(iter(curves.values()))]
    left.plot(stages, stages, "k:", linewidth=1, label="n stages, no bubble")
    for name, curve in curves.items():
        left.plot(stages, [point.throughput for point in curve], marker=".", label=name)
        right.plot(stages, [point.throughput / point.n for point in curve], marker=".", label=name)
    for name, curve in curves.items():
        right.plot(
            stages,
            [point.m / (point.m + point.n - 1) for point in curve],
            "k--",
            linewidth=1,
            label="m / (m + n - 1)" if name == "m = 32" else None,
        )
    left.set_yscale("log", base=2)
    left.set_ylabel("throughput, relative to one stage")
    right.set_ylabel("efficiency")
    right.set_ylim(0, 1.05)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(stages, [str(n) for n in stages], rotation=45)
        axis.set_xlabel("stages n (simulated)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
