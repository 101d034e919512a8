"""What a user does with a stage's gradients between ``step`` and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain

from torch import Tensor
from torch.amp import GradScaler

from procpipe.about import About
from procpipe.clipping import Agree, clip
from procpipe.data.loss import Loss
from procpipe.scaling import share


class Gradients(About):
    """Clipping, loss scaling, and what is left to be added up over replicas."""

    _agreement: Callable[..., AbstractContextManager[Agree]]
    _keeps_own: bool
    _loss: Loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all stages by their common norm, as for the plain model.

        Every rank calls it, and it waits for all of them (and, on GPUs, for the device).

        Args:
            max_norm: the largest norm that is not clipped.
            norm_type: the p of the p-norm; ``inf`` is allowed.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before clipping, 0-dim, on every rank.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or calls in
                ``no_sync()`` have left gradients to be added up.

        Source: ``torch.nn.utils.clip_grad_norm_``.
        """
        with self._agreement("clip_grad_norm_", of_gradients=True) as agree:
            by_partition, copies = self._tied.gradients(self._by_partition())
            if self.replica > 0:  # replica 0 counts them
                copies = [*chain(*by_partition.values()), *copies]
                by_partition = {}
            return clip(
                by_partition,
                copies,
                max_norm,
                norm_type,
                agree,
                self.device,
                error_if_nonfinite=error_if_nonfinite,
            )

    def scaler(self, scaler: GradScaler) -> GradScaler:
        """Connect a scaler to this stage, to be used as in one process; return the scaler itself.

        ``step`` then scales gradients, and an inf or NaN on one rank skips the optimizer's step on
        all. Every rank calls it, and waits for all of them; also in the scaler's ``unscale_``, or
        its ``step`` where that comes first. See docs/mixed_precision.md.

        Args:
            scaler: with the same options and state on each rank; the newest one given counts.

        Raises:
            DisagreementError: options or states differ between ranks.
        """
        with self._agreement("scaler") as agree:
            unscale = partial(self._agreement, "scaler.unscale_", of_gradients=True)
            share(scaler, unscale, agree, self.device)
            self._loss.scale = scaler.scale
        return scaler

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of calls in this block to be added up over replicas by the next call.

        For accumulation over several steps: gradients then travel once. Every rank does it; does
        not communicate. With FSDP likewise; without replicas or FSDP it changes nothing.

        Source: ``torch.nn.parallel.DistributedDataParallel.no_sync``.
        """
        before, self._keeps_own = self._keeps_own, True
        try:
            yield
        finally:
            self._keeps_own = before
