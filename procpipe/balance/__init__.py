"""Finds a balance: measures the layers of a model and divides them optimally.

    from procpipe.balance import balance_by_size, balance_by_time

The names are torchgpipe's. ``Inputs`` are several inputs, where one is expected.
``profile_layers``, for planning, is procpipe's.
"""

from procpipe.balance.alone import Inputs
from procpipe.balance.balances import balance_by_size, balance_by_time
from procpipe.balance.profile import profile_layers

__all__ = ["Inputs", "balance_by_size", "balance_by_time", "profile_layers"]
