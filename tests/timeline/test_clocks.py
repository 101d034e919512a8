"""Clocks of other ranks: the arithmetic by literal numbers, the messages over a real socket."""

from __future__ import annotations

import struct
import threading
import time

import pytest

from procpipe.timeline.clocks import CLOCK, ClockReading, Clocks, drift_ppm, offset_at
from tests.channel.meshes import make_meshes


def test_the_quickest_answer_is_used() -> None:
    # Sent at, the other rank's time, answered at: the second is quickest: 1000 ahead, within 5.
    pings = [(0, 1400, 900), (2000, 3005, 2010), (4000, 5700, 4900)]

    assert ClockReading.of(pings) == ClockReading(3005, 1000, 5)


def test_an_offset_within_its_error_is_0_and_adds_to_the_error() -> None:
    assert ClockReading.of([(100, 107, 110)]) == ClockReading(107, 0, 7)
    assert ClockReading.of([(100, 111, 110)]) == ClockReading(111, 6, 5)


def test_a_drift_is_corrected_linearly_between_two_readings() -> None:
    readings = [ClockReading(1_000, 500, 5), ClockReading(11_000, 600, 5)]

    assert [offset_at(readings, t) for t in (0, 1_000, 6_000, 11_000, 20_000)] == [
        500, 500, 550, 600, 600,
    ]  # fmt: skip
    assert drift_ppm(readings) == 10_000
    assert offset_at(readings[:1], 6_000) == 500
    assert drift_ppm(readings[:1]) is None
    assert drift_ppm([readings[0], ClockReading(11_000, 510, 5)]) == 0


@pytest.fixture
def meshes():
    made = make_meshes(2)
    yield made
    for mesh in made:
        mesh.close()


@pytest.mark.parametrize("ahead_ns", [0, 10**15])
def test_a_waiting_rank_answers_with_its_time(meshes, ahead_ns) -> None:
    clocks = [Clocks(mesh) for mesh in meshes]
    if ahead_ns:  # a rank on another host, with another clock
        meshes[1].on(0, CLOCK, lambda sequence, *_: meshes[1].send(
            0, CLOCK, 0, sequence, struct.pack("<q", time.perf_counter_ns() + ahead_ns)
        ))  # fmt: skip
    is_over: list[bool] = []
    waiter = threading.Thread(
        target=lambda: meshes[1].wait(lambda: is_over, lambda: "the end", every_s=0.01)
    )
    waiter.start()
    reading = clocks[0].read_all()[1]
    is_over.append(True)
    waiter.join()

    assert abs(reading.offset_ns - ahead_ns) <= reading.error_ns
    assert 0 < reading.error_ns < 1_000_000_000
    assert ahead_ns or reading.offset_ns == 0


def test_a_rank_that_has_left_has_no_time(meshes) -> None:
    clocks = Clocks(meshes[0])
    meshes[1].leave()
    meshes[0].poll(1.0)

    assert clocks.read(1) is None
    assert clocks.read_all() == {}
