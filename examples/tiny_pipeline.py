"""A whole pipeline in one file, to be read from top to bottom: procpipe without its precautions.

    torchrun --nproc_per_node=2 examples/tiny_pipeline.py        or with 3, 4, … processes

A model that is too big for one device is cut into parts of consecutive layers. Each process has one
part, and is called a stage. In the forward pass each stage sends what its layers make, the
*activation*, to the next stage. In the backward pass the *gradient* of that activation comes back.

If a whole mini-batch goes through at once, one stage works while the others are idle:

    time      0   1   2   3   4   5
    stage 0   F                   B            F: forward of this stage's layers
    stage 1       F           B                B: backward of this stage's layers
    stage 2           F   B

So the mini-batch is divided into micro-batches, which follow one another through the stages. While
stage 1 computes with the first micro-batch, stage 0 computes with the second. The gradients of the
micro-batches add up to that of the mini-batch. A pipeline changes where and when something is
computed, but not the result.

What is left out, and where procpipe does it (docs/architecture.md continues from here):

    data read by one process; tuples, masks   procpipe/data/, procpipe/run/batches.py
    a balance; a model too big to be built    procpipe/balance/, procpipe/model/materialize.py
    other schedules, each proved to end       procpipe/plan/
    shared memory, GPUs, any dtype            procpipe/channel/
    frozen, in-place, tied layers; BatchNorm  procpipe/compute/, procpipe/batchnorm.py
    skip connections across several stages    procpipe/skip/
    failures and ends of processes            procpipe/run/calls.py, procpipe/channel/monitor.py
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# -- 1. The model is cut, and the mini-batch divided -----------------------------------------------


def cut(model: nn.Sequential, balance: Iterable[int]) -> list[nn.Module]:
    """Cut a model into parts of consecutive layers; ``balance`` is the number of layers of each.

    A slice of an ``nn.Sequential`` has the layers themselves, under their names in the whole model.
    """
    return [model[start:end] for start, end in pairwise(accumulate(balance, initial=0))]


def divide(input: Tensor, target: Tensor, m: int) -> list[tuple[Tensor, Tensor, float]]:
    """Divide a mini-batch into at most ``m`` micro-batches: input, target and share of the samples.

    The loss is a mean over the samples of a mini-batch. It is the sum of the micro-batches' means,
    each times the share of its micro-batch: the last micro-batch may be smaller than the others.
    """
    parts = zip(input.chunk(m), target.chunk(m), strict=True)
    return [(x, y, len(x) / len(input)) for x, y in parts]


# -- 2. The order of a stage's tasks ---------------------------------------------------------------
#
#    m: number of micro-batches    i: index of a micro-batch    k: clock cycle
#    n: number of stages           j: index of a stage

Task = tuple[str, int]  # forward or backward of micro-batch i: ("F", i) or ("B", i)
Schedule = Callable[[int, int, int], list[Task]]  # from m, n, j to the tasks of stage j, in order


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield what runs at the same time in the forward pass: the pairs (i, j) with i + j = k.

    k   (i,j) (i,j) (i,j)            (m = 3, n = 3)
    -   ----- ----- -----
    0   (0,0)
    1   (1,0) (0,1)
    2   (2,0) (1,1) (0,2)
    3         (2,1) (1,2)
    4               (2,2)

    Stage j runs micro-batch i one cycle after stage j-1 ran it, and one cycle after it ran i-1
    itself. The table is that of torchgpipe (Kim et al. 2020), https://arxiv.org/abs/2004.09910.
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(n) if 0 <= k - j < m]


def gpipe(m: int, n: int, j: int) -> list[Task]:
    """List the tasks of stage j in GPipe: all forward, then all backward in reverse.

    time      0   1   2   3   4   5   6   7   8   9   10  11            (m = 4, n = 3)
    stage 0   F0  F1  F2  F3                  B3  B2  B1  B0
    stage 1       F0  F1  F2  F3          B3  B2  B1  B0
    stage 2           F0  F1  F2  F3  B3  B2  B1  B0

    In each pass, a stage is idle for n-1 of m+n-1 cycles. This idle time is called the *bubble*. It
    is small if there are many more micro-batches than stages.

    No process looks at a clock. A stage runs the tasks of its row in order, and each task waits for
    its input. The times of the table follow from that.

    Source: Huang et al., "GPipe" (2019), https://arxiv.org/abs/1811.06965.
    """
    forward = [i for cycle in clock_cycles(m, n) for i, stage in cycle if stage == j]
    return [("F", i) for i in forward] + [("B", i) for i in reversed(forward)]


def one_f_one_b(m: int, n: int, j: int) -> list[Task]:
    """List the tasks of stage j in 1F1B: one forward, one backward, after a warm-up.

    time      0   1   2   3   4   5   6   7   8   9   10  11            (m = 4, n = 3)
    stage 0   F0  F1  F2          B0  F3  B1      B2      B3
    stage 1       F0  F1      B0  F2  B1  F3  B2      B3
    stage 2           F0  B0  F1  B1  F2  B2  F3  B3

    The bubble is as in GPipe, but less memory is needed. From F to B of a micro-batch, a stage
    holds what backward needs. In GPipe this grows to m micro-batches, here to n-j at most.

    Source: Narayanan et al. (2021), who call it PipeDream-Flush, https://arxiv.org/abs/2006.09503.
    """
    num_warm_up = min(n - 1 - j, m)  # one for each stage that comes later
    tasks = [("F", i) for i in range(num_warm_up)]
    for i in range(num_warm_up, m):  # steady
        tasks += [("F", i), ("B", i - num_warm_up)]
    return tasks + [("B", i) for i in range(m - num_warm_up, m)]  # drain


# -- 3. Messages between neighbours ----------------------------------------------------------------


class Messages:
    """Sends tensors to other processes and receives theirs, by torch.distributed.

    A send must not block. In 1F1B a stage sends an activation to the next stage while that one
    sends a gradient back. If each send waited for the receive of the other side, neither stage
    would reach its receive: a deadlock. So ``isend`` starts a send and returns; only receives wait.

    A message needs no name. From one stage to the next go only activations, and back come only
    gradients. They arrive in the order in which they are sent, that of the tasks that make them.
    All stages run the forward tasks in one order, and the backward tasks in one order.
    """

    MAX_DIMS = 8

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of every message; the processes agree, since all know the model
        self.sends: list[Any] = []  # torch's handles, which keep the tensors until the wait

    def send(self, tensor: Tensor, to: int) -> None:
        """Start to send a tensor, which must not change before ``wait_until_sent``.

        To receive a tensor, a process must know its shape. So a header of fixed size comes first:
        the number of dimensions, and the size of each.
        """
        sizes = [tensor.dim(), *tensor.shape]
        header = torch.tensor(sizes + [0] * (1 + self.MAX_DIMS - len(sizes)))
        self.sends += [dist.isend(header, to), dist.isend(tensor.contiguous(), to)]

    def receive(self, source: int) -> Tensor:
        """Wait for the next tensor of another process."""
        header = torch.empty(1 + self.MAX_DIMS, dtype=torch.int64)
        dist.recv(header, source)
        num_dims, *sizes = header.tolist()
        tensor = torch.empty(sizes[:num_dims], dtype=self.dtype)
        dist.recv(tensor, source)
        return tensor

    def wait_until_sent(self) -> None:
        """Wait until all sends have ended."""
        while self.sends:
            self.sends.pop().wait()


# -- 4. A stage ------------------------------------------------------------------------------------

LossFn = Callable[[Tensor, Tensor], Tensor]  # from output and target to a mean over samples


class TinyStage:
    """One process's part of a model, and what it does in a step.

    Args:
        model: the whole model, with equal parameters on every process.
        balance: the number of layers of each stage; one entry for each process.
        loss_fn: the loss of a micro-batch, called on the last stage.
        recompute: hold only input and output of a micro-batch, and run forward again in backward.
            That takes time, and saves the memory of what autograd keeps between the layers.
    """

    def __init__(
        self, model: nn.Sequential, balance: Iterable[int], loss_fn: LossFn, recompute: bool
    ) -> None:
        self.j, self.n = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = self.j == 0, self.j == self.n - 1
        self.layers = cut(model, balance)[self.j]
        self.loss_fn, self.recompute = loss_fn, recompute
        self.messages = Messages(next(model.parameters()).dtype)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of each micro-batch
        self.max_held = 0

    def step(self, input: Tensor, target: Tensor, m: int, schedule: Schedule) -> Tensor:
        """Add a mini-batch's gradients to ``.grad``, and return its loss on every process.

        Every process calls this with the same arguments. Only the first stage uses the input, and
        only the last one the target.
        """
        self.micro_batches = divide(input, target, m)
        self.loss = torch.zeros((), dtype=self.messages.dtype)
        for kind, i in schedule(len(self.micro_batches), self.n, self.j):
            run = self.forward if kind == "F" else self.backward
            run(i)
            self.max_held = max(self.max_held, len(self.held))
        self.messages.wait_until_sent()
        dist.broadcast(self.loss, src=self.n - 1)
        return self.loss

    def forward(self, i: int) -> None:
        """Take the input of micro-batch i, run the layers, and send the output on.

        Autograd does not see other processes. Each stage has a graph of its own for each
        micro-batch. It begins at the input, a leaf that will get a gradient, and ends at the
        output. What is sent is the output's values, detached from the graph.
        """
        if self.is_first:
            input, _, _ = self.micro_batches[i]
        else:
            input = self.messages.receive(self.j - 1).requires_grad_()
        if self.recompute:
            output = checkpoint(self.run_layers, i, input, use_reentrant=False)
        else:
            output = self.run_layers(i, input)
        if self.is_last:
            self.loss += output.detach()
        else:
            self.messages.send(output.detach(), self.j + 1)
        self.held[i] = input, output

    def backward(self, i: int) -> None:
        """Take the gradient of the output of micro-batch i, and send that of the input back.

        ``autograd.backward`` applies the chain rule from where the next stage has left it: the
        gradient of this stage's output. It adds to the gradients of the parameters, and leaves that
        of the input in ``input.grad``. The last stage's output is the loss, where the rule starts.
        """
        input, output = self.held.pop(i)
        gradient = None if self.is_last else self.messages.receive(self.j + 1)
        torch.autograd.backward(output, gradient)
        if not self.is_first:
            assert input.grad is not None
            self.messages.send(input.grad, self.j - 1)

    def run_layers(self, i: int, input: Tensor) -> Tensor:
        """Return the output of the layers; on the last stage, micro-batch i's part of the loss."""
        output: Tensor = self.layers(input)
        if self.is_last:
            _, target, share = self.micro_batches[i]
            output = self.loss_fn(output, target) * share
        return output


# -- 5. A script -----------------------------------------------------------------------------------


def build_model() -> nn.Sequential:
    """Return the same model of nine layers on every process."""
    torch.manual_seed(1)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), *hidden, nn.Linear(32, 4))


def main() -> None:
    """Train a pipeline in three ways, each time beside the whole model in every process."""
    dist.init_process_group("gloo")  # finds the other processes by what torchrun has set
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    input, target = torch.randn(30, 16), torch.randint(4, (30,))
    balance = [len(part) for part in torch.arange(9).tensor_split(dist.get_world_size())]
    for schedule, recompute in ((gpipe, False), (one_f_one_b, False), (one_f_one_b, True)):
        whole = build_model()
        stage = TinyStage(build_model(), balance, F.cross_entropy, recompute)
        optimizer = torch.optim.SGD([*stage.layers.parameters(), *whole.parameters()], lr=0.5)
        lines = [f"{schedule.__name__}, {recompute=}"]
        for _ in range(3):
            optimizer.zero_grad()
            loss = stage.step(input, target, 8, schedule)  # 4 samples in each, 2 in the last
            expected = F.cross_entropy(whole(input), target)
            expected.backward()
            optimizer.step()
            lines.append(f"    loss {loss:.8f}, of the whole model {expected:.8f}")
            torch.testing.assert_close(loss, expected)
        if stage.is_first:
            print(*lines, f"    held at most {stage.max_held} micro-batches", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
