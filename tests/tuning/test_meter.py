"""The measurements for "auto" in one process; the rest is in tests/dist/test_auto.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from procpipe.compute.layers import PartitionLayers
from procpipe.compute.partition import Partition
from procpipe.plan.routes import Transfer
from procpipe.plan.task import Task
from procpipe.run.messages import Order, StepDetail
from procpipe.run.observer import Observers
from procpipe.run.trace import Trace
from procpipe.tree import Flat
from procpipe.tuning.auto import BYTES, AutoSchedule
from procpipe.tuning.meter import Meter
from procpipe.tuning.step_costs import Report

ORDER = Order("step", detail=StepDetail("gpipe", BYTES))
TASK = Task("F", 0, 0)


class Control:
    """Keeps what this rank reports."""

    def agree(self, ours, combine):
        self.report = ours
        return ()


@pytest.fixture
def parts() -> Any:
    control: Any = Control()
    partition = Partition(PartitionLayers({"0": nn.Tanh()}, torch.device("cpu"), is_first=True))
    return Meter(control, AutoSchedule(), {0: partition}, Trace()), partition, control


def run_forward(partition):
    x = torch.randn(3, 5, requires_grad=True)
    partition.forward(0, Flat.of((x,))._replace(requires_grad=(True,)), keep=True, recompute=False)


def test_saved_bytes_and_message_sizes_are_reported(parts):
    meter, partition, control = parts
    with Observers([meter]).step(ORDER):
        meter.begin_layers(TASK)
        run_forward(partition)
        meter.end_task(TASK)
        meter.held({Transfer("activation", i, 0, 1): 10 + i for i in range(2)})

    report = Report(**control.report)
    assert report.sizes == [
        ("saved", 0, 0, 0),  # tanh saves only its output, which counts elsewhere
        ("activation", 0, 1, 10),
        ("activation", 0, 1, 11),
    ]


def fail_in_a_task(meter):
    meter.begin_layers(TASK)
    raise ZeroDivisionError


def test_a_failed_step_leaves_no_hooks(parts):
    meter, partition, _ = parts
    with pytest.raises(ZeroDivisionError), Observers([meter]).step(ORDER):
        fail_in_a_task(meter)

    run_forward(partition)
    assert meter._tensors._saved == []
