"""Whether CuPy can run here, in one line, found without importing it."""

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from plsh.backend import Availability

__all__ = ["availability"]

_INSTALL = 'pip install "plsh[cupy-cuda13]" (driver for CUDA 13) or "plsh[cupy-cuda12]"'
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def availability() -> Availability:
    """Say whether the backend can be used here. Cheap; never raises."""
    global _works
    if _works:
        return Availability(True)
    for check in CHECKS:
        try:
            reason = check()
        except Exception as error:  # a broken installation breaks no listing
            return Availability(False, f"{check.__doc__} failed: {error!r}; {_INSTALL}", error)
        if reason is not None:
            return Availability(False, reason)
    _works = True
    return Availability(True)


_works = False  # what has worked is not asked again


def _wheels() -> list[tuple[str, int | None]]:
    """Return the installed CuPy distributions, each with the CUDA major of its name."""
    found = []
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        wheel = re.fullmatch(r"cupy-cuda(\d+)x", name)
        if wheel or name == "cupy":
            found.append((name, int(wheel.group(1)) if wheel else None))
    return sorted(set(found), key=str)


def _check_installed() -> str | None:
    """Looking for CuPy."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed; {_INSTALL}"
    wheels = _wheels()
    if len(wheels) > 1:
        names = ", ".join(name for name, _ in wheels)
        return f"several CuPy wheels are installed ({names}) and break one another; keep just one"
    return None


def _check_driver() -> str | None:
    """Asking the CUDA driver."""
    driver = load_driver()
    if driver is None:
        return "there is no CUDA driver (libcuda); install NVIDIA's driver, or use another backend"
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    major = version.value // 1000
    for name, needed in _wheels():
        if needed is not None and major < needed:
            return (
                f"{name} needs a driver for CUDA {needed}, this one is for CUDA {major}; update "
                f'the driver, or pip uninstall {name} and pip install "plsh[cupy-cuda{major}]"'
            )
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code == _NO_DEVICE or (code == 0 and count.value == 0):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        return f"there is a CUDA driver and no GPU that it may use{hint}; use another backend"
    if code != 0:
        return f"the CUDA driver fails with error {code}; see whether nvidia-smi works"
    return None


def _check_compiler() -> str | None:
    """Looking for NVRTC."""
    majors = {needed for _, needed in _wheels() if needed is not None}
    if find_nvrtc(majors):
        return None
    major = max(majors, default=13)
    return (
        "there is no NVRTC, which compiles the kernels; "
        f'pip install "plsh[cupy-cuda{major}]", or set CUDA_PATH to a CUDA toolkit'
    )


CHECKS: tuple[Callable[[], str | None], ...] = (_check_installed, _check_driver, _check_compiler)


def load_driver() -> ctypes.CDLL | None:
    """Load the CUDA driver; None if there is none."""
    names = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def find_nvrtc(majors: set[int]) -> bool:
    """Whether NVRTC is found where CuPy looks for it: in wheels, a toolkit, or the system."""
    pattern = "nvrtc64*.dll" if sys.platform == "win32" else "libnvrtc.so*"
    roots = []
    try:
        nvidia = importlib.util.find_spec("nvidia")
    except ValueError:  # a module without a spec
        nvidia = None
    if nvidia is not None and nvidia.submodule_search_locations is not None:
        roots += [Path(where) for where in nvidia.submodule_search_locations]
    if os.environ.get("CUDA_PATH"):
        roots.append(Path(os.environ["CUDA_PATH"]))
    for root in roots:
        if any(root.glob(f"{depth}{pattern}") for depth in ("lib*/", "bin/", "*/lib/", "*/bin/")):
            return True
    if ctypes.util.find_library("nvrtc") is not None:
        return True
    for major in sorted(majors):
        try:
            ctypes.CDLL(f"libnvrtc.so.{major}")
        except OSError:
            continue
        return True
    return Path("/usr/local/cuda").is_dir() and any(
        Path("/usr/local/cuda").glob(f"lib64/{pattern}")
    )
