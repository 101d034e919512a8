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

from procpipe.balance import divide, layer_profile
from procpipe.launch.console import Table
from procpipe.launch.main import main
from procpipe.launch.plan import measure
from procpipe.launch.plan.check import Rehearsal
from procpipe.launch.plan.measure import measure_model
from procpipe.launch.plan.options import parse_bytes
from procpipe.launch.plan.report import check_table
from procpipe.launch.plan.subject import Subject, stand_in_loss
from procpipe.planner.costs_file import from_text
from procpipe.planner.model import Link
from procpipe.planner.propose import Proposal, Question, propose
from procpipe.replicas.bucket import buckets_of
from procpipe.words import bytes_text, seconds_text

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
unequal = torch.rand(8, 4), torch.rand(7, 2)
number = 3
wide = torch.rand(8, 5)
two = nn.Sequential(nn.Bilinear(4, 3, 2), nn.ReLU())
two_inputs = Inputs(torch.rand(8, 4), torch.rand(8, 3)), torch.rand(8, 2)

twice = nn.Sequential(linear, nn.ReLU(), linear)
normed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
tied[2].weight = tied[0].weight
each = lambda output, target: F.mse_loss(output, target, reduction="none")

def broken():
    raise RuntimeError("no data here")

def exits():
    sys.exit("bye")
"""

#: Two even layers that keep 3 MB a sample each, on 8 samples.
COSTS = {
    "procpipe layer costs": 1,
    "batch": 8,
    "samples": [1],
    "layers": [
        {
            "name": name,
            "forward_s": [0.001],
            "backward_s": [0.002],
            "output_bytes": [1000],
            "kept_bytes": [3_000_000],
            "parameter_bytes": 1_000_000,
            "trained_bytes": 1_000_000,
        }
        for name in ("first", "second")
    ],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    monkeypatch.setattr(measure, "_BUDGET_S", 0.0)  # as few rounds as possible
    monkeypatch.setattr(layer_profile, "_MIN_ROUNDS", 1)
    monkeypatch.setattr(measure, "_NUM_ROUNDS", 1)
    (tmp_path / "mymodel.py").write_text(MYMODEL)
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    return tmp_path


def plan(*words: str, replicas: int | None = 1) -> int:
    """Plan one pipeline, another number of replicas, or all numbers of them (None)."""
    of_replicas = [] if replicas is None else ["--replicas", str(replicas)]
    code: int = main(["plan", "--device", "cpu", *of_replicas, *words])
    return code


def test_a_plan_is_made_from_saved_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--costs", "costs.json", "-n", "2", "--optimizer", "sgd", "--chunks", "8") == 0

    printed = capsys.readouterr().out
    # 8 micro-batches of 1 + 1 + 1 ms (forward and both halves) on each stage, and 1 ms at the ends
    # as the first activation comes and the last gradient goes: zb-h1. On one device, 8 * 6 ms.
    assert "one alone, if it had the memory, would take 48 ms" in printed
    assert re.search(r"zb-h1 \* +never +8 +25 ms +1\.92x", printed), printed
    assert re.search(r"gpipe +never +8 +27 ms +1\.78x", printed), printed
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
    assert re.search(r"gpipe +never +8 .* no\n", printed), printed
    assert re.search(r"1f1b +always +8 .* yes\n", printed), printed
    assert re.search(r"1f1b +except_last +8 .* no\n", printed), printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[1, 1], chunks=8, checkpoint="always", schedule="zb-h1", '
        "loss_fn=loss_fn)"
    )


#: A row of the table of stages and replicas, from the step on.
TIMES = r"+[\d.]+ m?s +[\d.]+x +[\d.]+%"


def test_stages_and_replicas_are_proposed_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "costs.json", "-n", "2", "--optimizer", "sgd", "--chunks", "2")

    assert plan(*words, "--replica-bandwidth", "1GB/s", replicas=None) == 0

    printed = capsys.readouterr().out
    # A replica has 4 of 8 samples: 4 * (3 + 3) ms. Half of its gradients, 2 MB, are sent, and half
    # of the sums: 2 ms, which nothing hides, as both layers are in one bucket.
    assert re.search(r"\n  1 x 2 \* +\S+ +never +2 +26 ms .* 0\.0% +7\.7% +0% .* yes\n", printed)
    assert re.search(rf"\n  2 x 1 +\S+ +never +2 {TIMES} +[\d.]+ MiB +yes\n", printed), printed
    assert "= all-reduce, 0% hidden; 7.7% of the step is that alone" in printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[2], replicas=2, chunks=2, checkpoint="never", '
        'schedule="1f1b", loss_fn=loss_fn)'
    )
    assert plan(*words, "--replica-bandwidth", "10MB/s", replicas=None) == 0
    assert "\n  2 x 1 * " in capsys.readouterr().out, "replicas take 200 ms to add up gradients"
    assert plan(*words, "--memory", "15.5MB", replicas=None) == 0
    printed = capsys.readouterr().out
    assert "\n  2 x 1 * " in printed, "a replica does not fit"
    assert re.search(r"\n  1 x 2 .* no\n", printed), printed


def test_the_number_of_replicas_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "costs.json", "-n", "4")

    assert plan(*words, replicas=2) == 0
    given = capsys.readouterr().out
    assert plan(*words, replicas=None) == 0

    printed = capsys.readouterr().out
    assert "balance=[1, 1], replicas=2, " in given
    assert "stages x replicas" not in given
    assert "left out: 4 stages x 1 replica, as 4 devices are asked for, but the mo" in printed
    assert {"2 x 2", "1 x 4"} == set(re.findall(r"\n  (\d x \d)", printed))


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


def test_if_nothing_fits_other_numbers_of_replicas_are_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--costs", "costs.json", "-n", "2", "--chunks", "4", "--optimizer", "none")
    none, some = "Nothing fits with another number of replicas either.\n", "proposals that fit with"

    assert plan(*words, "--memory", "9MB", replicas=2) == 1
    assert "that fit with --replicas 1.\nMore devices, " in capsys.readouterr().out
    assert plan(*words, "--memory", "9MB", replicas=1) == 0
    capsys.readouterr()
    assert plan(*words, "--memory", "2MB", replicas=2) == 1
    assert none in capsys.readouterr().out
    assert plan(*words, "--memory", "2MB", replicas=None) == 1  # all of them are in a table
    text = capsys.readouterr().out
    assert none not in text
    assert some not in text


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
    assert [layer["type"] for layer in saved["layers"]] == ["Linear", "ReLU", "Linear"]
    assert (saved["batch"], saved["samples"]) == (8, [2])
    assert "stands in" not in measured
    assert measured[measured.index("a mini-batch") :].replace("=loss)", "=loss_fn)") == read


def test_a_link_is_measured_if_it_is_used_or_saved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("mymodel:build", "--sample", "mymodel:sample", "-n", "2", "--chunks", "2")

    def links(*more: str) -> list[str]:
        assert plan(*words, *more, replicas=None) == 0
        printed = capsys.readouterr().out
        return re.findall(r"^(?:transfers|all-reduces): .*?([\w-]+)\)$", printed, re.MULTILINE)

    assert links() == ["measured", "measured"]
    assert links("--bandwidth", "10GB/s") == ["--bandwidth"]
    assert links("--replica-bandwidth", "10GB/s") == ["measured"]
    assert links("--bandwidth", "10GB/s", "--save", "mine.json") == ["measured", "measured"]


def test_a_sample_of_several_inputs_is_repeated_for_a_larger_batch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-n", "2", "--chunks", "2", "--batch", "20", "--save", "mine.json")

    assert plan("mymodel:two", "--sample", "mymodel:two_inputs", *words) == 0
    saved = json.loads((folder / "mine.json").read_text())

    assert (saved["batch"], saved["samples"], saved["input_bytes"]) == (20, [10], [280.0])
    assert "no --loss is given: the mean of squares of the output stands in" in (
        capsys.readouterr().out
    )


def test_measured_layers_predict_what_autograd_keeps_in_partitions() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(27, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4), nn.Sigmoid(),
    )  # fmt: skip
    sample = torch.rand(6, 2, 8, 8)
    subject = Subject(model, (sample,), None, stand_in_loss, batch=6)
    measured = replace(measure_model(subject, [6], torch.device("cpu")), loss=None)

    for balance in ([10], [1, 9], [2, 8], [3, 7], [4, 6], [5, 5], [6, 1, 3], [7, 2, 1]):
        x, truth = sample, []
        for last, count in zip(accumulate(balance), balance, strict=True):
            num_bytes, x = kept_bytes(nn.Sequential(*list(model)[last - count : last]), x)
            truth.append(num_bytes)
        assert list(measured.costs(balance, 6, Link()).saved_bytes) == truth, balance


def test_planned_buckets_are_those_that_replicas_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("procpipe.plan.buckets", "procpipe.planner.model"):
        monkeypatch.setattr(f"{module}.BUCKET_BYTES", 300)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)), nn.Linear(6, 2))
    model.append(nn.Linear(2, 2, bias=False))  # a layer has one tensor of at most 300 bytes, or two
    model[3].weight = model[0].weight
    subject = Subject(model, (torch.rand(4, 6),), None, stand_in_loss, batch=4)
    measured = measure_model(subject, [4], torch.device("cpu"))

    for balance, placement in (([3, 3], [0, 1]), ([2, 1, 3], [0, 1, 0]), ([6], [0])):
        planned = measured.buckets(balance, placement, 4, Link(), 2)
        cuts = [0, *accumulate(balance)]
        for stage in range(max(placement) + 1):
            parts = [j for j, its_stage in enumerate(placement) if its_stage == stage]
            layers = [layer for j in parts for layer in list(model)[cuts[j] : cuts[j + 1]]]
            own = dict.fromkeys(p for layer in layers for p in layer.parameters())
            tied = [p for p in own if p is model[0].weight and len(balance) == 2]
            real = [
                sum(p.nbytes for p in bucket.missing)
                for bucket in buckets_of([p for p in own if not any(p is t for t in tied)])
            ]
            found = [bucket.num_bytes for bucket in planned[stage]]
            assert found == [*real, *(p.nbytes for p in tied)], (balance, stage)


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


def test_default_sizes_that_the_model_refuses_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan("mymodel:normed", "--sample", "mymodel:sample", "-n", "2") == 0

    printed = capsys.readouterr().out
    assert "left out: micro-batches of less than 2, since the model cannot be run on 1 s" in printed
    assert "Expected more than 1 value per channel" in printed
    assert re.search(r"gpipe[ *]+never +[124] ", printed), printed
    assert not re.search(r"(never|always|except_last) +8 ", printed), printed


def test_layers_that_share_a_parameter_are_divided(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-n", "3", "--chunks", "2")

    assert plan("mymodel:tied", "--sample", "mymodel:sample", *words, "--save", "mine.json") == 0
    assert plan("--costs", "mine.json", *words) == 0

    printed = capsys.readouterr().out
    # Layers 0 and 2 are on two of the stages: each has 16 numbers, and sends them to the other.
    assert len(re.findall(r"^  0\.weight +0, [12] +64 B +128 B$", printed, re.MULTILINE)) == 2


def test_layers_of_an_earlier_versions_costs_stay_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-n", "2", "--chunks", "2", "--save", "mine.json")
    assert plan("mymodel:tied", "--sample", "mymodel:sample", *words) == 0
    path = folder / "mine.json"
    whole = json.loads(path.read_text())
    del whole["ties"]
    path.write_text(json.dumps(whole | {"shared": [[0, 2]]}))
    capsys.readouterr()

    assert plan("--costs", "mine.json", "-n", "2", "--chunks", "2") == 0
    with pytest.raises(SystemExit):
        plan("--costs", "mine.json", "-n", "3", "--chunks", "2")

    printed = capsys.readouterr()
    assert "balance=[3, 1]" in printed.out
    assert "0.weight" not in printed.out
    assert "layers that must be in one partition, '0' and '2' for instance" in printed.err


def test_a_missing_folder_is_an_error_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan(*MODEL, "--save", "nowhere/mine.json")

    captured = capsys.readouterr()
    assert "--save nowhere/mine.json cannot be written: there is no folder " in captured.err
    assert captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_planning_from_costs_of_a_gpu_needs_no_gpu() -> None:
    assert main(["plan", "--costs", "costs.json", "-n", "2", "--device", "cuda"]) == 0


@pytest.mark.parametrize(("width", "is_drawn"), [(28, True), (27, False)])
def test_a_table_is_never_cut(
    width: int, is_drawn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("a title", [("schedule", "step"), ("zb-h1 and more", "1.23 ms")])

    table.print(Console(width=width, force_terminal=True))

    printed = capsys.readouterr().out
    assert "zb-h1 and more" in printed
    assert ("│" in printed) == is_drawn


def proposal_and_measured() -> tuple[Proposal, Rehearsal]:
    """Return a proposal, and the measurement of a run of its plan."""
    model = from_text(json.dumps(COSTS)).model
    found = propose(model, Question(2, 8, chunks=(2,)), divide)
    proposal = next(p for p in found if (p.schedule, p.checkpoint) == ("1f1b", "never"))
    task_s = {"F0": 0.004, "B0": 0.008, "F1": 0.004, "B1": 0.008}
    return proposal, Rehearsal(proposal.total_s, 0.5, task_s)


def test_a_run_is_compared_with_its_prediction() -> None:
    proposal, measured = proposal_and_measured()

    rows = {row[0]: row[1:] for row in check_table(proposal, measured, is_cpu=True).rows}

    assert rows["stage 0, forward"] == ("4 ms", "4 ms", "+0.0%")
    assert rows["idle"] == ("33.3%", "50.0%", "+16.7%")


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
        "--chunks 8: the model cannot be run on micro-batches of 1 sample (while layer '1'",
    ),
    ((*MODEL, "--chunks", "8,"), "'8,' has a comma without a number on each side"),
    ((*MODEL, "--memory", "0"), "0: a device needs memory"),
    ((), "the following arguments are required: -n"),
    (("-n", "2"), "a model is needed, as in mymodel:build, or --hf FOLDER, or --costs"),
    (("mymodel:build", "-n", "2"), "a sample is needed"),
    (("mymodel", "--sample", "a:b", "-n", "2"), "'mymodel', but must be MODULE:NAME"),
    (("nowhere:x", "--sample", "a:b", "-n", "2"), "there is no module 'nowhere'"),
    (("mymodel:x", "--sample", "a:b", "-n", "2"), "mymodel has no 'x'"),
    (
        ("mymodel:linear", "--sample", "mymodel:sample", "-n", "2"),
        "mymodel:linear is a Linear, but the model must be an nn.Sequential",
    ),
    (
        ("mymodel:broken", "--sample", "mymodel:sample", "-n", "2"),
        "mymodel:broken(), raised RuntimeError: no data here",
    ),
    (("mymodel:build", "--sample", "mymodel:three", "-n", "2"), "a tuple of 3, but must be"),
    (("mymodel:build", "--sample", "mymodel:number", "-n", "2"), "holds no tensor with samples"),
    (
        ("mymodel:build", "--sample", "mymodel:unequal", "-n", "2"),
        "the input has 8 samples, but the target 7",
    ),
    (("mymodel:build", "--sample", "mymodel:wide", "-n", "2"), "while layer '0' (Linear) was"),
    ((*MODEL, "--loss", "mymodel:number"), "but the loss must be a function"),
    ((*MODEL[:-1], "4"), "-n 4: the model has 3 layers"),
    ((*MODEL[:-1], "4", "--replicas", "3"), "3: all replicas have equally many stages, so of 4 d"),
    ((*MODEL[:-1], "8", "--replicas", "2"), "-n 8: the model has 3 layers, and each stage needs"),
    ((*MODEL, "--replicas", "2", "--batch", "1"), "has 1 sample, too few for 2 replicas of as"),
    ((*MODEL, "--memory", "24Gigs"), "'24Gigs' is not an amount of bytes; one reads like 24GiB"),
    ((*MODEL, "--bandwidth", "fast"), "'fast' is not a bandwidth; one reads like 20GB/s"),
    ((*MODEL, "--chunks", "4,16"), "--chunks 16: the mini-batch has 8 samples"),
    ((*MODEL, "--chunks", "4,x"), "x: give a number of at least 1"),
    ((*MODEL, "--costs", "costs.json"), "so leave out the model"),
    (("--costs", "costs.json", "-n", "2", "--check"), "so leave out --check"),
    (("--costs", "costs.json", "-n", "3"), "3 devices are asked for, but the model has 2 layers"),
    (("--costs", "costs.json", "-n", "2", "--chunks", "16"), "16 chunks are asked for"),
    (("--costs", "no.json", "-n", "2"), "--costs no.json cannot be read"),
    (("--costs", "mymodel.py", "-n", "2"), "--costs mymodel.py is not a file of costs: it is not"),
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
        "1TiB": 1 << 40,
    }
    assert {text: parse_bytes(text) for text in amounts} == amounts
    for text in ("", "GiB", "-1GiB", "1 GiB 2", "1PB", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not an amount of bytes"):
            parse_bytes(text)


def test_sizes_and_times_as_text() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 1 << 20, 24 << 30, 3 << 40)] == [
        "0 B", "999 B", "0.977 KiB", "1 MiB", "24 GiB", "3,072 GiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 0.00001, 0.0123, 0.9994, 0.99951, 75.0)] == [
        "0", "10 µs", "12.3 ms", "999 ms", "1 s", "75 s",
    ]  # fmt: skip
