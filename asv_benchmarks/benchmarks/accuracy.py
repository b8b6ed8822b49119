"""Errors beside the times, against the float64 oracle on sampled rows; and pairs scored."""

from plsh.bench import PEERS, Case, error, exact_rows, own_rows
from plsh.cli.cost import distinct_pairs
from plsh.methods import resolve

from .common import BACKENDS, DTYPES, LONG, METHODS, SHORT, need, runner
from .ratios import PAIRS, on_gpu


class Error:
    """Relative Frobenius error of the output."""

    param_names = ("backend", "method", "dtype", "causal")
    params = (BACKENDS, tuple(METHODS), DTYPES, (True, False))
    version = "1"
    unit = "relative"

    def setup(self, backend, method, dtype, causal):
        """Compute the output."""
        self.case = Case(SHORT, dtype=dtype, causal=causal)
        self.out = runner(backend, method, self.case).output()
        self.inputs = self.case.inputs()

    def track_alibi(self, backend, method, dtype, causal):
        """Return the error against exact ALiBi."""
        return error(self.out, exact_rows(self.case, self.inputs))

    def track_rounding(self, backend, method, dtype, causal):
        """Return the error against the same positional weight: rounding alone."""
        return error(self.out, own_rows(self.case, self.inputs, METHODS[method]))


class Peers:
    """The error of each peer against exact ALiBi, at the length of the ratios."""

    param_names = ("pair",)
    params = (tuple(PAIRS),)
    version = "1"
    unit = "relative"
    timeout = 900

    def setup(self, pair):
        """Make the peer's runner."""
        backend, name = PAIRS[pair]
        self.case = Case(LONG, device=on_gpu(backend))
        need(PEERS[name].reason(self.case) is None)
        self.runner = PEERS[name].runner(self.case)

    def track_alibi(self, pair):
        """Return the error."""
        return error(self.runner.output(), exact_rows(self.case, self.case.inputs()))


class Pairs:
    """Pairs of a query and a key with weight > 0, all heads."""

    param_names = ("method", "n", "causal")
    params = (tuple(METHODS), (SHORT, LONG), (True, False))
    version = "1"
    unit = "pairs"

    def track_pairs(self, method, n, causal):
        """Return their number."""
        slopes = Case(n).slopes
        weight = resolve(METHODS[method], None, slopes, len(slopes)).weight
        return sum(distinct_pairs(weight, n, causal))
