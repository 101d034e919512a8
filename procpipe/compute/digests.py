"""Detects layers whose recomputation differs from their first forward.

    F(i)   output of each layer ──> a few numbers, kept
    R(i)   output of each layer ──> the same numbers, compared: the first that differ name a layer

The numbers are projections on fixed random vectors, and a root mean square. Bits cannot be
compared: some kernels of torch give other last digits with a graph than without one (on a CPU
``nn.LSTM`` in float32), or each time (``index_put_`` with ``accumulate=True`` on several threads;
atomic additions on a GPU). So outputs count as equal if they differ by less than a small part of
the layer's values: 1e-9 in float64, 1.2e-4 in float32, and 0.05 in shorter types, under autocast
and on GPUs. A different dropout mask differs by far more.

A digest reads every output once in float64, which takes longer than a layer that only adds, and on
a GPU the host waits for the numbers at the end of R. So only few mini-batches are compared: 1 and
2, where most differences show, and 16, 128, 1024 and so on, for what begins to differ later.
``schedule="auto"`` times those from 3 to 15.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procpipe.torch_internals import pytree

_NUM_PROJECTIONS = 4

#: The most elements that are projected together; also the length of the random vectors.
_CHUNK = 2**16

#: The largest difference, as a part of the values: where rounding is coarse or differs each time.
_COARSE = 0.05

_MINI_BATCHES = frozenset({1, *(2 * 8**k for k in range(20))})

#: What recomputation repeats, for errors.
REPEATED = (
    "Repeated are the global generators of torch, random and numpy.random, and buffers "
    "(register_buffer, for a counter): use these, or checkpoint='never'"
)


class _Entry(NamedTuple):
    """One tensor: what it is; sums of projections, and of squares last, if it has numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: Tensor | None


#: All tensors of an output, from left to right.
_Digest = list[_Entry]

#: The outputs of one forward task, in order, after its input: the layer's index, and the digest.
Look = list[tuple[int, _Digest]]


class Digests:
    """Chooses the mini-batches to compare, and keeps the digests of the task that runs."""

    def __init__(self) -> None:
        self._num_mini_batches = 0
        self._is_due: bool | None = None
        self._look: Look | None = None
        self._vectors: dict[torch.device, Tensor] = {}

    def begin(self) -> None:
        """Start a mini-batch."""
        self._is_due = self._look = None

    def start(self) -> Look | None:
        """Start the digests of a first forward that will be recomputed, in some mini-batches."""
        if self._is_due is None:  # the first of a mini-batch
            self._num_mini_batches += 1
            self._is_due = self._num_mini_batches in _MINI_BATCHES
        self._look = [] if self._is_due else None
        return self._look

    def start_again(self, first: Look | None) -> None:
        """Start those of a recomputation, if its first forward has any."""
        self._look = None if first is None else []

    def stop(self) -> Look | None:
        """Return the digests since the start."""
        look, self._look = self._look, None
        return look

    @property
    def is_looking(self) -> bool:
        """Whether digests are taken now."""
        return self._look is not None

    def add(self, place: int, value: Any) -> None:
        """Add the digest of an output, a nested value."""
        if self._look is not None:
            with torch.no_grad():
                self._look.append((place, self._digest(value)))

    def _digest(self, value: Any) -> _Digest:
        return [
            _Entry(tuple(leaf.shape), leaf.dtype, self._sums(leaf))
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]

    def _sums(self, tensor: Tensor) -> Tensor | None:
        is_plain = type(tensor.detach()) is Tensor and tensor.layout == torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized or tensor.numel() == 0:
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        vectors = self._vectors.get(tensor.device)
        if vectors is None:
            # On a GPU, another stage's may be drawn on another stream.
            draw = _cpu_vectors if tensor.device.type == "cpu" else _vectors
            vectors = self._vectors[tensor.device] = draw(tensor.device)
        total: Tensor | None = None
        for k, piece in enumerate(_pieces(tensor)):
            values = piece.to(torch.float64).nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
            # A different factor for each piece, so that exchanged pieces are detected.
            projected = torch.mv(vectors[: len(values)].T, values) * (1 + 0.5 * math.cos(k))
            sums = torch.cat([projected, torch.dot(values, values)[None]])
            total = sums if total is None else total.add_(sums)
        return total


def _vectors(device: torch.device) -> Tensor:
    """Draw the random vectors, the same in all stages: ``(_CHUNK, _NUM_PROJECTIONS) float64``."""
    own = torch.Generator(device).manual_seed(0)
    shape = _CHUNK, _NUM_PROJECTIONS
    with torch.inference_mode(mode=False):
        return torch.randn(shape, generator=own, dtype=torch.float64, device=device)


_cpu_vectors = functools.cache(_vectors)


class Difference(NamedTuple):
    """The first output that differs: its layer's index, and the difference in words."""

    place: int
    how: str


def difference(first: Look, again: Look, *, is_coarse: bool) -> Difference | None:
    """Compare a first forward and its recomputation; ``is_coarse`` under autocast and on GPUs."""
    tolerance = _COARSE if is_coarse else _tolerance(first)
    scale_before = 0.0
    for (place, one), (place_again, other) in zip(first, again, strict=False):
        forms = [[(entry.shape, entry.dtype) for entry in digest] for digest in (one, other)]
        if forms[0] != forms[1] or place != place_again:
            return Difference(place, f"{_in_words(forms[1])} instead of {_in_words(forms[0])}")
        pairs = list(_numbers_of(one, other))
        scale = max((max(ours[-1], theirs[-1]) for ours, theirs in pairs), default=0.0)
        # The input's scale counts too: where values cancel out, only rounding is left.
        limit = tolerance * max(scale, scale_before)
        for ours, theirs in pairs:
            apart = max(abs(x - y) for x, y in zip(ours, theirs, strict=True))
            if apart > limit:
                return Difference(
                    place, f"values that differ by about {apart / scale:.2g} of their size"
                )
            if apart > 0:  # layers from here on may amplify what was rounded differently
                tolerance = _COARSE
        scale_before = scale
    return None


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into flat pieces, the same for all strides, without a copy of the whole."""
    if tensor.numel() <= _CHUNK:
        yield tensor.flatten()
        return
    num_rows = _CHUNK * len(tensor) // tensor.numel()
    for part in tensor.split(max(1, num_rows)):
        if num_rows:
            yield part.flatten()
        else:
            yield from _pieces(part[0])


def _numbers_of(one: _Digest, other: _Digest) -> Iterator[tuple[list[float], list[float]]]:
    for ours, theirs in zip(one, other, strict=True):
        if ours.sums is not None and theirs.sums is not None:
            yield _scaled(ours), _scaled(theirs)


def _scaled(entry: _Entry) -> list[float]:
    """Return projections and the root mean square, which do not grow with the tensor."""
    assert entry.sums is not None
    *projected, squares = entry.sums.tolist()
    num_values = math.prod(entry.shape)
    return [*(x / math.sqrt(num_values) for x in projected), math.sqrt(squares / num_values)]


def _tolerance(look: Look) -> float:
    """Return how much values may differ, for the coarsest floating-point type among them."""
    dtypes = {entry.dtype for _, digest in look for entry in digest}
    epsilons = [torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex]
    return min(_COARSE, max(1e-9, 1000 * max(epsilons, default=0.0)))


def _in_words(forms: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    words = [f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in forms]
    return ", ".join(words) or "no tensor"
