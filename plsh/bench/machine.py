"""The machine beside the figures: its facts, its threads, its free memory."""

import contextlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from .. import __version__

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SETTINGS = ("OPENBLAS_CORETYPE", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
"""What changes a library's speed, and is reported where it is set."""
_LIBRARIES = ("numpy", "torch", "jax", "jaxlib", "cupy-cuda12x", "cupy-cuda13x")


def processors() -> int:
    """Count the processors that this process may use; each library takes a thread for each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_conflict() -> str | None:
    """Say which setting would give some libraries other threads than the rest; None if none."""
    count = processors()
    for name in _THREADS:
        value = os.environ.get(name)
        if value and value != str(count):
            return (
                f"{name}={value} gives some libraries another number of threads than the {count} "
                "processors that this process may use, so times could not be compared; unset it, "
                "or choose processors for all alike, as in taskset -c 0 plsh bench"
            )
    return None


def share_threads() -> None:
    """Give torch, if it is imported, a thread for each processor, as the other libraries take."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != processors():
        torch.set_num_threads(processors())


def free_bytes(device: str | None = None) -> int:
    """Return the bytes of memory that are free: of a CUDA device if torch is there, else here."""
    torch = sys.modules.get("torch")
    if device is not None and device.startswith("cuda") and torch is not None:
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo", encoding="ascii") as lines:
            line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 << 30


def facts() -> dict[str, str]:
    """Return what a figure depends on beside the code: processor, threads, versions, settings.

    Examples
    --------
    >>> sorted({"blas", "machine", "processor", "threads"} - set(facts()))
    []
    """
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    found = {
        "plsh": __version__,
        "machine": f"{platform.machine()}, {platform.system()}",
        "processor": _processor(),
        "threads": str(processors()),
        "python": platform.python_version(),
        "blas": f"{blas['name']} {blas['version']}",
    }
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    found |= {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    return found


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            line = next(line for line in lines if line.startswith("model name"))
        return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
