"""Train a small convolutional network on handwritten digits, with one process a stage.

    python examples/train_digits.py                             one stage
    torchrun --nproc_per_node=2 examples/train_digits.py        two; or three, four, …
    torchrun --nproc_per_node=2 --max-restarts=3 examples/train_digits.py --save runs/digits
                                                             resumes from the last save if killed

Every process runs this same file, and any number of them gives the same losses. The data are the
1,797 digits of 8 x 8 pixels that come with scikit-learn.
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from procpipe import Stage, state


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # as under torchrun; the number changes the order of additions
    torch.manual_seed(0)
    train_loader, test_images, test_digits = load_data()
    loader = state.Resumable(train_loader)
    model = build_model()

    stage = Stage(
        model,
        balance=args.balance,  # by default divided by parameters and estimated work
        sample=test_images[:2],
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        deferred_batch_norm=True,  # statistics of the whole mini-batch
        loss_fn=F.cross_entropy,
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
    stage.print(f"{len(model)} layers, balance {stage.balance}")

    progress: dict[str, Any] = {"epoch": 1, "step": 0, "loader": loader}
    progress["loss"] = torch.zeros((), device=stage.device)
    if args.save and state.load(args.save, stage, optimizer, extra=progress, missing_ok=True):
        stage.print(f"resumed after {progress['step']} steps")

    while progress["epoch"] <= args.epochs:
        epoch = progress["epoch"]
        for input, target in stage.batches(with_progress(loader, f"epoch {epoch:2}")):
            optimizer.zero_grad()
            loss = stage.step(input, target)
            optimizer.step()
            progress["loss"] += loss
            progress["step"] += 1
            if args.save and progress["step"] % args.save_every == 0:
                save(args.save, stage, optimizer, progress)
        mean = progress["loss"].item() / len(loader)
        correct = accuracy(stage, test_images, test_digits)
        stage.print(f"epoch {epoch:2}   loss {mean:.4f}   test accuracy {correct:.1%}")
        progress["epoch"] += 1
        progress["loss"].zero_()

    if args.save:
        save(args.save, stage, optimizer, progress)
    stage.print(f"\n{stage.report()}")


def build_model() -> nn.Sequential:
    """Return an ordinary flat ``nn.Sequential``, which can be cut between any two layers."""
    return nn.Sequential(
        *(*convolution(1, 32), *convolution(32, 32), nn.MaxPool2d(2)),  # 8 x 8 -> 4 x 4 pixels
        *(*convolution(32, 64), *convolution(64, 64), nn.MaxPool2d(2)),  # 4 x 4 -> 2 x 2
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def convolution(num_inputs: int, num_outputs: int) -> list[nn.Module]:
    """Return the layers of a 3 x 3 convolution."""
    return [
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    ]


def load_data() -> tuple[DataLoader[Any], Tensor, Tensor]:
    """Return mini-batches to train on, and a fifth of the images and digits to test with."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target)
    test, train = torch.randperm(len(images)).split([360, len(images) - 360])
    train_set = TensorDataset(images[train], digits[train])
    return DataLoader(train_set, batch_size=64, shuffle=True), images[test], digits[test]


def with_progress(loader: Iterable[Any], title: str) -> Iterator[Any]:
    """Show a progress bar on the rank that reads the loader; elsewhere this does not run."""
    yield from tqdm(loader, title, leave=False, disable=None)


def save(
    folder: str, stage: Stage, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Save all that this script needs to resume; the files are written in the background."""
    step = progress["step"]
    state.save(folder, stage, optimizer, extra=progress, step=step, asynchronous=True)


@torch.no_grad()
def accuracy(stage: Stage, images: Tensor, digits: Tensor) -> float:
    """Return the share of images whose digit is recognised."""
    stage.eval()
    guesses = stage.fetch(stage(images)).argmax(1).cpu()
    stage.train()
    return float((guesses == digits).float().mean())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--balance", type=int, nargs="+", help="number of layers of each stage")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    parser.add_argument(
        "--checkpoint", default="except_last", choices=["always", "except_last", "never"]
    )
    parser.add_argument("--save", metavar="FOLDER", help="save there regularly, and resume from it")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
