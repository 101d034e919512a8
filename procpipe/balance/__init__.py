"""Finds a balance, so that nobody has to guess it: profiles the layers, divides them optimally.

    from procpipe.balance import balance_by_size, balance_by_time

The names are torchgpipe's.
"""

from procpipe.balance.alone import Inputs
from procpipe.balance.automatic import balance_by_size, balance_by_time
from procpipe.balance.profile import layer_sizes, layer_times

__all__ = ["Inputs", "balance_by_size", "balance_by_time", "layer_sizes", "layer_times"]
