"""A stage with components of its pipeline switched off, for the ablation only.

    ordered     backward with the micro-batches in reverse, each recomputed while its gradient is
                still to come
    beside      receives are posted ahead, and sends are not waited for
    direct      skip tensors go straight to the stage that pops them

With a component off:

    ordered     the backward pass is in the order of the forward pass, and a micro-batch is
                recomputed once its gradient is there (``unordered``)
    beside      the sender waits until a transfer is over (``_WaitingSender``), and the receiver
                posts no buffer before it needs the message (``_WaitingReceiver``): under the plans
                of the ablation no stage then waits for ever
    direct      each layer passes the skip tensors on to the next (``carrying``)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from procpipe import Stage
from procpipe.plan.routes import ACTIVATION, GRADIENT, SKIP, SKIP_GRADIENT
from procpipe.plan.schedules.gpipe import clock_cycles, recomputed
from procpipe.plan.task import BACKWARD, RECOMPUTE, Cycle, Plan, Task
from procpipe.skip import pop, stash


@dataclass(frozen=True)
class Components:
    """Which components of a pipeline are on; see above."""

    ordered: bool = True
    beside: bool = True
    direct: bool = True


class SwitchedStage(Stage):
    """A stage of which some components are off.

    Takes what :class:`~procpipe.Stage` takes. Where transfers are not beside compute, large tensors
    have to go through sockets (``World.transport``), whose ``settle`` waits for the transfer, and
    every tensor that a stage passes on has to require a gradient.

    Args:
        module: the full model.
        balance: number of layers in each stage.
        components: which are on.
        options: as for a ``Stage``.
    """

    def __init__(
        self, module: nn.Sequential, balance: list[int], components: Components, **options: Any
    ) -> None:
        if not components.ordered:
            mode = options.get("checkpoint", "except_last")
            options["schedule"] = lambda m, n: unordered(m, n, recomputed(mode, m))
        super().__init__(module if components.direct else carrying(module), balance, **options)
        self._components = components

    def _connect(self) -> Any:
        pipeline: Any = super()._connect()
        if not self._components.beside:
            senders, receivers = pipeline.wires.channels.senders, pipeline.wires.channels.receivers
            for key in senders:
                if key[0] in _BESIDE_COMPUTE:
                    senders[key] = _WaitingSender(senders[key])
            for key in receivers:
                if key[0] in _BESIDE_COMPUTE:
                    receivers[key] = _WaitingReceiver(receivers[key])
        return pipeline


# -- ordered --------------------------------------------------------------------------------------


def unordered(m: int, n: int, recompute: Collection[int] = ()) -> Plan:
    """Plan a mini-batch whose backward pass is in the order of the forward pass.

    A recomputation comes in the cycle after the one in which the next stage makes the gradient:

        k   stage 0   stage 1   stage 2          (m = 2, n = 3, recompute = {0, 1})
        0   F0
        1   F1        F0
        2             F1        F0
        3                       F1
        4                       R0
        5                       B0
        6             R0        R1
        7             B0        B1
        8   R0        R1
        9   B0        B1
        10  R1
        11  B1

    Args:
        m: the number of micro-batches.
        n: the number of stages.
        recompute: the micro-batches to recompute.
    """
    work = [(kind, i) for i in range(m) for kind in (RECOMPUTE, BACKWARD)]
    cycles = list(clock_cycles(m, n))
    for k in range(len(work) + 2 * (n - 1)):
        tasks = [
            Task(*work[k - 2 * away], n - 1 - away)
            for away in reversed(range(n))
            if 0 <= k - 2 * away < len(work)
        ]
        cycle: Cycle = tuple(t for t in tasks if t.kind == BACKWARD or t.i in recompute)
        if cycle:
            cycles.append(cycle)
    return Plan(m, n, tuple(cycles))


# -- beside ---------------------------------------------------------------------------------------

_BESIDE_COMPUTE = (ACTIVATION, GRADIENT, SKIP, SKIP_GRADIENT)


class _WaitingSender:
    """The sending end of a channel; waits until the receiver has what was sent."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def send(self, message: Any) -> None:
        self._sender.send(message)
        self._sender.settle()


class _WaitingReceiver:
    """The receiving end of a channel; allows a buffer for each message when it waits for it."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver

    def expect(self) -> None:
        """Do nothing: the buffer is allowed later."""

    def forgo(self) -> None:
        raise NotImplementedError("every tensor that a stage passes on has to require a gradient")

    def take(self) -> Any:
        self._receiver.expect()
        return self._receiver.take()


# -- direct ---------------------------------------------------------------------------------------

_ORIGINAL = "__wrapped__"  # the generator that @skippable has wrapped


def carrying(model: nn.Sequential) -> nn.Sequential:
    """Return the model with its skip tensors handed on from layer to layer, under the same names.

    Takes models whose skip tensors are popped in the opposite order of their stashes, by layers
    without parameters.
    """
    layers = [
        (name, _Skip(layer) if hasattr(layer.forward, _ORIGINAL) else _Passing(layer))
        for name, layer in model.named_children()
    ]
    return nn.Sequential(OrderedDict[str, nn.Module](layers))


class _Passing(nn.Module):
    """A layer that passes on the skip tensors that come beside its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Run the layer; without skip tensors, its input or output goes alone."""
        x, stack = _parted(value)
        return _joined(self.layer(x), stack)


class _Skip(nn.Module):
    """A layer that stashes or pops, on the stack of the skip tensors that come beside its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Not a submodule: Stage would find its declarations and make routes for them.
        self._steps = partial(getattr(layer.forward, _ORIGINAL), layer)

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Run the layer to its end."""
        x, stack = _parted(value)
        steps, given = self._steps(x), None
        while True:
            try:
                request = steps.send(given)
            except StopIteration as end:
                return _joined(end.value, stack)
            given = None
            if isinstance(request, stash):
                stack.append(request.tensor)
            elif isinstance(request, pop):
                given = stack.pop()


def _parted(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, list[Any]]:
    return (value[0], list(value[1:])) if isinstance(value, tuple) else (value, [])


def _joined(x: Tensor, stack: list[Any]) -> Tensor | tuple[Tensor, ...]:
    return (x, *stack) if stack else x
