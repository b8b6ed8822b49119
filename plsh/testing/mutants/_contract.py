"""Faults of state, types, errors and memory: what a backend owes its callers."""

from typing import Any

import numpy as np

from plsh.backend import AttentionOutput, Capabilities, Gradients, Harness, Request
from plsh.testing.model import Head, ModelBackend
from plsh.weights import UNLIMITED

from ._mutant import Mutant, collector

MUTANTS: list[Mutant] = []
mutant = collector(MUTANTS)

# --- state ----------------------------------------------------------------------------------------


@mutant("state", "BCK-10")
class QueriesScaledInPlace(ModelBackend):
    """The queries are multiplied by the scale where they are."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        found = super().attend(q, k, v, request)
        q *= q.dtype.type(request.static.scale)
        return found


@mutant("state", "BCK-10")
class CotangentsScaledInPlace(ModelBackend):
    """The gradient by the output is zeroed in dead rows where it is."""

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        grad_out[output.lse == -np.inf] = 0
        return super().vjp(q, k, v, output, grad_out, grad_lse, request)


@mutant("state", "NUM-11")
class OutputReused(ModelBackend):
    """The output is a buffer of the backend, which the next call of that shape overwrites."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        found = super().attend(q, k, v, request)
        key = (found.out.shape, found.out.dtype)
        kept = self.kept.setdefault(key, found)
        for old, new in zip(kept, found, strict=True):
            old[...] = new
        return AttentionOutput(*kept)


@mutant("state", "NUM-11")
class SumsNotCleared(ModelBackend):
    """The sums of the gradients by k and v begin with what the last tile left."""

    def __init__(self) -> None:
        self.left: dict[Any, Any] = {}

    def key_gradients(self, group: Any, rows: Any, j: int) -> Any:
        dk, dv = super().key_gradients(group, rows, j)
        before = self.left.get((dk.shape, dv.shape, dk.dtype), (0, 0))
        self.left[dk.shape, dv.shape, dk.dtype] = (dk, dv)
        return dk + before[0], dv + before[1]


@mutant("state", "NUM-11")
class OrderOfTilesRandom(ModelBackend):
    """Tiles of keys are added up in the order in which they happen to be done."""

    def key_tiles(self, head: Head, i: int) -> Any:
        return np.random.default_rng().permutation(super().key_tiles(head, i)).tolist()


@mutant("state", "BCK-15")
class GlobalRandomNumbersDrawn(ModelBackend):
    """A call draws from NumPy's global random numbers."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        np.random.random()  # noqa: NPY002 — the fault
        return super().attend(q, k, v, request)


@mutant("state", "HSH-2")
class BlocksOfAnotherCall(ModelBackend):
    """Blocks are kept by range and head, and not by what they are drawn from."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def labels(self, request: Request, start: int, n: int, h: int) -> Any:
        own = super().labels(request, start, n, h)
        return self.kept.setdefault((start, h, own.shape), own)


@mutant("state", "ATT-9")
class SlopesOfAnotherCall(ModelBackend):
    """Slopes are copied to the device once for each number of heads."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def slope(self, slopes: Any, b: int, h: int, acc: Any) -> Any:
        own = super().slope(slopes, b, h, acc)
        return self.kept.setdefault((np.shape(slopes), b, h, acc), own)


# --- types ----------------------------------------------------------------------------------------


@mutant("types", "ATT-6")
class OutputInFloat32(ModelBackend):
    """The output of half precision stays in float32."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        out, lse = super().attend(q, k, v, request)
        return AttentionOutput(out.astype(lse.dtype), lse)


@mutant("types", "ATT-7")
class LseOfTheInputDtype(ModelBackend):
    """The lse has the dtype of q."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        out, lse = super().attend(q, k, v, request)
        return AttentionOutput(out, lse.astype(q.dtype))


@mutant("types", "ATT-26")
class GradientsInFloat32(ModelBackend):
    """The gradients of half precision stay in float32."""

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        dq, dk, dv, by_slope = super().vjp(q, k, v, output, grad_out, grad_lse, request)
        dq, dk, dv = (x.astype(output.lse.dtype) for x in (dq, dk, dv))
        return Gradients(dq, dk, dv, by_slope)


@mutant("types", "ATT-26")
class SlopeGradientInFloat64(ModelBackend):
    """The gradient by slopes is float64, in which it is summed."""

    def slope_gradient(self, by_slope: Any, acc: Any, request: Request) -> Any:
        return super().slope_gradient(by_slope, np.dtype(np.float64), request)


@mutant("types", "ATT-5")
class StridesIgnored(ModelBackend):
    """Inputs are read as if they were contiguous."""

    def groups(self, arrays: Any, request: Request) -> Any:
        return super().groups(tuple(map(_as_it_lies, arrays)), request)


def _as_it_lies(x: Any) -> Any:
    """Return as many numbers as `x` has, in the order in which they lie in memory."""
    if x.flags.c_contiguous or not isinstance(x.base, np.ndarray) or x.base.dtype != x.dtype:
        return x
    whole = x.base.ravel(order="K")
    return whole[: x.size].reshape(x.shape) if whole.size >= x.size else x


@mutant("types", "BCK-9")
class HarnessKeepsBfloat16(ModelBackend):
    """The harness hands bfloat16 over as it is, a dtype that NumPy does not know."""

    def harness(self) -> Harness:
        own = super().harness()
        return Harness(own.asarray, np.array, own.synchronize)


# --- errors ---------------------------------------------------------------------------------------


@mutant("errors", "BCK-7")
class TransformDeclared(ModelBackend):
    """It declares jit, which it has not."""

    def capabilities(self) -> Capabilities:
        return Capabilities(arrays=("numpy",), gradients="vjp", transforms=("jit",))


@mutant("errors", "BCK-7")
class CausalDeclined(ModelBackend):
    """It declares all methods, and can run none that is causal."""

    def can_run(self, request: Request) -> str | None:
        return "it has no causal mask" if request.static.causal else None


@mutant("errors", "BCK-8")
class OffsetsRefusedTooLate(ModelBackend):
    """It can run a request with an offset for each batch row, and then raises."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        if isinstance(request.arrays.q_offset, tuple):
            raise ValueError("q_offset must be an int")
        return super().attend(q, k, v, request)


@mutant("errors", "BCK-8")
class CanRunRaises(ModelBackend):
    """Whether it can run is asked of the length of the offsets, which a number has not."""

    def can_run(self, request: Request) -> str | None:
        return None if len(request.arrays.q_offset) else "no rows"


@mutant("errors", "ATT-26")
class NoGradientsAfterAll(ModelBackend):
    """It declares gradients of its own, and returns zeros."""

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        return Gradients(np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), None)


@mutant("errors", "ATT-21")
class DeadRowsRaise(ModelBackend):
    """A row that sees no key is an error."""

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        found = super().attend(q, k, v, request)
        if np.any(found.lse == -np.inf):
            raise ValueError("a row sees no key")
        return found


# --- memory ---------------------------------------------------------------------------------------


@mutant("memory", "MEM-1")
class DenseForward(ModelBackend):
    """The scores of a head are held, Nq x Nk."""

    tile = 128

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        buffers["scores"] = np.empty((len(own.q), len(own.k)), dtype=own.acc)
        return own


@mutant("memory", "MEM-1")
class DenseBackward(ModelBackend):
    """The backward pass holds P, Nq x Nk."""

    tile = 128

    def vjp(
        self, q: Any, k: Any, v: Any, output: Any, grad_out: Any, grad_lse: Any, request: Request
    ) -> Gradients:
        held = np.empty((q.shape[2], k.shape[2]), dtype=output.lse.dtype)
        found = super().vjp(q, k, v, output, grad_out, grad_lse, request)
        del held
        return found


@mutant("memory", "MEM-1")
class BandOfKeysCopied(ModelBackend):
    """The keys in the band of each query are copied side by side, N x bandwidth."""

    tile = 128

    def head(self, place: Any, arrays: Any, request: Request, buffers: Any) -> Head:
        own = super().head(place, arrays, request, buffers)
        if own.width < UNLIMITED:
            buffers["band"] = np.empty((len(own.q), own.width), dtype=own.acc)
        return own


@mutant("memory", "MEM-2")
class EveryCallKept(ModelBackend):
    """Each call leaves its output in a cache without an end."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def attend(self, q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
        found = super().attend(q, k, v, request)
        self.kept.append(found.out.copy())
        return found
