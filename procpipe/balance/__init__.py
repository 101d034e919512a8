"""Finds a balance: profiles the layers of a model and divides them optimally.

    from procpipe.balance import balance_by_size, balance_by_time

The names are torchgpipe's; ``profile_layers`` and ``divide``, for planning, are procpipe's.
"""

from procpipe.balance.alone import Inputs
from procpipe.balance.blocks import blocks as divide
from procpipe.balance.layer_profile import LayerProfile, Profile, SkipProfile, profile_layers
from procpipe.balance.profile import balance_by_size, balance_by_time, layer_sizes, layer_times

__all__ = [
    "Inputs",
    "LayerProfile",
    "Profile",
    "SkipProfile",
    "balance_by_size",
    "balance_by_time",
    "divide",
    "layer_sizes",
    "layer_times",
    "profile_layers",
]
