"""``procpipe plan`` as a user types it, without processes; docs/planning.md is run with them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from procpipe.launch.main import main
from procpipe.launch.plan import measure
from procpipe.launch.plan.best import Measured
from procpipe.launch.plan.measure import measure_layers
from procpipe.launch.plan.options import parse_bytes
from procpipe.launch.plan.report import Table as TextTable
from procpipe.launch.plan.report import proposals_table, tasks_table
from procpipe.launch.plan.subject import Subject, stand_in_loss
from procpipe.planner.layers import Layer, Profile, Table, to_text
from procpipe.planner.propose import Question, propose

MYMODEL = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from procpipe.balance import Inputs

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
build = lambda: model
sample = torch.rand(8, 4), torch.rand(8, 2)
loss = F.mse_loss
linear = nn.Linear(4, 4)
three = 1, 2, 3
number = 3
wide = torch.rand(8, 5)
two = nn.Sequential(nn.Bilinear(4, 3, 2), nn.ReLU())
two_inputs = Inputs(torch.rand(8, 4), torch.rand(8, 3)), torch.rand(8, 2)

twice = nn.Sequential(linear, nn.ReLU(), linear)
normed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
tied[2].weight = tied[0].weight
each = lambda output, target: F.mse_loss(output, target, reduction="none")

class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.two(x + F.relu(self.one(x)))

class Reads(Added):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)

def broken():
    raise RuntimeError("no data here")

def exits():
    sys.exit("bye")
"""

#: Two even layers that keep 3 MB a sample each, on 8 samples.
LAYERS = tuple(
    Layer(
        name,
        0.001,
        0.002,
        output_bytes=1000,
        held_bytes=3_001_000,
        kept_bytes=3_000_000,
        parameter_bytes=1_000_000,
        trained_bytes=1_000_000,
    )
    for name in ("first", "second")
)
COSTS = Profile(8, (Table(1, LAYERS),))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)  # as few rounds as possible
    monkeypatch.setattr(measure, "_NUM_ROUNDS", 1)
    (tmp_path / "mymodel.py").write_text(MYMODEL)
    (tmp_path / "costs.json").write_text(to_text(COSTS))
    return tmp_path


def plan(*words: str, replicas: int | None = 1) -> int:
    """Plan one pipeline, another number of replicas, or all numbers of them (None)."""
    of_replicas = [] if replicas is None else ["--replicas", str(replicas)]
    processes = [] if {"--check", "--estimate"} & {*words} else ["--estimate"]
    code: int = main(["plan", "--device", "cpu", *of_replicas, *processes, *words])
    return code


def test_a_plan_is_made_from_saved_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--costs", "costs.json", "-n", "2", "--optimizer", "sgd", "--chunks", "8") == 0

    printed = capsys.readouterr().out
    # 8 micro-batches of 1 + 1 + 1 ms (forward and both halves) on each stage, and 1 ms at the ends
    # as the first activation comes and the last gradient goes: zb-h1. On one device, 8 * 6 ms.
    assert "one alone, if it had the memory, would take 48 ms" in printed
    assert re.search(r"zb-h1 \* +2 +never +8 +25 ms +1\.92x", printed), printed
    assert re.search(r"1f1b +2 +never +8 +27 ms +1\.78x", printed), printed
    assert re.search(r"0 +first +24 ms +1\.91 MiB", printed), printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[1, 1], chunks=8, checkpoint="never", schedule="zb-h1", '
        "loss_fn=loss_fn)"
    )


def test_little_memory_costs_time(capsys: pytest.CaptureFixture[str]) -> None:
    # Parameters and gradients take 2 MB, a micro-batch 3 MB: there is room for one. Schedules hold
    # more, unless all are recomputed.
    words = ("--costs", "costs.json", "-n", "2", "--optimizer", "none", "--chunks", "8")

    assert plan(*words, "--memory", "5.5MB") == 0

    printed = capsys.readouterr().out
    assert re.search(r"zb-h1 \* +2 +always +8 .* yes\n", printed), printed
    assert "never" not in printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[1, 1], chunks=8, checkpoint="always", schedule="zb-h1", '
        "loss_fn=loss_fn)"
    )


def test_stages_and_replicas_are_proposed_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "costs.json", "-n", "2", "--optimizer", "sgd", "--chunks", "2")

    assert plan(*words, "--bandwidth", "1GB/s", replicas=None) == 0

    printed = capsys.readouterr().out
    # A replica has 4 of 8 samples: 4 * (3 + 3) ms. Half of its gradients, 2 MB, are sent, and half
    # of the sums: 2 ms, which nothing hides, as both layers are in one bucket.
    assert re.search(
        r"\n  \S+ \* +1 x 2 +never +2 +26 ms .* 0\.0% +7\.7%, 0% hidden .* yes\n", printed
    ), printed
    assert re.search(r"\n  zb-h1 +2 x 1 +never +2 +[\d.]+ ms .* yes\n", printed), printed
    assert "= all-reduce, 0% hidden; 7.7% of the step is that alone" in printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[2], replicas=2, chunks=2, checkpoint="never", '
        'schedule="1f1b", loss_fn=loss_fn)'
    )
    # Replicas take 200 ms to add up gradients; a replica does not fit.
    for more in (("--bandwidth", "10MB/s"), ("--memory", "15.5MB")):
        assert plan(*words, *more, replicas=None) == 0
        assert re.search(r"\n  \S+ \* +2 ", capsys.readouterr().out), more


def test_the_number_of_replicas_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "costs.json", "-n", "4")

    assert plan(*words, replicas=2) == 0
    given = capsys.readouterr().out
    assert plan(*words, replicas=None) == 0

    printed = capsys.readouterr().out
    assert "balance=[1, 1], replicas=2, " in given
    assert {"2 x 2", "1 x 4"} >= set(re.findall(r"\n  \S+[ *]+(\d x \d) ", printed)) != set()


def test_if_nothing_fits_the_least_memory_is_printed_and_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--costs", "costs.json", "-n", "2", "--optimizer", "none", "--chunks", "8")

    assert plan(*words, "--memory", "2MB") == 1
    text = capsys.readouterr().out
    found = re.search(r"nothing fits into 1\.91 MiB: the least is 4\.77 MiB \((\d+) bytes\)", text)
    assert found, text
    assert "    stage = Stage(model, balance=[1, 1], chunks=8, " in text
    least = int(found[1])

    assert plan(*words, "--memory", f"{least}B") == 0
    assert plan(*words, "--memory", f"{least - 1}B") == 1


def test_saved_costs_give_the_same_proposal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-n", "2", "--chunks", "4", "--bandwidth", "10GB/s")
    model = ("mymodel:build", "--sample", "mymodel:sample", "--loss", "mymodel:loss")

    assert plan(*model, *words, "--save", "mine.json") == 0
    measured = capsys.readouterr().out
    assert plan("--costs", "mine.json", *words) == 0
    read = capsys.readouterr().out

    saved = json.loads((folder / "mine.json").read_text())
    assert [layer["name"] for layer in saved["tables"][0]["layers"]] == ["0", "1", "2"]
    assert (saved["batch"], saved["tables"][0]["samples"]) == (8, 2)
    assert "stands in" not in measured
    first = "a mini-batch of"
    measured, read = (text[text.index(first) :] for text in (measured, read))
    assert measured.replace("=loss)", "=loss_fn)") == read


def test_a_link_is_measured_unless_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("mymodel:build", "--sample", "mymodel:sample", "-n", "2", "--chunks", "2")

    def link(*more: str) -> list[str]:
        assert plan(*words, *more) == 0
        return re.findall(r"^transfers: .*?([\w-]+)\)$", capsys.readouterr().out, re.MULTILINE)

    assert link() == ["measured"]
    assert link("--bandwidth", "10GB/s") == ["--bandwidth"]


def test_an_ordinary_module_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--any", "--sample", "mymodel:sample", "--loss", "mymodel:loss", "-n", "2")

    assert plan("mymodel:Added", *words, "--chunks", "4") == 0

    printed = capsys.readouterr().out
    assert "measuring 2 layers" in printed
    assert "stage = Stage(procpipe.sequential(model, *inputs), balance=[1, 1], chunks=4" in printed


def test_a_sample_of_several_inputs_is_repeated_for_a_larger_batch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-n", "2", "--chunks", "2", "--batch", "20", "--save", "mine.json")

    assert plan("mymodel:two", "--sample", "mymodel:two_inputs", *words) == 0
    saved = json.loads((folder / "mine.json").read_text())

    (table,) = saved["tables"]
    assert (saved["batch"], table["samples"], table["input_bytes"]) == (20, 10, 280)
    assert "no --loss is given: the mean of squares of the output stands in" in (
        capsys.readouterr().out
    )


def test_parameters_that_layers_share_are_found(folder: Path) -> None:
    words = ("-n", "3", "--chunks", "2")

    assert plan("mymodel:tied", "--sample", "mymodel:sample", *words, "--save", "mine.json") == 0

    tie = {"name": "0.weight", "layers": [0, 2], "num_bytes": 64, "is_trained": True}
    assert json.loads((folder / "mine.json").read_text())["tables"][0]["ties"] == [tie]


def test_measured_layers_predict_what_autograd_keeps_in_partitions() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(27, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4), nn.Sigmoid(),
    )  # fmt: skip
    sample = torch.rand(6, 2, 8, 8)
    subject = Subject(model, (sample,), None, stand_in_loss, batch=6)
    (table,) = measure_layers(subject, [6], torch.device("cpu"))
    measured = replace(table, loss=None)

    for balance in ([10], [1, 9], [2, 8], [3, 7], [4, 6], [5, 5], [6, 1, 3], [7, 2, 1]):
        x, truth = sample, []
        for last, count in zip(accumulate(balance), balance, strict=True):
            num_bytes, x = kept_bytes(nn.Sequential(*list(model)[last - count : last]), x)
            truth.append(num_bytes)
        assert list(measured.costs(balance).saved_bytes) == truth, balance


def kept_bytes(layers: nn.Sequential, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Run layers; count the memory that autograd keeps, without inputs, outputs and state."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = x.clone().requires_grad_() * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layers(x)
    for tensor in (x, output, *layers.parameters(), *layers.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(saved.values()), output.detach()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_planning_from_costs_of_a_gpu_needs_no_gpu() -> None:
    assert main(["plan", "--costs", "costs.json", "-n", "2", "--device", "cuda"]) == 0


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    table = TextTable("a title", [("schedule", "step"), ("zb-h1 and more", "1.23 ms")])

    table.print(Console(width=10, force_terminal=True))

    assert "  zb-h1 and more  1.23 ms\n" in capsys.readouterr().out


def test_a_run_is_compared_with_its_prediction() -> None:
    found = propose(COSTS, Question(2, 8, chunks=(2,)))
    proposal = next(p for p in found if (p.schedule, p.checkpoint) == ("1f1b", "never"))
    task_s = {("F", 0): 0.004, ("B", 0): 0.008, ("F", 1): 0.004, ("B", 1): 0.012}
    measured = Measured(1.5 * proposal.total_s, 0.5, 1 << 20, task_s)

    rows = {row[0]: row[1:] for row in tasks_table(proposal, measured).rows}
    (row,) = proposals_table([proposal], {proposal: measured}, None, 0.048, None).rows[1:]

    assert rows["stage 0, forward"] == ("4 ms", "4 ms", "+0.0%")
    assert rows["stage 1, backward"] == ("8 ms", "12 ms", "+50.0%")
    assert rows["idle"] == ("33.3%", "50.0%", "+16.7%")
    assert row[4:7] == ["36 ms (54 ms)", "0.89x", "33.3% (50.0%)"]
    assert row[7].endswith(" (1 MiB)")


MODEL = ("mymodel:build", "--sample", "mymodel:sample", "-n", "2")
MISTAKES = [
    (
        ("mymodel:exits", "--sample", "mymodel:sample", "-n", "2"),
        "mymodel:exits(), raised SystemExit: bye",
    ),
    (
        ("mymodel:twice", "--sample", "mymodel:sample", "-n", "2"),
        "the model holds duplicate children: layers '0' and '2' are one Linear",
    ),
    (
        (*MODEL, "--loss", "mymodel:each"),
        "loss_fn returned shape (8, 2), but must return the mean over the micro-batch's samples",
    ),
    (
        ("mymodel:normed", "--sample", "mymodel:sample", "-n", "2", "--chunks", "2,8"),
        "the model cannot be run on micro-batches of 1 sample (while layer '1'",
    ),
    (
        ("mymodel:normed", "--sample", "mymodel:sample", "-n", "2"),
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 8]); "
        "give the numbers of --chunks to try, fewer than 8",
    ),
    ((*MODEL, "--chunks", "8,"), "give a number of at least 1"),
    ((), "the following arguments are required: -n"),
    (("-n", "2"), "one of the arguments MODULE:NAME --hf --costs is required"),
    (("mymodel:build", "-n", "2"), "a sample is needed"),
    (("mymodel", "--sample", "a:b", "-n", "2"), "'mymodel', but must be MODULE:NAME"),
    (("nowhere:x", "--sample", "a:b", "-n", "2"), "there is no module 'nowhere'"),
    (("mymodel:x", "--sample", "a:b", "-n", "2"), "mymodel has no 'x'"),
    (
        ("mymodel:linear", "--sample", "mymodel:sample", "-n", "2"),
        "mymodel:linear is a Linear, but the model must be an nn.Sequential",
    ),
    (
        ("mymodel:Reads", "--any", "--sample", "mymodel:sample", "-n", "2"),
        "mymodel:Reads cannot be cut: CannotCutError: the forward reads values of a tensor",
    ),
    (
        ("mymodel:Added", "--any", "--sample", "mymodel:wide", "-n", "2"),
        "mymodel:Added cannot be cut: RuntimeError: ",
    ),
    (
        ("mymodel:broken", "--sample", "mymodel:sample", "-n", "2"),
        "mymodel:broken(), raised RuntimeError: no data here",
    ),
    (("mymodel:build", "--sample", "mymodel:three", "-n", "2"), "a tuple of 3, but must be"),
    (("mymodel:build", "--sample", "mymodel:number", "-n", "2"), "holds no tensor with samples"),
    (("mymodel:build", "--sample", "mymodel:wide", "-n", "2"), "while layer '0' (Linear) was"),
    ((*MODEL, "--loss", "mymodel:number"), "but the loss must be a function"),
    ((*MODEL[:-1], "4"), "cannot divide 3 layers into 4 partitions"),
    ((*MODEL[:-1], "4", "--replicas", "3"), "3 replicas are asked for on 4 devices"),
    ((*MODEL[:-1], "8", "--replicas", "2"), "cannot divide 3 layers into 4 partitions"),
    ((*MODEL, "--replicas", "2", "--batch", "1"), "has 1 sample, and each of 2 replicas needs at"),
    ((*MODEL, "--memory", "24Gigs"), "'24Gigs' is not an amount of bytes; one reads like 24GiB"),
    (
        (*MODEL, "--bandwidth", "fast"),
        "'fast' is not an amount of bytes; one",
    ),
    ((*MODEL, "--chunks", "4,x"), "x: give a number of at least 1"),
    ((*MODEL, "--costs", "costs.json"), "--costs: not allowed with argument MODULE:NAME"),
    (
        ("--costs", "costs.json", "-n", "2", "--check"),
        "--check runs the model, so it",
    ),
    (("--costs", "costs.json", "costs.json", "-n", "2"), "give one file of costs, or the files"),
    ((*MODEL, "--check", "--estimate"), "not allowed with argument --check"),
    (
        ("--costs", "costs.json", "-n", "2", "--chunks", "16"),
        "has 8 samples of a mini-",
    ),
    (("--costs", "no.json", "-n", "2"), "--costs no.json: [Errno 2] No such file"),
    (
        ("--costs", "mymodel.py", "-n", "2"),
        "--costs mymodel.py: ",
    ),
]


def test_each_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in MISTAKES:
        with pytest.raises(SystemExit) as ended:
            plan(*words)

        printed = capsys.readouterr().err
        assert ended.value.code == 2, words
        assert message in printed, words
        assert "Traceback" not in printed, words


def test_amounts_of_bytes() -> None:
    amounts = {
        "24GiB": 24 << 30,
        "80GB": 80 * 10**9,
        "500MiB": 500 << 20,
        "1.5 kb": 1500,
        "7": 7,
        "7B": 7,
        "20GB/s": 20 * 10**9,
        "1TiB": 1 << 40,
    }
    assert {text: parse_bytes(text) for text in amounts} == amounts
    for text in ("", "GiB", "-1GiB", "1 GiB 2", "1PB", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not an amount of bytes"):
            parse_bytes(text)
