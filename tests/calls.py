"""Calls of the conformance suite on one array library, by any backend's name.

`check_call` compares output, lse and gradients by the library's own differentiation with the
float64 oracle; `pairwise` covers all pairs of options with few calls.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from namespaces import NAMESPACES, Namespace

import plsh
from plsh import testing
from plsh.conformance import calls
from plsh.conformance.calls import FACTORS, FAR, pairwise

__all__ = ["FACTORS", "FAR", "Call", "check_call", "pairwise"]


@dataclass(frozen=True)
class Call(calls.Call):
    """One call, of arrays of one library, to one backend; large logits and far keys, too."""

    namespace: str = "numpy"
    std: float = 1.0  # of q and k
    gap: int = 0  # positions between the keys and later queries, negative: earlier queries

    backend = "reference"

    def __str__(self) -> str:
        words = [self.namespace, super().__str__()]
        words += [] if self.std == 1 else [f"std{self.std:g}"]
        words += [] if self.gap == 0 else [f"gap{self.gap}"]
        return "-".join(words)

    @property
    def ns(self) -> Namespace:
        return NAMESPACES[self.namespace]

    @cached_property
    def inputs(self) -> testing.AttentionInputs:
        """The inputs, ``(B, H, N, D)``, in NumPy."""
        seed = sum(self.lengths) * 1000 + self.dims[0]
        shape = (self.rows, *self.heads, *self.lengths, *self.dims)
        return testing.make_inputs(*shape, self.dtype, seed, self.std)

    @cached_property
    def positions(self) -> tuple[Any, Any]:
        """(q_offset, k_offset): numbers, or one per batch row."""
        if not self.gap:
            return super().positions
        len_q, len_k = self.lengths
        return (len_k + self.gap, 0) if self.gap > 0 else (0, len_q - self.gap)

    def arrays(self) -> list[Any]:
        """q, k, v, grad_out and grad_lse, in the caller's layout, of the library."""
        return super().arrays(self.ns)

    def keywords(self) -> dict[str, Any]:
        """The keywords of the call; arrays are of the library."""
        found = super().keywords(self.ns)
        return {**found, "return_lse": self.return_lse, "backend": self.backend}


def check_call(call: Call) -> None:
    """Output, lse, and gradients where the library differentiates, against the oracle."""
    expected, plain = call.yardsticks
    with call.ns.scope():
        q, k, v, grad_out, grad_lse = call.arrays()
        keywords = call.keywords()
        slopes = keywords.pop("slopes")
        if call.is_decay:
            slopes = call.ns.asarray(slopes, "float64" if call.dtype == "float64" else "float32")

        def f(*inputs: Any) -> tuple[Any, ...]:
            m = inputs[3] if len(inputs) > 3 else slopes
            result = plsh.attention(*inputs[:3], slopes=m, **keywords)
            return tuple(result) if call.return_lse else (result,)

        cotangents = (grad_out, grad_lse) if call.return_lse else (grad_out,)
        if call.ns.vjp is None:
            outputs, grads = f(q, k, v), None
        else:
            outputs, grads = call.ns.vjp(f, [q, k, v] + [slopes] * call.is_decay, cotangents)
        testing.assert_attention_close(outputs[0], expected.out, plain.out, like=q)
        if call.return_lse:
            testing.assert_output_close(plsh.AttentionOutput(*outputs), expected, plain, like=q)
        if grads is not None:
            testing.assert_gradients_close(grads, expected, plain, like=q)
