"""Peak memory: of the process, of a call on the host, of a call on a GPU."""

from plsh.bench import Case, device_peak, host_peak

from .common import APPROXIMATIONS, BACKENDS, LONG, WORKS, need, runner
from .ratios import on_gpu


class Calls:
    """Calls at n = 8192 and 65536, of 16 and 128 MiB an array."""

    param_names = ("backend", "method", "n", "work")
    params = (BACKENDS[:-1], APPROXIMATIONS, (LONG, 65536), WORKS)
    version = "1"
    unit = "bytes"

    def setup(self, backend, method, n, work):
        """Make the runner, and bring in what libraries load at a first call."""
        self.call = getattr(self.prepare(backend, method, 256, work), work)
        self.call()
        self.call = getattr(self.prepare(backend, method, n, work), work)

    def prepare(self, backend, method, n, work):
        """Return a runner; n/a where it hasn't the work."""
        made = runner(backend, method, Case(n, device=on_gpu(backend)))
        need(work == "forward" or made.has_gradients)
        return made

    def peakmem_process(self, backend, method, n, work):
        """Let asv read the peak of the whole process."""
        self.call()

    def track_host(self, backend, method, n, work):
        """Return what a first call adds to the host's memory, its results included."""
        peak = host_peak(self.call)
        need(peak is not None)
        return peak

    def track_device(self, backend, method, n, work):
        """Return what a call adds to the GPU's memory, its results included."""
        peak = device_peak(self.call)
        need(peak is not None)
        return peak
