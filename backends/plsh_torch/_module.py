"""`ALiBiAttention`: attention with linear biases as a module, projections outside."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import plsh

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
        window by tol its values fix blocks and widths, and are read when they are given or loaded.

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
        self._host: tuple[float, ...] | None = None
        if carries:
            self.register_buffer("slopes", None)
            return
        given = plsh.alibi_slopes(heads) if slopes is None else slopes
        values = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach().clone()
        if values.ndim == 0:
            values = values.expand(heads).clone()
        if values.shape != (heads,):
            raise ValueError(f"slopes must have shape (H,) = ({heads},), got {tuple(values.shape)}")
        if not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise ValueError(f"slopes must be finite and >= 0, got {values.tolist()}")
        if learn_slopes:
            self.slopes = torch.nn.Parameter(values)
        else:
            self.register_buffer("slopes", values)
            if lsh or by_tol:  # what fixes widths and blocks must be known
                self._host = tuple(values.tolist())

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
        method, slopes = self.method, self.slopes if self._host is None else self._host
        if isinstance(method, plsh.PositionalLSH):
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
            slopes=slopes,
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

    def _load_from_state_dict(self, *args: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*args, **keywords)
        self._restore(self.slopes, None)  # assign=True takes whatever dtype comes
        if self._host is not None and self.slopes is not None and not self.slopes.is_meta:
            self._host = tuple(self.slopes.tolist())
