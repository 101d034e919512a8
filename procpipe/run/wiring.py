"""Connects one rank to the others: what must agree, and which transports they use."""

from __future__ import annotations

from procpipe.job.transports import Choice, Offer, choose
from procpipe.run.control import Control


def agree_on_transports(control: Control, ours: Offer, wanted: str | None) -> Choice:
    """Tell the others what this rank can use; return what all use.

    Every rank calls it, and it waits for all of them.

    Args:
        control: the line to the other ranks.
        ours: this rank's offer.
        wanted: the transport that the user asks for, or None for the best.

    Raises:
        ValueError: on rank 0, see :func:`choose`.
    """
    told = control.agree(ours, lambda of_all: choose([Offer(*of_one) for of_one in of_all], wanted))
    return Choice(*told)
