"""The models that contenders train, each chosen for what it shows about a pipeline.

There are three sizes of each: for two cores, for GPUs, and tiny ones to see that a part runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.gpt import gpt
from examples.models.unet import unet
from procpipe.balance import balance_by_time


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        name: as on the command line.
        shows: what it shows about a pipeline, in a few words.
        sizes: the model and its micro-batch, in a few words.
        model: builds it, the same on every rank.
        input_shape: of one micro-batch; float between 0 and 1, or tokens.
        target_shape: of one micro-batch; likewise.
        loss_fn: ``(output, target) -> 0-dim loss``, the mean over samples.
        num_words: inputs are tokens below it; 0 for float.
        num_classes: targets are classes below it; 0 for float.
        is_even: whether all layers cost the same; else the balance is found by time.
        has_skips: whether it has skip tensors.
        is_autocast: whether it is trained in bfloat16 autocast.
    """

    name: str
    shows: str
    sizes: str
    model: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    num_words: int = 0
    num_classes: int = 0
    is_even: bool = True
    has_skips: bool = False
    is_autocast: bool = False


@dataclass(frozen=True)
class Job:
    """A workload on ``num_stages`` processes, in ``num_micro_batches``.

    All contenders of one launch share a job, and so one balance.

    Attributes:
        workload: what is trained.
        num_stages: processes, n.
        num_micro_batches: in a mini-batch, m.
        device: ``"cpu"`` or ``"cuda"``; ranks share GPUs if there are fewer.
        transport: of procpipe's large tensors; None for the one that it chooses.
        balances: those that are known, by number of partitions.
    """

    workload: Workload
    num_stages: int
    num_micro_batches: int
    device: str = "cpu"
    transport: str | None = None
    balances: dict[int, list[int]] = field(default_factory=dict)

    @property
    def devices(self) -> list[torch.device]:
        """Every rank's device."""
        if self.device == "cpu":
            return [torch.device("cpu")] * self.num_stages
        num_gpus = torch.cuda.device_count()
        return [torch.device("cuda", rank % num_gpus) for rank in range(self.num_stages)]

    @property
    def own_device(self) -> torch.device:
        """This rank's device."""
        return self.devices[dist.get_rank()] if dist.is_initialized() else self.devices[0]

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks use one GPU."""
        return self.device == "cuda" and torch.cuda.device_count() < self.num_stages

    @cached_property
    def input(self) -> Tensor:
        """A mini-batch's input on this rank's device, with the same values on every rank."""
        return self._data(self.workload.input_shape, 1, self.workload.num_words)

    @cached_property
    def target(self) -> Tensor:
        """A mini-batch's target on this rank's device, with the same values on every rank."""
        return self._data(self.workload.target_shape, 2, self.workload.num_classes)

    def model(self) -> nn.Sequential:
        """Build the model on this rank's device, with the same parameters every time."""
        torch.manual_seed(0)
        with self.own_device:
            return self.workload.model()

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return each micro-batch's input and target."""
        m = self.num_micro_batches
        return list(zip(self.input.chunk(m), self.target.chunk(m), strict=True))

    def balance(self, num_partitions: int) -> list[int]:
        """Divide the layers among parts, the same on every rank, which all call it."""
        if num_partitions not in self.balances:
            self.balances[num_partitions] = self._find_balance(num_partitions)
        return self.balances[num_partitions]

    def _find_balance(self, num_partitions: int) -> list[int]:
        if self.workload.is_even:
            each, more = divmod(len(self.model()), num_partitions)
            return [each + (part < more) for part in range(num_partitions)]
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            sample = self.input[: self.workload.input_shape[0]]
            found = [balance_by_time(num_partitions, self.model().to(self.own_device), sample)]
        dist.broadcast_object_list(found)
        return list(found[0])

    def _data(self, shape: tuple[int, ...], seed: int, below: int) -> Tensor:
        size = (shape[0] * self.num_micro_batches, *shape[1:])
        data = torch.rand(size, generator=torch.Generator().manual_seed(seed))
        return ((data * below).long() if below else data).to(self.own_device)


# -- models ---------------------------------------------------------------------------------------


def linears(num_layers: int, width: int, *more: type[nn.Module]) -> nn.Sequential:
    """Build equal layers, each a matrix and what follows it."""
    if not more:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), *(m() for m in more)) for _ in range(num_layers)]
    )


def transformer(width: int, num_heads: int) -> nn.Sequential:
    """Build eight encoder layers without dropout."""
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(8)
        ]
    )


class Wait(nn.Module):
    """Simulates a layer: takes a fixed time without using a core.

    So that what is measured is the order of events and the transport, also on a machine with fewer
    cores than processes.

    Args:
        seconds: of a forward; a backward takes twice as long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and return the input's values."""
        found: Tensor = _Wait.apply(x, self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return found


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.like, ctx.seconds = weight, seconds
        time.sleep(seconds)
        # Not a view, which torch's ZBV would refuse.
        return x.new_empty(0).set_(x)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient.contiguous(), torch.zeros_like(ctx.like), None


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Compute the mean cross entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


# -- workloads ------------------------------------------------------------------------------------


def _tiny() -> Workload:
    sizes = "8 x Linear(16, 16), micro-batch 4"
    return Workload("tiny", "host cost of a task", sizes, partial(linears, 8, 16), (4, 16), (4, 16))


def _transformer(width: int, num_heads: int, num_tokens: int, samples: int) -> Workload:
    shape = (samples, num_tokens, width)
    sizes = f"8 layers, d {width}, {num_tokens} tokens, micro-batch {samples}"
    model = partial(transformer, width, num_heads)
    return Workload("transformer", "the ordinary case", sizes, model, shape, shape)


def _mlp(width: int, samples: int) -> Workload:
    sizes = f"8 x Linear({width}, {width}) and ReLU, micro-batch {samples}"
    model, shape = partial(linears, 8, width, nn.ReLU), (samples, width)
    return Workload("mlp", "large activations, less compute", sizes, model, shape, shape)


def _blocks(width: int, samples: int) -> Workload:
    sizes = f"16 x (Linear({width}, {width}), GELU), micro-batch {samples}"
    model, shape = partial(linears, 16, width, nn.GELU), (samples, width)
    return Workload("blocks", "equal layers for 2 to 16 stages", sizes, model, shape, shape)


def _overlap(task_ms: float, mib: float) -> Workload:
    num_floats = int(mib * (1 << 18))
    return Workload(
        "overlap",
        "whether transfers run beside compute",
        f"4 x a wait of {task_ms:g} ms forward and twice that backward, {mib:g} MiB a message",
        lambda: nn.Sequential(*[Wait(task_ms / 1e3) for _ in range(4)]),
        (1, num_floats),
        (1, 1),
        lambda output, target: output.mean(),
    )


def _unet(depth: int, num_convs: int, channels: int, pixels: int, samples: int) -> Workload:
    return Workload(
        "unet",
        "skip routes, memory-bound layers",
        f"U-Net of depth {depth}, {num_convs} convolutions, base {channels}, {pixels} px, "
        f"micro-batch {samples}",
        partial(unet, depth, num_convs, channels),
        (samples, 3, pixels, pixels),
        (samples, 1, pixels, pixels),
        F.binary_cross_entropy_with_logits,
        is_even=False,
        has_skips=True,
    )


def _gpt(
    words: int, num_layers: int, width: int, num_heads: int, context: int, samples: int
) -> Workload:
    return Workload(
        "gpt",
        "a language model in bfloat16 autocast",
        f"GPT of {num_layers} blocks, width {width}, {num_heads} heads, {words} words, "
        f"micro-batch {samples} x {context} tokens",
        partial(gpt, words, num_layers, width, num_heads, context),
        (samples, context),
        (samples, context),
        token_loss,
        num_words=words,
        num_classes=words,
        is_even=False,
        is_autocast=True,
    )


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


#: For two cores, with one thread each.
WORKLOADS = _by_name(
    _tiny(),
    _transformer(256, 4, 128, 2),
    _mlp(1024, 128),
    _unet(3, 2, 16, 128, 1),
    _overlap(10, 16),
)

#: By ``--sizes``: for two cores, for GPUs (``gpt`` has 1 B parameters), and to see that it runs.
SIZES = {
    "small": WORKLOADS,
    "full": _by_name(
        _tiny(),
        _transformer(2048, 16, 512, 4),
        _mlp(8192, 1024),
        _blocks(4096, 1024),
        _unet(5, 5, 64, 192, 4),
        _gpt(32768, 24, 1792, 14, 1024, 2),
    ),
    "tiny": _by_name(
        _tiny(),
        _transformer(16, 2, 8, 1),
        _mlp(16, 2),
        _overlap(1, 0.25),
        _blocks(8, 4),
        _unet(2, 1, 2, 16, 1),
        _gpt(64, 2, 16, 2, 8, 1),
    ),
}
