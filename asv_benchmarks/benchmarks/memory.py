"""Peak memory: of the process, of a call on the host, of a call on a GPU."""

from plsh.bench import Case, device_peak, host_peak

from .common import APPROXIMATIONS, BACKENDS, LONG, WORKS, need, runner
from .ratios import on_gpu


class _Calls:
    """Calls at n = 8192 and 65536, of 16 and 128 MiB an array."""

    param_names = ("backend", "method", "n", "work")
    params = (BACKENDS[:-1], APPROXIMATIONS, (LONG, 65536), WORKS)
    version = "1"

    def setup(self, backend, method, n, work):
        """Make the runner, and bring in what libraries load at a first call."""
        self.prepare(backend, method, 256, work)()
        self.call = self.prepare(backend, method, n, work)

    def prepare(self, backend, method, n, work):
        """Return a call; n/a where the backend hasn't the work."""
        made = runner(backend, method, Case(n, device=on_gpu(backend)))
        need(work == "forward" or made.has_gradients)
        return getattr(made, work)


class Process(_Calls):
    """All that the process has."""

    def peakmem_process(self, backend, method, n, work):
        """Let asv read the peak."""
        self.call()


class Host(_Calls):
    """What a first call adds to the host's memory, its results included."""

    unit = "bytes"

    def setup(self, backend, method, n, work):
        """Make the call; n/a where nobody counts."""
        super().setup(backend, method, n, work)
        need(host_peak(lambda: None) is not None)

    def track_host(self, backend, method, n, work):
        """Return the bytes."""
        return host_peak(self.call)


class Device(_Calls):
    """What a call adds to the GPU's memory, its results included."""

    unit = "bytes"

    def setup(self, backend, method, n, work):
        """Make the call; n/a without a GPU."""
        super().setup(backend, method, n, work)
        need(device_peak(lambda: None) is not None)

    def track_device(self, backend, method, n, work):
        """Return the bytes."""
        return device_peak(self.call)
