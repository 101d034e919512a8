"""Train a small GPT on the source code of Python's standard library, with one process a stage.

    python examples/train_lm.py                             one stage
    torchrun --nproc_per_node=2 examples/train_lm.py        two; or three, four, …
    torchrun --nproc_per_node=4 examples/train_lm.py --replicas 2       two pipelines of two

It reads bytes and predicts the next one; in the end it writes some Python of its own. Every
process runs this same file, and any number of them gives the same losses.
"""

import argparse
import math
import os
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from procpipe import Stage

NUM_BYTES = 2_000_000  # of source code: 95% to train, the rest to evaluate
CONTEXT = 64  # bytes before each predicted one
WIDTH, NUM_HEADS, NUM_BLOCKS = 128, 4, 4


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # as under torchrun; the number changes the order of additions
    torch.manual_seed(0)
    train_text, test_text = read_text().tensor_split([NUM_BYTES * 95 // 100])
    with torch.device("meta"):  # no memory here; Stage allocates this process's layers only
        model = build_model()
    stage = Stage(
        model,
        balance=args.balance,  # by default divided by parameters and estimated work
        sample=torch.zeros(1, CONTEXT, dtype=torch.long),
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        replicas=args.replicas,
        loss_fn=next_byte_loss,
    )
    train_batches = random_passages(
        train_text, args.batch_size // stage.replicas, stage.replicas, stage.replica
    )
    test_batches = [*islice(random_passages(test_text, 64), 4)][stage.replica :: stage.replicas]
    optimizer = torch.optim.AdamW(parameter_groups(stage), lr=args.learning_rate)
    scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step / args.steps))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    stage.print(f"{num_parameters:,} parameters, {len(model)} layers, balance {stage.balance}")

    for first in range(0, args.steps, args.evaluate_every):
        num_steps = min(args.evaluate_every, args.steps - first)
        total = torch.zeros((), device=stage.device)
        for input, target in stage.batches(with_progress(train_batches, num_steps)):
            optimizer.zero_grad()
            total += stage.step(input, target)
            stage.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
        train_bits, test_bits = bits(total / num_steps), bits(evaluate(stage, test_batches))
        step = first + num_steps
        stage.print(
            f"step {step:4}   bits per byte {train_bits:.3f}   on other files {test_bits:.3f}"
        )

    stage.print(f"\n{stage.report()}")
    stage.print(f"\n{generate(stage, args.prompt, args.generate)}")


# -- the text -----------------------------------------------------------------------------------


def read_text() -> Tensor:
    """Return the first bytes of the standard library's modules, in alphabetical order."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text[:NUM_BYTES]), dtype=torch.uint8)


def random_passages(
    text: Tensor, batch_size: int, replicas: int = 1, replica: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield passages, and the same one byte later: both ``(batch_size, CONTEXT)``, for ever.

    Each replica has its own part of them; without replicas that is all.
    """
    passages = TensorDataset(text.unfold(0, CONTEXT + 1, 1))
    sampler = DistributedSampler[Any](passages, replicas, replica, drop_last=True)
    generator = torch.Generator()  # so that the loader leaves the global one alone
    loader = DataLoader(passages, batch_size, sampler=sampler, drop_last=True, generator=generator)
    for epoch in count():
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            yield batch[:, :-1].long(), batch[:, 1:].long()


def with_progress(batches: Iterable[Any], num_steps: int) -> Iterator[Any]:
    """Show a progress bar on the rank that reads the batches; elsewhere this does not run."""
    yield from tqdm(islice(batches, num_steps), total=num_steps, leave=False, disable=None)


# -- the model ----------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Embeds bytes and their positions, ``(batch, time, WIDTH)``."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)

    def reset_parameters(self) -> None:
        """Initialise with small vectors; called for a model built on the meta device."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, bytes: Tensor) -> Tensor:
        """Embed ``(batch, time)`` bytes."""
        places = torch.arange(bytes.shape[1], device=bytes.device)
        return torch.add(self.byte(bytes), self.place(places))


class Block(nn.Module):
    """A transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix_heads = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add both to ``x``, ``(batch, time, WIDTH)``."""
        heads = self.query_key_value(self.norm1(x)).unflatten(2, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix_heads(seen.transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(self.norm2(x)))


def build_model() -> nn.Sequential:
    """Return a flat ``nn.Sequential``, which can be cut between any two blocks."""
    blocks = [Block() for _ in range(NUM_BLOCKS)]
    return nn.Sequential(Embedding(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


# -- training and use ---------------------------------------------------------------------------


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def parameter_groups(stage: Stage) -> list[dict[str, Any]]:
    """Apply weight decay to matrices only, not to biases and norms."""
    parameters = list(stage.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warm_up_and_cosine(progress: float) -> float:
    """Return the learning rate as a share of its peak, reached after a tenth of the steps."""
    return min(10 * progress + 0.01, 0.55 + 0.45 * math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(stage: Stage, batches: Iterable[Any]) -> Tensor:
    """Return the mean loss without training."""
    stage.eval()
    total, weight = torch.zeros(()), torch.zeros(())
    for input, target in stage.batches(batches):
        total = total + stage.step(input, target).cpu() * stage.last_weight.cpu()
        weight = weight + stage.last_weight.cpu()
    stage.train()
    mean: Tensor = stage.sum_over_replicas(total) / stage.sum_over_replicas(weight)
    return mean


@torch.no_grad()
def generate(stage: Stage, prompt: str, num_bytes: int) -> str:
    """Continue a text byte by byte, each drawn from the model's probabilities."""
    stage.eval()
    text = torch.tensor([list(prompt.encode())])
    generator = torch.Generator().manual_seed(2)
    for _ in range(num_bytes):
        logits = stage.fetch(stage(text[:, -CONTEXT:])[:, -1])
        likely = (logits.cpu() / 0.7).softmax(1)
        text = torch.cat([text, torch.multinomial(likely, 1, generator=generator)], 1)
    stage.train()
    return bytes(text[0].tolist()).decode(errors="replace")


def bits(loss: Tensor) -> float:
    return loss.item() / math.log(2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--balance", type=int, nargs="+", help="number of layers of each stage")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines of this model")
    parser.add_argument("--checkpoint", default="never", choices=["always", "except_last", "never"])
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--generate", type=int, default=400, metavar="BYTES")
    return parser.parse_args()


if __name__ == "__main__":
    main()
