"""Small tables on the device, made from recipes on the host, and kept for the next call."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

from plsh.compat import Array

from ._device import Device

__all__ = ["TABLES", "Tables"]


class Tables:
    """Uploaded tables, least recently used out first, bounded in bytes; thread-safe.

    A table belongs to one device and stream, so that its upload, its use and the reuse of its
    memory are in the order of that stream. One that a graph has recorded stays for good, since the
    graph may run again at any time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, tuple[Array, int]] = OrderedDict()
        self._recorded: dict[Hashable, Array] = {}
        self._bytes = 0

    def get(self, device: Device, key: Hashable, make: Callable[[], npt.NDArray[Any]]) -> Array:
        """Return the table of that key, made and uploaded if it is not held."""
        full = (device.key, key)
        with self._lock:
            if full in self._held:
                self._held.move_to_end(full)
                if device.capturing:
                    self._recorded[full] = self._held[full][0]
                return self._held[full][0]
        host = make()  # outside the lock: two threads may both make it
        table, cost = device.upload(host), host.nbytes + 1024
        with self._lock:
            if full not in self._held and cost <= self._max_bytes:
                self._held[full] = (table, cost)
                self._bytes += cost
                while self._bytes > self._max_bytes:
                    self._bytes -= self._held.popitem(last=False)[1][1]
        return table

    def clear(self) -> None:
        """Forget every table but those of recorded graphs."""
        with self._lock:
            self._held.clear()
            self._bytes = 0


TABLES = Tables(max_bytes=1 << 26)
