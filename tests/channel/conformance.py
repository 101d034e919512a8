"""The cases that every transport must pass, each run by both ends of two connected ranks.

    case(end)      called on rank 0 and on rank 1 at the same time (threads or processes)
      end.rank                 0 or 1
      end.sender(kind)         to the other rank, FIFO by kind
      end.receiver(kind)       from the other rank
      end.meet()               waits for the other rank, without the channels

A case raises ``AssertionError`` on the rank that detects a fault. Independent of transports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from procpipe.channel.link import INLINE_BYTES, Receiver, Sender
from procpipe.tree import Flat, flatten

#: Kinds of channels that are open in both directions.
KINDS = (1, 2, 3)

MIB = 1 << 20


class End(Protocol):
    """One rank's side of a case."""

    rank: int
    device: torch.device

    def sender(self, kind: int = 1) -> Sender: ...

    def receiver(self, kind: int = 1) -> Receiver: ...

    def meet(self) -> None: ...


Case = Callable[[End], None]


# -- the cases ----------------------------------------------------------------------------------


def sizes_around_the_inline_limit(end: End) -> None:
    """Small messages and large ones, in any turn, of one tensor or of several."""
    limit = INLINE_BYTES
    sizes = [1, limit, 3, 4 * limit, 0, *(limit + k for k in (-4, -1, 0, 1, 4)), 2, 2, MIB, 1]
    transfer(end, [numbers(size, torch.uint8) for size in sizes])
    # Each below the limit, together above it.
    transfer(end, [[numbers(limit // 8 + k, torch.uint8) for k in range(20)]])


def kinds_and_directions_are_independent(end: End) -> None:
    """Several megabytes both ways at once, which are taken in another order than sent."""
    sizes = (1, INLINE_BYTES + 1, MIB, 2 * MIB)
    for size in sizes:
        for kind in KINDS:
            end.sender(kind).send(flat(end, numbers(size, torch.uint8) + kind + 10 * end.rank))
            end.receiver(kind).expect()
    for kind in reversed(KINDS):
        for size in sizes:
            expected = numbers(size, torch.uint8) + kind + 10 * (1 - end.rank)
            assert_same(end.receiver(kind).take().value, expected)
    settle(end)


def requires_grad_is_sent_though_nothing_else_changes(end: End) -> None:
    for flags in ((True, False), (False, True), (False, False), (True, True)):
        if end.rank == 0:
            tensors = [torch.ones(3, device=end.device) for _ in flags]
            end.sender().send(Flat(*flatten(tuple(tensors)), flags))
        else:
            end.receiver().expect()
            assert end.receiver().take().requires_grad == flags
    settle(end)


def empty_and_dimensionless_tensors(end: End) -> None:
    empties = [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, dtype=torch.int64)]
    transfer(end, [*empties, empties, torch.tensor(3.5), torch.tensor(True), [torch.tensor(7)] * 2])
    big = numbers(INLINE_BYTES + 1, torch.uint8)
    transfer(end, [[torch.empty(2, 0), big, torch.empty(0), torch.tensor(1.5)]])


def every_dtype(end: End) -> None:
    dtypes = [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    ]
    transfer(end, [numbers(5, dtype) for dtype in dtypes])
    transfer(end, [[numbers(5, dtype) for dtype in dtypes]])
    transfer(end, [numbers(INLINE_BYTES + 1, dtype) for dtype in dtypes])


def non_contiguous_tensors(end: End) -> None:
    for rows in (4, INLINE_BYTES // 4):
        t = numbers(rows * 6, torch.float32).reshape(rows, 6)
        z = torch.complex(t, t + 1)
        views = [t.T, t[:, ::2], t[1:, 2], t[:1].expand(rows, 6)]
        views += [t.reshape(rows, 2, 3).permute(2, 0, 1)]
        transfer(end, [*views, z.conj(), z.conj().imag, z[:, 1].conj()])


def the_order_of_elements_in_memory_stays(end: End) -> None:
    """The strides of a tensor arrive, also of dimensions of size 1; a view with gaps is copied."""
    shapes: list[tuple[int, ...]] = [(2, 3, 4, 5), (2, 3, 1, 1), (1, 1, 4, 5), (2, 64, 16, 17)]
    shapes += [(0, 3, 2, 2), (2, 3, 4, 5, 6)]
    kept = []
    for shape in shapes:
        x = numbers(math.prod(shape), torch.float64).reshape(shape)
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        kept += [x, x.contiguous(memory_format=last), torch.complex(x, x + 1).conj()]
        kept += [kept[-2].float(), x.transpose(0, 2)]
    values = [*kept, kept]
    if end.device.type == "cpu":  # on its way to a device such a view becomes dense
        values.append(kept[3][:, ::2])
    if end.rank == 0:
        for value in values:
            end.sender().send(flat(end, value))
    else:
        for value in values:
            end.receiver().expect()
            message = end.receiver().take()
            assert_same(message.value, value)
            for received, sent in zip(message.tensors, flatten(value)[0], strict=True):
                strides = torch.empty_like(sent).stride()
                assert received.stride() == strides, (received.stride(), strides)
    settle(end)


def structures_and_plain_values_are_exact(end: End) -> None:
    t = torch.ones(1)
    plain = [
        *(None, True, False, 1, 0, -1, 2**80, 1.0, 0.0, -0.0, 0.1, 1e-320, 1e308),
        *(math.nan, math.inf, -math.inf, "", "*", "v", "ä\u2028\U0001f600\x00\ud800"),
    ]
    transfer(end, [[t, value] for value in plain])
    transfer(end, [plain, {"a": {1: (t,), "1": []}, "": ()}, (), [], {}, None])
    transfer(end, [(((((t, None), [None]), {}), {"k": [t, {"k": t}]}), t)])
    # Equal in Python, but not the same: the previous metadata must not be used again.
    transfer(end, [[t, 1], [t, True], [t, 1.0], [t, True], [t, 0.0], [t, -0.0], [t, False]])


def sends_do_not_wait_for_the_receiver(end: End) -> None:
    """Send 16 MB, in tokens and after them, before the receiver does anything."""
    sizes = [INLINE_BYTES] * 128 + [MIB] * 8
    if end.rank == 0:
        for k, size in enumerate(sizes):
            end.sender().send(flat(end, torch.full((size,), k % 251, dtype=torch.uint8)))
        end.meet()
    else:
        end.meet()
        for k, size in enumerate(sizes):
            end.receiver().expect()
            assert_same(
                end.receiver().take().value, torch.full((size,), k % 251, dtype=torch.uint8)
            )
    settle(end)


def expect_may_run_ahead_and_forgo_undoes_it(end: End) -> None:
    contents = [numbers(size, torch.uint8) for size in (1, INLINE_BYTES + 1, 2)]
    if end.rank == 0:
        for content in contents:
            end.sender().send(flat(end, content))
    else:
        receiver = end.receiver()
        for _ in range(5):
            receiver.expect()
        receiver.forgo()
        assert_same(receiver.take().value, contents[0])
        receiver.forgo()
        assert_same(receiver.take().value, contents[1])
        assert_same(receiver.take().value, contents[2])
    settle(end)


CASES: tuple[Case, ...] = (
    sizes_around_the_inline_limit,
    kinds_and_directions_are_independent,
    requires_grad_is_sent_though_nothing_else_changes,
    empty_and_dimensionless_tensors,
    every_dtype,
    non_contiguous_tensors,
    the_order_of_elements_in_memory_stays,
    structures_and_plain_values_are_exact,
    sends_do_not_wait_for_the_receiver,
    expect_may_run_ahead_and_forgo_undoes_it,
)


# -- parts of the cases -------------------------------------------------------------------------


def transfer(end: End, values: list[Any], kind: int = 1) -> None:
    """Send values from rank 0 to rank 1, which checks them."""
    if end.rank == 0:
        for value in values:
            end.sender(kind).send(flat(end, value))
    else:
        for value in values:
            end.receiver(kind).expect()
            message = end.receiver(kind).take()
            assert_same(message.value, value)
            assert all(tensor.device == end.device for tensor in message.tensors)
    settle(end)


def settle(end: End) -> None:
    """Wait until both ends have received everything."""
    for kind in KINDS:
        end.sender(kind).settle()
    end.meet()


def flat(end: End, value: Any) -> Flat:
    """Take a value apart, on the end's device, without making it contiguous."""
    message = Flat.of(value)
    return Flat([tensor.to(end.device) for tensor in message.tensors], *message[1:])


def numbers(size: int, dtype: torch.dtype) -> Tensor:
    """Return ``size`` numbers that are not all equal and fit the dtype."""
    return (torch.arange(size) % 113).to(dtype)


def assert_same(received: Any, sent: Any) -> None:
    """Check that a nested value is equal in every bit, types included."""
    received_tensors, received_structure = flatten(received)
    tensors, structure = flatten(sent)
    # repr distinguishes 1 from True and 1.0, and 0.0 from -0.0; nan is equal to itself.
    assert repr(received_structure) == repr(structure), f"{received_structure} is not {structure}"
    assert len(received_tensors) == len(tensors)
    for a, b in zip(received_tensors, tensors, strict=True):
        form = f"{tuple(a.shape)} {a.dtype}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{form}, not {tuple(b.shape)} {b.dtype}"
        same = torch.equal(a.cpu(), b.resolve_conj().resolve_neg())
        assert same, f"the elements of {form} differ: {a}, not {b}"
