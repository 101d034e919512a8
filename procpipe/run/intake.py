"""Begins a mini-batch on every rank: scatters it, issues its order, routes the target.

rank 0       input ── scatter ── order: sizes, weights, where the target is ──> every rank
the target   goes along its route, or is on the last stage already: given there by the user, or
delivered by ``batches``

Where the first rank of each replica reads its own share of the mini-batch, or nothing:

first ranks  share ── sizes, weights ──> rank 0 ── order of all shares ──> every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from procpipe.data.loss import Loss, checked_accumulate, checked_total
from procpipe.data.mean_loss import MeanLoss
from procpipe.data.microbatch import scatter, scatter_like
from procpipe.data.minibatch import Ingoing, Inputs, MiniBatch, on_device
from procpipe.data.remote import has_placeholder
from procpipe.job.grid import Grid
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.run.batches import Batches
from procpipe.run.exchange import Exchange, Scattered
from procpipe.run.messages import DELIVERED, LOCAL, ROUTED, Order


class Intake:
    """One rank's side of beginning mini-batches.

    ``batches`` records which target the last stage has; ``output_stage`` is the stage of the last
    partition.
    """

    def __init__(
        self,
        issue_or_follow: Callable[..., Order],
        loss: Loss,
        batches: Batches,
        grid: Grid,
        output_stage: int,
        device: torch.device,
    ) -> None:
        self._issue_or_follow = issue_or_follow
        self._loss = loss
        self._batches = batches
        self._grid = grid
        self._output_stage = output_stage
        self._device = device

    def begin(
        self,
        exchange: Exchange,
        call: str,
        inputs: Inputs,
        target: Any,
        total_weight: Any = None,
        accumulate: Any = None,
        *,
        chunks: int,
        checkpoint: str,
        is_training: bool,
        reduces: bool,
    ) -> tuple[Order, MiniBatch, Ingoing | None]:
        """Scatter the mini-batch and issue its order on rank 0; follow the order elsewhere.

        ``call`` is "step" or "forward". Rank 0's inputs, ``total_weight``, ``accumulate``,
        ``chunks`` and ``checkpoint`` count; so does its target, or else that of the last stage.
        """
        divisors: dict[str, Any] = {}
        if self._grid.rank == 0:
            divisors["accumulate"] = checked_accumulate(accumulate, total_weight)
            divisors["total_weight"] = checked_total(total_weight)
        keeps = is_training and torch.is_grad_enabled()
        if self._batches.is_sharded:
            takes = self._grid.stage == 0 and not has_placeholder(inputs)
            ingoing = None
            if takes:
                ingoing = Ingoing.of_parts(*scatter(inputs, chunks), self._device)
            targets, offer = self._offer(call, ingoing, target, checkpoint, keeps=keeps)
            self._issue_or_follow(call, reduces=reduces)  # is every rank in this call?
            offers = exchange.gather_offers(offer)
            decided = self._of_shares(call, offers) if self._grid.rank == 0 else {}
            order = self._issue_or_follow(call, reduces=reduces, **divisors, **decided)
        elif self._grid.rank != 0:
            self._batches.check_not_sharded(inputs)
            order = self._issue_or_follow(call, reduces=reduces)
            ingoing, targets = exchange.take(order, self._device)
        else:
            parts = exchange.scatter(inputs, chunks)  # step 1
            shares = [
                (tuple(sizes), _recomputed(checkpoint, sizes, keeps=keeps)) for _, sizes in parts
            ]
            decided = {"reduces": reduces}
            decided |= dict(zip(("sizes", "recompute"), shares[0], strict=True))
            decided |= {"shares": tuple(shares)} if len(shares) > 1 else {}
            targets = None
            if call == "step":
                targets, about_loss = self._about_loss(target, parts)
                decided |= {**divisors, **about_loss}
            order = self._issue_or_follow(call, **decided)
            ingoing, targets = exchange.share(order, parts, targets, self._device)
        batch = MiniBatch(ingoing.inputs if ingoing else None, keep=order.is_grad_enabled)
        if call == "step":
            batch = self._with_loss(batch, order, target, targets)
        return order, batch, ingoing

    def _offer(
        self, call: str, ingoing: Ingoing | None, target: Any, checkpoint: str, *, keeps: bool
    ) -> tuple[Sequence[Any] | None, list[Any]]:
        """Return each micro-batch's target of this rank's share, and what rank 0 is to know of it.

        Ranks that have no share offer no micro-batches.
        """
        if ingoing is None:
            return None, [[], [], [], False]
        sizes, targets = ingoing.sizes, None
        weights: Sequence[float] = ()
        if call == "step":
            targets = None if target is None else scatter_like(target, sizes)
            weights = self._loss.weights(targets, sizes, is_share=True)
        again = _recomputed(checkpoint, sizes, keeps=keeps)
        return targets, [sizes, again, weights, targets is not None]

    def _of_shares(self, call: str, offers: Sequence[list[Any]]) -> dict[str, Any]:
        """Return, on rank 0, what the order says of all shares.

        Raises:
            ValueError: no replica has any.
        """
        sizes, recompute, weights, of_targets = zip(*offers, strict=True)
        if not any(sizes):
            raise ValueError(
                "no replica has a mini-batch: in a loop over batches(…, sharded=True) give what it "
                "yields, on the first rank of each replica"
            )
        all_weights = tuple(chain(*weights))
        if call == "step":
            self._loss.warn_of_weights(all_weights)
        shares = tuple(zip(map(tuple, sizes), map(tuple, recompute), strict=True))
        return {
            "shares": shares,
            "sizes": shares[0][0],
            "recompute": shares[0][1],
            "weights": all_weights,
            "whole": math.fsum(all_weights),
            "is_sharded": True,
            "target": ROUTED if self._output_stage != 0 and any(of_targets) else LOCAL,
        }

    def _about_loss(
        self, target: Any, parts: Sequence[Scattered]
    ) -> tuple[Sequence[Any] | None, dict[str, Any]]:
        """Return each micro-batch's target, if rank 0 sends it, and what the order says of it."""
        sizes = [size for _, of_replica in parts for size in of_replica]
        way, place = ROUTED, 0
        if target is None or self._output_stage == 0:
            way = LOCAL
        elif len(parts) == 1 and (found := self._batches.find_delivered(target)) is not None:
            way, place = DELIVERED, found
        is_sent = target is not None and (way == ROUTED or len(parts) > 1)
        weighs = self._loss.weight is not None
        targets = scatter_like(target, sizes) if is_sent or way != LOCAL else None
        about: dict[str, Any] = {"target": way, "delivered": place}
        if not weighs or way != LOCAL or len(parts) > 1:
            weights = self._loss.weights(targets, sizes)
            about |= {"weights": weights, "whole": math.fsum(weights)}
        return targets if is_sent else None, about

    def _with_loss(
        self, batch: MiniBatch, order: Order, target: Any, given: Sequence[Any] | None
    ) -> MiniBatch:
        """Add what a step needs to know of the loss.

        ``target`` is what the user gave on this rank; ``given``, of each micro-batch, what came
        from rank 0.
        """
        loss = None
        if self._grid.stage == self._output_stage:
            if given is None and order.target != ROUTED and order.sizes:
                given = self._own_targets(order, target)
            weights, whole, is_known = order.weights, order.whole, True
            if not order.shares and not weights:  # only this stage has the target
                on_host = self._batches.on_host(target)
                counted = None if on_host is None else scatter_like(on_host, order.sizes)
                weights = self._loss.weights(counted, order.sizes)
                whole, is_known = math.fsum(weights), False
            loss = MeanLoss(
                self._loss,
                weights,
                whole if order.total_weight is None else order.total_weight,
                accumulate=order.accumulate,
                weight=None if is_known else whole,
            )
        return replace(
            batch,
            targets=None if given is None else [on_device(part, self._device) for part in given],
            loss=loss,
            keep=order.keeps_graph,
            reduces=order.reduces,
            is_backward=order.keeps_graph,
            is_step=True,
        )

    def _own_targets(self, order: Order, target: Any) -> Sequence[Any] | None:
        """Return, on a last stage, each micro-batch's target, if it has one that no rank sends."""
        if order.target == DELIVERED:
            target = self._batches.delivered[order.delivered]
        if order.shares and target is not None and not has_placeholder(target):
            raise ValueError(
                "with replicas the target of step() is divided as the input is, but rank 0 gave "
                f"none, and {self._grid.rank_name(self._grid.rank)} did: give it where the input "
                "is: on rank 0, or in a loop over batches(…, sharded=True) on each first rank"
            )
        if order.target == LOCAL:
            self._loss.warn_of_ignored(self._batches.on_host(target))
        return None if target is None or order.shares else scatter_like(target, order.sizes)


def _recomputed(checkpoint: str, sizes: Sequence[int], *, keeps: bool) -> tuple[int, ...]:
    """Return the micro-batches that are recomputed, if a backward pass follows."""
    return tuple(sorted(recomputed(checkpoint, len(sizes)))) if keeps else ()
