"""The threads of a call: each works off jobs, and its operations run on it alone.

The operations of tiles are too small for torch's own threads, which wait for one another in each.
How many threads an operation takes is a setting of the thread that calls it, in OpenMP and in MKL;
``torch.set_num_threads`` would set it for new threads too, so the libraries are asked directly.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from ._scratch import Scratch, borrow, give_back

Job = TypeVar("Job")

_helpers: deque[int] = deque(maxlen=256)
"""Threads of late, as the system numbers them."""
_FORK_WAIT = 1.0
"""Seconds a fork waits at most: a call may be running, or a number have been given again."""


def _see_helpers_off() -> None:
    """Wait until threads that have ended have left the process, too.

    Python takes a thread for ended before its libraries have cleaned up behind it. MKL does that
    under a lock; a process forked in that moment would wait for it forever in its first product.
    """
    latest = time.monotonic() + _FORK_WAIT
    for number in list(_helpers):
        while os.path.exists(f"/proc/self/task/{number}") and time.monotonic() < latest:
            time.sleep(1e-4)
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_see_helpers_off)


class Setters(NamedTuple):
    """Functions that set how many threads an operation of the calling thread takes."""

    openmp: Callable[[int], None]
    mkl: Callable[[int], int] | None  # None where torch is built without; returns what was set


@functools.cache
def _setters() -> Setters | None:
    """Find them in the libraries that torch has loaded; None if they are not there."""
    try:  # a handle finds the symbols of all that its library depends on
        library = ctypes.PyDLL(torch._C.__file__)  # too short to let go of the interpreter
        openmp = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    openmp.restype = None
    return Setters(openmp, getattr(library, "MKL_Set_Num_Threads_Local", None))


@contextlib.contextmanager
def alone() -> Iterator[bool]:
    """Run the operations of this thread on it alone, if that can be; say whether they do."""
    count, setters = torch.get_num_threads(), _setters()  # asked first, torch sets up a new thread
    if setters is None:
        yield count == 1
        return
    setters.openmp(1)
    before = None if setters.mkl is None else setters.mkl(1)
    try:
        yield torch.get_num_threads() == 1
    finally:
        setters.openmp(count)
        if setters.mkl is not None and before is not None:
            setters.mkl(before)


def run(work: Callable[[Job, Scratch], None], jobs: Sequence[Job], threads: int) -> None:
    """Work off independent jobs in that order, on so many threads, the calling one among them.

    Each thread begins with a job of its own: what memory it needs shows in the first call.
    """
    queue: deque[Job] = deque()

    def work_off(job: Job | None) -> None:
        scratch = borrow()
        while job is not None:
            work(job, scratch)
            job = _pop(queue)
        give_back(scratch)

    def help_out(job: Job) -> None:
        # A new thread has no modes of its own: gradients would be recorded, and what is made in
        # inference mode could not be written to.
        _helpers.append(threading.get_native_id())
        with torch.inference_mode(), alone():
            work_off(job)

    with alone() as is_alone:
        helpers = max(min(threads, len(jobs)) - 1, 0) if is_alone else 0
        queue.extend(jobs[helpers:])
        if not helpers:
            work_off(_pop(queue))
            return
        with ThreadPoolExecutor(helpers) as pool:
            try:
                running = [pool.submit(help_out, job) for job in jobs[:helpers]]
                work_off(_pop(queue))
                for done in running:
                    done.result()
            except BaseException:  # an interrupt, or a fault: what has not begun need not
                queue.clear()
                raise


def _pop(queue: "deque[Any]") -> Any:
    """Take the first item, None if there is none; safe among threads."""
    try:
        return queue.popleft()
    except IndexError:
        return None
