"""Side-by-side measurements, one table a command: ``python -m benchmarks.<name>``."""
