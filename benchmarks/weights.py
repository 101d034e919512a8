"""Peak memory of each process that reads or writes its part of a model's weights.

The model is built on the meta device. Figures are the peak of resident pages, as the kernel counts
them and a user sees them, above what the process had after its imports:

    import everything, connect            note memory                         before
    meta model -> Stage                   peak - before                       build
    load_weights, or export               reset the peak; peak - before       peak

A stage's weights are the least that a process can have. Pages of files that are mapped into memory
count as well, as long as they are mapped; the kernel's own cache of files is not the process's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory import counted_memory, reset_peak
from benchmarks.report import Report, Table
from benchmarks.rounds import launch
from procpipe import Stage, state

_VOCABULARY, _WIDTH, _NUM_BLOCKS = 16384, 768, 8
_MIB = 1 << 20

#: What is read or written -> the name of the file or folder.
CASES = {
    "safetensors, 4 files": "files",
    "safetensors of bfloat16": "bfloat16",
    "torch.save": "plain.pt",
    "torch.save of bfloat16": "bfloat16.pt",
    "state.save": "saved",
    "export": "exported",
}


@dataclass(frozen=True)
class Use:
    """What one process added to its memory, in bytes, and how long the call took.

    Attributes:
        weights: of the stage.
        build: at the peak of building the stage.
        peak: at the peak of the call.
        seconds: of the call.
    """

    weights: int
    build: int
    peak: int
    seconds: float


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, default=2)


def run(options: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        _write_files(Path(folder))
        uses = {
            case: [
                Use(**of_rank)
                for of_rank in launch(
                    "benchmarks.weights:measure", options.stages, case=case, folder=folder
                )
            ]
            for case in CASES
        }
    figures = {case: [asdict(use) for use in ranks] for case, ranks in uses.items()}
    settings = vars(options) | {"out": str(options.out)}
    return Report(
        "weights", [tabulate(uses)], figures, settings, lambda figure: _draw(figure, uses)
    )


def tabulate(uses: Mapping[str, Sequence[Use]]) -> Table:
    """Lay out the largest process of each case, in proportion to its stage's weights."""
    rows: list[list[Any]] = []
    for case, ranks in uses.items():
        largest = max(ranks, key=lambda use: use.peak / use.weights)
        builds = max(use.build / use.weights for use in ranks)
        rows.append([case, *(value / _MIB for value in (largest.weights, largest.peak))])
        rows[-1] += [largest.peak / largest.weights, builds, max(use.seconds for use in ranks)]
    num_stages = max(map(len, uses.values()))
    return Table(
        f"peak memory of a process, {num_stages} stages: {_NUM_BLOCKS} blocks of width {_WIDTH}, "
        f"{_VOCABULARY} tokens, float32",
        ["", "weights, MiB", "peak, MiB", "of its weights", "Stage(…) of them", "s"],
        rows,
        [".0f", ".0f", ".2f", ".2f", ".2f"],
        ["of the process with the largest share; weights: its stage's; s: of the slowest"],
    )


def measure(case: str, folder: str) -> list[dict[str, Any]]:
    """Read or write weights in this launch's processes; every rank calls it."""
    import torch.distributed as dist

    num_stages = dist.get_world_size()
    with torch.device("meta"):
        tiny = nn.Sequential(*[nn.Embedding(1, 1) for _ in range(num_stages)])
    Stage(tiny, [1] * num_stages).report()  # for all imports: those for the meta device are 75 MiB
    before = counted_memory()["VmRSS"]
    model = make_model("meta")
    ends = [len(model) * j // num_stages for j in range(num_stages + 1)]
    stage = Stage(model, [end - start for start, end in pairwise(ends)])
    build = counted_memory()["VmHWM"] - before
    stage.report()  # connects
    weights = sum(value.nbytes for value in stage.state_dict().values())
    reset_peak()
    start_s = time.perf_counter()
    path = Path(folder, CASES[case])
    if case == "export":
        state.export(path, stage)
    else:
        state.load_weights(path, stage)
    seconds = time.perf_counter() - start_s
    use = Use(weights, build, counted_memory()["VmHWM"] - before, seconds)
    ranks: list[Any] = [None] * num_stages
    dist.all_gather_object(ranks, asdict(use))
    return ranks


def make_model(device: str) -> nn.Sequential:
    """Make a model of 240 MiB, of which a fifth each is the embedding and the output layer."""
    with torch.device(device):
        blocks = [
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            for _ in range(_NUM_BLOCKS)
        ]
        return nn.Sequential(
            nn.Embedding(_VOCABULARY, _WIDTH),
            *blocks,
            nn.Linear(_WIDTH, _VOCABULARY, bias=False),
        )


def _write_files(folder: Path) -> None:
    """Write a model's weights in each form; no part of what is measured."""
    model = make_model("cpu")
    halves = {key: value.bfloat16() for key, value in model.state_dict().items()}
    torch.save(model.state_dict(), folder / CASES["torch.save"])
    torch.save(halves, folder / CASES["torch.save of bfloat16"])
    state.save(folder / CASES["state.save"], model)
    _write_safetensors(folder / CASES["safetensors, 4 files"], model.state_dict())
    _write_safetensors(folder / CASES["safetensors of bfloat16"], halves)


def _write_safetensors(folder: Path, values: Mapping[str, Tensor]) -> None:
    """Write four files and their index, as Hugging Face lays them out."""
    from safetensors.torch import save_file

    folder.mkdir()
    keys = list(values)
    weight_map: dict[str, str] = {}
    for i in range(4):
        name = f"model-{i + 1:05d}-of-00004.safetensors"
        ours = keys[i::4]
        save_file({key: values[key].contiguous() for key in ours}, folder / name)
        weight_map |= dict.fromkeys(ours, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _draw(figure: Any, uses: Mapping[str, Sequence[Use]]) -> None:
    """Draw the share of each case; a line is where a process holds just its stage's weights."""
    axes = figure.subplots()
    shares = [max(use.peak / use.weights for use in ranks) for ranks in uses.values()]
    axes.barh(list(uses), shares, color="tab:blue")
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("peak memory of a process / its stage's weights")
