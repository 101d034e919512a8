"""What a user holds: one stage of a pipeline, as an ``nn.Sequential`` of this process's layers.

    stage.step(input, target)          forward and backward of a whole mini-batch
    output = stage(input)              forward only; then any loss code, then loss.backward()
    for … in stage.batches(loader)     rank 0 reads, the others follow

Every rank makes the same calls. Each call goes the same way:

    1  rank 0 splits the mini-batch and issues an order       Coordinator.issue
       the others wait for it, in the same call               Coordinator.follow
    2  every rank runs its stage's program                    Executor.run
    3  the result: a loss everywhere; an output on the last
       stage, a placeholder elsewhere

If anything goes wrong in a call on one rank, it ends with an error on every rank, and the stage
cannot be used again.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from procpipe.balance.agreed import agreed_balance
from procpipe.batchnorm import DeferredBatchNorm
from procpipe.clipping import as_tensor, clip_by_norm, norms, total_norm
from procpipe.compute.ledger import num_bytes
from procpipe.compute.partition import Partition
from procpipe.compute.skips import SkipPorts
from procpipe.compute.wrappers import (
    check_not_data_parallel,
    check_not_sharded,
    is_data_parallel,
    refuse_data_parallel,
)
from procpipe.data.batches import Batches, Loader
from procpipe.data.microbatch import scatter_like
from procpipe.data.minibatch import Ingoing, Loss, input_and_target, join_outputs, on_device
from procpipe.data.remote import Remote
from procpipe.errors import StageClosedError
from procpipe.job.world import DEFAULT_STALL_TIMEOUT_S, DEFAULT_TIMEOUT_S, World
from procpipe.model.cut import (
    check_model,
    check_shared_parameters,
    cut,
    fit_balance,
    layer_facts,
)
from procpipe.model.materialize import materialize
from procpipe.plan.placement import partitions_of
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import AUTO, schedule_of
from procpipe.plan.task import Plan
from procpipe.run.calls import Calls
from procpipe.run.executor import MiniBatch
from procpipe.run.faults import note_full_device
from procpipe.run.messages import DELIVERED, LOCAL, ROUTED, Order
from procpipe.run.pipeline import Pipeline
from procpipe.run.trace import StageStatistics, TimedTask, table
from procpipe.run.transports import NAMES
from procpipe.skip.layout import SkipLayout
from procpipe.skip.skippable import verify_skippables
from procpipe.timeline.collect import claimed
from procpipe.tree import children_of, map_tensors
from procpipe.tuning.auto import AutoSchedule, checked_limits
from procpipe.version import __version__

_UNSET: Any = object()


class Stage(nn.Sequential):
    """This process's part of a model that is trained as a pipeline, one process a stage.

    Every rank builds it from the same full model and the same arguments, and then makes the same
    calls. It holds only its own layers, under their names in the full model, so ``parameters()``
    is what this process's optimizer needs and ``state_dict()`` has the full model's keys. Started
    without a launcher, it is the whole model in one stage.

    Building it does not communicate, unless it fails or a balance is to be found; the first call
    connects the processes.

    Args:
        module: the full model, a flat ``nn.Sequential``. If it was built on the meta device, only
            this stage's layers get memory; they are initialised by their ``reset_parameters()``,
            with values that no balance changes.
        balance: number of layers in each partition, of which each stage runs one, or as many as
            ``schedule`` says; or ``"time"`` or ``"size"`` to have rank 0 find it from a sample
            (then every rank waits for rank 0 here). Without a launcher it is checked, but all
            layers are in one partition.
        sample: on rank 0, what a balance is found from: a mini-batch's input, or
            :class:`~procpipe.balance.Inputs` of several.
        chunks: number of micro-batches a mini-batch is split into.
        devices: one device a rank; by default this host's GPUs in order, or CPUs. Several ranks may
            share a GPU: ``["cuda:0", "cuda:0"]``.
        checkpoint: what is recomputed in the backward pass: ``"always"``, ``"except_last"`` (every
            micro-batch but the last that there really is) or ``"never"``.
        schedule: in which order the stages of a ``step`` work: ``"gpipe"`` (all micro-batches
            forward, then all backward); ``"1f1b"`` (a backward as soon as there can be one: as
            fast, but a stage holds no more micro-batches than there are stages); ``"interleaved"``
            (1F1B with several partitions a stage); ``"zb-h1"`` and ``"zb-v"`` (backward in two
            tasks, with one or two partitions a stage); ``"auto"`` (the first steps are measured,
            and the fastest plan found for what they cost, with any number of partitions a stage);
            or a function ``(m, n) -> procpipe.plan.task.Plan`` of the numbers of micro-batches and
            of stages, whose plan also says what is recomputed. ``stage(input)`` always is in two
            parts. See docs/schedules.md.
        memory_limit_bytes: the most that a stage, or each stage in order, may hold for backward
            passes: activations, messages and what layers save, not parameters, gradients and the
            optimizer's state. Only with ``schedule="auto"``, which recomputes more micro-batches
            than ``checkpoint`` says where they would not fit else. Without a launcher one number
            is for the whole model, and of several the sum.
        deferred_batch_norm: replace batch normalisation by :class:`~procpipe.DeferredBatchNorm`.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target, of
            one micro-batch: the mean over its samples, 0-dim. Runs on the last stage, as part of
            its last layer. Parameters of its own are not among ``parameters()``.
        loss_weight: ``loss_weight(target)``: what one micro-batch counts in the mean over the
            mini-batch, a finite number from 0; by default its number of samples. One that counts
            0 is left out, even if its loss is NaN. Where all count 0, loss and gradients are 0,
            and a warning says so once.
        check_loss: raise :class:`~procpipe.NonFiniteLossError` when a micro-batch's loss is NaN or
            infinite, before its backward; on GPUs the last stage's host then waits for each loss.
        transport: what carries large tensors: ``"shm"`` (CPUs of one host, the default there),
            ``"gloo"`` (CPUs, several hosts), ``"nccl"`` (different GPUs; shared ones too
            from NCCL 2.30 on, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``) or ``"cuda_ipc"`` (all stages
            on one GPU). By default each pair of ranks uses what suits it, so that on GPUs
            there may be both.
        timeout_s: how long a wait for another rank may last before it is an error.
        stall_timeout_s: how long a wait lasts before it is reported on standard error.
        trace: where rank 0 writes a timeline of all stages when the stages close, or when the run
            fails: JSON for https://ui.perfetto.dev and ``procpipe timeline``. Has the first steps
            of a run and the last; give it on every rank, rank 0's path counts. Each stage of a
            process needs a file of its own. On GPUs each step then waits for the device.
        world: this process's place in the job; by default what the launcher says.

    Attributes:
        balance: number of layers in each partition, a list of int.
        placement: the stage of each partition, a list of int; ``[0, 1, …]`` unless a schedule has
            several partitions a stage. Below, "the last stage" is that of the last partition.
        devices: each stage's device, a list of ``torch.device``.
        chunks: see above; rank 0's counts.
        checkpoint: see above; rank 0's counts.
        rank: this process's rank, which is also the index of its stage.
        device: this stage's device.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or ``balance`` not of ints; skip tensors
            that are not stashed and popped in pairs, or of another package; data parallelism around
            a layer.
        ValueError: a wrong balance, ``chunks`` or ``checkpoint``; a layer twice in the model; a
            parameter in two partitions; fewer partitions than processes; a ``trace`` without a
            folder, or that another stage of this process writes or has written.
        IndexError: more partitions, or processes, than there are processes, or devices.

    Source: torchgpipe 0.0.7, ``torchgpipe.GPipe``.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | str | None = None,
        *,
        sample: Any = None,
        chunks: int = 1,
        devices: Sequence[torch.device | str | int] | None = None,
        checkpoint: str = "except_last",
        schedule: str | Callable[[int, int], Plan] = "gpipe",
        memory_limit_bytes: int | Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        check_loss: bool = False,
        transport: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        trace: str | os.PathLike[str] | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self._world = world or World.from_environment(
            devices, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        )
        self._calls = Calls(self._world, self._connect)
        self._open_pass: object = None
        try:
            # In a tuple, so that nn.Module does not register it.
            self._stand_in = (nn.Parameter(torch.empty(0, device=self._world.device)),)
            check_model(module)
            if self._world.num_ranks > 1:
                check_not_sharded(module)
            verify_skippables(module)
            self.chunks = _checked_chunks(chunks)
            if not isinstance(checkpoint, str):
                raise TypeError(f"checkpoint is {checkpoint!r}, but must be a str")
            recomputed(checkpoint, 1)
            self._schedule = schedule_of(schedule)
            num_ranks = self._world.num_ranks
            self._limits_bytes = checked_limits(
                memory_limit_bytes,
                num_ranks,
                is_auto=self._schedule is AUTO,
                is_launched=self._world.is_launched,
            )
            if isinstance(balance, str):
                num_partitions = self._schedule.count(num_ranks)
                balance = agreed_balance(
                    balance, module, sample, self.chunks, self._world, num_partitions
                )
            self.balance = fit_balance(
                balance,
                len(module),
                num_ranks,
                is_launched=self._world.is_launched,
                partitions_per_stage=self._schedule.partitions_per_stage,
            )
            self._placement = self._schedule.place(len(self.balance), num_ranks)
            self._transport = _checked_transport(transport)
            self.checkpoint = checkpoint
            check_shared_parameters(module, self.balance)
            if isinstance(loss_fn, nn.Module) and self.rank == self._output_rank:
                loss_fn.to(self.device)  # class weights, for one, belong where the output is
            self._loss = Loss(loss_fn, loss_weight, check_loss)
            self._layer_facts = layer_facts(module)
            self._is_deferring = bool(deferred_batch_norm)
            self._adopt_layers(module, deferred_batch_norm)
            self._batches = Batches(
                self._calls, self._order, self.rank, self._output_rank, self.device
            )
            self._trace = trace if self.rank else claimed(trace)
        except BaseException as error:
            note_full_device(error, self.rank, self.device)
            self._calls.fail("Stage", error)
            raise

    @property
    def rank(self) -> int:
        """This process's rank, which is also the index of its stage."""
        return self._world.rank

    @property
    def device(self) -> torch.device:
        """This stage's device."""
        return self._world.device

    @property
    def devices(self) -> list[torch.device]:
        """Each stage's device."""
        return list(self._world.devices)

    @property
    def placement(self) -> list[int]:
        """The stage of each partition."""
        return list(self._placement)

    @property
    def schedule(self) -> str:
        """The name of the schedule; for ``"auto"`` also what the newest training step ran.

        For instance ``"auto: measuring, step 2 of 6, zb-h1"``, ``"auto: trying zb-h1"`` and then
        ``"auto: zb-h1"``, or ``"auto: searched"`` for a plan that is no fixed schedule. A plan
        of the user's own is ``"a function"``. Does not communicate.
        """
        pipeline = self._calls.pipeline
        found = pipeline.meter.schedule if pipeline else ""
        return f"{self._schedule.name}: {found}" if found else self._schedule.name

    # -- running --------------------------------------------------------------------------------

    def step(self, *inputs: Any, target: Any = _UNSET) -> Tensor:
        """Run a mini-batch: forward, loss and, in training with gradients on, backward.

        Every rank calls it; rank 0's ``inputs`` and ``target`` are the ones that count, so the
        others may pass anything, or nothing. Returns once this stage has done its part.

        Args:
            inputs: the model's inputs, nested values of tensors ``(batch, …)``. Of two positional
                values the second is the target, unless that is given by name.
            target: what ``loss_fn`` gets beside the output; ``None`` for none. A model of several
                inputs needs it by name: ``step(a, b, target=y)``. One given only on the last stage
                is used there.

        Returns:
            The mean loss over the mini-batch's samples, 0-dim, detached, on every rank. Gradients
            are added to the parameters' ``.grad`` (and to those of inputs that require them).

        Raises:
            RemoteStageError: another rank failed.
            ValueError: no ``loss_fn``, or a mini-batch that cannot be split.
            TypeError: no tensor in the inputs; more than two positional values and no ``target=``.
        """
        with self._calls.together("step") as pipeline:
            self._loss.check()
            if target is _UNSET:
                inputs, target = input_and_target(inputs, is_read=self.rank == 0)
            order, batch, ingoing = self._begin("step", inputs, target)
            self._run_forward(pipeline, order, batch)
            if ingoing is not None:
                ingoing.add_gradients(batch.input_gradients)
            assert batch.loss is not None, "every step ends with a loss on every rank"
            return batch.loss

    def forward(self, *inputs: Any) -> Any:
        """Run a mini-batch forward; a loss of the output can be run backward on every rank.

        Every rank calls it; rank 0's ``inputs`` are the ones that count.

        Args:
            inputs: the model's inputs, nested values of tensors ``(batch, …)``.

        Returns:
            The model's output ``(batch, …)`` on the last stage. Elsewhere a placeholder that takes
            part in any torch operation and has no value; ``backward()`` of anything computed from
            it runs this stage's part of the backward pass, so every rank calls it.

        Raises:
            RemoteStageError: another rank failed.
            ValueError: a mini-batch that cannot be split.
            TypeError: no tensor in the inputs.
        """
        with self._calls.together("forward") as pipeline:
            order, batch, ingoing = self._begin("forward", inputs, None)
            self._run_forward(pipeline, order, batch)
        this = self._open_pass = object()

        def run_backward(gradients: list[list[Tensor | None]] | None = None) -> None:
            batch.output_gradients = gradients
            self._run_backward(this, order, batch, ingoing)

        may_follow = run_backward if batch.keep else None
        if self.rank != self._output_rank:
            return Remote(self._output_rank, "the output of stage(input)", may_follow)
        return join_outputs([batch.outputs.pop(i) for i in range(len(order.sizes))], may_follow)

    def batches(self, loader: Loader) -> Iterator[Any]:
        """Iterate over a data loader that rank 0 alone reads; ends everywhere when it ends.

        Every rank calls it, and each item waits for rank 0. Other ranks may pass anything for
        ``loader``; it is not touched there.

        Args:
            loader: gives mini-batches, ``(input, target)`` or of any other form; or a function that
                makes such a loader, called on rank 0 only (``lambda: tqdm(loader)`` shows one bar).

        Yields:
            On rank 0 the loader's items. Elsewhere items of the same form, with placeholders in
            the place of tensors; except that on the last stage all but the first entry of a tuple
            or list (the target) is real, so that a loss can be computed there. A named tuple,
            dataclass or Mapping keeps its class where the rank has imported it.

        Raises:
            RemoteStageError: another rank failed, in reading the loader for instance.
        """
        batches = self._batches
        return batches.read(loader) if self.rank == 0 else batches.follow()

    def fetch(self, value: Any) -> Any:
        """Bring a value that one rank holds to every rank.

        Every rank calls it, with the value where it is real and the placeholder elsewhere, and
        waits for the rank that holds it.

        Args:
            value: a nested value of tensors, or a placeholder.

        Returns:
            The value, detached, on this stage's device.
        """
        with self._calls.together("fetch") as pipeline:
            holder = _holder(value)
            holder = self._order("fetch", detail=holder).detail
            if self.rank != holder:
                return pipeline.take_value(holder)
            for peer in range(self._world.num_ranks):
                if peer != holder:
                    pipeline.send_value(peer, value)
            return map_tensors(lambda tensor: tensor.detach(), value)

    # -- training -------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all stages by their common norm, as for the plain model.

        Every rank calls it, and it waits for all of them (and, on GPUs, for the device).

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: the p of the p-norm; ``inf`` is allowed.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before clipping, 0-dim, on every rank.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

        Source: ``torch.nn.utils.clip_grad_norm_``.
        """
        with self._calls.together("clip_grad_norm_") as pipeline:
            self._order("clip_grad_norm_")
            by_partition = {
                j: [p.grad for p in part.parameters() if p.grad is not None]
                for j, part in self._by_partition().items()
            }
            gradients = [gradient for part in by_partition.values() for gradient in part]
            ours = [(j, norms(part, norm_type)) for j, part in by_partition.items()]
            total = pipeline.control.agree(ours, lambda of_all: total_norm(of_all, norm_type))
            norm = as_tensor(total).to(self.device)
            if error_if_nonfinite and not torch.isfinite(norm):
                raise RuntimeError(
                    f"the gradients' norm over all stages is {norm}, so they cannot be clipped; "
                    "look for the layer that makes it so, or leave error_if_nonfinite off"
                )
            clip_by_norm(gradients, max_norm, norm)
            return norm

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return this stage's parameters, for this process's optimizer.

        Where none of them requires a gradient, because the stage has no parameters or all are
        frozen, an empty one that does comes last: so no optimizer refuses what is left of them
        (``[p for p in stage.parameters() if p.requires_grad]``). It stands in for a parameter to
        train, has no elements and never a gradient, and is neither in ``named_parameters()`` nor
        in ``state_dict()``; ``procpipe.state`` passes over it.
        """
        is_trainable = False
        for parameter in super().parameters(recurse):
            is_trainable = is_trainable or parameter.requires_grad
            yield parameter
        if not is_trainable:
            stand_in = self._stand_in[0]
            stand_in.requires_grad = True  # stage.requires_grad_(False) froze it too
            yield stand_in

    def __getitem__(self, index: Any) -> Any:
        """Return one of this stage's layers; of a slice, a plain ``nn.Sequential`` of them."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this stage's part of a state dict of the full model, or of this stage alone.

        Entries of layers that other stages hold are passed over; with ``strict``, entries of no
        layer of the model are an error. Does not communicate.
        """
        ours = {
            key: value
            for key, value in state_dict.items()
            if key.split(".", 1)[0] not in self._layers_elsewhere
        }
        if (versions := getattr(state_dict, "_metadata", None)) is not None:
            ours = OrderedDict(ours)
            ours._metadata = versions  # type: ignore[attr-defined]
        return super().load_state_dict(ours, strict, assign)

    # -- looking on -----------------------------------------------------------------------------

    def statistics(self) -> StageStatistics:
        """Return what this stage did so far; does not communicate.

        How its idle time divides takes the times of all stages: that is in ``split`` once
        ``report()`` has brought them together.
        """
        pipeline = self._calls.pipeline
        if pipeline is None:
            raise StageClosedError("there are no statistics before the first call and after close")
        return pipeline.statistics()

    def reset_peak_held_bytes(self) -> None:
        """Let ``statistics().peak_held_bytes`` start anew, as after a warm-up.

        Does not communicate.
        """
        pipeline = self._calls.pipeline
        if pipeline is None:
            raise StageClosedError("nothing is counted before the first call and after close")
        pipeline.executor.ledger.reset_peak()

    def last_step(self) -> list[TimedTask]:
        """Return this stage's tasks of the last call that ran any, in order, with their times.

        Does not communicate.
        """
        pipeline = self._calls.pipeline
        if pipeline is None:
            raise StageClosedError("there are no tasks before the first call and after close")
        return pipeline.executor.trace.last_step()

    def report(self) -> str:
        """Return a table of what all stages did so far, on every rank, which all call it.

        It also tells how each stage spent the last step: busy, and idle because of the plan
        (bubble), of unequal stages (imbalance) and of communication. ``statistics().split`` has
        the same numbers from then on.
        """
        with self._calls.together("report") as pipeline:
            self._order("report")
            told = table(pipeline.report())
            return f"{told}\nschedule {self.schedule}" if self._schedule is AUTO else told

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only; takes what the built-in ``print`` takes."""
        if self.rank == 0:
            print(*values, **{"flush": True, **options})

    def close(self) -> None:
        """Leave the pipeline once all that was sent has arrived; happens at exit by itself."""
        self._calls.close()

    # -- what a process's device is for the launcher to say -------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Stage:
        """Convert parameters to a dtype; a device is refused, as each stage has its own."""
        if "device" in kwargs or "tensor" in kwargs or any(_names_device(arg) for arg in args):
            self._refuse_to_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Refuse: each stage has its own device."""
        self._refuse_to_move()

    def cpu(self) -> NoReturn:
        """Refuse: each stage has its own device."""
        self._refuse_to_move()

    def _refuse_to_move(self) -> NoReturn:
        raise TypeError(
            f"stage {self.rank} stays on {self.device}: each stage has its own device, given by "
            "the launcher or by Stage(devices=…); only a dtype can be changed"
        )

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
        """Refuse to be copied or pickled: a copy would be no end of the connected pipeline."""
        raise TypeError(
            "a Stage cannot be copied or pickled, as it is one end of connected processes: copy "
            "its state_dict(), whose keys are the full model's"
        )

    # -- one call, step by step -----------------------------------------------------------------

    @property
    def _output_rank(self) -> int:
        """The stage of the last partition, which has the output and the loss."""
        return self._placement[-1]

    def _order(self, call: str, **decided: Any) -> Order:
        return self._calls.order(call, is_training=self.training, **decided)

    def _begin(
        self, call: str, inputs: tuple[Any, ...], target: Any
    ) -> tuple[Order, MiniBatch, Ingoing | None]:
        """Split the mini-batch and issue its order on rank 0; follow the order elsewhere."""
        if self.rank != 0:
            order, ingoing = self._order(call), None
        else:
            ingoing = Ingoing.of(inputs, _checked_chunks(self.chunks), self.device)
            order = self._issue(call, ingoing, target)
        keep = order.keeps_graph if call == "step" else order.is_grad_enabled
        batch = MiniBatch(keep=keep, recompute=frozenset(order.recompute))
        batch.inputs = ingoing.inputs if ingoing else None
        if call == "step":
            self._give_target(batch, order, target)
        return order, batch, ingoing

    def _issue(self, call: str, ingoing: Ingoing, target: Any) -> Order:
        """Issue the order of a mini-batch, on rank 0."""
        keeps = self.training and torch.is_grad_enabled()
        sizes = ingoing.sizes
        decided: dict[str, Any] = {
            "sizes": sizes,
            "input_bytes": num_bytes(ingoing.inputs[0].tensors),  # the first is the largest
            "recompute": tuple(sorted(recomputed(self.checkpoint, len(sizes)))) if keeps else (),
        }
        if call == "step":
            decided["target"] = self._way_of(target)
            if self._loss.weight is None or decided["target"] != LOCAL:
                parts = scatter_like(target, sizes) if self._loss.weight else None
                decided["shares"] = self._loss.shares(parts, sizes)
        return self._order(call, **decided)

    def _way_of(self, target: Any) -> str:
        """Tell how the target of a step gets to the last stage."""
        if target is None or self._output_rank == 0:
            return LOCAL
        return DELIVERED if self._batches.has_delivered(target) else ROUTED

    def _give_target(self, batch: MiniBatch, order: Order, target: Any) -> None:
        """Give a batch the target, on the ranks that have a use for it, and the loss's shares."""
        is_sender = self.rank == 0 and order.target == ROUTED
        is_user = self.rank == self._output_rank and order.target != ROUTED
        if is_user and order.target == DELIVERED:
            target = self._batches.delivered_target
        if (is_sender or is_user) and target is not None:
            parts = scatter_like(target, order.sizes)
            batch.targets = [on_device(part, self.device) for part in parts]
        batch.loss_of = self._loss.of
        batch.shares = order.shares
        if is_user and not order.shares:  # of the target as given: on a CPU nobody waits
            given = parts if batch.targets is not None else None
            batch.shares = self._loss.shares(given, order.sizes)

    def _run_forward(self, pipeline: Pipeline, order: Order, batch: MiniBatch) -> None:
        """Run a program that begins a mini-batch."""
        self._open_pass = None
        pipeline.executor.begin()
        for layer in self._deferred:
            layer.begin()
        pipeline.run(order, batch)
        for layer in self._deferred:
            layer.commit()

    def _run_backward(
        self, this: object, order: Order, batch: MiniBatch, ingoing: Ingoing | None
    ) -> None:
        """Run this stage's part of the backward pass of an earlier ``stage(input)``."""
        if this is not self._open_pass:
            raise RuntimeError(
                "backward() of an output that a later call of the stage has let go of, or that "
                "went backward already: run each output's loss backward, once, before the next "
                "forward pass"
            )
        self._open_pass = None
        with self._calls.together("backward") as pipeline:
            order = self._order("backward", sizes=order.sizes, recompute=order.recompute)
            pipeline.run(order, batch)
            if ingoing is not None:
                ingoing.add_gradients(batch.input_gradients)

    # -- building -------------------------------------------------------------------------------

    def _adopt_layers(self, module: nn.Sequential, deferred_batch_norm: bool) -> None:
        """Take this stage's layers out of the full model, onto this stage's device."""
        parts = cut(module, self.balance)
        self._skip_layout = SkipLayout.of(parts)
        ours_by_index = {j: parts[j] for j in partitions_of(self._placement, self.rank)}
        self._names = {j: tuple(ours) for j, ours in ours_by_index.items()}
        for j, ours in ours_by_index.items():
            first_index = sum(self.balance[:j])
            materialize(ours, self.device, first_index=first_index, seed=torch.initial_seed())
            for name, layer in ours.items():
                if hasattr(self, name):
                    raise ValueError(
                        f"a layer of the model is named {name!r}, which is also an attribute of "
                        "Stage: name the layer otherwise"
                    )
                if deferred_batch_norm:
                    layer = DeferredBatchNorm.convert_deferred_batch_norm(layer)
                self.add_module(name, layer)
        self.training = module.training
        elsewhere = (part for j, part in enumerate(parts) if j not in ours_by_index)
        self._layers_elsewhere = {name for part in elsewhere for name in part}
        self._deferred = [m for m in self.modules() if isinstance(m, DeferredBatchNorm)]

    def _by_partition(self) -> dict[int, nn.ModuleList]:
        """Return this stage's layers by the indices of its partitions."""
        return {
            j: nn.ModuleList(self._modules[name] for name in names)
            for j, names in self._names.items()
        }

    def _connect(self) -> Pipeline:
        if self._world.num_ranks > 1:
            check_not_sharded(self)
        facts = {
            "procpipe": __version__,
            "torch": torch.__version__,
            "the number of processes": self._world.num_ranks,
            "balance": self.balance,
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
            "schedule": self._schedule.name,
            "memory_limit_bytes": self._limits_bytes,
            "placement": self.placement,
            "deferred_batch_norm": self._is_deferring,
            "the type of devices": self.device.type,
            "transport": self._transport,
            "trace": self._trace is not None,
            "layers": self._layer_facts,
        }
        partitions = {
            j: Partition(
                {name: self._modules[name] for name in names},
                self.device,
                is_first=j == 0,
                is_last=j == len(self.balance) - 1,
                skips=SkipPorts(self._skip_layout, j),
            )
            for j, names in self._names.items()
        }
        routes = Routes(
            self._world.num_ranks, tuple(self._skip_layout.keys), placement=self._placement
        )
        auto = AutoSchedule(self._limits_bytes) if self._schedule is AUTO else None
        return Pipeline(
            self._world,
            partitions,
            routes,
            facts,
            self._transport,
            self._schedule,
            self._trace,
            auto,
        )


def _checked_chunks(chunks: int) -> int:
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"chunks must be an int, not {chunks!r}")
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}, but a mini-batch has at least 1 micro-batch")
    return chunks


def _checked_transport(name: str | None) -> str | None:
    if name not in (None, *NAMES):
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"transport is {name!r}, but must be one of {names}, or left out")
    return name


def _holder(value: Any) -> int:
    """Return the rank that holds a nested value: that of a placeholder in it, else rank 0."""
    if isinstance(value, Remote):
        return value.rank
    return max(map(_holder, children_of(value)), default=0)


def _names_device(argument: Any) -> bool:
    return isinstance(argument, (str, int, torch.device, Tensor)) and not isinstance(argument, bool)
