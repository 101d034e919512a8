"""The version, in one place that needs no installed metadata."""

__version__ = "0.1.0"
