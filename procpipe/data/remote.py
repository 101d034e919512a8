"""The placeholder for a value that lives on another rank.

``stage(input)`` returns the real output on the last stage and a ``Remote`` elsewhere, so that
one loss code, without a branch on the rank, does the right thing on every rank:

    output = stage(input)                        rank 3: a tensor     rank 0: a Remote
    loss = F.cross_entropy(output, target)               a tensor             a Remote
    loss.backward()                                      autograd             this stage's part

A Remote takes part in any torch operation, in any position, and the result is a Remote again, as
are its sizes, its dtype and its device. It has no value, so an operation that needs one raises, as
does one that would write it into a tensor of this rank, or that combines values which no rank has
together. Does not communicate.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, NoReturn

import torch
from torch import Tensor

from procpipe.errors import RemoteValueError
from procpipe.notes import warn
from procpipe.torch_internals import pytree

#: Attributes and methods that need the tensor itself.
VALUE_NAMES = frozenset(
    ["item", "tolist", "numpy", "grad", "grad_fn", "data_ptr", "untyped_storage"]
)

#: Attributes and methods that describe a tensor: placeholders without a backward pass, as ``data``.
DESCRIBING_NAMES = frozenset(
    ["shape", "size", "dim", "ndim", "numel", "stride", "data", "dtype", "device", "layout"]
)

#: Names of torch functions that write into their first argument, but for those of ``tensor +=
#: remote`` and the like: they rebind the name on the left to the result, so they are absorbed;
#: ``tensor.add_(remote)`` cannot be distinguished from them.
_WRITING = re.compile(r"(?!(add|sub|mul|div|floor_divide|remainder|pow)_$).*[^_]_|__setitem__")

#: Backward passes by their numbers, each in a list that all values of its output share, and that is
#: empty once the pass has been run.
_Passes = dict[int, list[Callable[[], None]]]


def _refusing(how: str) -> Callable[..., NoReturn]:
    """Make a method of ``Remote`` that needs the value."""

    def refuse(self: Remote, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error(how)

    return refuse


class Remote:
    """Stands for a tensor, or a nested value of tensors, that lives on another rank.

    Torch functions and operators, attributes (``output.logits``) and items (``output[0]``) give
    another Remote of the same rank, whose ``backward`` is the same; under ``torch.no_grad()``,
    and from ``detach``, one that has none.

    Args:
        rank: the rank that holds the value; of several that do, one.
        what: what it is, for messages: "the output of stage(input)".
        backward: runs this rank's part of the backward pass, and may block until the other ranks
            have done theirs; ``None`` if nothing requires grad. It is called at most once, by
            whichever of the values computed from this one is the first to have its backward called.
        others: further ranks that hold the value.
    """

    __slots__ = ("_passes", "_ranks", "_what", "rank")

    _numbers = itertools.count()  # of backward passes, in the order of their forward passes

    def __init__(
        self,
        rank: int,
        what: str,
        backward: Callable[[], None] | None,
        *,
        others: Iterable[int] = (),
    ) -> None:
        self.rank = rank
        self._ranks = frozenset([rank, *others])
        self._what = what
        self._passes: _Passes = {} if backward is None else {next(self._numbers): [backward]}

    @property
    def requires_grad(self) -> bool:
        """Whether ``backward`` has anything to run."""
        return bool(self._passes)

    def detach(self) -> Remote:
        """Return a placeholder of the same value without a backward pass."""
        return self._with({})

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run this rank's part of the backward pass.

        Every rank calls it; blocks as long as the pass does. What was computed from several
        outputs runs the pass of each, the latest first, as autograd does on the rank of the value.

        Args:
            *args: ignored; they matter on the rank of the value only.
            **kwargs: likewise.

        Raises:
            RuntimeError: nothing requires grad, or the pass was run before.
        """
        if not self._passes:
            raise RuntimeError(
                f"backward() of a value on rank {self.rank} ({self._what}): it does not require "
                "grad; compute it from an output of stage(input), do not detach that, and call "
                "the stage with gradients enabled"
            )
        if not all(self._passes.values()):
            raise RuntimeError(
                f"backward() a second time for a value on rank {self.rank} ({self._what}): a "
                "mini-batch has one backward pass; add up its losses and call backward() on the sum"
            )
        for number in sorted(self._passes, reverse=True):
            self._passes[number].pop()()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        remote = _result(func, (args, kwargs))
        name = getattr(func, "__name__", str(func))
        if func in (torch.autograd.grad, torch.autograd.backward):
            raise remote._error(f"torch.autograd.{name}(), unlike value.backward(),")
        if isinstance(kwargs.get("out"), Tensor) or (
            args and isinstance(args[0], Tensor) and _WRITING.fullmatch(name)
        ):
            raise remote._error(f"{name} into a tensor of this rank")
        return remote

    def _absorb(self, *args: Any, **kwargs: Any) -> Remote:
        return _result("this operation", (self, args, kwargs))

    __call__ = __getitem__ = _absorb
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = _absorb
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = _absorb
    __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = _absorb
    __abs__ = __invert__ = __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = _absorb
    __lt__ = __le__ = __gt__ = __ge__ = _absorb
    __eq__ = __ne__ = _absorb  # type: ignore[assignment]
    __hash__ = object.__hash__

    #: NumPy's scalars leave operators with a placeholder to the placeholder.
    __array_ufunc__ = None

    def __setitem__(self, index: Any, value: Any) -> None:
        """Do nothing: the item is set where the value is."""

    def __getattr__(self, name: str) -> Remote:
        # Python, copy, pickle and NumPy probe for protocols by underscored names.
        if name.startswith("_"):
            raise AttributeError(f"a placeholder for a value of another rank has no {name!r}")
        if name in VALUE_NAMES:
            raise self._error(f".{name}")
        return self.detach() if name in DESCRIBING_NAMES else self._absorb()

    __bool__ = _refusing("the truth of it")
    __int__ = _refusing("int()")
    __float__ = _refusing("float()")
    __index__ = _refusing("its use as a number (in range(), in the bounds of a slice)")
    __len__ = _refusing("len()")
    __iter__ = _refusing(
        "unpacking or iteration (name the items instead: value[0], value[1], value.shape[0])"
    )
    __contains__ = _refusing("`in`")
    __array__ = _refusing("conversion to NumPy")
    __reduce_ex__ = _refusing("copying or pickling")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._error(f"formatting as {spec!r}")
        return repr(self)

    def __repr__(self) -> str:
        grad = ", requires grad" if self._passes else ""
        return f"<Remote: {self._what}, on rank {self.rank}{grad}>"

    def _with(self, passes: _Passes, ranks: Iterable[int] = (), what: str = "") -> Remote:
        """Return a placeholder for what is computed from this one."""
        ranks = ranks or self._ranks
        other = Remote(min(ranks), what or self._what, None, others=ranks)
        other._passes = passes
        return other

    def _error(self, how: str) -> RemoteValueError:
        return RemoteValueError(
            f"{how} needs a value that lives on rank {self.rank} ({self._what}): move this into "
            "loss_fn, or call stage.fetch(value) on all ranks and use what it returns"
        )


def holder_of(value: Any, first: int) -> int:
    """Return the rank that holds a nested value: that of a placeholder in it, else ``first``."""
    return max((remote.rank for remote in _remotes_in(value)), default=first)


def check_held(value: Any) -> None:
    """Check that the rank which is to send a value everywhere has all of it.

    Raises:
        RemoteValueError: some of it is a placeholder.
    """
    for missing in _remotes_in(value):
        raise RemoteValueError(
            f"fetch() of a value that no rank has whole: here {missing!r} is missing. Fetch what "
            "different ranks hold one by one"
        )


def _remotes_in(value: Any) -> list[Remote]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Remote)]


def _result(func: Any, arguments: Any) -> Remote:
    """Return the placeholder for what an operation computes, given all its nested arguments."""
    name = getattr(func, "__name__", func)
    joined = reduce(partial(_joined, name), _remotes_in(arguments))
    if not torch.is_grad_enabled():
        return joined.detach()
    leaves = pytree.tree_leaves(arguments)
    requiring = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    if not joined._passes and any(tensor.grad_fn for tensor in requiring):
        here = "this rank (computed from the output of stage(input), as it requires grad)"
        raise _no_rank_has_both(name, joined, here)
    if requiring:
        warn(
            f"{name} combines a tensor that requires grad on this rank "
            f"with a value that lives on rank {joined.rank}, so the tensor gets no gradient "
            "here; give such a term (a penalty on parameters, say) a backward() of its own"
        )
    return joined


def _joined(name: str, one: Remote, other: Remote) -> Remote:
    """Return the placeholder for what is computed from two."""
    ranks = one._ranks & other._ranks
    if not ranks:
        raise _no_rank_has_both(name, one, f"rank {other.rank} ({other._what})")
    what = one._what if len(one._ranks) <= len(other._ranks) else other._what
    return one._with(one._passes | other._passes, ranks, what)


def _no_rank_has_both(name: str, one: Remote, other: str) -> RemoteValueError:
    return RemoteValueError(
        f"{name} combines a value of rank {one.rank} ({one._what}) with one of {other}, and no "
        "rank has both. stage.batches brings all but the first entry of a tuple to the rank of the "
        "output: have the loader yield what the loss needs after the input, as (input, target) or "
        "(x, x), or use loss_fn and step(input, target)"
    )
