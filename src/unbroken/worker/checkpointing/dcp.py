"""torch.distributed.checkpoint without its pickles: plans as typed values, metadata as data.

Torch's reader unpickles `.metadata`, and its planner unpickles values that are not tensors. This
reader reads the metadata with `wire.pickled` and the table of classes below, and everything else
with `torch.load(weights_only=True)`. So a checkpoint can hold no code.
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from unbroken.wire.pickled import Known, load
from unbroken.worker.typed_values import Form, choice, record

from .storage import CheckpointError, File, Storage, verified

METADATA = ".metadata"
METADATA_BYTES_MAX = 1 << 30
METADATA_OPCODES_MAX = 200_000_000
_PLAIN = (type(None), bool, int, float, str)


def checkpoint_module(name: str) -> Any:
    """Return a module of torch.distributed.checkpoint."""
    return import_module(f"torch.distributed.checkpoint.{name}")


@cache
def dcp_forms() -> tuple[Form, ...]:
    """Return the forms of torch's plans and of the results of writing them."""
    planner, metadata = checkpoint_module("planner"), checkpoint_module("metadata")
    kinds = [
        planner.SavePlan, planner.WriteItem, planner.TensorWriteData, metadata.MetadataIndex,
        metadata.ChunkStorageMetadata, metadata.TensorProperties,
        checkpoint_module("storage").WriteResult, checkpoint_module("filesystem")._StorageInfo,
    ]  # fmt: skip
    if hasattr(planner, "BytesIOWriteData"):  # since torch 2.5
        kinds.append(planner.BytesIOWriteData)
    return (*map(record, kinds), choice(planner.WriteItemType))


def writer(storage: Storage, folder: str, files: list[File]) -> Any:
    """Return a writer of torch that writes verified files, and names them in `files`."""
    result = checkpoint_module("filesystem").FileSystemWriter(folder, sync_files=False)
    result.fs, result.path = _files(storage, files), folder
    # Two ranks that complete a checkpoint at the same time write the same bytes.
    result.save_id = folder
    return result


def write_items(
    storage: Storage, folder: str, plan: Any, planner: Any
) -> tuple[list[Any], list[File]]:
    """Write a rank's part, in several files at the same time if the storage gains by it."""
    prefix, shares = plan.storage_data, _shares(plan.items, storage.writers)

    def written(at: int) -> tuple[list[Any], list[File]]:
        files: list[File] = []
        own = replace(prefix, prefix=f"{prefix.prefix}{at}_") if len(shares) > 1 else prefix
        share = replace(plan, items=shares[at], storage_data=own)
        return writer(storage, folder, files).write_data(share, planner).wait(), files

    with ThreadPoolExecutor(len(shares)) as pool:
        done = list(pool.map(lambda at: storage.retried(lambda: written(at)), range(len(shares))))
    results = [result for share, _ in done for result in share]
    return results, [file for _, files in done for file in files]


def write_metadata(
    storage: Storage, folder: str, metadata: Any, results: list[list[Any]]
) -> list[File]:
    """Write the file that reads the parts of all ranks together."""

    def written() -> list[File]:
        files: list[File] = []
        writer(storage, folder, files).finish(metadata, results)
        return files

    return storage.retried(written)


def _shares(items: list[Any], count: int) -> list[list[Any]]:
    """Divide items among files of about the same size."""
    sizes = [0] * count
    shares: list[list[Any]] = [[] for _ in range(count)]
    for item in sorted(items, key=_size, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(item)
        sizes[least] += _size(item)
    return [share for share in shares if share] or [[]]


def _size(item: Any) -> int:
    if item.tensor_data is None:
        return 1
    tensor = item.tensor_data
    return int(prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize) + 1


def reader(storage: Storage, folder: str) -> Any:
    """Return a reader like torch's that runs no code of the checkpoint."""
    filesystem = checkpoint_module("filesystem")

    class Reader(filesystem.FileSystemReader):  # type: ignore[misc, name-defined]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return read_metadata(storage, f"{folder}/{METADATA}")

    result = Reader(folder)
    result.fs, result.path = _files(storage, []), folder
    return result


def _files(storage: Storage, files: list[File]) -> Any:
    """Return the file system that torch's writers and readers use: a storage."""
    filesystem = checkpoint_module("filesystem")

    class Files(filesystem.FileSystemBase):  # type: ignore[misc, name-defined]
        @contextmanager
        def create_stream(self, path: str, mode: str) -> Iterator[Any]:
            if mode == "rb":
                with storage.reading(path) as stream:
                    yield stream
                return
            # Torch renames its metadata; here nothing counts before the manifest is there.
            with verified(storage, path.removesuffix(".tmp"), files) as checksum:
                yield checksum

        def concat_path(self, path: str, suffix: str) -> str:
            return f"{path}/{suffix}"

        def init_path(self, path: str) -> str:
            return path

        def rename(self, path: str, new_path: str) -> None: ...

        def mkdir(self, path: str) -> None: ...

        def exists(self, path: str) -> bool:
            return False

        def rm_file(self, path: str) -> None: ...

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: str) -> bool:
            return True

    return Files()


def planner() -> Any:
    """Return a planner like torch's that loads plain values only."""
    base = checkpoint_module("default_planner").DefaultLoadPlanner

    class Planner(base):  # type: ignore[misc, valid-type]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            plain = load_plain(value, name)
            if self.flatten_state_dict:
                nested = checkpoint_module("_nested_dict")
                nested.set_element(self.original_state_dict, self.mappings[name], plain)
            else:
                self.state_dict[name] = plain

    return Planner()


def load_plain(file: Any, name: str) -> Any:
    """Read a file of torch.save, tensors and plain values only. Raises CheckpointError if it holds
    more."""
    torch = import_module("torch")
    try:
        with _allowed():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be read without running code from the checkpoint: "
            f"{str(error).splitlines()[0]}"[:500]
        ) from error


def _allowed() -> AbstractContextManager[Any]:
    """Allow numpy's numbers and arrays, which generators and learning rates may be."""
    safe_globals = getattr(import_module("torch").serialization, "safe_globals", None)
    numpy = sys.modules.get("numpy")
    if safe_globals is None or numpy is None:
        return nullcontext()
    core = import_module("numpy._core" if hasattr(numpy, "_core") else "numpy.core")
    kinds = [type(numpy.dtype(code)) for code in "?bhilqBHILQefdFD"]
    made = [core.multiarray._reconstruct, core.multiarray.scalar]
    older = [(item, f"numpy.core.multiarray.{item.__name__}") for item in made]
    found: AbstractContextManager[Any] = safe_globals(
        [numpy.ndarray, numpy.dtype, *made, *older, *kinds]
    )
    return found


def complain_of_odd(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the state of modules and optimizers holds a value that `restore`
    would refuse."""
    torch = import_module("torch")
    plain = (*_PLAIN, torch.Size, torch.dtype, torch.device, torch.Tensor)
    odd = _odd(state, plain)
    if odd is not None:
        path, value = odd
        kind = type(value)
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept: use tensors,"
            " numbers, strings, lists, tuples and dicts, or keep it out of the state"
        )


def _odd(value: Any, plain: tuple[type, ...]) -> tuple[str, Any] | None:
    """Return the path of the first value that is not plain, and the value."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif kind in (list, tuple):
        parts = enumerate(value)
    else:
        is_plain = kind in plain or isinstance(value, plain[-1]) or _is_number(value)
        return None if is_plain else ("", value)
    for key, item in parts:
        if type(item) not in _PLAIN and (result := _odd(item, plain)) is not None:
            return (f"{key}.{result[0]}" if result[0] else f"{key}"), result[1]
    return None


def _is_number(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


def read_metadata(storage: Storage, name: str) -> Any:
    """Return the metadata that torch has written. Raises CheckpointError if it is malformed or
    holds more."""
    metadata = checkpoint_module("metadata")
    try:
        data = storage.read(name)
        if len(data) > METADATA_BYTES_MAX:
            raise ValueError(f"{len(data)} bytes, more than {METADATA_BYTES_MAX}")
        result = load(data, _names(), METADATA_OPCODES_MAX)
        if type(result) is not metadata.Metadata:
            raise ValueError("it is no Metadata")
        for info in result.storage_data.values():
            if not info.relative_path.endswith(".distcp") or "/" in info.relative_path:
                raise ValueError(f"it names the file {info.relative_path!r}")
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{storage.path}/{name} cannot be read: {error}") from error
    result.storage_meta = metadata.StorageMeta()
    return result


@cache
def _names() -> dict[tuple[str, str], Any]:
    """Return all names that metadata may contain."""
    torch, metadata = import_module("torch"), checkpoint_module("metadata")
    kinds = (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta,
        checkpoint_module("filesystem")._StorageInfo,
    )  # fmt: skip
    layouts = {str(var): var for var in vars(torch).values() if isinstance(var, torch.layout)}
    properties = metadata.TensorProperties
    encoding = metadata._MEM_FORMAT_ENCODING
    known_encoding = Known(encoding)
    path = Known(lambda *parts: _Path("/".join(map(str, parts))), _Path, lambda *_: None)

    def member(kind: Any, name: str) -> Any:
        if kind is not known_encoding:
            raise ValueError("names an attribute")
        return encoding[name]

    return {
        **{(kind.__module__, kind.__qualname__): _dataclass(kind) for kind in kinds},
        (properties.__module__, properties.__qualname__): Known(
            lambda: object.__new__(properties), properties, properties.__setstate__
        ),
        (encoding.__module__, encoding.__qualname__): known_encoding,
        # How Python 3.11.0 to 3.11.3 write a member of an enum; the first module: protocol 2.
        **{(module, "getattr"): Known(member) for module in ("__builtin__", "builtins")},
        ("torch", "Size"): Known(torch.Size),
        ("torch.serialization", "_get_layout"): Known(layouts.__getitem__),
        ("collections", "OrderedDict"): Known(OrderedDict),
        **{
            ("torch", name): var for name, var in vars(torch).items()
            if isinstance(var, torch.dtype)
        },
        **{
            (module, kind): path for module in ("pathlib", "pathlib._local")
            for kind in ("PosixPath", "PurePosixPath", "Path")
        },
    }  # fmt: skip


class _Path(str):
    """A path, whose class differs between versions of Python; its value is never read."""


def _dataclass(kind: Any) -> Known:
    wanted = frozenset(kind.__dataclass_fields__)

    def fill(found: Any, state: Any) -> None:
        if not isinstance(state, dict) or not state.keys() <= wanted:
            raise ValueError(f"a state that is none of a {kind.__qualname__}")
        for name, value in state.items():
            object.__setattr__(found, name, value)

    return Known(lambda: object.__new__(kind), kind, fill)
