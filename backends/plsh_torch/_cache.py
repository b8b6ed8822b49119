"""Tables of counts that recur from call to call: forward, backward, recomputation, steps."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

KEPT = 3 << 23
"""Bytes that are kept, at most."""


class Tables:
    """Tensors lately made, least recently used out first, bounded in bytes; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Any, Tensor] = OrderedDict()
        self._bytes = 0

    def get(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return the table of that key, made at need. It must not be written to."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = make()  # outside the lock: two threads may both make it
        with self._lock:
            if key not in self._held and made.nbytes <= self._max_bytes:
                self._held[key] = made
                self._bytes += made.nbytes + 512
                while self._bytes > self._max_bytes and len(self._held) > 1:
                    self._bytes -= self._held.popitem(last=False)[1].nbytes + 512
        return made


TABLES = Tables(KEPT)
