"""Side by side with peers: each part is ``python -m benchmarks PART``."""
