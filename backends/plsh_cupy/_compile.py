"""From source to a binary for one architecture, with a cache on disk that any process may share.

A cache entry is written whole under another name and then moved into place, and carries its own
digest: a reader sees all of it or none. Where the folder can't be read or written, a process
compiles for itself.
"""

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ._plan import Instance
from ._source import OPTIONS, source_of

__all__ = ["CompileError", "cache_folder", "compiled"]

Compiler = Callable[[str, str, tuple[str, ...]], bytes]
"""``compiler(source, name, options) -> binary``; raises CompileError with the log."""

_LOCKS: dict[str, threading.Lock] = {}
_LOCK = threading.Lock()


class CompileError(RuntimeError):
    """A kernel did not compile."""

    def __init__(self, name: str, options: tuple[str, ...], log: str) -> None:
        super().__init__(
            f"{name} did not compile with {' '.join(options)}; the CUDA compiler (NVRTC) and the "
            'CuPy wheel must fit each other and the device: pip install -U "plsh[cupy-cuda13]" or '
            f'"plsh[cupy-cuda12]". The compiler says:\n{log.strip()}'
        )
        self.log = log


def cache_folder() -> Path:
    """Return where binaries are kept: beside CuPy's own, whose variable moves both."""
    given = os.environ.get("CUPY_CACHE_DIR")
    return (Path(given) if given else Path.home() / ".cupy" / "kernel_cache") / "plsh"


def compiled(
    instance: Instance, target: str, version: str, compiler: Compiler, folder: Path | None = None
) -> bytes:
    """Return the binary of an instance for a target such as ``sm_90``, compiled or from the cache.

    `version` names the compiler; another one compiles anew. Threads that want the same binary
    compile it once.
    """
    options = (*OPTIONS, f"-arch={target}")
    source, name = source_of(instance), f"{instance.kernel}.cu"
    key = hashlib.sha256("\0".join((version, *options, source)).encode()).hexdigest()
    path = _path(folder, key)
    with _LOCK:
        lock = _LOCKS.setdefault(key, threading.Lock())
    with lock:
        binary = _load(path)
        if binary is None:
            binary = compiler(source, name, options)
            _save(path, binary)
    return binary


def _path(folder: Path | None, key: str) -> Path | None:
    try:
        return (cache_folder() if folder is None else folder) / f"{key}.cubin"
    except RuntimeError:  # there is no home
        return None


def _load(path: Path | None) -> bytes | None:
    """Read an entry; None if there is none, or it is not whole."""
    if path is None:
        return None
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, binary = entry[:32], entry[32:]
    return binary if hashlib.sha256(binary).digest() == digest else None


def _save(path: Path | None, binary: bytes) -> None:
    """Write an entry, if the folder allows it."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, own = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(binary).digest() + binary)
            os.replace(own, path)
        finally:
            Path(own).unlink(missing_ok=True)
