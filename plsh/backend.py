"""The contract of a backend: what it is handed, what it returns, what it says of itself.

Third parties implement `Backend` and register it under the entry-point group ``plsh.backends``;
``spec/`` numbers the requirements, and ``spec/example_backend`` is a complete small one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt

from .compat import Array
from .partition import extend_labels
from .weights import StepWeight, TableWeight, Weight

__all__ = [
    "SPEC_VERSION",
    "AttentionOutput",
    "Availability",
    "Backend",
    "Capabilities",
    "Gradients",
    "Harness",
    "Operands",
    "Request",
    "Static",
]

SPEC_VERSION = "1.1"
"""Version of ``spec/`` that this core implements. A backend of another major is unavailable."""


class AttentionOutput(NamedTuple):
    """Output of attention, with the log of its denominators.

    Attributes
    ----------
    out : Array
        ``(B, H, Nq, Dv)`` or in the caller's layout, of q's dtype.
    lse : Array
        ``(B, H, Nq)`` in either layout: natural log of ``sum_j w_ij exp(scale * q_i . k_j)``,
        float32 (float64 for float64); -inf in a row that sees no key.

    Notes
    -----
    Spec: ATT-6, ATT-7, ATT-21.
    """

    out: Array
    lse: Array


class Gradients(NamedTuple):
    """Gradients by the inputs, each of its input's shape and dtype; `slopes` is None under lsh.

    Notes
    -----
    Spec: ATT-26.
    """

    q: Array
    k: Array
    v: Array
    slopes: Array | None


@dataclass(frozen=True, slots=True)
class Static:
    """The part of a request that compilers may specialise on: hashable, no arrays, no lengths.

    Attributes
    ----------
    method : {"exact", "window", "lsh"}
        What the caller asked for; the weight says how it is computed.
    weight : DecayWeight, StepWeight or TableWeight
        The recipe of the positional weight.
    causal : bool
        Whether a key after the query is hidden.
    scale : float
        Factor of the inner products.
    heads, kv_heads : int
        H and Hkv; query head h reads key head ``h // (H // Hkv)``.
    head_dim, value_dim : int
        D and Dv.
    dtype : str
        Of q, k, v and the output: float16, bfloat16, float32 or float64.
    array_kind : str
        Of q, k, v: numpy, torch, jax, cupy or array-api.
    """

    method: Literal["exact", "window", "lsh"]
    weight: Weight
    causal: bool
    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    array_kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """The part of a request that may be traced: None, numbers, or arrays of q's kind.

    Attributes
    ----------
    slopes : None, tuple or Array
        ``(H,)`` or ``(B, H)`` under a `DecayWeight`, per token; else None.
    q_offset, k_offset : int, tuple of int or Array
        Position of the first query and key; a number (or 0-d), or ``(B,)``.
    segment_ids : None or (Array, Array)
        ``(B, Nq)`` and ``(B, Nk)`` integers; equal ids see each other, a negative id is padding.
    labels : None or Array
        ``(H or 1, s, n)`` int32 under a `TableWeight`; else None.
    """

    slopes: Any
    q_offset: Any
    k_offset: Any
    segment_ids: tuple[Array, Array] | None
    labels: Any


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call, checked: arrays are ``(B, H, N, D)`` and every rule of the core holds."""

    static: Static
    arrays: Operands

    def labels(self, start: int, stop: int, head: int | None = None) -> Any:
        """Return the labels of positions ``[start, stop)`` under lsh, int32.

        ``(H or 1, s, n)``, or ``(s, n)`` of one head. NumPy for a recipe; an array of the operand's
        kind for a `PartitionSet`, whose range is extended by its first and last label (only padding
        lies there).
        """
        weight = self.static.weight
        if isinstance(weight, StepWeight):
            return weight.labels(start, stop, head)
        if not isinstance(weight, TableWeight):
            raise TypeError(f"labels exist under lsh only, the weight is {weight!r}")
        table = self.arrays.labels
        if head is not None:
            table = table[min(head, table.shape[0] - 1)]  # one head of partitions serves all
        return extend_labels(table, weight.start, start, stop)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used on this machine, and if not, why and what to install.

    Attributes
    ----------
    ok : bool
    reason : str
        "" if it can, else one sentence with the remedy, such as the pip extra.
    cause : BaseException, optional
        What went wrong; the error that a caller gets is raised from it.
    """

    ok: bool
    reason: str = ""
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares. A declared capability is tested; an undeclared one is refused.

    Attributes
    ----------
    arrays : tuple of str
        Kinds of arrays taken: numpy, torch, jax, cupy, array-api.
    dtypes : tuple of str
        Of float16, bfloat16, float32, float64.
    methods : tuple of str
        Of exact, window, lsh.
    gradients : {"vjp", "autograd"} or None
        "vjp": the backend has `vjp`. "autograd": the framework differentiates `attend`.
    transforms : tuple of str
        Of jvp, jit, vmap, compile, second_order: what may be applied to `plsh.attention`, on every
        kind of arrays that has it (spec: TRF).
    max_head_dim : int or None
        Largest D and Dv; None for no limit.
    """

    arrays: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    methods: tuple[str, ...] = ("exact", "window", "lsh")
    gradients: Literal["vjp", "autograd"] | None = None
    transforms: tuple[str, ...] = ()
    max_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("arrays", "dtypes", "methods", "transforms"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a tuple of names, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Harness:
    """How tests and benchmarks drive a backend's arrays.

    Attributes
    ----------
    asarray : callable
        ``asarray(numpy_array, dtype=name, device=name or None)``.
    to_numpy : callable
        Copy to NumPy; bfloat16 comes back as float32.
    synchronize : callable
        Wait until all work on an array's device is done.
    devices : tuple of str
        Devices to test on; the first is the default.
    vjp : callable or None
        ``vjp(f, inputs, cotangents) -> gradients``, for a function of arrays to a tuple of arrays.
    jvp : callable or None
        ``jvp(f, inputs, tangents) -> (outputs, their tangents)``.
    jit, vmap, compile : callable or None
        The framework's transforms of a function; ``vmap(f, in_axes=…)``.
    """

    asarray: Callable[..., Array]
    to_numpy: Callable[[Array], npt.NDArray[Any]]
    synchronize: Callable[[Array], None]
    devices: tuple[str, ...] = ("cpu",)
    vjp: Callable[..., Sequence[Array]] | None = None
    jvp: Callable[..., Any] | None = None
    jit: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    compile: Callable[..., Any] | None = None


@runtime_checkable
class Backend(Protocol):
    """What a backend provides.

    With ``gradients == "vjp"`` it also has
    ``vjp(q, k, v, output, grad_out, grad_lse, request) -> Gradients``.
    """

    @property
    def name(self) -> str:
        """Identifier, the same as the entry point's name."""

    @property
    def spec_version(self) -> str:
        """Version of the spec it implements, "major.minor"."""

    def availability(self) -> Availability:
        """Say whether it can be used here. Cheap; never raises."""

    def capabilities(self) -> Capabilities:
        """Declare what it can do. Needs no framework."""

    def can_run(self, request: Request) -> str | None:
        """Return None if it can serve this request, else the reason in one sentence."""

    def attend(self, q: Array, k: Array, v: Array, request: Request) -> AttentionOutput:
        """Compute attention of checked arrays ``(B, H, N, D)``."""

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks, on the first kind of `arrays` declared.

        May import the framework. `plsh.testing.harness_for` makes those of the known libraries.
        """
