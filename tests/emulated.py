"""What the tests of the CuPy backend share: calls for the emulator, and its backend in the place of
NumPy's, so that the tests of `test_numpy_backend` run on the CUDA kernels as they stand; and
stand-ins for CuPy and torch, so that the host side runs as it stands.
"""

import functools
import sys
from dataclasses import dataclass

import numpy as np
import plsh_cupy
import plsh_numpy
from cuda_emulator import EmulatedBackend
from cuda_emulator.fake_cupy import fake_cupy
from laws import inputs
from plsh_cupy import _call, _cuda, _tables
from test_numpy_backend import BandCall

import plsh
from plsh.backend import Availability, Operands, Request, Static
from plsh.weights import UNLIMITED, DecayWeight, StepWeight, TableWeight

BACKEND = EmulatedBackend()
"""The kernels as they are."""


@dataclass(frozen=True)
class CudaCall(BandCall):
    """A call whose integers have a dtype of their own."""

    integers: str = "int32"

    def __str__(self):
        return super().__str__() + ("" if self.integers == "int32" else f"-{self.integers}")

    def keywords(self):
        found = super().keywords()
        ids = found["segment_ids"]
        if ids is not None:
            pair = ids if isinstance(ids, tuple) else (ids,)
            pair = tuple(x.astype(self.integers) for x in pair)
            found["segment_ids"] = pair if len(pair) == 2 else pair[0]
        return found


def put_in_place(monkeypatch, backend=BACKEND):
    """Let calls of backend "numpy" run on an emulated one."""
    for method in ("attend", "vjp"):
        ours = getattr(backend, method)
        monkeypatch.setattr(
            type(plsh_numpy.BACKEND), method, lambda self, *x, ours=ours, **kw: ours(*x, **kw)
        )


def results(q, k, v, method, grad_out, grad_lse=None, backend="numpy", **keywords):
    """Return out, lse and the gradients that there are."""
    call = {"method": method, "backend": backend, **keywords}
    output = plsh.attention(q, k, v, return_lse=True, **call)
    grads = plsh.attention_vjp(q, k, v, output, grad_out, grad_lse, **call)
    return (*output, *(x for x in grads if x is not None))


# --- the host side, on stand-ins ------------------------------------------------------------------


def put_stand_in(monkeypatch, folder, **device):
    """Put a fresh stand-in in CuPy's place, with caches of its own; return it."""
    cupy = fake_cupy(BACKEND.emulator, **device)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
    monkeypatch.setattr(_cuda, "KERNELS", type(_cuda.KERNELS)())
    monkeypatch.setattr(_cuda, "limits_of", functools.cache(_cuda.limits_of.__wrapped__))
    monkeypatch.setattr(_call, "TABLES", _tables.Tables(1 << 26))
    return cupy


def register_here():
    """Register the backend itself under a name of its own, as if a GPU were there; return it."""
    backend = type("Here", (type(plsh_cupy.BACKEND),), {
        "name": "cupy_here", "availability": lambda self: Availability(True)
    })()  # fmt: skip
    plsh.register_backend(backend)
    return backend.name


def host_arrays(n=70):
    """Return q, k, v and grad_out of the requests below, on the host."""
    q, k, v = inputs(n, dtype="float32")
    return q, k, v, np.ones((*q.shape[:3], v.shape[3]), dtype="float32")


def request(weight=None, kind="cupy", **operands):
    """Return a causal request for them: of a decay, or another weight."""
    method, slopes = ("exact", (0.5,) * 4) if weight is None else ("lsh", None)
    given = {"slopes": slopes, "q_offset": 0, "k_offset": 0, "segment_ids": None}
    given |= {"labels": None, **operands}
    weight = DecayWeight((UNLIMITED,) * 4) if weight is None else weight
    static = Static(method, weight, True, 0.3, 4, 2, 8, 6, "float32", kind)
    return Request(static, Operands(**given))


LABELS = np.sort(np.random.default_rng(0).integers(0, 70, (1, 3, 70)), axis=-1).astype(np.int32)
LABELS = np.minimum(LABELS, np.arange(70, dtype=np.int32))
TABLE = TableWeight(3, 0, 70, (69,) * 4)


def requests(move=lambda x: x, kind="cupy"):
    """Name requests, with operands that `move` puts on the device."""
    recipe = StepWeight(plsh.RandomBinning(9.0), 5, "iid", 0, (0, 1, 2, 3))
    cuts = StepWeight(plsh.IndependentCuts(9.0), 5, None, 0, (0, 1, 2, 3))
    ids = np.repeat([[0, 1]], 35, axis=1).repeat(2, axis=0)
    offsets = {"q_offset": move(np.array([5, 9])), "k_offset": move(np.array(5))}
    return {
        "decay": request(kind=kind),
        "recipe": request(recipe, kind),
        "table on the host": request(TABLE, kind, labels=LABELS),
        "table on the device": request(TABLE, kind, labels=move(LABELS)),
        "operands on the device": request(
            kind=kind,
            slopes=move(np.array([0.5, 0.25, 1, 0], dtype="float32")),
            segment_ids=(move(ids), move(ids)),
            **offsets,
        ),
        "offsets of rows": request(kind=kind, q_offset=(4, 1), k_offset=(4, 0)),
        "slopes of rows": request(kind=kind, slopes=((0.5, 0.25, 1, 0), (1, 2, 0.125, 0.5))),
        "blocks by position": request(cuts, kind, **offsets),
    }


def on_the_backend(backend, arrays, asked):
    """Return out, lse and the gradients that there are, of the backend's own methods."""
    q, k, v, grad_out = arrays
    output = backend.attend(q, k, v, asked)
    grads = backend.vjp(q, k, v, output, grad_out, None, asked)
    return [x for x in (*output, *grads) if x is not None]
