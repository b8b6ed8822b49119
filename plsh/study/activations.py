"""Queries, keys and values of trained models: ours, or a Hugging Face model in a local folder.

They are taken where the scores are computed: after rotary embedding and norms of q and k, causal,
with the key head of each query head's own group, and with the model's scale.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..alibi import slopes_of
from ..byte_model import ByteModel
from ..cli.common import CliError
from .corpus import Bytes

Float = npt.NDArray[np.float64]


class Heads(NamedTuple):
    """Inputs of the heads of one attention, ``(H, n, D)`` float64, for the scale D^-1/2.

    Attributes
    ----------
    slopes : tuple of float
        ALiBi's, one for each head.
    """

    q: Float
    k: Float
    v: Float
    slopes: tuple[float, ...]


def of_byte_model(model: ByteModel, text: Bytes) -> list[Heads]:
    """Return the heads of each layer of our model, run under exact ALiBi."""
    found: list[Heads] = []
    exact = model.attention("exact")

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        a, b, c = (np.asarray(x[0], dtype=np.float64) for x in (q, k, v))
        found.append(Heads(a, b, c, model.slopes))
        return exact(layer, q, k, v)

    model.logits(text, attend)
    return found


class HuggingFace:
    """A causal model of transformers, read from a local folder; nothing is downloaded.

    Parameters
    ----------
    path : Path
        With the model and its tokenizer, as ``save_pretrained`` writes them.

    Raises
    ------
    CliError
        It cannot be read, or computes its attention in a way that cannot be listened to.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CliError(f"--model must be a folder that save_pretrained wrote, got {path}")
        try:
            import transformers
        except ImportError:
            raise CliError(
                '--model needs transformers; pip install "plsh[study,transformers]"'
            ) from None
        transformers.AttentionInterface.register(_NAME, _recorded)
        transformers.AttentionMaskInterface.register(_NAME, transformers.masking_utils.sdpa_mask)
        self.path = path
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            load = transformers.AutoModelForCausalLM.from_pretrained
            kind = transformers.AutoConfig.from_pretrained(path, local_files_only=True).model_type
            chosen = {} if kind in _FUSED else {"attn_implementation": _NAME}
            self.model = load(path, local_files_only=True, **chosen).eval()
        except (OSError, ValueError, KeyError) as error:
            raise CliError(f"--model {path} cannot be read: {str(error).splitlines()[0]}") from None

    def heads(self, text: str, length: int) -> list[Heads]:
        """Return the heads of each layer on the first `length` tokens of a text."""
        import torch

        given = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
        ids = given["input_ids"]
        if ids.shape[1] < length:
            raise CliError(
                f"the text gives {ids.shape[1]} tokens of --model, which is fewer than {length}"
            )
        with _recording() as found, self._hooks(), torch.inference_mode():
            self.model(input_ids=ids, use_cache=False)
        if not found:
            raise CliError(f"--model {self.path} has no attention that can be listened to")
        return found

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Listen to the projections of models whose attention cannot be chosen by name."""
        handles = []
        name, heads, split = _FUSED.get(self.model.config.model_type, ("", "", None))
        for module in self.model.modules():
            if not name or not hasattr(module, name):
                continue
            if getattr(module, "clip_qkv", None):
                raise CliError(f"--model {self.path} clips q, k and v, which is not supported")
            count = getattr(module, heads)

            def listen(_: Any, inputs: Any, fused: Any, count: int = count) -> None:
                q, k, v = split(fused, count)
                _record(q, k, v, None)

            handles.append(getattr(module, name).register_forward_hook(listen))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_NAME = "plsh_study_recorded"
_FOUND: list[list[Heads]] = []
"""Who listens now: the last."""


@contextmanager
def _recording() -> Iterator[list[Heads]]:
    found: list[Heads] = []
    _FOUND.append(found)
    try:
        yield found
    finally:
        _FOUND.pop()


def _record(q: Any, k: Any, v: Any, scale: float | None) -> None:
    """Keep tensors ``(1, H, n, D)``, ``(1, Hkv, n, D)``, in groups, the scale put into q."""
    if not _FOUND:
        return
    head_dim, heads = q.shape[-1], q.shape[1]
    factor = 1.0 if scale is None else scale * head_dim**0.5
    arrays = [x[0].detach().double().cpu().numpy() for x in (q, k, v)]
    arrays = [np.repeat(x, heads // x.shape[0], axis=0) for x in arrays]
    _FOUND[-1].append(Heads(arrays[0] * factor, arrays[1], arrays[2], slopes_of(heads)))


def _recorded(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **more: Any
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _record(q, k, v, scaling)
    return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **more)


def _bloom(fused: Any, heads: int) -> Any:
    """Split ``(1, n, 3 H D)``, of which each head has its q, k, v together."""
    return fused.view(*fused.shape[:2], heads, 3, -1).permute(3, 0, 2, 1, 4)


def _mpt(fused: Any, heads: int) -> Any:
    """Split ``(1, n, 3 H D)``, q of all heads first."""
    return fused.view(*fused.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)


_FUSED: dict[str, tuple[str, str, Any]] = {
    "bloom": ("query_key_value", "num_heads", _bloom),
    "mpt": ("Wqkv", "n_heads", _mpt),
}
"""By the type of model: the projection of q, k, v at once, the count of heads, the split."""
