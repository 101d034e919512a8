"""The files of a saved state: the format of ``torch.distributed.checkpoint``, without its network.

    stage-0/__0_0.distcp  .metadata    written by rank 0: its keys
    stage-1/__0_0.distcp  .metadata    written by rank 1
    .metadata                          both together, which rank 0 makes of the two

Each rank writes, and reads, its own keys by itself: torch's savers and loaders would bring the
ranks together over a process group and with pickle. The result is an ordinary saved state of torch.

Importing this module takes half a second, so it is imported when something is saved or loaded.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from procpipe.state.folders import sync_folder

__all__ = ["METADATA", "Index", "merge_parts", "read_index", "write_part"]

METADATA = ".metadata"


@dataclasses.dataclass(frozen=True)
class Index:
    """What a saved state holds.

    Attributes:
        folder: where it is.
        shapes: by key, the shape of a tensor; None for any other value.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...] | None]
    metadata: Metadata

    def read(self, keys: Iterable[str], into: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Read values; a tensor into the one that ``into`` has for it, of the same shape.

        Values that are no tensors are read by torch's restricted unpickler, which runs no code.
        """
        found: dict[str, Any] = {}
        for key in keys:
            entry = self.metadata.state_dict_metadata[key]
            if into is not None and key in into:
                found[key] = into[key]
            elif isinstance(entry, TensorStorageMetadata):
                found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                found[key] = None
        planner, reader = _LoadPlanner(), _Reader(self.folder)
        try:
            planner.set_up_planner(found, self.metadata, is_coordinator=True)
            reader.set_up_storage_reader(self.metadata, is_coordinator=True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            [plan] = reader.prepare_global_plan(planner.create_global_plan([plan]))
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:
            error.add_note(f"procpipe: while reading the saved state {self.folder}")
            raise
        return found


def write_part(folder: Path, values: dict[str, Any]) -> None:
    """Write values into a new folder of their own; all is on the disk when its index appears."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = FileSystemWriter(folder)
    planner.set_up_planner(values, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    [plan], metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan([plan])
    results = writer.write_data(planner.finish_plan(plan), planner).value()
    writer.finish(metadata, [results])
    sync_folder(folder)


def merge_parts(folder: Path, names: Iterable[str]) -> None:
    """Make one saved state of the parts in sub-folders of these names."""
    whole = Metadata({}, planner_data={}, storage_data={}, storage_meta=StorageMeta())
    for name in names:
        part = _Reader(folder / name).read_metadata()
        whole.version = part.version
        whole.state_dict_metadata |= part.state_dict_metadata
        # Paths of keys, by which torch makes nested dictionaries of them.
        whole.planner_data |= {key: tuple(key.split(".", 1)) for key in part.state_dict_metadata}
        for index, info in part.storage_data.items():
            inside = dataclasses.replace(info, relative_path=f"{name}/{info.relative_path}")
            whole.storage_data[index] = inside
    with open(folder / METADATA, "wb") as file:
        pickle.dump(whole, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_index(folder: Path) -> Index:
    """Read what a saved state holds, also one that plain PyTorch has written."""
    metadata = _Reader(folder).read_metadata()
    shapes = {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    return Index(folder, shapes, metadata)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        with open(path, "rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except Exception as error:
                error.add_note(f"procpipe: while reading {path}")
                raise
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{path} holds no index of a saved state")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


class _Unpickler(pickle.Unpickler):
    """Makes what an index is made of, and nothing else: who opens a file need not trust it."""

    def find_class(self, module: str, name: str) -> Any:
        if module == MetadataIndex.__module__ and name in _DATA:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return super().find_class(module, name)
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"an index of a saved state has no use for {module}.{name}")


#: Of the module of torch that describes indices.
_DATA = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
#: By name, as a pickle may also ask for "os.system" of a module that has imported os.
_PATHS = {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
}
