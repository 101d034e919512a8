"""``procpipe plan`` as a user types it, without processes; docs/planning.md is run with them."""

from __future__ import annotations

import argparse
import re
from itertools import accumulate

import pytest
import torch
from torch import nn

from procpipe import NoChunk
from procpipe.balance import Inputs
from procpipe.launch.main import main
from procpipe.launch.plan import command
from procpipe.launch.plan.options import parse_bytes, parser
from procpipe.launch.plan.replay import Usual
from procpipe.launch.plan.report import proposals_table, tasks_table
from procpipe.launch.plan.subject import MistakeError, Subject, load
from procpipe.planner.costs import Layer, Machine, Table, task_seconds
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

twice = nn.Sequential(linear, nn.ReLU(), linear)
normed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
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


def costs(samples: int) -> Table:
    """Return those of two even layers that keep 3 MB a sample each."""
    layers = tuple(
        Layer(
            name,
            task_seconds(samples * 0.001, samples * 0.002),
            output_bytes=samples * 1000,
            held_bytes=samples * 3_001_000,
            kept_bytes=samples * 3_000_000,
            parameter_bytes=1_000_000,
            trained_bytes=1_000_000,
        )
        for name in ("first", "second")
    )
    return Table(samples, layers)


COSTS = command.Source("two layers", 8, 2, costs, Machine())


def plan_costs(*words: str) -> int:
    """Plan the two layers above, with 8 samples."""
    code: int = command.plan(COSTS, parser().parse_args(["--costs", "-", "-n", "2", *words]))
    return code


def test_a_plan_is_made_from_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_costs("--replicas", "1", "--optimizer", "sgd", "--chunks", "8") == 0

    printed = capsys.readouterr().out
    # 8 micro-batches of 1 + 1 + 1 ms (forward and both halves) on each stage, and 1 ms at the ends
    # as the first activation comes and the last gradient goes: zb-h1. On one device, 8 * 6 ms.
    assert "one alone, if it had the memory, would take 48 ms" in printed
    assert re.search(r"zb-h1 \* +2 +never +8 +25 ms +1\.92x", printed), printed
    assert re.search(r"1f1b +2 +never +8 +27 ms +1\.78x", printed), printed
    assert re.search(r"their balances\n  zb-h1 +never +\[1, 1\]\n", printed), printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[1, 1], chunks=8, checkpoint="never", schedule="zb-h1", '
        "loss_fn=loss_fn)"
    )


def test_little_memory_costs_time(capsys: pytest.CaptureFixture[str]) -> None:
    # Parameters and gradients take 2 MB, a micro-batch 3 MB: there is room for one. Schedules hold
    # more, unless all are recomputed.
    words = ("--replicas", "1", "--optimizer", "none", "--chunks", "8")

    assert plan_costs(*words, "--memory", "5.5MB") == 0

    printed = capsys.readouterr().out
    assert re.search(r"zb-h1 \* +2 +always +8 ", printed), printed
    assert "never" not in printed


def test_if_nothing_fits_the_least_memory_is_printed_and_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--replicas", "1", "--optimizer", "none", "--chunks", "8")

    assert plan_costs(*words, "--memory", "2MB") == 1
    text = capsys.readouterr().out
    found = re.search(r"nothing fits into 1\.91 MiB: the least is 4\.77 MiB \((\d+) bytes\)", text)
    assert found, text
    assert "    stage = Stage(model, balance=[1, 1], chunks=8, " in text
    least = int(found[1])

    assert plan_costs(*words, "--memory", f"{least}B") == 0
    assert plan_costs(*words, "--memory", f"{least - 1}B") == 1


def test_stages_and_replicas_are_proposed_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--optimizer", "sgd", "--chunks", "2")

    assert plan_costs(*words, "--bandwidth", "1GB/s") == 0

    printed = capsys.readouterr().out
    # A replica has 4 of 8 samples: 4 * (3 + 3) ms. Half of its gradients, 2 MB, are sent, and half
    # of the sums: 2 ms, which nothing hides, as both layers are in one bucket.
    assert "transfers: 1.0 GB/s" in printed
    assert re.search(r"\n  \S+ \* +1 x 2 +never +2 +26 ms .* 0\.0% +7\.7% ", printed), printed
    assert re.search(r"\n  zb-h1 +2 x 1 +never +2 +[\d.]+ ms ", printed), printed
    assert printed.rstrip().endswith(
        'stage = Stage(model, balance=[2], replicas=2, chunks=2, checkpoint="never", '
        'schedule="1f1b", loss_fn=loss_fn)'
    )
    # Replicas take 200 ms to add up gradients; a replica does not fit.
    for more in (("--bandwidth", "10MB/s"), ("--memory", "15.5MB")):
        assert plan_costs(*words, *more) == 0
        assert re.search(r"\n  \S+ \* +2 ", capsys.readouterr().out), more
    assert plan_costs("-n", "4", "--replicas", "2") == 0
    assert "balance=[1, 1], replicas=2, " in capsys.readouterr().out


MODEL = ("mymodel:build", "--sample", "mymodel:sample", "--loss", "mymodel:loss", "-n", "2")


def test_the_layers_of_a_model_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--chunks", "4", "--estimate"]) == 0

    printed = capsys.readouterr().out
    assert "measuring 3 layers on one CPU thread\nmicro-batches of 1, 2 samples are" in printed
    assert "estimated from layers that run alone; left out is what processes of one" in printed
    assert re.search(r"\nstage = Stage\(model, balance=.*, chunks=4, .*loss_fn=loss\)\n", printed)


def test_an_ordinary_module_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("mymodel:Added", "--any", *MODEL[1:], "--replicas", "1", "--chunks", "4", "--estimate")

    assert main(["plan", *words]) == 0

    printed = capsys.readouterr().out
    assert "measuring 2 layers" in printed
    assert "stage = Stage(procpipe.sequential(model, *inputs), balance=[1, 1], chunks=4" in printed


def test_inputs_are_repeated_for_more_samples_but_not_those_for_all() -> None:
    mask = torch.ones(3, 1)
    inputs = Inputs(torch.arange(3), NoChunk(mask), mask=mask, scale=2.0)
    made = Subject(nn.Sequential(), inputs, {"y": torch.arange(3)}, len, 3)

    found, target = made.of_size(7)

    assert found.values[0].tolist() == target["y"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert found.values[1] is mask
    assert (found.named["mask"].shape, found.named["scale"]) == ((7, 1), 2.0)
    whole = made.of_size(7, is_for_stage=True)[0].values[1]
    assert isinstance(whole, NoChunk)
    assert whole.tensor is mask


def test_measured_layers_predict_what_autograd_keeps_in_partitions() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(27, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4), nn.Sigmoid(),
    )  # fmt: skip
    sample = torch.rand(6, 2, 8, 8)
    made = Subject(model, Inputs(sample), None, lambda y: y.square().mean(), batch=6)
    measured = made.table(6, torch.device("cpu"))

    for balance in ([9, 1], [1, 8, 1], [2, 7, 1], [3, 6, 1], [4, 5, 1], [5, 4, 1], [6, 1, 2, 1]):
        x, truth = sample, []
        for last, count in zip(accumulate(balance), balance, strict=True):
            num_bytes, x = kept_bytes(nn.Sequential(*list(model)[last - count : last]), x)
            truth.append(num_bytes)
        assert [one.kept_bytes for one in measured.costs(balance).partitions[:-1]] == truth[:-1], (
            balance
        )


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


def test_a_run_is_compared_with_its_prediction() -> None:
    found = propose({4: costs(4)}, Machine(), Question(2, 8, chunks=(2,)))
    proposal = next(p for p in found if (p.schedule, p.checkpoint) == ("1f1b", "never"))
    task_s = {("F", 0): 0.004, ("B", 0): 0.008, ("F", 1): 0.004, ("B", 1): 0.012}
    # Stages are busy for 2 * (4 + 8) and 2 * (4 + 12) of 54 ms.
    run = Usual(proposal.timeline.plan, (4, 4), {}, 1, 0.054, task_s, Machine(), {}, 1 << 20)

    compared = tasks_table(proposal, run)
    row = proposals_table([proposal], {proposal: run}, None, 0.048)

    assert re.search(r"stage 0, forward +4 ms +4 ms +\+0\.0%\n", compared), compared
    assert re.search(r"stage 1, backward +8 ms +12 ms +\+50\.0%$", compared), compared
    assert re.search(r"idle +33\.3% +48\.1% +\+14\.8%\n", compared), compared
    assert re.search(r" 36 ms \(54 ms\) +0\.89x +33\.3% \(48\.1%\) .* \(1 MiB\)$", row), row


#: Words, and what is said of them.
MISTAKES = [
    (("-n", "2"), "one of the arguments MODULE:NAME --hf --costs is required"),
    ((*MODEL, "--costs", "x"), "--costs: not allowed with argument MODULE:NAME"),
    ((*MODEL, "--check", "--estimate"), "not allowed with argument --check"),
    ((*MODEL, "--memory", "24Gigs"), "'24Gigs' is not an amount of bytes; one reads like 24GiB"),
    ((*MODEL, "--chunks", "4,x"), "x: give a number of at least 1"),
    (("mymodel:build", "-n", "2"), "--sample and --loss are needed"),
    (("--costs", "x", "-n", "2", "--check"), "--check runs the model, so it"),
    (("--costs", "no.json", "-n", "2"), "--costs no.json: [Errno 2] No such file"),
    (("--costs", "mymodel.py", "-n", "2"), "--costs mymodel.py: mymodel.py is no whole timeline"),
    (("nowhere:x", *MODEL[1:]), "(ModuleNotFoundError: No module named 'nowhere')"),
    (
        (*MODEL[:-1], "4", "--replicas", "1"),
        "3 layers and 8 samples cannot be divided among 4 devices as asked",
    ),
    (
        ("mymodel:normed", *MODEL[1:], "--chunks", "2,8"),
        "the model cannot be run on a micro-batch of 1 sample (while layer '1' (BatchNorm1d) was",
    ),
    (
        (*MODEL[:3], "--loss", "mymodel:each", "-n", "2"),
        "loss_fn returned shape (8, 2), but must return the mean over the micro-batch's samples",
    ),
]


def check_mistake(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])

    printed = capsys.readouterr().err
    assert ended.value.code == 2, words
    assert message in printed, (words, printed)
    assert "Traceback" not in printed, words


def test_each_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in MISTAKES:
        check_mistake(words, message, capsys)


def test_what_is_named_must_be_there_and_of_the_right_kind() -> None:
    for names, message in (
        ({"model": "mymodel"}, "mymodel is a module, but the model must be an nn.Sequential"),
        ({"model": "mymodel:x"}, r"mymodel:x, cannot be imported \(AttributeError: "),
        ({"model": "mymodel:exits"}, r"mymodel:exits\(\), raised SystemExit: bye"),
        ({"model": "mymodel:twice"}, "duplicate children: layers '0' and '2' are one Linear"),
        ({"model": "mymodel:linear"}, "is a Linear, but .* nn.Sequential.*; --any cuts others"),
        ({"model": "mymodel:Reads", "is_cut": True}, "cut: CannotCutError: .* cannot be recorded"),
        ({"model": "mymodel:Added", "is_cut": True, "sample": "mymodel:wide"}, "RuntimeError: "),
        ({"sample": "mymodel:broken"}, r"mymodel:broken\(\), raised RuntimeError: no data here"),
        ({"sample": "mymodel:three"}, "a tuple of 3, but must be"),
        ({"sample": "mymodel:number"}, "holds no tensor with samples"),
        ({"loss": "mymodel:number"}, "but the loss must be a function"),
    ):
        given = {"model": "mymodel:model", "sample": "mymodel:sample", "loss": "mymodel:loss"}
        with pytest.raises(MistakeError, match=message):
            load(**given | names)


def test_amounts_of_bytes() -> None:
    amounts = {
        "24GiB": 24 << 30,
        "80GB": 80 * 10**9,
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
