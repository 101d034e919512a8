"""Step times that ``procpipe plan`` predicts, beside measured ones.

Six workloads on two stages, each under three schedules. As in ``procpipe plan``, a calibration run
measures tasks, host and messages inside a pipeline; from it each schedule's step is predicted. The
calibration and the schedules run in the same processes, in turns:

    profile the layers, divide them ── launch ── rounds of calibration, gpipe, 1f1b, zb-h1
                                                        │ recorded         │ timed
                                         predicted <────┘     measured <───┘

What is measured is the median ratio of a schedule's step to the calibration's of the same round,
times the calibration's median: a slow machine slows both. All runs are in the table and in the JSON
file. Processes are started for each workload, as often as ``--launches`` says.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from benchmarks.report import Report, Table
from benchmarks.rounds import Step, launch, measure, ratio
from examples.models.gpt import gpt
from examples.models.resnet import resnet
from examples.models.unet import unet
from procpipe import Stage, hf
from procpipe.balance import profile_layers
from procpipe.launch.plan import replay, trial
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import KINDS
from procpipe.planner import simulate
from procpipe.planner.divide import divide
from procpipe.timeline.chrome import read
from procpipe.timeline.steps import merged

_NUM_STAGES, _NUM_MICRO_BATCHES = 2, 8

#: Each schedule, with its checkpoint mode.
_SCHEDULES = {"gpipe": "except_last", "1f1b": "never", "zb-h1": "never"}

_CALIBRATION = "calibration"


@dataclass(frozen=True)
class Workload:
    """A model and its data, fixed before anything was measured.

    Attributes:
        sizes: in a few words.
        model: builds it, the same on every rank.
        micro_batch: returns input and target of so many samples.
        samples: of a micro-batch.
        loss_fn: the loss.
    """

    sizes: str
    model: Callable[[], nn.Sequential]
    micro_batch: Callable[[int], tuple[Any, Any]]
    samples: int
    loss_fn: Callable[..., Tensor]


def _real(shape: tuple[int, ...], target: tuple[int, ...], num_samples: int) -> tuple[Any, Any]:
    return torch.rand(num_samples, *shape), torch.rand(num_samples, *target)


def _words(num_words: int, length: int, num_samples: int) -> tuple[Any, Any]:
    tokens = torch.randint(num_words, (num_samples, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(num_samples: int) -> tuple[Any, Any]:
    return torch.rand(num_samples, 3, 64, 64), torch.randint(10, (num_samples,))


def _llama_batch(num_samples: int) -> tuple[Any, Any]:
    tokens = torch.randint(257, (num_samples, 128))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, tokens


def _llama() -> nn.Sequential:
    from transformers import AutoModelForCausalLM

    from examples.finetune_hf import llama_config

    model: Any = AutoModelForCausalLM.from_config(llama_config())
    found: nn.Sequential = hf.sequential(model)
    return found


def _mlp() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)])


def _uneven() -> nn.Sequential:
    widths = [256, 1536, 128, 128, 1024, 512, 2048, 64]
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)])


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


WORKLOADS = {
    "gpt": Workload(
        "4 blocks, width 256, 128 tokens, 2 samples",
        lambda: gpt(512, 4, 256, 4, 128),
        partial(_words, 512, 128),
        2,
        _token_loss,
    ),
    "unet": Workload(
        "depth 3, 2 convolutions, base 16, 96 pixels, 1 sample",
        lambda: unet(depth=3, num_convs=2, base_channels=16),
        partial(_real, (3, 96, 96), (1, 96, 96)),
        1,
        F.binary_cross_entropy_with_logits,
    ),
    "mlp": Workload(
        "8 x Linear(1024, 1024) and ReLU, 128 samples",
        _mlp,
        partial(_real, (1024,), (1024,)),
        128,
        F.mse_loss,
    ),
    "resnet": Workload(
        "2, 2, 2, 2 bottleneck blocks, base 16, 64 pixels, 4 samples",
        lambda: resnet(10, (2, 2, 2, 2), 16),
        _images,
        4,
        F.cross_entropy,
    ),
    "hf": Workload(
        "the Llama of examples/finetune_hf.py, 128 tokens, 4 samples",
        _llama,
        _llama_batch,
        4,
        hf.causal_lm_loss,
    ),
    "uneven": Workload(
        "7 linear layers of widths 64 to 2048, 256 samples",
        _uneven,
        partial(_real, (256,), (64,)),
        256,
        F.mse_loss,
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launches", type=int, default=1)


def run(options: argparse.Namespace) -> Report:
    turns = [(name, k) for k in range(options.launches) for name in options.workloads]
    runs = []
    for name, number in track(turns, "predictions"):
        runs.append({"workload": name, "launch": number, **_run(name, options.rounds)})
    tables = [tabulate(runs), _tabulate_machines(runs)]
    return Report("predictions", tables, runs, vars(options) | {"out": str(options.out)})


def _run(name: str, num_rounds: int) -> dict[str, Any]:
    """Measure one workload; return predicted and measured seconds, and the machine's numbers."""
    workload = WORKLOADS[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, (sample, target) = workload.model(), workload.micro_batch(workload.samples)
    table = profile_layers(model, sample, target=target, loss_fn=workload.loss_fn)
    balance = divide(table.layer_seconds(), _NUM_STAGES)
    with tempfile.TemporaryDirectory() as folder:
        traced = str(Path(folder, "run.json"))
        times = launch(
            "benchmarks.predictions:measure_runs", _NUM_STAGES, name=name, balance=balance,
            trace=traced, num_rounds=num_rounds,
        )  # fmt: skip
        calibrated = replay.usual(merged(map(read, Path(folder).iterdir())))
    timed = table.timed(balance, calibrated.task_s)
    machine = replay.machine_of(calibrated, timed)
    costs = timed.costs(balance, machine)
    m, n = _NUM_MICRO_BATCHES, _NUM_STAGES
    predicted_s = {
        schedule: simulate(
            SCHEDULES[schedule].plan(m, tuple(range(n)), recomputed(mode, m)), costs
        ).total_s
        for schedule, mode in _SCHEDULES.items()
    }
    tasks = {f"{kind}{j}": seconds for (kind, j), seconds in calibrated.task_s.items()}
    numbers = {"machine": vars(machine), "task_s": tasks, "balance": balance}
    return {"predicted_s": predicted_s, "times": times, **numbers}


def measure_runs(
    name: str, balance: Sequence[int], trace: str, num_rounds: int
) -> dict[str, list[float]]:
    """Measure steps of the calibration and of each schedule, in turns; every rank calls it."""
    import torch.distributed as dist

    workload, m = WORKLOADS[name], _NUM_MICRO_BATCHES
    of_calibration = trial.calibration(balance, 1, workload.samples, "".join(KINDS), 1.0)
    calibrated = dict(of_calibration.stage)
    calibrated["schedule"] = partial(trial.mixed_plan, kinds=of_calibration.kinds)
    made: dict[str, tuple[dict[str, Any], int]] = {
        _CALIBRATION: (calibrated | {"trace": trace}, of_calibration.batch)
    }
    for schedule, mode in _SCHEDULES.items():
        options: dict[str, Any] = {"balance": balance, "chunks": m, "checkpoint": mode}
        options["schedule"] = schedule
        made[schedule] = options, m * workload.samples
    stages, steps = [], {}
    for contender, (options, batch) in made.items():
        torch.manual_seed(0)
        model, (input, target) = workload.model(), workload.micro_batch(batch)
        stages.append(Stage(model, loss_fn=workload.loss_fn, **options))
        steps[contender] = _step(stages[-1], input, target)
    dist.barrier()
    times = measure(steps, num_rounds=num_rounds, num_steps=1)
    for stage in stages:
        stage.close()
    return times


def _step(stage: Stage, input: Any, target: Any) -> Step:
    def step() -> None:
        stage.zero_grad()
        stage.step(input, target=target)

    return step


def tabulate(runs: Sequence[dict[str, Any]]) -> Table:
    """Lay out predicted and measured steps of all runs."""
    rows: list[list[Any]] = []
    for found in runs:
        calibrated = found["times"][_CALIBRATION]
        for schedule, predicted_s in found["predicted_s"].items():
            seconds = found["times"][schedule]
            measured_s = ratio(seconds, calibrated) * statistics.median(calibrated)
            rows.append([f"{found['workload']}, {schedule}", found["launch"]])
            rows[-1] += [predicted_s * 1e3, measured_s * 1e3, statistics.median(seconds) * 1e3]
            rows[-1].append(f"{min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f}")
            rows[-1].append(100 * (measured_s / predicted_s - 1))
    apart = sorted(abs(row[-1]) for row in rows)
    return Table(
        f"predictions: a step on {_NUM_STAGES} stages, m = {_NUM_MICRO_BATCHES}",
        ["", "launch", "predicted ms", "measured ms", "median ms", "range", "difference %"],
        rows,
        ["d", ".1f", ".1f", ".1f", "s", "+.1f"],
        [
            *(f"{name}: {WORKLOADS[name].sizes}" for name in {r["workload"]: 0 for r in runs}),
            "measured: by the rounds' ratios to the calibration; median and range of the rounds",
            f"of {len(rows)} differences the median is {statistics.median(apart):.1f}%, and the "
            f"largest {apart[-1]:.1f}%",
        ],
    )


def _tabulate_machines(runs: Sequence[dict[str, Any]]) -> Table:
    """Lay out what the calibrations say of the machine."""
    rows = [
        [
            found["workload"],
            found["launch"],
            *(found["machine"][name] * 1e6 for name in ("host_s", "hop_s", "step_s")),
            1e-9 / found["machine"]["send_s"] if found["machine"]["send_s"] else None,
        ]
        for found in runs
    ]
    return Table(
        "predictions: the machine, as calibrated",
        ["", "launch", "host of a task, µs", "hop, µs", "of a step, µs", "sends, GB/s"],
        rows,
        ["d", ".0f", ".0f", ".0f", ".1f"],
    )
