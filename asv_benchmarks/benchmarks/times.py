"""Wall time of warm calls that wait for their work; and of what comes before them."""

import time

import plsh
from plsh.bench import Case, growth, in_turn

from .common import APPROXIMATIONS, BACKENDS, DTYPES, LONG, METHODS, SHORT, Backends, need, runner


class _Grid:
    """Warm calls over all parameters."""

    param_names = ("backend", "method", "n", "dtype", "causal")
    params = (BACKENDS, tuple(METHODS), (SHORT, LONG), DTYPES, (True, False))
    version = "1"
    warmup_time = 0
    rounds = 2
    repeat = (3, 10, 2.0)

    def setup(self, backend, method, n, dtype, causal):
        """Make the runner, and make the measured call once: some compile."""
        # Exact attention of long, symmetric or half-precision calls teaches nothing more.
        need(method != "exact" or n == SHORT or (dtype == "float32" and causal))
        self.runner = runner(backend, method, Case(n, dtype=dtype, causal=causal))
        self.warm()


class Forward(_Grid):
    """Attention."""

    def warm(self):
        """Make the measured call once."""
        self.runner.forward()

    def time_forward(self, backend, method, n, dtype, causal):
        """Time attention."""
        self.runner.forward()


class Training(_Grid):
    """Forward with backward."""

    def warm(self):
        """Make the measured call once."""
        need(self.runner.has_gradients)
        self.runner.training()

    def time_training(self, backend, method, n, dtype, causal):
        """Time attention and its gradients."""
        self.runner.training()


class Small(Backends):
    """Calls of 128 tokens, where the overhead of a call is most of it."""

    length = 128
    version = "1"

    def time_forward(self, backend, method):
        """Time a short call."""
        self.runner.forward()


class First(Backends):
    """The first call of a process, which imports, draws partitions and compiles."""

    version = "1"
    length = LONG
    params = (BACKENDS, APPROXIMATIONS)
    unit = "s"

    def setup(self, backend, method):
        """Make the runner, and no call."""
        self.runner = runner(backend, method, Case(self.length))

    def track_first_call(self, backend, method):
        """Return the seconds of the first call."""
        begin = time.perf_counter()
        self.runner.forward()
        return time.perf_counter() - begin


class Partitions:
    """Drawing partitions and their labels: 8 heads, ALiBi widths."""

    param_names = ("sampler", "samples", "n")
    params = (("stratified", "iid"), (16, 64), (LONG, 65536))
    version = "1"

    def setup(self, sampler, samples, n):
        """Make the hash family."""
        self.family = plsh.RandomBinning(1 / plsh.alibi_slopes(8))

    def time_labels(self, sampler, samples, n):
        """Time drawing the blocks and labelling every position."""
        self.family.sample(samples, n, sampler=sampler).labels()


class Growth:
    """How time grows with n: 1 is linear, 2 quadratic."""

    param_names = ("backend", "method")
    params = (BACKENDS[:-1], APPROXIMATIONS)
    version = "1"
    unit = "exponent"
    timeout = 900
    lengths = (8192, 16384, 32768, 65536)

    def setup(self, backend, method):
        """Make a runner of each length."""
        self.runners = {n: runner(backend, method, Case(n)) for n in self.lengths}

    def track_forward(self, backend, method):
        """Return the exponent of the fit."""
        calls = {str(n): runner.forward for n, runner in self.runners.items()}
        times = in_turn(calls, 3)
        return growth(self.lengths, [times[name].fastest for name in calls])
