"""The speed of a pipeline with one device a stage, simulated from each layer's cost on one.

A machine with two cores cannot show eight stages side by side. The simulator can, from seconds
measured here one layer at a time, on one thread or GPU; transfers take no time in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.published.experiment import Experiment, Scale, Setting
from procpipe.balance import balance_by_time, profile_layers
from procpipe.plan.schedules.gpipe import gpipe, recomputed
from procpipe.planner import Costs, simulate


@dataclass(frozen=True)
class LayerCosts:
    """What one micro-batch costs on one device.

    Attributes:
        layers_s: seconds of each layer, forward and backward.
        forward_share: how much of that the forward is, in the whole model.
    """

    layers_s: Sequence[float]
    forward_share: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole model."""
        return sum(self.layers_s)

    def step_s(self, balance: Sequence[int], num_micro_batches: int, checkpoint: str) -> float:
        """Simulate a step with a device a stage."""
        m, n = num_micro_batches, len(balance)
        edges = [sum(balance[:j]) for j in range(n + 1)]
        stages_s = [sum(self.layers_s[first:end]) for first, end in pairwise(edges)]
        forward_s = tuple(s * self.forward_share for s in stages_s)
        backward_s = tuple(s * (1 - self.forward_share) for s in stages_s)
        plan = gpipe(m, n, recompute=recomputed(checkpoint, m))
        return simulate(plan, Costs(forward_s, backward_s, recompute_s=forward_s)).total_s


class Forecast:
    """Balances and simulated speed-ups of one experiment, from measurements in this process."""

    def __init__(self, experiment: Experiment, scale: Scale) -> None:
        self._experiment = experiment
        self._scale = scale
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._balances: dict[int, tuple[int, ...]] = {}
        self._costs: dict[int, LayerCosts] = {}

    def balance(self, setting: Setting) -> tuple[int, ...]:
        """Find the best balance by time, once for each number of stages."""
        n = setting.num_stages
        if n not in self._balances:
            with _one_thread():
                found = balance_by_time(n, *self._model_and_sample(setting.micro_batch))
            self._balances[n] = tuple(found)
        return self._balances[n]

    def speed_up(self, setting: Setting) -> float:
        """Simulate a setting that has a balance; one device that recomputes nothing has 1."""
        baseline = self._experiment.baseline_at(self._scale)
        alone_s = self._costs_of(baseline.micro_batch).total_s / baseline.micro_batch
        costs = self._costs_of(setting.micro_batch)
        step_s = costs.step_s(setting.balance, setting.num_micro_batches, setting.checkpoint)
        return alone_s * setting.batch_size / step_s

    def _costs_of(self, micro_batch: int) -> LayerCosts:
        if micro_batch not in self._costs:
            with _one_thread():
                self._costs[micro_batch] = _measured(*self._model_and_sample(micro_batch))
        return self._costs[micro_batch]

    def _model_and_sample(self, micro_batch: int) -> tuple[nn.Sequential, Tensor]:
        model = self._experiment.model_at(self._scale).to(self._device)
        sample, _ = self._experiment.mini_batch(self._scale, micro_batch, self._device)
        return model, sample


def _measured(model: nn.Sequential, sample: Tensor) -> LayerCosts:
    table = profile_layers(model, sample)
    layers_s = table.layer_seconds()
    forward_s = sum(layer.forward_s for layer in table.layers)
    return LayerCosts(layers_s, forward_s / sum(layers_s))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as a stage does; this matters on CPUs only."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
