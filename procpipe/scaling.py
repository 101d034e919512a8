"""``stage.scaler``: torch's ``GradScaler``, whose inf checks have one result for all stages.

stage.step       each micro-batch's backward pass begins with its share in the loss, times scale
scaler.unscale_  each rank checks and unscales its own gradients; the results are combined
scaler.step      torch's own: an inf or NaN on any rank skips the optimizer's step on all
scaler.update    torch's own: from equal results it makes equal scales, without communication
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from procpipe.clipping import Agree
from procpipe.data.remote import Remote
from procpipe.errors import DisagreementError
from procpipe.run.messages import compare_facts
from procpipe.torch_internals import CheckedScaler, check_scaler

_SAME = "give every rank's scaler the same options, saved state and update(new_scale)"


class StageScaler(CheckedScaler):
    """A ``GradScaler`` of one rank; its inf checks have the same result on every rank.

    Attributes:
        call: begins a call of all ranks, and gives what brings their values together in it.
    """

    call: Callable[[], AbstractContextManager[Agree]]

    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale; a placeholder for one of another rank stays as it is."""
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        return outputs if isinstance(outputs, Remote) else super().scale(outputs)

    def checked(
        self, check: Callable[[], Mapping[torch.device, Tensor]], zero: Tensor
    ) -> dict[torch.device, Tensor]:
        """Check this rank's gradients; return 1 if any rank found an inf or NaN in its own, else 0.

        Every rank calls it, and it waits for all of them and once for the device. The result is on
        the CPU, so that ``step`` does not wait for the device again; there is none if no rank has a
        gradient.

        Raises:
            DisagreementError: the scale differs between ranks; on every rank.
        """
        with self.call() as agree:
            of_devices = check().values()
            found = sum((value.to(zero.device) for value in of_devices), start=zero)
            # As one number, as each copy to the host waits for the device.
            both = complex(torch.complex(self.scale(torch.ones_like(zero)), found).item())
            ours = [both.imag] if of_devices else []
            differences, of_ranks = agree([both.real, ours], _combined)
            if differences:
                raise DisagreementError(differences)
        if not of_ranks:
            return {}
        result = torch.tensor(max(of_ranks))
        # From pinned memory update() copies it to the scale's device without waiting.
        result = result.pin_memory() if zero.device.type == "cuda" else result
        return {result.device: result}


def share(
    scaler: GradScaler,
    call: Callable[[], AbstractContextManager[Agree]],
    agree: Agree,
    device: torch.device,
) -> None:
    """Make a scaler, in place, one that decides with those of all ranks; see ``Stage.scaler``.

    ``call`` is as in ``StageScaler``; the scale is to be on ``device``.
    """
    check_scaler()
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"stage.scaler() takes a torch.amp.GradScaler, not {type(scaler)}")
    facts = {"enabled": scaler.is_enabled(), **scaler.state_dict()}
    if differences := agree(facts, _differences):
        raise DisagreementError(differences)
    if not isinstance(scaler, StageScaler):
        kind = type(scaler)  # it may be a class derived from GradScaler
        scaler.__class__ = type(kind.__name__, (StageScaler, kind), {})
    scaler.call = call  # type: ignore[attr-defined]
    # torch makes the scale's tensor in the first call, which only the last stage may make.
    scaler.scale(torch.ones((), device=device))


def _differences(of_ranks: list[dict[str, Any]]) -> list[str]:
    named = [{f"the scaler's {name}": x for name, x in facts.items()} for facts in of_ranks]
    return [f"{difference}: {_SAME}" for difference in compare_facts(named)]


def _combined(of_ranks: list[tuple[float, list[float]]]) -> tuple[list[str], list[float]]:
    """Return how the scales differ, and all results of inf checks."""
    scales = [{"scale": scale} for scale, _ in of_ranks]
    return _differences(scales), [found for _, of_rank in of_ranks for found in of_rank]
