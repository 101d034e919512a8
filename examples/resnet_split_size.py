"""Measure how fast a ResNet-101 trains: on one device, cut in two, and as a pipeline.

    torchrun --nproc_per_node=2 examples/resnet_split_size.py

It writes resnet_split_size.png: the time of a mini-batch, mean and standard deviation,

    one device        the whole model in one process, in plain PyTorch; the others wait
    model parallel    one stage a process, the mini-batch in one piece: one works at a time
    pipelined         the same stages, the mini-batch in pieces of the split size

and pipelined for every split size of a sweep. All processes are on this machine, with one thread
each (or a GPU each). The ways take turns, so a drift in the machine's speed affects all alike.

By default the images are small, so that it takes two minutes on two cores. A split size below 16
is slow there for another reason: in a process of one thread, PyTorch uses a slower convolution for
so few images. The size of the original:

    --image-size 128 --batch-size 120 --mini-batches 3 --repeats 10
    --split-size 20 --sweep 1 3 5 8 10 12 20 40 60

Source: the experiment of PyTorch's tutorial "Single-Machine Model Parallel Best Practices",
https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html, there with ResNet-50
and one process for all devices.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import SGD

from procpipe import Stage

sys.path.insert(0, str(Path(__file__).parents[1]))  # wherever this is started from
from examples.models.resnet import resnet101

NUM_CLASSES = 1000
LEARNING_RATE = 1e-3


@dataclass
class Way:
    """A way to train, in pieces of how many images, and how long each repeat took."""

    name: str
    split_size: int
    seconds: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Seconds a mini-batch."""
        return statistics.mean(self.seconds)

    @property
    def deviation(self) -> float:
        """Of the repeats, in seconds a mini-batch."""
        return statistics.stdev(self.seconds)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    classes = torch.randint(NUM_CLASSES, (args.batch_size,))
    mini_batches = [(images, classes)] * args.mini_batches

    stage = Stage(
        resnet101(NUM_CLASSES),
        balance=args.balance or "time",
        sample=images[: args.split_size],
        checkpoint="never",
        loss_fn=F.cross_entropy,
    )
    optimizer = SGD(stage.parameters(), LEARNING_RATE)
    on_one_device = plain_training(mini_batches, stage.device)
    stage.print(f"ResNet-101, {args.batch_size} images of {args.image_size} x {args.image_size}")
    stage.print(f"{len(stage.balance)} stages, balance {stage.balance}")

    one_device = Way("one device", args.batch_size)
    model_parallel = Way("model parallel", args.batch_size)
    sweep = [Way("pipelined", split_size) for split_size in args.sweep]
    ways = [one_device, model_parallel, *sweep]
    for repeat in range(args.repeats + 1):
        for way in ways:
            if way is one_device:
                seconds = time_plain_training(stage, on_one_device)
            else:
                stage.chunks = args.batch_size // way.split_size
                seconds = time_pipeline(stage, optimizer, mini_batches)
            if repeat > 0:  # the first is to warm up
                way.seconds.append(seconds / len(mini_batches))

    stage.print(f"\n{table(ways)}\n\n{stage.report()}")
    pipelined = sweep[args.sweep.index(args.split_size)]
    title = (
        f"ResNet-101, {args.batch_size} images of {args.image_size} x {args.image_size}, "
        f"{len(stage.balance)} processes: {hardware(stage)}; mean ± standard deviation of "
        f"{args.repeats} repeats"
    )
    draw(args.picture, title, [one_device, model_parallel, pipelined], sweep)
    stage.print(f"\nsee {args.picture}")


# -- what is measured ---------------------------------------------------------------------------


def plain_training(
    mini_batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> Iterator[float]:
    """Train the whole model on one device before each yield; yields the seconds it took."""
    model = resnet101(NUM_CLASSES).to(device)
    optimizer = SGD(model.parameters(), LEARNING_RATE)
    while True:
        start = time.perf_counter()
        for images, classes in mini_batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), classes.to(device))
            loss.backward()
            optimizer.step()
        wait_device(device)
        yield time.perf_counter() - start


def time_plain_training(stage: Stage, on_one_device: Iterator[float]) -> float:
    """Return the seconds of training on one device, while the processes of other stages wait.

    Only one process reads the iterator given to ``batches``, so only that process trains.
    """
    seconds = [stage.fetch(seconds) for seconds in stage.batches(islice(on_one_device, 1))]
    return float(seconds[0])


def time_pipeline(
    stage: Stage, optimizer: SGD, mini_batches: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Return the seconds until all stages have trained."""
    wait_all(stage)
    start = time.perf_counter()
    for images, classes in mini_batches:
        optimizer.zero_grad()
        stage.step(images, classes)
        optimizer.step()
    wait_all(stage)
    return float(stage.fetch(time.perf_counter() - start))


def wait_all(stage: Stage) -> None:
    """Wait until every stage has called this and has nothing left to compute."""
    wait_device(stage.device)
    stage.report()


def wait_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hardware(stage: Stage) -> str:
    return "a GPU each" if stage.device.type == "cuda" else "CPUs, one thread each"


# -- the output ---------------------------------------------------------------------------------


def table(ways: list[Way]) -> str:
    """Format the seconds of each way as a table."""
    header = f"{'':14} {'split size':>10} {'s a mini-batch':>15} {'deviation':>10} {'speed-up':>9}"
    return "\n".join([header, *(line(way, ways[0]) for way in ways)])


def line(way: Way, reference: Way) -> str:
    return (
        f"{way.name:14} {way.split_size:>10} {way.mean:>15.3f} {way.deviation:>10.2g} "
        f"{reference.mean / way.mean:>8.2f}x"
    )


def draw(path: Path, title: str, three: list[Way], sweep: list[Way]) -> None:
    """Write a picture: three ways side by side, and the sweep of the split size."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    draw_bars(left, three)
    draw_sweep(right, three[:2], sweep)
    write(figure, path)


def draw_bars(axes: Axes, ways: list[Way]) -> None:
    *names, last = (way.name for way in ways)
    labels = [*names, f"{last},\nsplit size {ways[-1].split_size}"]
    colors = ["tab:gray", "tab:orange", "tab:blue"]
    means, deviations = [way.mean for way in ways], [way.deviation for way in ways]
    axes.bar(labels, means, yerr=deviations, capsize=6, color=colors)
    axes.set_ylabel("time of a mini-batch in s")


def draw_sweep(axes: Axes, levels: list[Way], sweep: list[Way]) -> None:
    looks = [("tab:gray", "-"), ("tab:orange", "--")]  # both are seen if they coincide
    for way, (color, style) in zip(levels, looks, strict=True):
        axes.axhline(way.mean, color=color, linestyle=style, label=way.name)
        axes.axhspan(way.mean - way.deviation, way.mean + way.deviation, color=color, alpha=0.15)
    sizes = [way.split_size for way in sweep]
    means, deviations = [way.mean for way in sweep], [way.deviation for way in sweep]
    axes.errorbar(
        sizes, means, deviations, fmt="o-", capsize=4, color="tab:blue", label="pipelined"
    )
    axes.set_xticks(sizes)
    axes.set_xlabel("split size: images in a micro-batch")
    axes.legend()


def write(figure: Figure, path: Path) -> None:
    """Write a picture by a rename: every process writes the same one, and the last one stays."""
    unfinished = path.with_suffix(f".{os.getpid()}.png")
    figure.savefig(unfinished)
    unfinished.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--balance", type=int, nargs="+", help="number of layers of each stage")
    parser.add_argument("--image-size", type=int, default=64, help="pixels a side")
    parser.add_argument("--batch-size", type=int, default=96, help="images in a mini-batch")
    parser.add_argument("--mini-batches", type=int, default=1, help="in a repeat")
    parser.add_argument("--repeats", type=int, default=5, help="2 or more, after one to warm up")
    parser.add_argument("--split-size", type=int, default=24, help="to compare the three ways with")
    parser.add_argument("--sweep", type=int, nargs="+", default=[8, 16, 24, 32, 48])
    parser.add_argument("--picture", type=Path, default=Path("resnet_split_size.png"))
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("a deviation takes 2 repeats or more")
    for split_size in (args.split_size, *args.sweep):
        if args.batch_size % split_size:
            parser.error(
                f"a split size of {split_size} does not divide the {args.batch_size} images of a "
                "mini-batch"
            )
    args.sweep = sorted({args.split_size, *args.sweep})
    return args


if __name__ == "__main__":
    main()
