"""A stage's peak of held bytes equals the one of ``simulate``, and does not grow over steps.

Every layer keeps the number of rows, so widths give all sizes: an activation of a micro-batch takes
``rows * width * 8`` bytes in float64.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from procpipe import is_recomputing
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe, recomputed
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from tests.cases import pairs
from tests.dist.stages import MODES, stage_of

pytestmark = pytest.mark.on_gpus

#: Columns of the inputs of stages 0, 1, …, and of the last stage's output.
WIDTHS = (6, 40, 3, 17, 8)
ROWS = 5
TARGET_WIDTH = 2
NUM_STEPS = 30


def make_model(num_stages):
    """One layer a stage, of known widths."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(WIDTHS[j], WIDTHS[j + 1], dtype=torch.float64) for j in range(num_stages))
    )


def loss_of(output, target):
    return output.mean() * target.mean()


def predicted(num_stages, m, mode, style, has_target=True):
    """Return each stage's peak bytes in the simulation."""
    sizes = [ROWS * width * 8 for width in WIDTHS[: num_stages + 1]]
    recompute = recomputed(mode, m)
    if style == "step":
        sizes[-1] = 8  # the last stage keeps the loss of each micro-batch as the root
    costs = Costs(
        forward_s=(1.0,) * num_stages,
        backward_s=(1.0,) * num_stages,
        recompute_s=(1.0,) * num_stages,
        input_bytes=sizes[0],
        output_bytes=tuple(sizes[1:]),
        target_bytes=ROWS * TARGET_WIDTH * 8 if has_target else 0,
    )
    stages = range(num_stages)
    boundaries = Routes(num_stages)
    if style == "step":
        has_target = has_target and num_stages > 1
        routes = Routes(num_stages, target=has_target)
        plans = [(gpipe(m, num_stages, recompute=recompute), routes)]
    elif style == "evaluation":
        routes = Routes(num_stages, target=has_target and num_stages > 1)
        plans = [(forward_plan(m, num_stages), routes)]
    elif style == "forward without gradients":
        plans = [(forward_plan(m, num_stages), boundaries)]
    else:  # the plan of the backward pass starts with all that the forward pass has kept
        plans = [(backward_plan(m, num_stages, recompute), boundaries)]
    timelines = [simulate(plan, costs, routes) for plan, routes in plans]
    return [max(timeline.peak_bytes(j) for timeline in timelines) for j in stages]


def run(stage, style, m):
    inputs = torch.randn(m * ROWS, WIDTHS[0], dtype=torch.float64)
    target = torch.randn(m * ROWS, TARGET_WIDTH, dtype=torch.float64)
    if style == "step":
        stage.step(inputs, target)
    elif style == "evaluation":
        stage.eval()
        stage.step(inputs, target)
        stage.train()
    elif style == "forward without gradients":
        with torch.no_grad():
            stage(inputs)
    else:
        stage(inputs).sum().backward()


STYLES = ("step", "forward and backward", "evaluation", "forward without gradients")


def peaks(bare, styles, counts):
    """Return this stage's peak for each case, in an order all ranks share."""
    found = {}
    for style, mode, m in pairs(styles, MODES, counts):
        options: Any = {"chunks": m, "checkpoint": mode, "loss_fn": loss_of}
        model, balance = make_model(bare.num_ranks), [1] * bare.num_ranks
        with stage_of(bare, f"{style} {mode} {m}", model, balance, **options) as stage:
            for _ in range(2):
                run(stage, style, m)
            statistics = stage.statistics()
            assert statistics.held_bytes == 0, f"{style} {mode} {m}"
        found[style, mode, m] = statistics.peak_held_bytes
    return found


def peaks_by_step(bare, mode):
    """Return the peak and the held bytes after each of many steps, and counts of live tensors."""
    model = make_model(bare.num_ranks)
    balance = [1] * bare.num_ranks
    num_tensors, statistics = [], []
    options: Any = {"chunks": 4, "checkpoint": mode, "loss_fn": loss_of}
    with stage_of(bare, mode, model, balance, **options) as stage:
        optimizer = torch.optim.AdamW(stage.parameters())
        for k in range(NUM_STEPS):
            optimizer.zero_grad()
            run(stage, "step", 4)
            if k % 10 == 0:
                run(stage, "evaluation", 4)
            optimizer.step()
            statistics.append(stage.statistics())
            if k in (2, NUM_STEPS // 2, NUM_STEPS - 1):
                num_tensors.append(count_tensors())
    return (
        [s.peak_held_bytes for s in statistics],
        [s.held_bytes for s in statistics],
        num_tensors,
    )


def count_tensors():
    gc.collect()
    # Not isinstance, which would import torch's lazy modules.
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


class Keep(nn.Module):
    """Notes the memory of its inputs and outputs, and counts how much of it is in use."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.notes: list[StorageWeakRef] = []

    def __deepcopy__(self, memo):
        return Keep(len(self.weight))

    def forward(self, input):
        output = input * self.weight
        self.notes += [StorageWeakRef(each.untyped_storage()) for each in (input, output)]
        return output

    def num_alive(self):
        return sum(not note.expired() for note in self.notes)


def alive_after(bare, mode, width):
    """Count a layer's inputs and outputs that outlive their mini-batch.

    The model's own input is alive on rank 0, as the test holds it. The garbage collector is off.
    """
    model = nn.Sequential(*(Keep(width) for _ in range(bare.num_ranks)))
    options: Any = {"chunks": 4, "checkpoint": mode, "loss_fn": torch.mean}
    with stage_of(bare, f"{mode} {width}", model, [1] * bare.num_ranks, **options) as stage:
        layer: Any = stage[0]
        alive = []
        gc.disable()
        try:
            for call in range(8):
                inputs = torch.randn(8, width, dtype=torch.float64)
                if call < 4:
                    stage.step(inputs)
                elif call < 6:
                    stage(inputs).sum().backward()
                elif call == 6:
                    stage(inputs)  # without backward
                    stage.step(inputs)
                else:
                    with torch.no_grad():
                        stage.step(inputs)
                del inputs
                # All ranks have ended the call, so that every acknowledgement is there.
                stage.clip_grad_norm_(math.inf)
                alive.append(layer.num_alive())
        finally:
            gc.enable()
    return alive


class Peek(nn.Module):
    """Notes how many of its outputs are in use when its backward pass begins."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.notes: list[StorageWeakRef] = []
        self.num_alive: list[int] = []

    def __deepcopy__(self, memo):
        return Peek(len(self.weight))

    def forward(self, input):
        if is_recomputing():
            self.num_alive.append(sum(not note.expired() for note in self.notes))
        output = input * self.weight
        if not is_recomputing():
            self.notes.append(StorageWeakRef(output.untyped_storage()))
        return output


def outputs_in_use(bare):
    """Count first outputs alive as the first recomputation begins, and before the second."""
    width = 5000
    model = nn.Sequential(*(Peek(width) for _ in range(bare.num_ranks)))
    options: Any = {"chunks": 4, "checkpoint": "always", "loss_fn": torch.mean}
    with stage_of(bare, "peek", model, [1] * bare.num_ranks, **options) as stage:
        stage.step(torch.randn(8, width, dtype=torch.float64))
        layer: Any = stage[0]
        return layer.num_alive


def held_while_open(bare, mode):
    """Return the bytes held between forward and backward; check that none are held afterwards."""
    options: Any = {"chunks": 2, "checkpoint": mode, "loss_fn": loss_of}
    model, balance = make_model(bare.num_ranks), [1] * bare.num_ranks
    inputs = torch.randn(2 * ROWS, WIDTHS[0], dtype=torch.float64)
    with stage_of(bare, mode, model, balance, **options) as stage:
        stage(inputs)
        held = stage.statistics().held_bytes
        stage(inputs).sum().backward()
        assert stage.statistics().held_bytes == 0
        return held


def test_the_prediction_of_a_small_case():
    """Two stages, two micro-batches, nothing recomputed: 5 rows of 6, 40 and 3 columns, 8 bytes.

    stage 0   2 inputs of 240, 2 outputs of 1600, and in the backward pass 2 gradients of 1600
    stage 1   2 inputs of 1600, 2 losses of 8, 2 targets of 80
    """
    assert predicted(2, 2, "never", "step") == [2 * 240 + 4 * 1600, 2 * (1600 + 8 + 80)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_peak_equals_the_simulation(ranks, num_ranks):
    by_rank = ranks(num_ranks).run(peaks, STYLES, (1, 2, 6), world=False).values()

    for style, mode, m in by_rank[0]:
        found = [of_rank[style, mode, m] for of_rank in by_rank]
        assert found == predicted(num_ranks, m, mode, style), f"{style}, {mode}, m = {m}"


@pytest.mark.only_on_cpus  # GPUs lag behind their hosts, and what they will still send is kept
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_flat_over_many_steps(ranks, mode):
    for peaks, held, num_tensors in ranks(3).run(peaks_by_step, mode, world=False).values():
        assert peaks == [peaks[0]] * NUM_STEPS
        assert peaks[0] > 0
        assert held == [0] * NUM_STEPS
        assert num_tensors == [num_tensors[0]] * 3


@pytest.mark.parametrize("width", [4, 5000], ids=["inside tokens", "behind tokens"])
@pytest.mark.only_on_cpus  # as above
@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_outlives_its_mini_batch(ranks, mode, width):
    for alive in ranks(2).run(alive_after, mode, width, world=False).values():
        assert alive == [0] * 8


def test_sent_tensors_are_freed_when_they_have_arrived(ranks):
    """Not with the next message, which may come only after the whole backward pass.

    Stage 0 recomputes its last micro-batch before it waits for a gradient, so an output may still
    be in transit; after the wait for the first gradient, all have been received.
    """
    first, _ = ranks(2).run(outputs_in_use, world=False).values()

    assert first[0] <= 4
    assert first[1:] == [0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_held_between_forward_and_backward(ranks, mode):
    # Inputs of 240 and 1600 bytes of both micro-batches, and outputs of 1600 and 120 of those that
    # are not recomputed.
    num_outputs = {"always": 0, "except_last": 1, "never": 2}[mode]
    expected = [2 * 240 + num_outputs * 1600, 2 * 1600 + num_outputs * 120]

    assert ranks(2).run(held_while_open, mode, world=False).values() == expected
