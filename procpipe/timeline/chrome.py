"""Writes a recording as JSON in the Trace Event Format, and reads it back.

The file opens in https://ui.perfetto.dev and ``chrome://tracing``. A stage is a process with rows
(threads) for steps, tasks, waits and messages:

    stage 0   steps      [──────────── step 0 (step) ────────────]
              tasks      [F0@0][F1@0]                 [B1@0][B0@0]
              waits                  [gradient 1 from stage 1]
              transfers       ─ ─     activation 0 to stage 1
                              └──▶ an arrow to the receiver's row of transfers

Everything else is in ``otherData``. Entries of other programs are ignored.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from procpipe.plan.task import Task
from procpipe.timeline.recording import Clock, Hop, Ran, Recording, Step

#: The file format; the number increases when older readers cannot read it.
FORMAT = "procpipe timeline 1"

#: The rows of a stage, in order from the top.
_ROWS = ("steps", "tasks", "waits", "transfers")
_STEPS, _TASKS, _WAITS, _TRANSFERS = range(4)

#: The number of stage 0's process.
_FIRST_PID = 1000

#: The least length of a slice in which an arrow can end.
_INSTANT_US = 0.001

Event = dict[str, Any]


def to_chrome(recording: Recording) -> dict[str, Any]:
    """Return a recording as plain JSON."""
    events = list(_names(recording))
    num_hops = 0
    for step in recording.steps:
        events += _step_events(step)
        events += [_task_event(step.number, ran) for ran in step.tasks]
        for number, hop in enumerate(step.hops, start=num_hops):
            events += _hop_events(step.number, number, hop)
        num_hops += len(step.hops)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
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
        raise ValueError("it is no timeline that Stage(trace=…) wrote")
    if other["format"] != FORMAT:
        raise ValueError(f"its form is {other['format']!r}, but this version reads {FORMAT!r}")
    try:
        return _recording(data["traceEvents"], other)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


# -- writing ------------------------------------------------------------------------------------


def _names(recording: Recording) -> Iterator[Event]:
    for clock in recording.clocks:
        stage = clock.stage
        yield _meta("process_name", stage, 0, {"name": f"stage {stage} (rank {stage})"})
        yield _meta("process_sort_index", stage, 0, {"sort_index": stage})
        for row, name in enumerate(_ROWS):
            yield _meta("thread_name", stage, row, {"name": name})
            yield _meta("thread_sort_index", stage, row, {"sort_index": row})


def _place(stage: int, row: int) -> Event:
    """Return the numbers of process and thread for a row of a stage.

    Each number is used once and 0 never: for Perfetto, a thread with its process's number is the
    main thread, and thread 0 is an idle processor.
    """
    pid = _FIRST_PID + stage
    return {"pid": pid, "tid": 10 * pid + row}


def _meta(name: str, stage: int, row: int, args: Event) -> Event:
    return {"ph": "M", "name": name, **_place(stage, row), "args": args}


def _slice(
    name: str, cat: str, stage: int, row: int, start_s: float, end_s: float, **args: Any
) -> Event:
    ts, dur = _microseconds(start_s), _microseconds(end_s - start_s)
    return {"ph": "X", "name": name, "cat": cat, **_place(stage, row), "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def _step_events(step: Step) -> Iterator[Event]:
    for stage, (begin_s, end_s) in enumerate(zip(step.begins_s, step.ends_s, strict=True)):
        name = f"step {step.number} ({step.call})"
        yield _slice(name, "step", stage, _STEPS, begin_s, end_s, step=step.number)


def _task_event(number: int, ran: Ran) -> Event:
    _, i, j = ran.task
    return _slice(
        str(ran.task), "task", ran.stage, _TASKS, ran.start_s, ran.end_s,
        step=number, micro_batch=i, partition=j,
    )  # fmt: skip


def _hop_events(step: int, number: int, hop: Hop) -> Iterator[Event]:
    """Yield the events of a message: sending, waiting, arrival, and an arrow."""
    told = {
        "step": step,
        "transfer": number,
        "kind": hop.payload,
        "micro_batch": hop.i,
        "from": hop.source,
        "to": hop.destination,
        "bytes": hop.num_bytes,
        "posted_to_taken_us": _microseconds(hop.taken_s - hop.posted_s),
    }
    arrives = f"{hop.payload} {hop.i} from stage {hop.source}"
    yield _slice(
        f"{hop.payload} {hop.i} to stage {hop.destination}", "transfer",
        hop.source, _TRANSFERS, hop.posted_s, hop.sent_s, **told,
    )  # fmt: skip
    yield _slice(
        arrives, "wait", hop.destination, _WAITS, hop.asked_s, hop.taken_s,
        **{name: told[name] for name in ("step", "transfer", "micro_batch", "from")},
    )  # fmt: skip
    # Perfetto reverses an arrow into a slice that began earlier, as waits do. So the end of the
    # wait, from when the message was sent, is a slice of its own.
    taken_us = _microseconds(hop.taken_s)
    arrival_us = min(_microseconds(max(hop.asked_s, hop.sent_s)), round(taken_us - _INSTANT_US, 3))
    yield {
        "ph": "X", "name": arrives, "cat": "arrival",
        **_place(hop.destination, _TRANSFERS),
        "ts": arrival_us, "dur": round(taken_us - arrival_us, 3), "args": told,
    }  # fmt: skip
    arrow = {"name": hop.payload, "cat": "flow", "id": number}
    yield {**arrow, "ph": "s", **_place(hop.source, _TRANSFERS), "ts": _microseconds(hop.posted_s)}
    yield {**arrow, "ph": "f", "bp": "e", **_place(hop.destination, _TRANSFERS), "ts": arrival_us}


def _boundaries(step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "call": step.call,
        "plan": step.plan,
        "sizes": list(step.sizes),
        "begins_us": [_microseconds(begin_s) for begin_s in step.begins_s],
        "ends_us": [_microseconds(end_s) for end_s in step.ends_s],
        "schedule": step.schedule,
    }


def _microseconds(seconds: float) -> float:
    """Return microseconds rounded to nanoseconds, the resolution of the clocks."""
    return round(seconds * 1e6, 3)


# -- reading ------------------------------------------------------------------------------------


def _recording(events: list[Event], other: Mapping[str, Any]) -> Recording:
    tasks: dict[int, list[Ran]] = {told["step"]: [] for told in other["steps"]}
    ends: dict[int, dict[str, Event]] = {}
    for event in events:
        category = event.get("cat")
        if category == "task":
            start_s, end_s = _times(event)
            ran = Ran(event["pid"] - _FIRST_PID, Task.parse(event["name"]), start_s, end_s)
            tasks[event["args"]["step"]].append(ran)
        elif category in ("transfer", "wait"):
            ends.setdefault(event["args"]["transfer"], {})[category] = event
    hops: dict[int, list[Hop]] = {number: [] for number in tasks}
    for both in ends.values():
        hops[both["transfer"]["args"]["step"]].append(_hop(both["transfer"], both["wait"]))
    known = {"format", "num_steps", "kept", "is_closed", "clock_error_s", "clocks",
             "layer_forward_s", "plans", "steps"}  # fmt: skip
    return Recording(
        steps=tuple(_step(told, tasks, hops) for told in other["steps"]),
        num_steps=other["num_steps"],
        plans=other["plans"],
        facts={name: fact for name, fact in other.items() if name not in known},
        clocks=tuple(Clock(**told) for told in other["clocks"]),
        layer_s=tuple(other["layer_forward_s"]),
        is_closed=other["is_closed"],
    )


def _step(told: Event, tasks: dict[int, list[Ran]], hops: dict[int, list[Hop]]) -> Step:
    number = told["step"]
    return Step(
        number,
        told["call"],
        told["plan"],
        tuple(told["sizes"]),
        tuple(begin / 1e6 for begin in told["begins_us"]),
        tuple(end / 1e6 for end in told["ends_us"]),
        tuple(tasks[number]),
        tuple(hops[number]),
        told.get("schedule", ""),  # older files have none
    )


def _hop(sent: Event, taken: Event) -> Hop:
    told = sent["args"]
    return Hop(
        told["kind"], told["micro_batch"], told["from"], told["to"], told["bytes"],
        *_times(sent), *_times(taken),
    )  # fmt: skip


def _times(event: Event) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
