"""Schedules as data: made, checked, simulated and drawn without any tensor."""
