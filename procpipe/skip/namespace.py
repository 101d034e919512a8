"""Namespaces distinguish the skip tensors of layers whose class is used twice."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Namespace:
    """Keeps the names of some layers apart from the same names of others.

    Two namespaces differ; a copy of one (of a module that was copied, say) equals it.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.Namespace``.
    """

    _id: uuid.UUID = field(default_factory=uuid.uuid4)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"


@dataclass(frozen=True)
class SkipKey:
    """Identifies a skip tensor: its name, and the namespace of its layers."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} in {self.namespace!r}"
