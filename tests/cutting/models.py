"""Ordinary models, written as their authors would, without a thought of pipelines."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Base(nn.Module):
    """Three layers, and what subclasses do between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("bias", torch.ones(8, 8).tril()[None])
        self.inner = nn.ModuleDict({"act": nn.GELU(), "in": nn.Identity()})
        self.calls, self.rng = [], random.Random(0)

    def between(self, h):
        return h

    def forward(self, x):
        h = self.second(torch.tanh(self.first(x)))
        return self.third(self.between(h))


class DoubleConv(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    """Pads where a size was odd, as the U-Net that most people copy does."""

    def __init__(self, inside, outside):
        super().__init__()
        self.up = nn.ConvTranspose2d(inside, inside // 2, 2, stride=2)
        self.conv = DoubleConv(inside, outside)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        if diff_y or diff_x:
            pads = [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2]
            x1 = F.pad(x1, pads)
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = Up(4 * width, 2 * width)
        self.up2 = Up(2 * width, width)
        self.outc = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


class TimeBlock(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.norm = nn.GroupNorm(1, inside)
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(8, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, temb):
        h = self.conv(F.silu(self.norm(x)))
        h = h + self.time(F.silu(temb))[:, :, None, None]
        return h + self.skip(x)


class TimeUNet(nn.Module):
    """Every block takes the embedding of the time."""

    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.downs = nn.ModuleList([TimeBlock(width, width), TimeBlock(width, 2 * width)])
        self.middle = TimeBlock(2 * width, 2 * width)
        self.ups = nn.ModuleList([TimeBlock(4 * width, width), TimeBlock(2 * width, width)])
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(100) * torch.arange(4, device=x.device) / 4).to(x.dtype)
        angles = t[:, None].to(x.dtype) * freqs[None]
        temb = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = self.start(x)
        skips = []
        for block in self.downs:
            h = block(h, temb)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle(h, temb)
        for block in self.ups:
            skip = skips.pop()
            h = F.interpolate(h, size=skip.shape[-2:], mode="nearest")
            h = block(torch.cat([h, skip], dim=1), temb)
        return self.end(h)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.item = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, query, item, bias=None):
        q = F.normalize(self.query(query), dim=-1)
        i = F.normalize(self.item(item), dim=-1)
        scores = self.scale * (q * i).sum(-1)
        return {"scores": scores if bias is None else scores + bias, "query": q}


def shared():
    """Return a model of one block, six times."""
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 8), *[block] * 6, nn.Linear(8, 3))


class Packed(nn.GRU):
    """Reads lengths, which must not be zeros."""

    def forward(self, h, lengths):  # type: ignore[override]
        packed = pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, last = super().forward(packed)
        return pad_packed_sequence(packed, True, total_length=h.shape[1])[0], last


class Classifier(nn.Module):
    """A recurrent network over words."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Embedding(31, 8)  # of a name that a tensor's method has, too
        self.rnn = Packed(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens):
        h, last = self.rnn(self.norm(tokens), (tokens > 8).sum(1).clamp_(min=2))
        last = last.view(2, 2, tokens.size(0), 8)
        both = torch.cat([last[-1, 0], last[-1, 1]], dim=-1)
        return self.out(both + h.mean(dim=1))
