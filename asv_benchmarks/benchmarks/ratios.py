"""Ratios within one process: they survive a noisy machine; the site should be read for them.

plsh and the other take turns, on equal threads and equal arrays. A ratio to a peer is plsh's time
over the peer's, so that lower is better in every benchmark here; 0.1 is ten times as fast.
"""

from plsh.bench import PEERS, Case, floor, in_turn

from .common import APPROXIMATIONS, BACKENDS, LONG, METHODS, WORKS, need, runner

PAIRS = {
    "numpy, numpy-dense": ("numpy", "numpy-dense"),
    **{f"torch, {name}": ("torch", name) for name in PEERS if PEERS[name].kind == "torch"},
    "jax, jax-bias": ("jax", "jax-bias"),
    **{f"cupy, {name}": ("cupy", name) for name in PEERS if PEERS[name].kind == "torch"},
}


def on_gpu(backend):
    """Name the device of a pair; None is the library's default."""
    return "cuda:0" if backend == "cupy" else None


class Peers:
    """plsh over a peer, at n = 8192."""

    param_names = ("pair", "method", "work")
    params = (tuple(PAIRS), APPROXIMATIONS, WORKS)
    version = "1"
    unit = "plsh / peer"
    timeout = 900

    def setup(self, pair, method, work):
        """Make both runners."""
        backend, name = PAIRS[pair]
        case = Case(LONG, device=on_gpu(backend))
        self.ours = runner(backend, method, case)
        need(PEERS[name].reason(case) is None)
        self.theirs = PEERS[name].runner(case)
        need(work == "forward" or self.theirs.has_gradients)

    def track_ratio(self, pair, method, work):
        """Return plsh's time over the peer's."""
        calls = {r.name: getattr(r, work) for r in (self.ours, self.theirs)}
        times = in_turn(calls, 5)
        return times["plsh"].seconds / times[self.theirs.name].seconds


class Floor:
    """plsh's forward over the bare matrix products of its tiles, at n = 8192."""

    param_names = ("backend", "method")
    params = (BACKENDS, APPROXIMATIONS)
    version = "1"
    unit = "plsh / floor"

    def setup(self, backend, method):
        """Make the runner and the products."""
        case = Case(LONG)
        self.runner = runner(backend, method, case)
        self.floor = floor(METHODS[method], case, self.runner.harness)

    def track_ratio(self, backend, method):
        """Return plsh's time over the floor's."""
        times = in_turn({"plsh": self.runner.forward, "floor": self.floor}, 5)
        return times["plsh"].seconds / times["floor"].seconds
