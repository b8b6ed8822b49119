"""A cache that keeps only the keys which some head can still see."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

import plsh
from plsh.weights import UNLIMITED

from ._attend import KeyHeads, default_slopes
from ._settings import ATTRIBUTE, KINDS, bandwidths, plan_of

ALIKE = 2.0
"""Heads whose widths differ by no more than this factor share a buffer."""


class Run(NamedTuple):
    """Key heads [start, stop) and how many past tokens of them are kept."""

    start: int
    stop: int
    width: int


class _Buffer:
    """The last tokens of some heads, at the end of a buffer that is moved now and then."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.count = 0  # tokens in the buffer

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens ``(B, heads, n, D)``; return these and up to `width` before them."""
        new = key.shape[-2]
        if self.keys is None or self.values is None:
            # A quarter more than is kept: to move all costs a token four tokens' copy on average.
            room = self.width + max(64, self.width // 4)
            self.keys = key.new_empty((*key.shape[:2], room, key.shape[-1]))
            self.values = value.new_empty((*value.shape[:2], room, value.shape[-1]))
        kept = min(self.count, self.width)
        if self.count + new > self.keys.shape[-2]:
            pairs = (self.keys, key), (self.values, value)
            if new > self.keys.shape[-2] - kept:
                # A long prompt: attention sees all of it, the buffer takes its end.
                whole = [
                    torch.cat([held[:, :, self.count - kept : self.count], x], -2)
                    for held, x in pairs
                ]
                self.count = min(kept + new, self.width)
                for (held, _), x in zip(pairs, whole, strict=True):
                    held[:, :, : self.count] = x[:, :, x.shape[-2] - self.count :]
                return whole[0], whole[1]
            for held, _ in pairs:
                held[:, :, :kept] = held[:, :, self.count - kept : self.count].clone()
            self.count = kept
        self.keys[:, :, self.count : self.count + new] = key
        self.values[:, :, self.count : self.count + new] = value
        self.count += new
        seen = slice(self.count - new - kept, self.count)
        return self.keys[:, :, seen], self.values[:, :, seen]

    def index(self, rows: Tensor) -> None:
        """Take batch rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (
                x.index_select(0, rows.to(x.device)) for x in (self.keys, self.values)
            )


class BoundedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: a buffer for each run of key heads."""

    is_croppable = False

    def __init__(self, runs: tuple[Run, ...]) -> None:
        super().__init__()
        self.runs = runs
        self.width = max(run.width for run in runs)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.seen, self.is_initialized = 0, False
        self.buffers = [_Buffer(run.width) for run in self.runs]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **keywords: Any) -> Any:
        """Add tokens; return what the heads see, as tensors, or `KeyHeads` of several runs."""
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise RuntimeError(
                "BoundedCache overwrites what it drops, which autograd may need; call the model "
                "under torch.no_grad(), or without a cache"
            )
        if key_states.shape[1] != self.runs[-1].stop:
            raise ValueError(
                f"BoundedCache was made for {self.runs[-1].stop} key heads, got "
                f"{key_states.shape[1]}: make it for the model that reads it"
            )
        self.is_initialized = True
        self.seen += key_states.shape[-2]
        made = [
            buffer.append(
                key_states[:, run.start : run.stop], value_states[:, run.start : run.stop]
            )
            for run, buffer in zip(self.runs, self.buffers, strict=True)
        ]
        if len(made) == 1:
            return made[0]
        return KeyHeads(tuple(k for k, _ in made)), KeyHeads(tuple(v for _, v in made))

    def get_seq_length(self) -> int:
        """Return how many tokens were seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the widest head sees, and the first one's place."""
        kept = min(self.seen, self.width)
        return kept + query_length, self.seen - kept

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to go back."""
        if tokens_to_remove:
            raise NotImplementedError(
                "BoundedCache can't be cropped: what came before is dropped; use the default "
                "cache for assisted generation"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the beams that go on."""
        for buffer in self.buffers:
            buffer.index(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        for buffer in self.buffers:
            if buffer.keys is not None:
                buffer.index(torch.arange(len(buffer.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some rows."""
        for buffer in self.buffers:
            if buffer.keys is not None:
                buffer.index(torch.arange(len(buffer.keys))[indices.cpu()])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [x for b in self.buffers for x in (b.keys, b.values) if x is not None]
        return sum(x.numel() * x.element_size() for x in held)


class BoundedCache(Cache):  # type: ignore[misc]
    """A cache for `generate` that drops the keys which no head can see any more.

    Under window and lsh a head sees a limited number of tokens. So decoding takes constant memory,
    and constant time a token, at any length, and generates what the full cache does.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model on ``plsh`` or ``plsh_window``, by name or by `switch`. Its method, slopes and seed
        are read now: make a new cache after changing them.
    per_head : bool, default True
        Keep of each head what it sees itself (heads of like widths share a buffer). False: of all
        heads of a layer as much as of its widest, in one call of attention.

    Raises
    ------
    TypeError
        The model isn't on plsh.
    ValueError
        Its method is exact, under which every key is seen for ever.

    Notes
    -----
    Spec: MTH-2, HSH-10, ATT-12. A head of slope 0 sees everything, and is kept whole. Gradients,
    cropping (assisted generation) and offloading are refused.

    Examples
    --------
    >>> from transformers import MptConfig, MptForCausalLM
    >>> from plsh_torch.transformers import switch
    >>> model = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=9))
    >>> BoundedCache(switch(model, plsh.Window(8))).layers[0].width
    8
    """

    def __init__(self, model: Any, *, per_head: bool = True) -> None:
        name = model.config._attn_implementation
        modules = [
            m
            for m in model.modules()
            if hasattr(m, ATTRIBUTE) or (hasattr(m, "layer_idx") and hasattr(m, "is_causal"))
        ]
        modules = [m for m in modules if hasattr(m, "layer_idx")]
        is_native = bool(modules) and name not in KINDS and hasattr(modules[0], ATTRIBUTE)
        if not modules or (name not in KINDS and not is_native):
            raise TypeError(
                f"model must run on plsh, got attn_implementation {name!r}; "
                "plsh_torch.transformers.switch(model, 'window') first"
            )
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", None) or config.n_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        layers = []
        for module in sorted(modules, key=lambda m: m.layer_idx):
            method, slopes = plan_of(module, None if is_native else name)
            if isinstance(method, plsh.Exact):
                raise ValueError(
                    "model must be on 'window' or 'lsh' for a bounded cache: under exact every "
                    "key is seen for ever; use the default cache"
                )
            reach = bandwidths(method, default_slopes(heads) if slopes is None else slopes)
            group = heads // key_heads
            widest = [max(reach[i : i + group]) for i in range(0, heads, group)]
            runs = _runs(widest if per_head else [max(widest)] * key_heads)
            unbounded = runs[-1].width >= UNLIMITED or max(widest) >= UNLIMITED
            layers.append(DynamicLayer() if unbounded else BoundedLayer(runs))
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes that the keys and values take."""
        return sum(
            layer.nbytes
            if isinstance(layer, BoundedLayer)
            else sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))
            for layer in self.layers
            if layer.is_initialized
        )


def _runs(widths: list[int]) -> tuple[Run, ...]:
    """Join neighbouring heads of like widths."""
    runs: list[Run] = []
    low = 0
    for head, width in enumerate(widths):
        if runs:
            last = runs[-1]
            low, high = min(low, width), max(last.width, width)
            if high <= ALIKE * max(low, 32):
                runs[-1] = Run(last.start, head + 1, high)
                continue
        runs.append(Run(head, head + 1, width))
        low = width
    return tuple(runs)
