"""An ``nn.Sequential`` that cannot be changed: what a stage refuses, and why."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from procpipe.compute.wrappers import (
    check_not_data_parallel,
    is_data_parallel,
    refuse_data_parallel,
)


class FixedLayers(nn.Sequential):
    """An ``nn.Sequential`` that cannot be changed, moved, copied or replicated."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Return one of this stage's layers; of a slice, a plain ``nn.Sequential`` of them."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert parameters to a dtype; a device is refused, as each stage has its own."""
        if "device" in kwargs or "tensor" in kwargs or any(_names_device(arg) for arg in args):
            self._refuse_to_move()
        return super().to(*args, **kwargs)

    def _refuse_to_move(self, device: Any = None) -> NoReturn:
        """Refuse: each stage has its own device."""
        raise TypeError(
            f"rank {self.rank} stays on {self.device}: each stage has its own device, given by "
            "the launcher or by Stage(devices=…); only a dtype can be changed"
        )

    cuda = cpu = _refuse_to_move

    def _refuse_to_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        check_not_data_parallel([("", arg) for arg in args if isinstance(arg, nn.Module)])
        raise TypeError(
            "the layers of a Stage stay as they are: change the model before Stage(model, …), on "
            "every rank alike"
        )

    append = extend = insert = pop = _refuse_to_change
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_to_change

    def _refuse_data_parallel(self, *_: Any) -> NoReturn:
        refuse_data_parallel("the Stage was given to DistributedDataParallel, DataParallel or FSDP")

    # Read by DistributedDataParallel, called by DataParallel on several GPUs, and set by
    # FullyShardedDataParallel and fully_shard, of what they wrap.
    _replicate_for_data_parallel = _refuse_data_parallel
    _ddp_params_and_buffers_to_ignore = property(_refuse_data_parallel, _refuse_data_parallel)
    _is_fsdp_managed_module = property(None, _refuse_data_parallel)

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse the subclass that torch's ``replicate`` would make of it."""
        super().__init_subclass__(**options)
        if is_data_parallel(cls):
            refuse_data_parallel("the Stage was given to replicate")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: a copy would not be connected to the other ranks."""
        raise TypeError(
            "a Stage cannot be copied or pickled, as it is one end of connected processes: copy "
            "its state_dict(), whose keys are the full model's"
        )


def _names_device(argument: Any) -> bool:
    return isinstance(argument, (str, int, torch.device, Tensor)) and not isinstance(argument, bool)
