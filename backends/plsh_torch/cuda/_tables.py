"""Small tables on the device, made from recipes on the host, and kept for the next call."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def capturing(device: torch.device) -> bool:
    """Whether the current stream is captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Tables:
    """Uploaded tables, least recently used out first, bounded in bytes; thread-safe.

    A table belongs to one device and stream, so that its upload, its use and the reuse of its
    memory are in the order of that stream. One that a graph has recorded stays for good, since the
    graph may run again at any time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()
        self._recorded: dict[tuple[Hashable, ...], Tensor] = {}
        self._bytes = 0

    def get(
        self, device: torch.device, key: Hashable, make: Callable[[], npt.NDArray[Any]]
    ) -> Tensor:
        """Return the table of that key, made and uploaded if it is not held."""
        if capturing(device):
            return self._record(device, key)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        full = (device, key, stream)
        with self._lock:
            if full in self._held:
                self._held.move_to_end(full)
                return self._held[full]
        made = torch.tensor(make())  # outside the lock: two threads may both make it
        if device.type == "cuda":  # nothing waits: pinned memory is reused when the copy is done
            made = made.pin_memory().to(device, non_blocking=True)
        cost = made.nbytes + 1024
        with self._lock:
            if full not in self._held and cost <= self._max_bytes:
                self._held[full] = made
                self._bytes += cost
                while self._bytes > self._max_bytes:
                    self._bytes -= self._held.popitem(last=False)[1].nbytes + 1024
        return made

    def _record(self, device: torch.device, key: Hashable) -> Tensor:
        """Return a table for a graph, from the warm-up before it: a graph can't record uploads."""
        with self._lock:
            found = self._recorded.get((device, key))
            if found is None:
                found = next((x for k, x in self._held.items() if k[:2] == (device, key)), None)
                if found is None:
                    raise RuntimeError(
                        "a CUDA graph can't record the upload of the blocks, slopes and widths of "
                        "a call: run it once with the same options before it is captured"
                    )
                self._recorded[device, key] = found
            return found


TABLES = Tables(max_bytes=1 << 26)
