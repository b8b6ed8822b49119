"""The kernels' source as one string that a run-time compiler takes, with lines that point home."""

import functools
import re
from importlib import resources

from ._params import PARAMS
from ._plan import Instance

__all__ = ["OPTIONS", "source_of"]

OPTIONS = ("--std=c++17",)
"""Options of every compilation. No fast math: denormals, infinities and division are meant."""

_INCLUDE = re.compile(r"#include <(\w+\.cuh)>\n")


@functools.cache
def source_of(instance: Instance) -> str:
    """Return an instance's source, headers inlined, with ``#line`` before each file.

    A compiler's message names the ``.cu`` or ``.cuh`` file and its own line.
    """
    macros = "".join(f"#define {k} {v}\n" for k, v in instance.macros(PARAMS.itemsize).items())
    return macros + _inlined(f"{instance.kernel}.cu", set())


def _inlined(name: str, seen: set[str]) -> str:
    """Return a file with its headers in place, each once."""
    if name in seen:
        return "\n"
    seen.add(name)
    text = resources.files(__package__).joinpath("kernels", name).read_text(encoding="utf-8")
    parts, line = [f'#line 1 "{name}"\n'], 1
    at = 0
    for found in _INCLUDE.finditer(text):
        parts.append(text[at : found.start()])
        line += text[at : found.end()].count("\n")
        parts.append(_inlined(found.group(1), seen))
        parts.append(f'#line {line} "{name}"\n')
        at = found.end()
    return "".join([*parts, text[at:]])
