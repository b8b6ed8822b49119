"""Peak memory of a call beyond what stood before it: resident on the host, or on a device."""

import contextlib
import gc
import sys
from collections.abc import Callable


def host_peak(call: Callable[[], object]) -> int | None:
    """Return the bytes by which resident memory rises during a call; None where nobody counts.

    Linux keeps the mark, of the whole process, and resets it by ``/proc/self/clear_refs``. The
    result of the call and what a library keeps for its next call count; memory that it kept from
    an earlier call does not, and what a thread frees meanwhile hides some.
    """
    gc.collect()  # or what others left behind may be freed within the call, and hide its memory
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        before = _status("VmRSS")
        held = call()
        peak = _status("VmHWM")
        del held
    except (OSError, StopIteration):
        return None
    return max(0, peak - before)


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024


def device_peak(call: Callable[[], object]) -> int | None:
    """Return the bytes by which a GPU's allocated memory rises during a call; None without one."""
    torch, cupy, jax = (sys.modules.get(name) for name in ("torch", "cupy", "jax"))
    if cupy is not None:
        pool = cupy.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        call()
        return int(pool.total_bytes() - before)
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return int(torch.cuda.max_memory_allocated() - before)
    if jax is not None:
        with contextlib.suppress(KeyError, TypeError):  # no statistics of a CPU
            before = jax.devices()[0].memory_stats()["bytes_in_use"]
            call()
            return int(jax.devices()[0].memory_stats()["peak_bytes_in_use"] - before)
    return None
