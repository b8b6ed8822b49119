"""`switch`: a loaded model to plsh, and back."""

import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

import plsh

from ._attend import NATIVE, register
from ._native import CLASSES, own_slopes
from ._settings import ATTRIBUTE, DEFAULTS, KINDS, Method, Settings

Model = TypeVar("Model", bound=Any)

_ATTENTION = (
    modeling_llama.LlamaAttention,
    modeling_mistral.MistralAttention,
    modeling_qwen3.Qwen3Attention,
)
_ROTARY = (
    modeling_llama.LlamaRotaryEmbedding,
    modeling_mistral.MistralRotaryEmbedding,
    modeling_qwen3.Qwen3RotaryEmbedding,
)
_BEFORE = "plsh_before"


class _Before(NamedTuple):
    """How a model was before the switch."""

    config: Any
    implementation: str


class NoRotary(nn.Module):
    """In place of a rotary embedding: rotates by nothing. Keeps the one that it replaces."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.replaced = replaced

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines 1 and sines 0, ``(B, N, D)``."""
        half: Any = self.replaced.inv_freq
        shape = (*position_ids.shape, 2 * half.shape[-1])
        return x.new_ones(shape), x.new_zeros(shape)


def switch(
    model: Model,
    method: str | Method | None = "window",
    *,
    slopes: Any = None,
    seed: int = 0,
    rope: bool = True,
) -> Model:
    """Switch a loaded model's attention to plsh, in place, or back.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Llama, Mistral, Qwen3, BLOOM or MPT.
    method : {"window", "lsh", "exact"}, Exact, Window, PositionalLSH or None, default "window"
        As for `plsh.attention`. None puts the model back as it was. A `PositionalLSH` gives its
        samples and sampler; `seed` stands in place of its own.
    slopes : sequence of float, length H, optional
        Decay per token of each head, >= 0; 0 is plain attention. None: those of the model's own
        bias (BLOOM, MPT), else `plsh.alibi_slopes`.
    seed : int, default 0
        Base seed of lsh: layer l draws its blocks from (seed, l), and after `set_step` from
        (seed, l, step).
    rope : bool, default True
        Whether rotary embeddings stay; False leaves the positions to ALiBi, as in the paper.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        The model is none of these, or `method` is no method.
    ValueError
        `slopes` is not one number >= 0 per head, or `rope` is False for a model without it.

    Notes
    -----
    Spec: ATT-1, MTH-1, MTH-2, MTH-3, HSH-2. Weights and their names stay as they are. Nothing of
    the switch is saved with them: switch again after loading, `rope` included.

    Examples
    --------
    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=9))
    >>> switch(model, "window") is switch(model, None) is model
    True
    """
    chosen = _checked(method)
    modules = [m for m in model.modules() if isinstance(m, (*_ATTENTION, *CLASSES))]
    if not modules:
        raise TypeError(
            "model must be a Llama, Mistral, Qwen3, BLOOM or MPT model of transformers, got "
            f"{type(model).__name__}; other models that use the library's attention interface "
            "take attn_implementation='plsh_window' after register()"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise TypeError(f"seed must be an int in [0, 2**64), got {seed!r}")
    if chosen is None:
        _restore(model)
        return model
    is_native = not isinstance(modules[0], _ATTENTION)
    rotary = [m for m in model.modules() if isinstance(m, _ROTARY)]
    if not rope and not rotary:
        raise ValueError(
            f"rope must be True for {type(model).__name__}, which has no rotary embedding"
        )
    heads = getattr(model.config, "num_attention_heads", None) or model.config.n_heads
    known = own_slopes(model) if slopes is None else _slopes(slopes, heads)
    if isinstance(chosen, plsh.PositionalLSH) and chosen.family is not None:
        if slopes is not None:
            raise ValueError(f"slopes must be None with {chosen!r}, which carries its widths")
        known = None
    _restore(model)
    register()
    config = model.config
    setattr(model, _BEFORE, _Before(config, config._attn_implementation))
    # Models may share one config: what is said of this one must not reach the others.
    _set_config(model, config, copy.deepcopy(config))
    name = next(name for name, kind in KINDS.items() if isinstance(chosen, kind))
    model.config._attn_implementation = NATIVE if is_native else name
    settings = Settings(chosen, known, seed)
    for module in modules:
        setattr(module, ATTRIBUTE, settings)
        module.__class__ = CLASSES.get(type(module), type(module))
    if not rope:
        _replace(model, _ROTARY, NoRotary)
    return model


def _restore(model: Any) -> None:
    before: _Before | None = getattr(model, _BEFORE, None)
    if before is None:
        return
    originals = {new: old for old, new in CLASSES.items()}
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            delattr(module, ATTRIBUTE)
        module.__class__ = originals.get(type(module), type(module))
    _replace(model, (NoRotary,), lambda module: module.replaced)
    _set_config(model, model.config, before.config)
    delattr(model, _BEFORE)


def _set_config(model: Any, old: Any, new: Any) -> None:
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


def _replace(model: nn.Module, kinds: Any, make: Any) -> None:
    for parent in list(model.modules()):
        if isinstance(parent, NoRotary):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, make(child))


def _checked(method: Any) -> Method | None:
    names = {"lsh": "plsh", "window": "plsh_window", "exact": "plsh_exact"}
    if isinstance(method, str) and method in names:
        return DEFAULTS[names[method]]
    if method is not None and not isinstance(method, plsh.Exact | plsh.Window | plsh.PositionalLSH):
        raise TypeError(
            f"method must be one of {tuple(names)}, Exact(), Window(), PositionalLSH(), or None "
            f"to switch back, got {method!r}"
        )
    return method


def _slopes(slopes: Any, heads: int) -> tuple[float, ...]:
    values = torch.as_tensor(slopes, dtype=torch.float64).tolist()
    if not isinstance(values, list) or len(values) != heads:
        raise ValueError(f"slopes must be one number per head ({heads}), got {slopes!r}")
    if not all(isinstance(m, float) and 0 <= m < float("inf") for m in values):
        raise ValueError(f"slopes must be finite and >= 0, got {slopes!r}")
    return tuple(values)
