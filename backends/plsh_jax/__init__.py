"""The JAX backend of plsh: a single-pass band kernel in ``jax.numpy`` and ``lax``.

What runs on a CPU runs on GPUs and TPUs, as XLA compiles it: there is no Pallas kernel. Every
transform applies: `jit`, `grad` (forward, reverse, twice), `vmap` over any operands, `checkpoint`,
`shard_map`, and automatic sharding over batch and heads.

- Lengths are static, as everywhere in XLA. Calls outside of `jit` round them up to a ladder, so
  that few programs serve all. ``jax.export`` with symbolic lengths is not supported, since the
  tiling follows the length: export one program a length, or pad to it with `segment_ids`.
- A `plsh.PartitionSet` is a pytree whose labels may be traced: a training step is compiled once and
  given the partitions of the step. It is registered as soon as plsh and JAX are both imported.
- Under `plsh.PositionalLSH` offsets may be traced; the host then looks the blocks up while the
  program runs, by a callback. A `PartitionSet` needs none.
- Where arrays may be spread over devices by their heads, heads run side by side, as the widest
  does, and no device asks another for keys. That is assumed of traced arrays on a mesh of automatic
  axes; explicit axes, `shard_map` and concrete arrays say it themselves.

``import plsh_jax`` imports no JAX.
"""

from typing import Any

from ._backend import BACKEND
from ._hook import register_soon

__all__ = ["BACKEND", "attention_fn", "dot_product_attention"]

register_soon()


def __getattr__(name: str) -> Any:
    if name in ("attention_fn", "dot_product_attention"):
        from . import _adapters

        return getattr(_adapters, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
