"""Simulates plans, and proposes how to run a model on several devices.

    from procpipe.planner import Costs, simulate

    timeline = simulate(gpipe(4, 2), Costs.uniform(2))

Not loaded by a step. ``procpipe plan`` is its command.
"""

from procpipe.planner.costs import Costs, Layer, Machine, task_seconds
from procpipe.planner.simulation import Timeline, simulate

__all__ = ["Costs", "Layer", "Machine", "Timeline", "simulate", "task_seconds"]
