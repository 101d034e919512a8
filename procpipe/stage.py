"""The public ``Stage``: one stage of a pipeline, an ``nn.Sequential`` of this process's layers.

    stage.step(input, target)          forward and backward of a whole mini-batch
    output = stage(input)              forward only; then any loss code, then loss.backward()
    for … in stage.batches(loader)     the first rank of a replica reads, its others follow

Every rank makes the same calls. Each call goes the same way:

    1  a replica's first rank scatters its mini-batch and     Coordinator.issue
       issues an order; its others wait for it, in the        Coordinator.follow
       same call; replicas compare their calls                Coordinator.announce, meet
    2  every rank runs its stage's program                    Runner.run
    3  the result: a loss everywhere; an output on the last
       stage, a placeholder elsewhere

If anything goes wrong in a call on one rank, it ends with an error on every rank, and the stage
cannot be used again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from procpipe import build
from procpipe.compute.wrappers import check_not_sharded, refuse_wrappers_of
from procpipe.data.loss import Loss, MeanLoss, divisors
from procpipe.data.microbatch import checked_chunks, on_device, scatter, scatter_like
from procpipe.data.minibatch import (
    UNSET,
    Inputs,
    MiniBatch,
    inputs_and_target,
    inputs_of,
    join_outputs,
)
from procpipe.data.remote import Remote, check_held, holder_of
from procpipe.errors import StageClosedError
from procpipe.gradients import clip_together, connect_scaler
from procpipe.job.world import DEFAULT_STALL_TIMEOUT_S, DEFAULT_TIMEOUT_S, World
from procpipe.local_layers import LocalLayers
from procpipe.model.arguments import checked_replicas, ranks_of
from procpipe.model.cut import check_model
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import schedule_of
from procpipe.plan.task import Plan
from procpipe.run.batches import Batches, Loader
from procpipe.run.calls import Calls
from procpipe.run.coordinator import Agree, Coordinator
from procpipe.run.faults import note_full_device
from procpipe.run.order import LOCAL, SENT, Order
from procpipe.run.runner import Runner
from procpipe.run.same_input import check_same
from procpipe.run.statistics import StageStatistics
from procpipe.run.stops import Signals
from procpipe.skip.skippable import verify_skippables
from procpipe.tree import map_tensors


class Stage(LocalLayers):
    """This process's part of a model that is trained as a pipeline, one process a stage.

    Every rank builds it from the same full model and the same arguments, and then makes the same
    calls. It holds only its own layers, under their names in the full model, so ``parameters()``
    is what this process's optimizer needs. Started without a launcher, it is the whole model in one
    stage. Building it connects the processes, and waits for all of them; the first call compares
    their settings and opens the channels. "The last stage" is that of the last partition.

    Args:
        module: the full model, a flat ``nn.Sequential``. Layers of different stages may share
            parameters: each stage has a copy, with the same value and, after each call, the same
            gradient. If the model was built on the meta device, only this stage's layers get
            memory; they are initialised by their ``reset_parameters()``, with values that do not
            depend on the balance. If it has an attribute ``keys``, ``procpipe.state`` maps its keys
            by that to those in files.
        balance: number of layers in each partition, of which each stage runs one, or as many as
            ``schedule`` says; or ``"time"`` or ``"size"`` to have rank 0 find it from ``sample``.
            If left out, it is found from the layers' parameters and forward FLOPs (on the meta
            device: nothing is computed), or parameters alone where no sample is known, and rank 0
            prints it. Without a launcher it is checked, but all layers are in one partition.
        sample: what a balance is found from: a mini-batch's input, a dict of named inputs, or
            ``procpipe.balance.Inputs`` of several. For ``"time"`` and ``"size"`` on rank 0;
            without a balance on every rank, by default the model's attribute ``sample`` (a tuple or
            dict of inputs).
        replicas: number of pipelines of this model, of equally many processes each. Each reads data
            of its own, and gradients are added up once a step. See docs/replicas.md.
        mesh: a ``DeviceMesh`` of one dimension, ``device_mesh["pp"]``, whose ranks make this
            pipeline; layers may be sharded over other dimensions. See docs/replicas.md.
        chunks: number of micro-batches that a replica's mini-batch is scattered into.
        devices: one device a rank; by default this host's GPUs in order, or CPUs. Several ranks may
            share a GPU: ``["cuda:0", "cuda:0"]``.
        checkpoint: what is recomputed in the backward pass: ``"always"``, ``"except_last"`` (every
            micro-batch but the last that there really is) or ``"never"``.
        schedule: in which order the stages of a ``step`` work: ``"gpipe"``, ``"1f1b"``,
            ``"interleaved"`` (several partitions a stage), ``"zb-h1"`` or ``"zb-v"`` (backward in
            two tasks, one or two partitions a stage); or a function ``(m, n) ->
            procpipe.plan.task.Plan`` of the numbers of micro-batches and of stages, whose plan also
            says what is recomputed. ``stage(input)`` always runs all micro-batches forward, then
            all backward. See docs/schedules.md.
        deferred_batch_norm: replace batch normalisation by ``procpipe.DeferredBatchNorm``.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target, of
            one micro-batch: the mean over its samples, or over what ``loss_weight`` counts, 0-dim.
            Runs on the last stage. Parameters of its own are not among ``parameters()``.
        loss_weight: ``loss_weight(target)``: what one micro-batch counts in the mean over the
            mini-batch (the tokens that are not masked, say), a finite number from 0. By default
            ``loss_fn.num_counted(target)``, where ``loss_fn`` has that method (those of procpipe
            have); else the number of samples. A micro-batch of weight 0 is left out, even if its
            loss is NaN. If all weights are 0, loss and gradients are 0, with one warning.
        check_loss: raise ``procpipe.NonFiniteLossError`` when a micro-batch's loss is NaN or
            infinite, before its backward; on GPUs the last stage's host then waits for each loss.
        check_tied: compare the copies of parameters and buffers that several stages use before each
            training call, and raise ``RuntimeError`` on every rank if they differ; otherwise before
            the calls 2, 4, 8, … with a warning on rank 0, or an error if buffers differ. Give it on
            every rank.
        timeout_s: after how long a wait for another rank is an error; 1,800 s by default.
        stall_timeout_s: after how long a wait is reported on standard error; 30 s by default.
        trace: where each rank writes what it does in the first and the latest steps, after each
            step: ``"run.json"`` gives ``run.0.json``, ``run.1.json``, … by rank, for ``procpipe
            timeline`` and https://ui.perfetto.dev. Give it on every rank, and each stage of a
            process another path. On GPUs each step then waits for the device.
        world: this process's place in the job; by default as the launcher set it.

    Attributes:
        rank: this process's rank; its stage's index, plus ``replica`` times the number of stages.
        replica: the replica that this process belongs to, from 0.
        replicas: the number of replicas.
        device: this stage's device.
        devices: each stage's device, by rank.
        balance: number of layers in each partition, a list of int.
        placement: the stage of each partition; ``[0, 1, …]`` unless each has several partitions.
        schedule: the name of the schedule; ``"a function"`` for a plan of your own.
        chunks: as above; may be set between calls, on each replica's first rank.
        checkpoint: likewise.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or ``balance`` not of ints; skip tensors
            that are not stashed and popped in pairs; data parallelism around a layer.
        ValueError: a wrong balance, number of processes, ``chunks`` or ``checkpoint``; a layer
            twice in the model; a ``trace`` without a folder.
        IndexError: more processes than devices.
        KeyError: a layer with the name of an attribute of ``Stage``.

    Source: torchgpipe 0.0.7, ``torchgpipe.GPipe``.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | str | None = None,
        *,
        sample: Any = None,
        replicas: int = 1,
        mesh: Any = None,
        chunks: int = 1,
        devices: Sequence[torch.device | str | int] | None = None,
        checkpoint: str = "except_last",
        schedule: str | Callable[[int, int], Plan] = "gpipe",
        deferred_batch_norm: bool = False,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        check_loss: bool = False,
        check_tied: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        trace: str | os.PathLike[str] | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self._world = world or World.from_environment(
            devices, ranks_of(mesh, replicas), timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        )
        self.rank, self.device = self._world.rank, self._world.device
        self.devices = list(self._world.devices)
        self._calls = Calls(self._world, self._connect)
        self._open_pass: MiniBatch | None = None  # whose backward() may follow
        try:
            self._world.connect()
            check_model(module)
            verify_skippables(module)
            self.chunks, self.checkpoint = checked_chunks(chunks), checkpoint
            recomputed(checkpoint, 1)  # or it names no mode
            self._schedule = schedule_of(schedule)
            self.schedule = self._schedule.name
            # A script without a launcher is one stage of one replica.
            replicas = replicas if self._world.is_launched else 1
            self.replicas = checked_replicas(replicas, self._world.num_ranks)
            self._grid = self._world.divide(self.replicas)
            self.replica = self._grid.replica
            self._coordinator = Coordinator(self._world.mesh, self._grid)
            self._defers_batch_norm = bool(deferred_batch_norm)
            cut = build.cut_model(
                module,
                balance,
                sample,
                self.chunks,
                self._schedule,
                self._coordinator,
                self._world,
                defers_batch_norm=self._defers_batch_norm,
            )
            self.balance, self.placement = cut.balance, list(cut.placement)
            self._output_rank = self._grid.rank_of(cut.placement[-1])
            self._adopt(cut, is_training=module.training)
            self._checks_tied = bool(check_tied)
            if isinstance(loss_fn, nn.Module) and self.rank == self._output_rank:
                loss_fn.to(self.device)  # class weights must be on the output's device
            self._loss = Loss(loss_fn, loss_weight, check_loss)
            self._keeps_own = False
            self._batches = Batches(
                self._calls,
                lambda: self.training,
                self._grid,
                self._output_rank,
                self.device,
            )
            self._last_weight: float | None = None
            self._num_forwards = 0  # calls of ``stage(input)`` whose inputs may be compared
            self._trace: Path | None = None
            if trace is not None:
                from procpipe.timeline.chrome import rank_path

                self._trace = rank_path(trace, self._grid.job_rank)
            self._guard = refuse_wrappers_of(self)
        except BaseException as error:
            note_full_device(error, self.device, f"rank {self.rank} builds its stage")
            self._calls.fail("Stage", error)
            raise

    # -- running --------------------------------------------------------------------------------

    def step(
        self,
        *inputs: Any,
        target: Any = UNSET,
        accumulate: Any = None,
        total_weight: Any = None,
        **named: Any,
    ) -> Tensor:
        """Run a mini-batch: forward, loss and, in training with gradients on, backward.

        Every rank calls it; the ``inputs`` and the ``target`` of the first rank (of each replica)
        count, so the others may pass anything, or nothing. Returns once this stage has done its
        part. In training the mini-batches of all replicas are one, of which each has a part; in
        eval mode each replica has its own, as many as it wants.

        Args:
            inputs: the model's inputs, nested values of tensors ``(batch, …)``. Of two positional
                values the second is the target, unless that is given by name.
            target: what ``loss_fn`` gets beside the output; ``None`` for nothing. A model of
                several inputs needs it by name: ``step(a, b, target=y)``. If only the last stage
                passes a target, that one is used.
            accumulate: of how many mini-batches this is one whose gradients are added up, an int
                from 1, the same for all replicas in training. Loss and gradients are divided by it,
                as by ``(loss / 4).backward()``, also in eval mode.
            total_weight: what the loss is divided by instead: the weight of all mini-batches whose
                gradients are added up, of all replicas, a number above 0. For means over tokens.
            named: inputs that the first layer takes by name, divided as the others. ``labels`` is
                the target, unless that is given: ``step(**batch)``.

        Returns:
            The mean loss over the mini-batch's samples, 0-dim, detached, on every rank; with
            ``accumulate`` or ``total_weight`` this mini-batch's part of the loss over all of them,
            and in eval mode that of this replica. Gradients are added to the ``.grad`` of
            parameters (and of inputs that require a gradient).

        Raises:
            RemoteStageError: another rank failed.
            ValueError: no ``loss_fn``, a mini-batch that cannot be scattered, or a wrong
                ``accumulate`` or ``total_weight``, or both.
            TypeError: no tensor in the inputs; more than two positional values and no ``target=``.
            CallMismatchError: another rank is in another call or mode, or in training another
                replica has another ``accumulate`` or ``total_weight``.
        """
        with self._calls.together("step") as pipeline:
            if self._loss.function is None:
                raise ValueError(
                    "step() needs a loss: give Stage(…, loss_fn=…), or call stage(input) and run "
                    "the loss of its output backward"
                )
            is_first, is_last = self._grid.stage == 0, self.rank == self._output_rank
            given, target = inputs_and_target(inputs, named, target, is_read=is_first)
            batch, decided = self._scattered(given)
            if is_first and (total_weight is not None or accumulate is not None):
                decided |= divisors(total_weight, accumulate)
            if is_first and not is_last and target is not None:
                decided["target"] = self._batches.delivered(target) or SENT
                decided["weights"] = self._loss.weights(target, decided["sizes"])
            order = self._begin_call("step", **decided)
            if is_first and order.target == SENT:
                pipeline.wires.send_target(target)
            counted = None  # elsewhere than on the last stage
            if is_last:
                batch.loss = self._mean_loss(pipeline, order, target)
                counted = math.fsum(batch.loss.weights)
            self._coordinator.announce(order, counted)
            self._run_mini_batch(pipeline, order, batch)
            batch.send_back()
            if batch.weight == 0 and is_last and (self.replica == 0 or not order.is_shared):
                self._loss.warn_once(
                    "loss_weight is 0 for every micro-batch of a mini-batch, so its loss and its "
                    "gradients are 0"
                )
            self._last_weight = batch.weight
            assert batch.mean is not None, "every step ends with a loss on every rank"
            return batch.mean  # step 10

    @property
    def last_weight(self) -> Tensor:
        """What the mini-batch of the newest ``step`` counts: its samples, or their weights.

        Of all replicas or of this one, as the loss is. 0-dim, float64, on every rank; does not
        communicate. So a loss over several mini-batches is the sum of ``loss * stage.last_weight``
        over the sum of ``stage.last_weight``.

        Raises:
            RuntimeError: there was no ``step`` yet.
        """
        if self._last_weight is None:
            raise RuntimeError("last_weight is that of the newest step(), and there was none yet")
        return torch.tensor(self._last_weight, dtype=torch.float64)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run a mini-batch forward; a loss of the output can be run backward on every rank.

        Every rank calls it; the ``inputs`` of the first rank (of each replica) count. Another rank
        may pass nothing, or placeholders; if it passes tensors, they are compared with the first
        rank's in calls 1, 2, 4, 8 and so on (with replicas in training only). Each replica has an
        output and a loss of its own; ``backward()``, which all call, averages gradients over
        replicas, weighted by their samples.

        Args:
            inputs: the model's inputs, nested values of tensors ``(batch, …)``.
            named: inputs that the first layer takes by name.

        Returns:
            The model's output ``(batch, …)`` on the last stage. Elsewhere a placeholder that takes
            part in any torch operation and has no value; ``backward()`` of anything computed from
            it runs this stage's part of the backward pass, so every rank calls it.

        Raises:
            RemoteStageError: another rank failed.
            ValueError: a mini-batch that cannot be scattered.
            TypeError: no tensor in the inputs.
            DisagreementError: a rank passes other tensors than the first rank of its replica.
        """
        with self._calls.together("forward") as pipeline:
            given = inputs_of(inputs, named)
            batch, decided = self._scattered(given)
            order = self._begin_call("forward", **decided)
            self._coordinator.announce(order)
            if order.is_shared or self.replicas == 1:
                self._num_forwards += 1
                check_same(given, self._num_forwards, self._grid, self._coordinator.agree_in_call)
            self._run_mini_batch(pipeline, order, batch)
        self._open_pass = batch if order.is_kept else None
        outputs, batch.outputs = batch.outputs, {}  # which the caller may drop
        may_follow = partial(self._run_backward, order, batch) if order.is_kept else None
        if self.rank != self._output_rank:
            return Remote(self._output_rank, "the output of stage(input)", may_follow)
        return join_outputs([outputs[i] for i in sorted(outputs)], may_follow)

    def batches(
        self, loader: Loader, *, stop_on: Signals = (), same_data: bool = False
    ) -> Iterator[Any]:
        """Iterate over a data loader that the first rank of each replica alone reads.

        Every rank calls it, and each item waits for the first rank. Other ranks may pass anything
        for ``loader``. With replicas each reads data of its own, as by a ``DistributedSampler`` of
        ``stage.replicas`` and ``stage.replica``. In training all wait for each other at each item,
        and their loops end with the first loader; in eval mode each has its own.

        Args:
            loader: gives mini-batches, ``(input, target)`` or of any other form; or a function that
                makes such a loader, called on the first rank only (``lambda: tqdm(loader)`` shows
                one bar a replica).
            stop_on: signals on which the loop ends, such as ``(signal.SIGTERM,)``; the same on
                every rank, in the main thread. When any rank gets one, the loop ends on every rank
                after the current mini-batch, ``is_stopped`` is True, and later loops with
                ``stop_on`` end at once; these signals then do nothing until ``close``. Each item
                waits for all ranks. With replicas, a signal in eval mode ends the next loop that
                trains. See docs/launching.md.
            same_data: whether replicas may read the same; otherwise it is an error if they do so
                in the first mini-batch in training.

        Yields:
            On the first rank the loader's items. Elsewhere items of the same form, with
            placeholders in the place of tensors; except that on the last stage all but the first
            entry of a tuple or list (the target) is real, and any other item as a whole, so that a
            loss can be computed there. An entry that cannot travel (a NumPy array) remains a
            placeholder. A Mapping of a class that torch's pytree does not know becomes a dict.

        Raises:
            RemoteStageError: another rank failed, in reading the loader for instance.
            CallMismatchError: ``stop_on`` or the mode is not the same on all ranks; or replicas
                have read the same.
            TypeError, ValueError: ``stop_on`` is no collection of signals that can be handled, or
                is given with ``mesh``.
            RuntimeError: ``stop_on`` in another thread than the main one.
        """
        if stop_on and self._grid.is_part:
            raise ValueError(
                "batches(…, stop_on=…) ends the loops of one pipeline, but with mesh= other ranks "
                "of the job have their own, which would go on: leave stop_on out, agree by "
                "torch.distributed and break"
            )
        return self._batches.read(loader, stop_on, same_data=bool(same_data))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has ended a loop over ``batches(…, stop_on=…)``, and not its loader.

        The same on every rank; does not communicate.
        """
        return self._batches.stops.is_stopped

    def sum_over_replicas(self, value: Any) -> Any:
        """Add up a number of each replica, as the losses of all in eval mode; on every rank.

        Every rank calls it, once after a loop, and waits for the same stage of other replicas.

        Args:
            value: a number, or a tensor of one; the same on all ranks of a replica. A placeholder
                remains one.

        Returns:
            The sum, which without replicas is the number; of a tensor, one of its shape and dtype.
        """
        is_remote, is_tensor = isinstance(value, Remote), isinstance(value, Tensor)
        number = None if is_remote else value.item() if is_tensor else value
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not (is_remote or is_number):  # the sum of two True in a tensor of bool would be True
            raise TypeError(
                f"sum_over_replicas() takes a number, or a tensor of one real number, not {value!r}"
            )
        with self._shared_call("sum_over_replicas", number):
            numbers = self._coordinator.meet()
        if is_remote:
            return value
        return torch.full_like(value, sum(numbers)) if is_tensor else sum(numbers)

    def fetch(self, value: Any) -> Any:
        """Bring a value that one rank holds to every rank of its replica.

        Every rank calls it, and waits for the rank that holds it.

        Args:
            value: a nested value of tensors where it is real, elsewhere the placeholder.

        Returns:
            The value, detached, on this stage's device.

        Raises:
            RemoteValueError: no rank has all of it.
        """
        with self._calls.together("fetch") as pipeline:
            here = holder_of(value, self._grid.rank_of(0))
            holder: int = self._begin_call("fetch", detail=here).detail  # as the first rank knows
            if self.rank != holder:
                return pipeline.wires.take_value(holder)
            check_held(value)
            for peer in self._grid.same_replica():
                if peer != holder:
                    pipeline.wires.send_value(peer, value)
            return map_tensors(lambda tensor: tensor.detach(), value)

    # -- gradients ------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all stages by their common norm, as for the plain model.

        Every rank calls it, and waits for all of them (and, on GPUs, for the device).

        Args:
            max_norm: the largest norm that is not clipped.
            norm_type: the p of the p-norm; ``inf`` is allowed.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before clipping, 0-dim, on every rank.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or ``no_sync()``
                has left gradients to be added up.

        Source: ``torch.nn.utils.clip_grad_norm_``.
        """
        with self._agreement("clip_grad_norm_", of_gradients=True) as agree:
            return clip_together(
                agree,
                self._parameters_by_partition(),
                {*(self._tied.elsewhere.values() if self.replica == 0 else self.parameters())},
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
                device=self.device,
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
        unscale = partial(self._agreement, "scaler.unscale_", of_gradients=True)
        with self._agreement("scaler") as agree:
            connect_scaler(scaler, agree, unscale, self.device, self._grid.numbers)
            self._loss.scale = scaler.scale
        return scaler

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of calls in this block to be added up over replicas by the next call.

        For accumulation over several steps: gradients then travel once. Every rank enters the
        block, which does not communicate. With FSDP the next call reduces them; without replicas
        or FSDP the block changes nothing.

        Source: ``torch.nn.parallel.DistributedDataParallel.no_sync``.
        """
        before, self._keeps_own = self._keeps_own, True
        try:
            yield
        finally:
            self._keeps_own = before

    # -- statistics -----------------------------------------------------------------------------

    def statistics(self) -> StageStatistics:
        """Return what this stage did so far; does not communicate.

        How its idle time divides is in ``split`` once ``report()`` has compared all stages.
        """
        if self._calls.pipeline is None:
            raise StageClosedError("there are no statistics before the first call and after close")
        return self._calls.pipeline.statistics()

    def report(self) -> str:
        """Return a table of what all stages did so far, on every rank, which all call it.

        It also shows how each stage spent the last step, as ``statistics().split`` does from then
        on: busy, and idle because of the plan (bubble), of unequal stages (imbalance) and of
        communication.
        """
        from procpipe.timeline.report import report_of_all
        from procpipe.timeline.text import table

        with self._shared_call("report") as pipeline:
            self._coordinator.meet()
            statistics = report_of_all(pipeline)
            pipeline.split = statistics[self.rank].split
            return table(statistics)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only; takes what the built-in ``print`` takes."""
        if self.rank == 0:
            print(*values, **{"flush": True, **options})

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the pipeline once all that was sent has arrived; happens at exit by itself."""
        self._calls.close()
        self._batches.close()
        self._guard.remove()

    # -- one call, step by step -----------------------------------------------------------------

    def _begin_call(self, call: str, **decided: Any) -> Order:
        """Begin a call, by its method's name; ``decided`` is what the first rank decides."""
        # A backward pass runs with gradients off on the rank where autograd calls it.
        is_grad_enabled = torch.is_grad_enabled() or call == "backward"
        return self._coordinator.begin(Order(call, self.training, is_grad_enabled, **decided))

    @contextmanager
    def _shared_call(self, call: str, value: Any = None) -> Iterator[Runner]:
        """Surround a call that all replicas make together; ``value`` is what this one announces."""
        with self._calls.together(call) as pipeline:
            self._coordinator.announce(self._begin_call(call), value)
            yield pipeline

    @contextmanager
    def _agreement(self, call: str, *, of_gradients: bool = False) -> Iterator[Agree]:
        with self._shared_call(call) as pipeline:
            if of_gradients:
                pipeline.replicas.check_added_up(call)
            yield self._coordinator.agree_in_call

    def _scattered(self, inputs: Inputs) -> tuple[MiniBatch, dict[str, Any]]:
        """Return a mini-batch, on the first rank scattered, and what that decides of the call."""
        if self._grid.stage != 0:
            return MiniBatch(), {}
        parts, structure, sizes = scatter(inputs, self.chunks)  # step 1
        batch = MiniBatch(parts, structure)
        keeps = self.training and torch.is_grad_enabled()
        again = tuple(sorted(recomputed(self.checkpoint, len(sizes)))) if keeps else ()
        return batch, {"sizes": tuple(sizes), "recompute": again, "reduces": not self._keeps_own}

    def _mean_loss(self, pipeline: Runner, order: Order, target: Any) -> MeanLoss:
        """Return, on the last stage, the loss of a step; ``target`` is what the user gave here."""
        if order.target == SENT:
            target = pipeline.wires.take_target()
        elif order.target != LOCAL:
            target = self._batches.target_of(*order.target)
        return MeanLoss(
            self._loss,
            scatter_like(on_device(target, self.device, "target"), order.sizes),
            order.weights or self._loss.weights(self._batches.as_read(target), order.sizes),
            lambda: math.fsum(self._coordinator.meet()),  # of all replicas
            order.total_weight,
            order.accumulate,
        )

    def _run_mini_batch(self, pipeline: Runner, order: Order, batch: MiniBatch) -> None:
        """Run the program that begins a mini-batch: of a step all of it, else its forward part."""
        self._open_pass = None
        if self._cut.ties and order.is_training and order.is_kept:
            self._tied.check_equal(self._coordinator.agree_in_call, always=self._checks_tied)
        for layer in self._deferred:
            layer.begin()
        pipeline.run(order, batch)
        self._coordinator.meet()  # also where nothing has been added up
        if order.is_training and pipeline.replicas.has_others:
            pipeline.replicas.end_forward(self.children())
        for layer in self._deferred:
            layer.commit()

    def _run_backward(
        self, order: Order, batch: MiniBatch, gradients: list[list[Tensor | None]] | None = None
    ) -> None:
        """Run this stage's part of the backward pass of an earlier ``stage(input)``.

        ``gradients`` are those of each micro-batch's output, on the rank that has it.
        """
        if batch is not self._open_pass:
            raise RuntimeError(
                "backward() of an output whose graph a later call of the stage has dropped, or "
                "whose backward pass was run already: run each output's loss backward, once, "
                "before the next forward pass"
            )
        self._open_pass = None
        with self._calls.together("backward") as pipeline:
            order = self._begin_call(
                "backward",
                sizes=order.sizes,
                recompute=order.recompute,
                reduces=not self._keeps_own,
            )
            self._coordinator.announce(order, sum(order.sizes))
            if gradients is not None and self.replicas > 1:
                share = sum(order.sizes) / sum(self._coordinator.meet())
                gradients = [[g if g is None else g * share for g in one] for one in gradients]
            batch.output_gradients = gradients
            pipeline.run(order, batch)
            self._coordinator.meet()
            batch.send_back()

    # -- building -------------------------------------------------------------------------------

    def _connect(self) -> Runner:
        check_not_sharded(self, self._grid.job_ranks)
        try:
            pipeline = build.connect(
                self._world,
                self._coordinator,
                self._schedule,
                self._cut,
                dict(self.named_children()),
                settings={
                    "chunks": self.chunks,
                    "checkpoint": self.checkpoint,
                    "check_tied": self._checks_tied,
                    "deferred_batch_norm": self._defers_batch_norm,
                },
                trace=self._trace,
            )
            if self.rank == self._output_rank:
                pipeline.replicas.make_equal(self._loss.modules())
        except RuntimeError as error:
            note_full_device(error, self.device, f"rank {self.rank} builds its stage")
            raise
        return pipeline
