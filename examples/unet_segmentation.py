"""Train a small U-Net to find flowers in noisy grey pictures, with one process a stage.

    python examples/unet_segmentation.py                             one stage
    torchrun --nproc_per_node=2 examples/unet_segmentation.py        two; or three, four, …

It writes unet_segmentation.png: the input, the true mask, and the network's output before and
after training. The two photographs come with scikit-learn. The mask of the petals is computed from
the colours of one photograph; the other has no petals, but a bright sky that looks like petals in
grey. Training uses the part of each photograph left of the dashed line only.

The skip tensors of the U-Net go straight from the process that has the encoder of a level to the
one that has the decoder.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from tqdm import tqdm

from procpipe import Stage

sys.path.insert(0, str(Path(__file__).parents[1]))  # wherever this is started from
from examples.models.unet import unet

TRAINED_WIDTHS = 102, 153  # columns of each photograph that are trained on, of 320
CROP = 96  # side of the pieces that are trained on, in pixels
NOISE = 0.2  # standard deviation, where black is 0 and white is 1


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # as under torchrun; the number changes the order of additions
    torch.manual_seed(0)
    colored, photos, truth = load_photos()
    input = with_noise(photos, torch.Generator().manual_seed(2))
    crops = random_crops(photos, truth, args.batch_size)

    model = build_model()
    stage = Stage(
        model,
        balance=args.balance or "time",
        sample=torch.zeros(args.batch_size, 1, CROP, CROP),
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        loss_fn=F.binary_cross_entropy_with_logits,
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.learning_rate)
    scheduler = OneCycleLR(optimizer, args.learning_rate, total_steps=args.steps)
    stage.print(f"{len(model)} layers, balance {stage.balance}")
    stage.print(f"a threshold of brightness   {overlaps(by_brightness(input, truth), truth)}")

    before = predict(stage, input)
    stage.print(f"before training             {overlaps(before, truth)}")
    for first in range(0, args.steps, args.evaluate_every):
        num_steps = min(args.evaluate_every, args.steps - first)
        loss = train(stage, optimizer, scheduler, crops, num_steps)
        after = predict(stage, input)
        stage.print(f"step {first + num_steps:4}   loss {loss:.4f}    {overlaps(after, truth)}")

    stage.print(f"\n{stage.report()}")
    columns = {
        "what the network sees": input,
        "what it is to find": colored * (0.2 + 0.8 * truth),
        "what it finds before training": before,
        "and after training": after,
    }
    draw(args.picture, columns)
    stage.print(f"\nsee {args.picture}")


# -- the photographs ----------------------------------------------------------------------------


def load_photos() -> tuple[Tensor, Tensor, Tensor]:
    """Return two photographs in colour and in grey, and where petals are.

    Half as large as they come: ``(2, 3, 213, 320)`` and twice ``(2, 1, 213, 320)`` float.
    """
    full_size = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2) / 255
    truth = (F.avg_pool2d(warm_colored(full_size), 2) > 0.5).float()
    truth[0] = 0  # a pagoda: its roofs have the colour of the petals
    colored = F.avg_pool2d(full_size, 2)
    return colored, colored.mean(1, keepdim=True), truth


def warm_colored(photos: Tensor) -> Tensor:
    """Return 1 where there is more red than green, without small holes and specks; else 0."""
    red, green, _ = photos.split(1, dim=1)
    warm = (F.avg_pool2d(red - green, 7, stride=1, padding=3) > 0.06).float()
    without_holes = shrink(grow(warm, 5), 5)
    return grow(shrink(without_holes, 27), 27)


def grow(mask: Tensor, size: int) -> Tensor:
    columns = F.max_pool2d(mask, (size, 1), stride=1, padding=(size // 2, 0))
    return F.max_pool2d(columns, (1, size), stride=1, padding=(0, size // 2))


def shrink(mask: Tensor, size: int) -> Tensor:
    return -grow(-mask, size)


def with_noise(photos: Tensor, generator: torch.Generator) -> Tensor:
    return photos + NOISE * torch.randn(photos.shape, generator=generator)


def random_crops(photos: Tensor, truth: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield crops of the photographs in turn, and the truth, ``(batch_size, 1, CROP, CROP)``."""
    generator = torch.Generator().manual_seed(1)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    pairs = torch.cat([photos, truth], dim=1)
    while True:
        crops = []
        for k in range(batch_size):
            top = below(photos.shape[2] - CROP + 1)
            left = below(TRAINED_WIDTHS[k % 2] - CROP + 1)
            crop = pairs[k % 2, :, top : top + CROP, left : left + CROP]
            crops.append(crop.flip(2) if below(2) else crop)
        photo, mask = torch.stack(crops).split(1, dim=1)
        yield with_noise(photo, generator), mask


# -- the model and its training -----------------------------------------------------------------


def build_model() -> nn.Sequential:
    """Return a U-Net of three levels, with few channels and so without dropout."""
    model = unet(depth=3, num_convs=1, base_channels=16, in_channels=1)
    for layer in model:
        if isinstance(layer, nn.Dropout2d):
            layer.p = 0.0
    return model


def train(
    stage: Stage,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    crops: Iterator[tuple[Tensor, Tensor]],
    num_steps: int,
) -> float:
    """Take steps, and return their mean loss."""

    def next_crops() -> Iterator[Any]:
        yield from tqdm(islice(crops, num_steps), total=num_steps, leave=False, disable=None)

    total = torch.zeros((), device=stage.device)
    for photos, masks in stage.batches(next_crops):
        optimizer.zero_grad()
        total += stage.step(photos, masks)
        optimizer.step()
        scheduler.step()
    return total.item() / num_steps


@torch.no_grad()
def predict(stage: Stage, input: Tensor) -> Tensor:
    """Return how likely each pixel is part of a flower, ``(2, 1, 213, 320)``."""
    stage.eval()
    likely: Tensor = stage.fetch(stage(input)).sigmoid().cpu()
    stage.train()
    return likely


# -- how good it is -----------------------------------------------------------------------------


def overlaps(likely: Tensor, truth: Tensor) -> str:
    """Describe the intersection over union with the truth, left and right of the dashed lines."""
    left, right = (overlap(likely[side], truth[side]) for side in sides(truth))
    return f"IoU {left:.3f} where it is trained, {right:.3f} elsewhere"


def overlap(likely: Tensor, truth: Tensor) -> float:
    found, real = likely > 0.5, truth > 0.5
    return float((found & real).sum() / (found | real).sum())


def sides(truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pixels are left of the dashed lines, and which right."""
    columns = torch.arange(truth.shape[3])
    is_left = columns < torch.tensor(TRAINED_WIDTHS).view(2, 1, 1, 1)
    return is_left.expand_as(truth), ~is_left.expand_as(truth)


def by_brightness(input: Tensor, truth: Tensor) -> Tensor:
    """Return 1 where the input is bright, else 0, for the best threshold: a baseline."""
    smooth = F.avg_pool2d(input, 9, stride=1, padding=4, count_include_pad=False)
    found = [(smooth > threshold / 100).float() for threshold in range(101)]
    overlaps = [overlap(mask, truth) for mask in found]
    return found[overlaps.index(max(overlaps))]


def draw(path: Path, columns: dict[str, Tensor]) -> None:
    """Write a picture of both photographs and their segmentation."""
    figure = Figure(figsize=(14, 5.4), layout="constrained")
    figure.suptitle("Finding flowers in grey: trained left of the dashed line only")
    axes = figure.subplots(2, len(columns))
    for (title, images), axes_of_column in zip(columns.items(), axes.T, strict=True):
        axes_of_column[0].set_title(title)
        for image, width, ax in zip(images, TRAINED_WIDTHS, axes_of_column, strict=True):
            ax.imshow(image.permute(1, 2, 0).clamp(0, 1), cmap="gray", vmin=0, vmax=1)
            ax.axvline(width, color="tab:orange", linestyle="--")
            ax.set_axis_off()
    write(figure, path)


def write(figure: Figure, path: Path) -> None:
    """Write a picture by a rename: every process writes the same one, and the last one stays."""
    unfinished = path.with_suffix(f".{os.getpid()}.png")
    figure.savefig(unfinished)
    unfinished.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--balance", type=int, nargs="+", help="number of layers of each stage")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="crops in a mini-batch")
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    parser.add_argument("--checkpoint", default="never", choices=["always", "except_last", "never"])
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--picture", type=Path, default=Path("unet_segmentation.png"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
