"""What a user does with a stage's gradients between ``step`` and the optimizer.

``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So every stage sends the
norms of its own parameters, and all stages combine them in the model's order. The total then equals
that of one process to the last digit.

``stage.scaler`` gives torch's ``GradScaler`` inf checks with one result for all stages:

stage.step       each micro-batch's backward pass begins with its share in the loss, times scale
scaler.unscale_  each rank checks and unscales its own gradients; the results are combined
scaler.step      torch's own: an inf or NaN on any rank skips the optimizer's step on all
scaler.update    torch's own: from equal results it makes equal scales, without communication
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from procpipe.data.microbatch import uploaded
from procpipe.data.remote import Remote
from procpipe.errors import DisagreementError
from procpipe.run.coordinator import Agree, compare_facts
from procpipe.torch_internals import check_gradients_by

#: A norm as plain JSON: its dtype's name, as torch adds up norms by dtypes, and its value.
_Norm = tuple[str, float]


def clip_together(
    agree: Agree,
    partitions: Mapping[int, Sequence[nn.Parameter]],
    elsewhere: Collection[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    device: torch.device,
) -> Tensor:
    """Clip the gradients of all ranks by their common norm, and return the norm.

    ``agree`` brings values of all ranks together; ``partitions`` has the parameters of this rank's.
    Another rank counts the norms of those ``elsewhere``.
    """
    found: dict[Tensor, Tensor] = {}  # gradients by parameter, each once
    counted = []
    for j, parameters in partitions.items():
        for parameter in parameters:
            if parameter.grad is not None and parameter not in found:
                found[parameter] = parameter.grad
                if parameter not in elsewhere:
                    counted.append((j, parameter.grad))
    norms = _norms([gradient for _, gradient in counted], norm_type)
    each = [(j, norm) for (j, _), norm in zip(counted, norms, strict=True)]
    norm = uploaded(_tensor_of(agree(each, partial(_total_norm, norm_type))), device)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradients' norm over all stages is {norm}, so they cannot be clipped; look for "
            "the layer that makes it so, or leave error_if_nonfinite off"
        )
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in found.values():
        gradient.mul_(coefficient.to(gradient.device))
    return norm


def connect_scaler(
    scaler: GradScaler,
    agree: Agree,
    unscale: Callable[[], AbstractContextManager[Agree]],
    device: torch.device,
    numbers: Sequence[int],
) -> None:
    """Have a scaler check gradients on all ranks together; ``unscale`` begins a call for that.

    ``numbers`` are those of the ranks in the job, for errors.
    """
    facts = {"enabled": scaler.is_enabled(), **scaler.state_dict()}
    if differences := agree(facts, partial(_differences, numbers)):
        raise DisagreementError(differences)
    check_gradients_by(scaler, partial(_checked, scaler, unscale, numbers))
    scaler.scale = partial(_scaled, scaler)  # type: ignore[method-assign]
    # torch makes the scale's tensor in the first call, which only the last stage may make.
    scaler.scale(torch.ones((), device=device))


def _scaled(scaler: GradScaler, outputs: Any) -> Any:
    """Multiply losses by the scale; a placeholder for one of another rank stays as it is."""
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_scaled(scaler, output) for output in outputs)
    return outputs if isinstance(outputs, Remote) else type(scaler).scale(scaler, outputs)


def _checked(
    scaler: GradScaler,
    call: Callable[[], AbstractContextManager[Agree]],
    numbers: Sequence[int],
    check: Callable[[], Mapping[torch.device, Tensor]],
    zero: Tensor,
) -> dict[torch.device, Tensor]:
    """Check this rank's gradients; return 1 if any rank found an inf or NaN in its own, else 0.

    Every rank calls it, and it waits for all of them and once for the device. The result is on the
    CPU, so that ``step`` does not wait for the device again; there is none if no rank has a
    gradient. ``call`` begins a call of all ranks, and gives what brings their values together.

    Raises:
        DisagreementError: the scale differs between ranks; on every rank.
    """
    with call() as agree:
        of_devices = check().values()
        found = sum((value.to(zero.device) for value in of_devices), start=zero)
        # In one copy, as each waits for the device.
        scale, found_inf = torch.stack([scaler.scale(torch.ones_like(zero)), found]).tolist()
        differences, of_ranks = agree(
            [scale, [found_inf] if of_devices else []], partial(_combined, numbers)
        )
        if differences:
            raise DisagreementError(differences)
    if not of_ranks:
        return {}
    result = torch.tensor(max(of_ranks), dtype=torch.float32)  # as torch makes it
    # From pinned memory update() copies it to the scale's device without waiting.
    result = result.pin_memory() if zero.device.type == "cuda" else result
    return {result.device: result}


def _norms(gradients: Sequence[Tensor], norm_type: float) -> list[_Norm]:
    """Return the norm of each gradient; waits for the device, once.

    The norm of a DTensor is that of the whole tensor: all processes that share it call this.
    """
    norms = [torch.linalg.vector_norm(gradient, float(norm_type)) for gradient in gradients]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    if not whole:
        return []
    values = torch.stack([norm.double() for norm in whole]).tolist()
    return [(_name_of(norm.dtype), value) for norm, value in zip(whole, values, strict=True)]


def _total_norm(norm_type: float, of_stages: list[list[tuple[int, _Norm]]]) -> _Norm:
    """Return the norm of the norms of all stages, in the model's order."""
    in_order = sorted(chain(*of_stages), key=itemgetter(0))  # by the index of the partition
    together = [_tensor_of(norm) for _, norm in in_order]
    total = torch.nn.utils.get_total_norm(together, float(norm_type))
    return _name_of(total.dtype), float(total)


def _tensor_of(norm: _Norm) -> Tensor:
    dtype, value = norm
    return torch.tensor(value, dtype=getattr(torch, dtype))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _differences(numbers: Sequence[int], of_ranks: list[dict[str, Any]]) -> list[str]:
    named = [{f"the scaler's {name}": x for name, x in facts.items()} for facts in of_ranks]
    same = "give every rank's scaler the same options, saved state and update(new_scale)"
    return [f"{difference}: {same}" for difference in compare_facts(named, numbers)]


def _combined(
    numbers: Sequence[int], of_ranks: list[tuple[float, list[float]]]
) -> tuple[list[str], list[float]]:
    """Return how the scales differ, and all results of inf checks."""
    scales = [{"scale": scale} for scale, _ in of_ranks]
    return _differences(numbers, scales), [found for _, of_rank in of_ranks for found in of_rank]
