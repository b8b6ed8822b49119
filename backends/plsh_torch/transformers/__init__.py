"""Hugging Face transformers on plsh: attention by name, ALiBi-native models, a bounded cache.

`register` makes ``attn_implementation="plsh_window"`` (``"plsh"``: lsh; ``"plsh_exact"``) work for
models whose attention goes through the library's interface (Llama, Mistral, Qwen3). `switch` does
that for a loaded model, with its method, slopes and seed, and for BLOOM and MPT too, and undoes it.
"""

try:
    import transformers as _library
except ImportError as error:
    raise ImportError(
        'plsh_torch.transformers needs Hugging Face transformers; pip install "plsh[transformers]"'
    ) from error

if tuple(int(x) for x in _library.__version__.split(".")[:2]) < (5, 24):
    raise ImportError(
        f"plsh_torch.transformers needs transformers >= 5.24, found {_library.__version__}; "
        'pip install -U "plsh[transformers]"'
    )

from ._attend import register
from ._bounded import BoundedCache
from ._switch import switch
from ._trainer import StepCallback, set_step

__all__ = ["BoundedCache", "StepCallback", "register", "set_step", "switch"]
