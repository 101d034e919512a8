"""Errors about what the layers of a partition did that it cannot follow."""

from __future__ import annotations

import torch
from torch import Tensor

from procpipe.errors import BoundaryError, RecomputeError


def input_changed(where: str) -> RecomputeError:
    """Return the error for a layer that changed its partition's input in place."""
    return RecomputeError(
        f"{where} changed its partition's input in place, so recomputing it would start "
        "from the wrong values: make the change out of place (x = x + 1 for x.add_(1)), let "
        "the partition begin at another layer, or use checkpoint='never'"
    )


def input_changed_past_autograd() -> RecomputeError:
    """Return the error for a layer that did so without a trace."""
    return RecomputeError(
        "a layer changed its partition's input past autograd (through x.data or NumPy), so "
        "recomputing it would start from the wrong values: change a copy, or use checkpoint='never'"
    )


def micro_batch_changed(i: int) -> RecomputeError:
    """Return the error for a micro-batch's input that somebody changed in place."""
    return RecomputeError(
        f"the input of micro-batch {i} was changed in place after its first forward, so "
        "recomputing it would start from the wrong values: leave a mini-batch's input "
        "alone until its backward() is over, or use checkpoint='never'"
    )


def changed_between(fault: str, i: int) -> RecomputeError:
    """Return the error for a parameter or buffer that was changed before a recomputation."""
    return RecomputeError(
        f"{fault} after the first forward of micro-batch {i} and before its recomputation, "
        "whose gradients would be wrong: change parameters and buffers after backward() is "
        "over (optimizer.step(), load_state_dict())"
    )


def other_gradients(i: int, flags: tuple[bool, ...], expected: tuple[bool, ...]) -> RecomputeError:
    """Return the error for a recomputation whose outputs require other gradients."""
    return RecomputeError(
        f"recomputing micro-batch {i} gave outputs that require gradients {flags}, but its "
        f"first forward was taken to give {expected}: either a layer takes "
        "another way the second time (see is_recomputing()), or which outputs require "
        "gradients differs between micro-batches of one form; use checkpoint='never'"
    )


def not_plain(where: str, output: Tensor) -> BoundaryError:
    """Return the error for an output of a subclass, or of a quantized dtype."""
    kind = type(output)
    return BoundaryError(
        f"{where} returned, or a layer before it stashed, a {kind.__module__}."
        f"{kind.__qualname__} of {output.dtype}, which would arrive in the next partition as a "
        "plain tensor: return plain ones (MaskedTensor.get_data() and get_mask(), "
        "DTensor.to_local(), x.dequantize(), x.as_subclass(torch.Tensor)), or let the "
        "partition end after the layer that uses it"
    )


def misplaced(where: str, output: Tensor, device: torch.device) -> BoundaryError:
    """Return the error for an output on another device, or with another layout."""
    return BoundaryError(
        f"{where} returned a tensor on {output.device} with layout {output.layout}, "
        f"shape {tuple(output.shape)}: what leaves a stage must be a strided tensor on the "
        f"stage's device, {device}"
    )


def named_without_layer() -> ValueError:
    """Return the error for named inputs where the first partition has no layer to take them."""
    return ValueError(
        "named values go to the model's first layer, and the first partition has no layer: "
        "give it one (balance), or give the values by position"
    )
