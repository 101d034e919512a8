"""What the experiments of speed have in common: measured, simulated and published side by side.

command ── balances, costs of layers ──> simulated        forecast.py
        ── launches n processes ───────> measured         training.py
                                         published        figures.py
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from benchmarks.published.experiment import BASELINE, Experiment, Scale, Setting
from benchmarks.published.figures import TORCHGPIPE
from benchmarks.published.forecast import Forecast
from benchmarks.report import Cell, Report, Table
from benchmarks.rounds import Times, launch, ratio


def configure(parser: argparse.ArgumentParser, experiment: Experiment) -> None:
    small = experiment.small
    stages = sorted({setting.num_stages for setting in experiment.settings})
    parser.add_argument("--full", action="store_true", help="the published sizes, on GPUs")
    parser.add_argument("--stages", type=int, nargs="+", choices=stages, default=stages)
    parser.add_argument("--rounds", type=int, default=3)
    if small.size:
        parser.add_argument(
            "--size",
            type=int,
            nargs=len(small.size),
            help=f"of {experiment.model}; by default {' '.join(map(str, small.size))}",
        )
    parser.add_argument("--image-size", type=int, help=f"by default {small.image_size}")
    parser.add_argument("--micro-batch", type=int, help=f"samples, by default {small.micro_batch}")
    parser.add_argument(
        "--max-micro-batches", type=int, help=f"by default {small.max_micro_batches}"
    )


def run(options: argparse.Namespace, experiment: Experiment) -> Report:
    scale = _scale(options, experiment)
    chosen = [s for s in experiment.settings if s.num_stages in options.stages]
    num_devices = torch.cuda.device_count()
    results = Results(
        experiment.baseline_at(scale),
        settings=[scale.of(s) for s in chosen if not options.full or s.num_stages <= num_devices],
        absent=[s.name for s in chosen if options.full and s.num_stages > num_devices],
    )
    forecast = Forecast(experiment, scale)
    for k, setting in enumerate(results.settings):
        results.settings[k] = replace(setting, balance=setting.balance or forecast.balance(setting))
        results.simulated[setting.name] = forecast.speed_up(results.settings[k])
    _measure(experiment, scale, results, options)
    return Report(
        experiment.part,
        [tabulate(experiment, scale, results)],
        asdict(results),
        asdict(scale) | {"full": options.full, "rounds": options.rounds},
        draw=lambda figure: _draw(figure, experiment, results),
    )


@dataclass
class Results:
    """The results of a run.

    Attributes:
        baseline: one device without a pipeline, scaled.
        settings: those that were run, with their balances.
        absent: the names of those for which there are too few GPUs.
        times: by setting, seconds a step in each round.
        baseline_times: by setting, seconds a step of the baseline in the same rounds.
        simulated: by setting, the speed-up over one device, with a device a stage.
    """

    baseline: Setting
    settings: list[Setting] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    times: Times = field(default_factory=dict)
    baseline_times: Times = field(default_factory=dict)
    simulated: dict[str, float] = field(default_factory=dict)

    def speed_ups(self) -> dict[str, float]:
        """Return each setting's measured speed-up over one device, round by round."""
        return {
            setting.name: ratio(self.baseline_times[setting.name], self.times[setting.name])
            * (setting.batch_size / self.baseline.batch_size)
            for setting in self.settings
        }


def _scale(options: argparse.Namespace, experiment: Experiment) -> Scale:
    given = {name: getattr(options, name, None) for name in Scale.__dataclass_fields__}
    base = experiment.published if options.full else experiment.small
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def _measure(
    experiment: Experiment, scale: Scale, results: Results, options: argparse.Namespace
) -> None:
    """Measure settings with equal numbers of stages in one launch; at full size each alone."""

    def times_of(*settings: Setting) -> Times:
        times: Times = launch(
            "benchmarks.published.training:measure_settings",
            max(setting.num_stages for setting in settings),
            part=experiment.part,
            scale=asdict(scale),
            settings=[asdict(setting) for setting in settings],
            num_rounds=options.rounds,
        )
        return times

    alone = times_of(results.baseline) if options.full and results.settings else None
    for n, of_stages in groupby(results.settings, key=lambda setting: setting.num_stages):
        settings = list(of_stages)
        print(f"{experiment.part}: {n} stages", flush=True)
        if alone is None:
            times = times_of(results.baseline, *settings)
        else:
            times = alone | {s.name: times_of(s)[s.name] for s in settings}
        for setting in settings:
            results.times[setting.name] = times[setting.name]
            results.baseline_times[setting.name] = times[BASELINE]


# -- the table and the plot -----------------------------------------------------------------------


def tabulate(experiment: Experiment, scale: Scale, results: Results) -> Table:
    """Lay out measured, simulated and published speed-ups over the experiment's reference."""
    speed_ups = _relative(experiment, results.speed_ups())
    simulated = _relative(experiment, results.simulated)
    ideal = _relative(experiment, {s.name: s.ideal for s in results.settings})
    has_huang = any(figure.huang_speed_up is not None for figure in experiment.figures.values())
    rows: list[list[Cell]] = []
    for setting in _rows(experiment, results):
        name = setting.name
        times = results.times.get(name)
        if name == BASELINE and results.baseline_times:
            times = [s for of_setting in results.baseline_times.values() for s in of_setting]
        per_s = setting.batch_size / statistics.median(times) if times else None
        figure = experiment.figures[name]
        rows.append(
            [
                name,
                setting.num_micro_batches,
                setting.batch_size,
                per_s,
                _starred(speed_ups.get(name), setting),
                simulated.get(name),
                ideal.get(name),
                figure.samples_per_s,
                figure.speed_up,
                *([figure.huang_speed_up] if has_huang else []),
            ]
        )
    headings = ["", "m", "samples a step", "samples/s", "speed-up", "simulated", "ideal"]
    headings += ["published samples/s", "published", *(["Huang et al."] if has_huang else [])]
    formats = ["d", "d", ".2f", ".2f", ".2f", ".2f", ".1f", ".2f", ".2f"]
    return Table(
        f"{experiment.part}: {_described(experiment, scale)}",
        headings,
        rows,
        formats[: len(headings) - 1],
        _notes(experiment, results),
    )


def _rows(experiment: Experiment, results: Results) -> list[Setting]:
    """List the settings of the table: those that were run, and those that were not."""
    baseline = [results.baseline] if BASELINE in experiment.figures else []
    absent = [s for s in experiment.settings if s.name in results.absent]
    return [*baseline, *results.settings, *absent]


def _relative(experiment: Experiment, speed_ups: Mapping[str, float]) -> dict[str, float]:
    """Turn speed-ups over one device into those over the reference, where that was run."""
    if experiment.reference == BASELINE:
        return {BASELINE: 1.0, **speed_ups} if speed_ups else {}
    if experiment.reference not in speed_ups:
        return {}
    reference = speed_ups[experiment.reference]
    return {name: speed_up / reference for name, speed_up in speed_ups.items()}


def _starred(speed_up: float | None, setting: Setting) -> Cell:
    if speed_up is None or not _is_crowded(setting):
        return speed_up
    return f"{speed_up:.2f}*"


def _is_crowded(setting: Setting) -> bool:
    return not torch.cuda.is_available() and setting.num_stages > (os.cpu_count() or 1)


def _described(experiment: Experiment, scale: Scale) -> str:
    def words(scale: Scale) -> str:
        size = f" ({', '.join(map(str, scale.size))})" if scale.size else ""
        return f"{experiment.model}{size}, images of {scale.image_size} x {scale.image_size}"

    samples = "" if scale.micro_batch is None else f", {scale.micro_batch} a micro-batch"
    if scale == experiment.published:
        return words(scale)
    return f"{words(scale)}{samples}; published: {words(experiment.published)}"


def _notes(experiment: Experiment, results: Results) -> list[str]:
    notes = [
        "samples/s, speed-up: measured here, median of rounds; speed-ups compare turns of one "
        "launch, which samples/s of different rows are not",
        "simulated: procpipe.planner with the layers' times measured here, a device a stage",
        "ideal: n m / (m + n - 1), without recomputation",
        "all pipelines recompute, as published, and the baseline does not; "
        f"published: {TORCHGPIPE}",
    ]
    crowded = any(_is_crowded(setting) for setting in results.settings)
    if crowded:
        notes.append(f"* more stages than this machine's {os.cpu_count()} cores, which they share")
    if experiment.reference != BASELINE:
        notes.append(f"all speed-ups are over {experiment.reference}")
    return notes + [f"not run: {name}: too few GPUs" for name in results.absent]


def _draw(figure: Any, experiment: Experiment, results: Results) -> None:
    """Draw measured, simulated and published speed-ups, side by side for each setting."""
    axis = figure.subplots()
    names = [setting.name for setting in _rows(experiment, results)]
    series: list[tuple[str, Mapping[str, float], str]] = [
        ("measured here", _relative(experiment, results.speed_ups()), "#0072b2"),
        ("simulated", _relative(experiment, results.simulated), "#56b4e9"),
        ("published", {k: v.speed_up for k, v in experiment.figures.items()}, "#c4c4c4"),
    ]
    for k, (label, values, colour) in enumerate(series):
        places = [x + 0.27 * (k - 1) for x in range(len(names))]
        axis.bar(places, [values.get(n, 0.0) for n in names], 0.27, label=label, color=colour)
    axis.set_xticks(range(len(names)), names, rotation=20 if len(names) > 5 else 0)
    axis.set_ylabel(f"speed-up over {experiment.reference}")
    axis.legend()
