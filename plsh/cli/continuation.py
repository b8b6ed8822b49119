"""``plsh demo --generate``: the byte model goes on with a text, with a trimmed KV cache."""

import codecs
import itertools
import os
import sys
import time

from ..byte_model import Cache, generate, load
from ..methods import Exact, Method, PositionalLSH, Window
from .common import Caller, CliError, describe, write

METHODS = ("exact", "window", "lsh")
PROMPT = "The for statement is used to iterate over the elements of a sequence"


def continue_text(
    prompt: str, count: int, name: str, temperature: float, seed: int, backend: str | None
) -> None:
    """Write the prompt and what the model makes of it, byte by byte, and what the cache held.

    Parameters
    ----------
    prompt : str
        As from the command line: bytes that are no text are escaped as `os.fsdecode` does.
    count : int
        Bytes to draw.
    name : {"exact", "window", "lsh"}
        The method.
    temperature : float
    seed : int
        Of the draws, and of lsh's blocks.
    backend : str or None
        Of NumPy arrays.
    """
    methods: dict[str, Method] = {
        "exact": Exact(),
        "window": Window(),
        "lsh": PositionalLSH(seed=seed),
    }
    method = methods[name]
    caller = Caller(backend)
    if not caller.takes_numpy:
        raise CliError(f"--generate needs a --backend of NumPy arrays, got {backend}")
    if not prompt:
        raise CliError("--prompt must have a byte or more, got none")
    text = os.fsencode(prompt)
    cache = Cache(load(), method, backend=caller.name)
    begin = time.perf_counter()
    tokens = generate(cache, text, count, temperature, seed)
    first = next(tokens)  # before anything is written: a backend may refuse
    write(f"{describe(method)}, temperature {temperature:g}\n")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sys.stdout.write(decoder.decode(text))
    for token in itertools.chain([first], tokens):
        sys.stdout.write(decoder.decode(bytes([token])))
        sys.stdout.flush()
    seconds = time.perf_counter() - begin
    write(decoder.decode(b"", final=True))
    write(
        f"\n{count / seconds:.0f} bytes per second; the KV cache holds {cache.tokens} of "
        f"{cache.position} positions, {cache.bytes / 2**10:.0f} KiB"
    )
