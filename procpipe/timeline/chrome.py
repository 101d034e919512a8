"""Writes a recording as JSON in the Trace Event Format, and reads it back.

The file opens in https://ui.perfetto.dev and ``chrome://tracing``. A stage is a process with rows
(threads) for steps, tasks, waits and messages, and with replicas for sums:

    stage 0   steps      [──────────── step 0 (step) ────────────]
              tasks      [F0@0][F1@0]                 [B1@0][B0@0]
              waits                  [gradient 1 from stage 1]
              transfers       ─ ─     activation 0 to stage 1
                              └──▶ an arrow to the receiver's row of transfers
              all-reduce                                 [──── gradients 0 ────]

Sums are asynchronous events, as several may be under way at a time.
Everything else is in ``otherData``. Entries of other programs are ignored.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from procpipe.plan.task import Task
from procpipe.timeline.recording import Clock, Hop, Ran, Recording, Step, Summed

#: The file format; the number increases when older readers cannot read it: 2 with replicas.
FORMAT = "procpipe timeline 1"
FORMAT_OF_REPLICAS = "procpipe timeline 2"

#: The rows of a stage, in order from the top; the last one only with replicas.
_ROWS = ("steps", "tasks", "waits", "transfers", "all-reduce")
_STEPS, _TASKS, _WAITS, _TRANSFERS, _SUMS = range(5)

#: The number of rank 0's process.
_FIRST_PID = 1000

#: The least length of a slice in which an arrow can end.
_INSTANT_US = 0.001

Event = dict[str, Any]


def to_chrome(recording: Recording) -> dict[str, Any]:
    """Return a recording as plain JSON."""
    events = list(_names(recording))
    num_hops = num_sums = 0
    for step in recording.steps:
        events += _step_events(step)
        events += [_task_event(step.number, ran) for ran in step.tasks]
        for number, hop in enumerate(step.hops, start=num_hops):
            events += _hop_events(step, number, hop)
        num_hops += len(step.hops)
        for number, one in enumerate(step.sums, start=num_sums):
            events += _sum_events(step, number, one)
        num_sums += len(step.sums)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT if _num_replicas(recording) == 1 else FORMAT_OF_REPLICAS,
            **recording.facts,
            "num_steps": recording.num_steps,
            "kept": recording.kept_text(),
            "is_closed": recording.is_closed,
            "clock_error_s": recording.clock_error_s,
            "clocks": [asdict(clock) for clock in recording.clocks],
            "layer_forward_s": list(recording.layer_s),
            "plans": dict(recording.plans),
            "steps": [_boundaries(step) for step in recording.steps],
        },
    }


def from_chrome(data: Any) -> Recording:
    """Read what :func:`to_chrome` wrote.

    Raises:
        ValueError: it is something else, or damaged.
    """
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or "format" not in other:
        raise ValueError("it is not a timeline that Stage(trace=…) wrote")
    if other["format"] not in (FORMAT, FORMAT_OF_REPLICAS):
        raise ValueError(
            f"its form is {other['format']!r}, but this version reads {FORMAT!r} and "
            f"{FORMAT_OF_REPLICAS!r}"
        )
    try:
        return _recording(data["traceEvents"], other)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


# -- writing ------------------------------------------------------------------------------------


def _names(recording: Recording) -> Iterator[Event]:
    num_replicas = _num_replicas(recording)
    num_stages = len(recording.clocks) // num_replicas
    for clock in recording.clocks:
        rank = clock.stage
        replica, stage = divmod(rank, num_stages)
        of = f" of replica {replica}" if num_replicas > 1 else ""
        yield _meta("process_name", rank, 0, {"name": f"stage {stage}{of} (rank {rank})"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
        for row, name in enumerate(_ROWS if num_replicas > 1 else _ROWS[:_SUMS]):
            yield _meta("thread_name", rank, row, {"name": name})
            yield _meta("thread_sort_index", rank, row, {"sort_index": row})


def _num_replicas(recording: Recording) -> int:
    return int(recording.facts.get("replicas", 1))


def _place(rank: int, row: int) -> Event:
    """Return the numbers of process and thread for a row of a rank.

    Each number is used once and 0 never: for Perfetto, a thread with its process's number is the
    main thread, and thread 0 is an idle processor.
    """
    pid = _FIRST_PID + rank
    return {"pid": pid, "tid": 10 * pid + row}


def _meta(name: str, rank: int, row: int, args: Event) -> Event:
    return {"ph": "M", "name": name, **_place(rank, row), "args": args}


def _slice(
    name: str, cat: str, rank: int, row: int, start_s: float, end_s: float, **args: Any
) -> Event:
    ts, dur = _microseconds(start_s), _microseconds(end_s - start_s)
    return {"ph": "X", "name": name, "cat": cat, **_place(rank, row), "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def _step_events(step: Step) -> Iterator[Event]:
    for rank, (begin_s, end_s) in enumerate(zip(step.begins_s, step.ends_s, strict=True)):
        name = f"step {step.number} ({step.call})"
        yield _slice(name, "step", rank, _STEPS, begin_s, end_s, step=step.number)


def _task_event(number: int, ran: Ran) -> Event:
    _, i, j = ran.task
    return _slice(
        str(ran.task), "task", ran.rank, _TASKS, ran.start_s, ran.end_s,
        step=number, micro_batch=i, partition=j,
    )  # fmt: skip


def _hop_events(step: Step, number: int, hop: Hop) -> Iterator[Event]:
    """Yield the events of a message: sending, waiting, arrival, and an arrow."""
    args = {
        "step": step.number,
        "transfer": number,
        "kind": hop.payload,
        "micro_batch": hop.i,
        "from": hop.source,
        "to": hop.destination,
        "bytes": hop.num_bytes,
        "posted_to_taken_us": _microseconds(hop.taken_s - hop.posted_s),
    }
    arrives = f"{hop.payload} {hop.i} from {step.name_of(hop.source)}"
    yield _slice(
        f"{hop.payload} {hop.i} to {step.name_of(hop.destination)}", "transfer",
        hop.source, _TRANSFERS, hop.posted_s, hop.sent_s, **args,
    )  # fmt: skip
    yield _slice(
        arrives, "wait", hop.destination, _WAITS, hop.asked_s, hop.taken_s,
        **{name: args[name] for name in ("step", "transfer", "micro_batch", "from")},
    )  # fmt: skip
    # Perfetto reverses an arrow into a slice that began earlier, as waits do. So the end of the
    # wait, from when the message was sent, is a slice of its own.
    taken_us = _microseconds(hop.taken_s)
    arrival_us = min(_microseconds(max(hop.asked_s, hop.sent_s)), round(taken_us - _INSTANT_US, 3))
    yield {
        "ph": "X", "name": arrives, "cat": "arrival",
        **_place(hop.destination, _TRANSFERS),
        "ts": arrival_us, "dur": round(taken_us - arrival_us, 3), "args": args,
    }  # fmt: skip
    arrow = {"name": hop.payload, "cat": "flow", "id": number}
    yield {**arrow, "ph": "s", **_place(hop.source, _TRANSFERS), "ts": _microseconds(hop.posted_s)}
    yield {**arrow, "ph": "f", "bp": "e", **_place(hop.destination, _TRANSFERS), "ts": arrival_us}


def _sum_events(step: Step, number: int, one: Summed) -> Iterator[Event]:
    """Yield the events of a sum over replicas: its beginning and end, and the wait for it."""
    name = f"all-reduce {one.what}"
    args = {"step": step.number, "sum": number, "what": one.what, "bytes": one.num_bytes}
    event = {"name": name, "cat": "all-reduce", "id": number, **_place(one.rank, _SUMS)}
    yield {**event, "ph": "b", "ts": _microseconds(one.start_s), "args": args}
    yield {**event, "ph": "e", "ts": _microseconds(one.end_s), "args": args}
    yield _slice(
        name, "all-reduce wait", one.rank, _WAITS, one.asked_s, one.taken_s, **args
    )  # fmt: skip


def _boundaries(step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "call": step.call,
        "plan": step.plan,
        "sizes": list(step.shares[0]),
        "begins_us": [_microseconds(begin_s) for begin_s in step.begins_s],
        "ends_us": [_microseconds(end_s) for end_s in step.ends_s],
        **({"shares": list(map(list, step.shares))} if step.num_replicas > 1 else {}),
    }


def _microseconds(seconds: float) -> float:
    """Return microseconds rounded to nanoseconds, the resolution of the clocks."""
    return round(seconds * 1e6, 3)


# -- reading ------------------------------------------------------------------------------------


#: What the events of a step hold.
_Parts = tuple[list[Ran], list[Hop], list[Summed]]


def _recording(events: list[Event], other: Mapping[str, Any]) -> Recording:
    parts: dict[int, _Parts] = {entry["step"]: ([], [], []) for entry in other["steps"]}
    of_hops: dict[int, dict[str, Event]] = {}
    of_sums: dict[int, dict[str, Event]] = {}
    for event in events:
        category = event.get("cat")
        if category == "task":
            task = Task.parse(event["name"])
            ran = Ran(event["pid"] - _FIRST_PID, task, *_times(event))
            parts[event["args"]["step"]][0].append(ran)
        elif category in ("transfer", "wait"):
            of_hops.setdefault(event["args"]["transfer"], {})[category] = event
        elif category in ("all-reduce", "all-reduce wait"):
            of_sums.setdefault(event["args"]["sum"], {})[event["ph"]] = event
    for both in of_hops.values():
        parts[both["transfer"]["args"]["step"]][1].append(_hop(both["transfer"], both["wait"]))
    for three in of_sums.values():
        parts[three["b"]["args"]["step"]][2].append(_sum(three["b"], three["e"], three["X"]))
    known = {"format", "num_steps", "kept", "is_closed", "clock_error_s", "clocks",
             "layer_forward_s", "plans", "steps"}  # fmt: skip
    return Recording(
        steps=tuple(_step(entry, *parts[entry["step"]]) for entry in other["steps"]),
        num_steps=other["num_steps"],
        plans=other["plans"],
        facts={name: fact for name, fact in other.items() if name not in known},
        clocks=tuple(Clock(**entry) for entry in other["clocks"]),
        layer_s=tuple(other["layer_forward_s"]),
        is_closed=other["is_closed"],
    )


def _step(entry: Event, tasks: list[Ran], hops: list[Hop], sums: list[Summed]) -> Step:
    return Step(
        entry["step"],
        entry["call"],
        entry["plan"],
        tuple(map(tuple, entry.get("shares") or [entry["sizes"]])),
        tuple(begin / 1e6 for begin in entry["begins_us"]),
        tuple(end / 1e6 for end in entry["ends_us"]),
        tuple(tasks),
        tuple(hops),
        tuple(sums),
    )


def _hop(sent: Event, taken: Event) -> Hop:
    args = sent["args"]
    return Hop(
        args["kind"], args["micro_batch"], args["from"], args["to"], args["bytes"],
        *_times(sent), *_times(taken),
    )  # fmt: skip


def _sum(begin: Event, end: Event, wait: Event) -> Summed:
    args = begin["args"]
    return Summed(
        begin["pid"] - _FIRST_PID, args["what"], args["bytes"],
        begin["ts"] / 1e6, end["ts"] / 1e6, *_times(wait),
    )  # fmt: skip


def _times(event: Event) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
