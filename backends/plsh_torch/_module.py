"""`ALiBiAttention`: attention with linear biases as a module, projections outside."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

import plsh
from plsh import compat

Self = TypeVar("Self", bound="ALiBiAttention")


class ALiBiAttention(torch.nn.Module):
    """Attention with linear biases over projected queries, keys and values.

    Parameters
    ----------
    heads : int
        Number of query heads, H.
    method : {"window", "lsh", "exact"}, method object or PartitionSet, default "window"
        As for `plsh.attention`.
    slopes : array_like of shape (H,) or number, optional
        Decay per token. None: `plsh.alibi_slopes(heads)`, or the widths that `method` carries.
    learn_slopes : bool, default False
        Make the slopes a parameter, under ``method="exact"`` or ``Window(width)``; else a buffer.
    causal : bool, default True
        Hide keys at positions after the query's.
    scale : float, optional
        Factor of the inner products. None: D**-0.5.
    seed : int, default 0
        Base seed of positional LSH; in place of the method's own.
    layer : int, default 0
        Under lsh each layer needs blocks of its own: layers with one seed share their cuts at
        every depth.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Order of the axes of q, k, v and the output.

    Attributes
    ----------
    slopes : Tensor or None
        Buffer or parameter ``(H,)``, float32. Casts of the module (``half()``, ``to(dtype)``)
        leave it float32, its gradient and its moves between devices are as usual. Under lsh and
        window by tol its values fix blocks and widths. New ones count from the next call on,
        with one exception: a compiled call doesn't see values written in place, until a call that
        isn't compiled has read them.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above; the message names it.

    Notes
    -----
    Spec: ATT-1, HSH-2. A step that changes compiles once: it is an argument of `forward`.

    Examples
    --------
    >>> import torch
    >>> attend = ALiBiAttention(4, method="lsh", layer=2)
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
    >>> attend(q, k, v, step=7).shape
    torch.Size([2, 4, 10, 8])
    """

    slopes: Tensor | None

    def __init__(
        self,
        heads: int,
        *,
        method: str | Any = "window",
        slopes: Any = None,
        learn_slopes: bool = False,
        causal: bool = True,
        scale: float | None = None,
        seed: int = 0,
        layer: int = 0,
        layout: str = "bhsd",
    ) -> None:
        super().__init__()
        _check_integer("heads", heads, 1)
        _check_integer("seed", seed)
        _check_integer("layer", layer)
        if not isinstance(learn_slopes, bool):
            raise TypeError(f"learn_slopes must be True or False, got {learn_slopes!r}")
        self.heads, self.causal, self.scale, self.layout = heads, causal, scale, layout
        self.seed, self.layer = seed, layer
        known = {"exact": plsh.Exact, "window": plsh.Window, "lsh": plsh.PositionalLSH}
        self.method = known[method]() if isinstance(method, str) and method in known else method
        lsh = isinstance(self.method, plsh.PositionalLSH)
        carries = isinstance(self.method, plsh.PartitionSet) or (
            isinstance(self.method, plsh.PositionalLSH) and self.method.family is not None
        )
        if slopes is not None and carries:
            raise ValueError(f"slopes must be None with {self.method!r}, which carries its widths")
        by_tol = isinstance(self.method, plsh.Window) and self.method.width is None
        if learn_slopes and (lsh or carries or by_tol):
            raise ValueError(
                f"learn_slopes needs method='exact' or Window(width), got {self.method!r}: no "
                "gradient flows through random blocks, and a width by tol needs known slopes"
            )
        self._fixed = lsh or by_tol  # blocks and widths are made of known numbers
        if carries:
            self.register_buffer("slopes", None)
        else:
            given = plsh.alibi_slopes(heads) if slopes is None else slopes
            values = _float32(given, heads)
            if learn_slopes:
                self.slopes = torch.nn.Parameter(values)
            else:
                self.register_buffer("slopes", values)
        self._read()
        shape = (0, heads, 1) if layout == "bshd" else (heads, 0, 1)
        nothing = torch.zeros(shape, dtype=torch.float32, device="cpu")
        # Raises for what every call would; a subclass may have a forward of its own.
        ALiBiAttention.forward(self, nothing, nothing, nothing)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; slopes are checked and read."""
        if name == "slopes" and isinstance(value, Tensor):
            _check_slopes(value, self.heads)
        super().__setattr__(name, value)
        if name == "slopes":
            self._read()

    def _read(self) -> None:
        """Keep the slopes as numbers too, where these must be known, and of what tensor they are.

        Reading them in each call would wait for a device, and can't be compiled.
        """
        held = self.slopes
        self._numbers: tuple[float, ...] | None = None
        self._read_of = _state(held)
        if self._fixed and held is not None and not compat.is_traced(held):
            self._numbers = tuple(held.tolist())

    def _known_slopes(self) -> Any:
        """Return the slopes as `plsh.attention` is to have them."""
        if self._fixed and not torch.compiler.is_compiling():
            held, version = self._read_of
            if held is not self.slopes or version is None or version != _state(held)[1]:
                self._read()
        return self.slopes if self._numbers is None else self._numbers

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        step: int | None = None,
        segment_ids: Any = None,
        q_offset: Any = None,
        k_offset: Any = 0,
        return_lse: bool = False,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        q, k, v : Tensor, shapes (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
            As for `plsh.attention`, in the module's layout.
        step : int, optional
            Under lsh, blocks of seed (seed, layer, step), such as the training step's number;
            None: of (seed, layer).
        segment_ids, q_offset, k_offset, return_lse
            As for `plsh.attention`.

        Returns
        -------
        Tensor or AttentionOutput
            As of `plsh.attention`.
        """
        method = self.method
        if isinstance(method, plsh.PositionalLSH):
            if step is not None:
                _check_integer("step", step)
            seed = (self.seed, self.layer) if step is None else (self.seed, self.layer, step)
            method = plsh.PositionalLSH(
                method.samples,
                sampler=method.sampler,
                seed=seed,
                family=method.family,
                head_ids=method.head_ids,
            )
        elif step is not None:
            raise ValueError(f"step draws new blocks under lsh only, the method is {method!r}")
        return plsh.attention(
            q,
            k,
            v,
            method=method,
            slopes=self._known_slopes(),
            causal=self.causal,
            scale=self.scale,
            segment_ids=segment_ids,
            q_offset=q_offset,
            k_offset=k_offset,
            layout=self.layout,
            return_lse=return_lse,
        )

    def extra_repr(self) -> str:
        """Describe the module's settings."""
        return (
            f"{self.heads}, method={self.method!r}, causal={self.causal}, seed={self.seed}, "
            f"layer={self.layer}"
        )

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module; the slopes and their gradient stay float32."""
        held, grad = self.slopes, None if self.slopes is None else self.slopes.grad
        exact = [None if x is None else x.detach() for x in (held, grad)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._restore(*exact)
        return self

    def _restore(self, values: Tensor | None, grad: Tensor | None) -> None:
        """Put values back into slopes of another dtype."""
        if self.slopes is None or values is None or self.slopes.dtype == torch.float32:
            return
        had_grad, device = self.slopes.grad is not None, self.slopes.device
        self.slopes.data = values.to(device, torch.float32)
        if had_grad and grad is not None:
            self.slopes.grad = grad.to(device)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **keywords: Any
    ) -> None:
        given = state_dict.get(prefix + "slopes")
        if isinstance(given, Tensor) and given.shape == (self.heads,):  # else torch says so
            _check_slopes(given, self.heads)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)
        self._restore(self.slopes, None)  # assign=True takes whatever dtype comes
        self._read()


def _check_integer(name: str, value: Any, least: int = 0) -> None:
    number = compat.as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < least or number >= 2**64:
        raise ValueError(f"{name} must lie in [{least}, 2**64), got {number}")


def _float32(given: Any, heads: int) -> Tensor:
    """Return slopes of any kind as a new tensor ``(H,)``, on the CPU wherever they were."""
    if isinstance(given, Tensor) and given.is_meta:
        raise ValueError("slopes must have values, got a tensor on the meta device")
    values = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    values = values.expand(heads) if values.ndim == 0 else values
    _check_slopes(values, heads)
    return values.clamp(max=torch.finfo(torch.float32).max).to(torch.float32, copy=True)


def _check_slopes(slopes: Tensor, heads: int) -> None:
    if slopes.shape != (heads,):
        raise ValueError(f"slopes must have shape (H,) = ({heads},), got {tuple(slopes.shape)}")
    if compat.is_traced(slopes):
        return
    if not bool((torch.isfinite(slopes) & (slopes >= 0)).all()):
        raise ValueError(f"slopes must be finite and >= 0, got {slopes.tolist()}")


def _state(x: Tensor | None) -> tuple[Tensor | None, int | None]:
    """Return what tells whether a tensor is the same and unchanged; None: it keeps no count."""
    return x, None if x is None or x.is_inference() else x._version
