"""Train a small GPT, an ordinary class, with one process a stage.

    python examples/train_nanogpt.py                            one stage
    torchrun --nproc_per_node=2 examples/train_nanogpt.py       two; or three, four, …

Its GPT is that of ``train_nanogpt_plain.py``, to the last byte, and so are the losses. Every
process runs this same file.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import procpipe

CONTEXT, WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 64, 4, 4


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add both to ``x``, ``(batch, time, WIDTH)``."""
        b, t, _ = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (h.view(b, t, NUM_HEADS, -1).transpose(1, 2) for h in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, WIDTH))
        return torch.add(x, self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """A GPT whose head is tied to its embedding, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        """Map ``(batch, time)`` bytes to logits of the next ones, ``(batch, time, 256)``."""
        t = idx.size(1)
        assert t <= CONTEXT, f"a text of {t} bytes is longer than {CONTEXT}"
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as under torchrun; the number changes the order of additions
    torch.manual_seed(0)
    passages = read_text().unfold(0, CONTEXT + 1, 1)
    model = GPT()
    layers = procpipe.sequential(model, passages[:2, 1:].long())
    stage = procpipe.Stage(layers, chunks=4, loss_fn=next_byte_loss)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)

    for step in range(1, args.steps + 1):
        batch = passages[torch.randint(len(passages), (args.batch_size,))].long()
        optimizer.zero_grad()
        loss = stage.step(batch[:, :-1], batch[:, 1:])
        stage.clip_grad_norm_(1.0)
        optimizer.step()
        if step % 20 == 0 or step == args.steps:
            stage.print(f"step {step:4}   bits per byte {loss.item() / math.log(2):.4f}")


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def read_text() -> Tensor:
    """Return the first bytes of the standard library's modules, in alphabetical order."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[:60])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


if __name__ == "__main__":
    main()
