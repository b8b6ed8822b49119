"""Reading and writing ``.npz`` files: nothing ignored, nothing unpickled, nothing half-written."""

import contextlib
import os
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .common import CliError

NDArray = npt.NDArray[Any]

_BROKEN = (  # what NumPy, zipfile and zlib raise on a damaged or foreign archive
    OSError,
    ValueError,
    EOFError,
    RuntimeError,  # encrypted; NotImplementedError: an unknown compression
    zipfile.BadZipFile,
    zlib.error,
)


def read_arrays(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> Any:
    """Return the arrays of an ``.npz`` file by name, in the machine's byte order.

    Raises
    ------
    CliError
        It can't be read, an array is missing, or one is there that is not asked for.
    """
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from None
    if start == b"\x93NUMPY":
        raise CliError(
            f"{path} is one .npy array; {', '.join(required)} come in one .npz archive, "
            "as numpy.savez writes it"
        )
    if not zipfile.is_zipfile(path):
        raise CliError(f"{path} is not an .npz archive, or was cut short")
    try:
        with np.load(path, allow_pickle=False) as archive:
            _check_names(path, archive.files, required, optional)
            return {name: _read_array(path, archive, name) for name in archive.files}
    except _BROKEN as error:
        raise CliError(f"{path} cannot be read as an .npz archive: {error}") from None


def _check_names(
    path: Path, names: list[str], required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    missing = [name for name in required if name not in names]
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    if missing:
        raise CliError(f"{path} lacks {', '.join(missing)}; it holds {shown or 'no arrays'}")
    unknown = [name for name in names if name not in required + optional]
    if unknown:
        raise CliError(
            f"{path} holds {', '.join(unknown)}, which would be ignored; what is read is "
            f"{', '.join(required + optional)}"
        )
    if len(set(names)) < len(names):
        raise CliError(f"{path} holds two arrays of one name: {shown}")


def _read_array(path: Path, archive: Any, name: str) -> NDArray:
    try:
        array = archive[name]
    except MemoryError as error:
        raise CliError(f"array {name} of {path} does not fit in memory: {error}") from None
    except _BROKEN as error:
        raise CliError(f"array {name} of {path} cannot be read: {error}") from None
    if not isinstance(array, np.ndarray):
        raise CliError(f"array {name} of {path} is not in .npy format")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_not_input(path: Path, source: Path) -> None:
    """Refuse an output that is the input."""
    target = path.resolve()
    if target == source.resolve() or (
        target.exists() and source.exists() and target.samefile(source)
    ):
        raise CliError(f"--output {path} is the input; it would be overwritten")


def write_arrays(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write an ``.npz`` file whole or not at all: beside the target, then renamed over it."""
    target = path.resolve()  # a link stays a link
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with partial.open("xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        _remove(partial)
        raise CliError(f"cannot write --output {path}: {error.strerror or error}") from None
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
