"""Choose the tiles of the torch backend's Triton kernels: rewrites the frozen table.

    python tools/choose_tiles.py

Tries them in the order of `PREFERENCES`, and keeps the first that spill nothing and fit the shared
memory; then ``python tools/compile_all.py --kernels triton`` tables what they need.
"""

import itertools
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor

import kernels_triton
from plsh_torch.cuda import _plan

PREFERENCES = {
    ("half", "forward", 64): ["128 64 8 3", "128 64 8 2", "64 64 4 3", "128 32 8 2", "64 64 4 2",
                              "64 32 4 2"],
    ("half", "forward", 128): ["128 64 8 2", "128 32 8 2", "64 64 4 2", "64 32 4 2", "64 16 4 2",
                               "32 32 8 2"],
    ("half", "forward", 256): ["64 32 8 2", "64 16 8 2", "32 32 8 2", "32 16 8 2", "32 16 4 2",
                               "16 16 4 2"],
    ("half", "by_query", 64): ["128 64 8 2", "64 64 4 2", "64 64 8 2", "64 32 4 2", "64 32 8 2"],
    ("half", "by_query", 128): ["64 64 8 2", "64 32 8 2", "64 32 4 2", "64 16 8 2", "32 32 8 2",
                                "32 16 8 2"],
    ("half", "by_query", 256): ["32 32 8 2", "32 16 8 2", "16 16 8 2", "16 16 4 2"],
    ("half", "by_key", 64): ["128 32 8 2", "64 32 8 2", "64 32 4 2", "64 16 8 2", "32 32 4 2",
                             "32 32 8 2", "32 16 4 2"],
    ("half", "by_key", 128): ["64 32 8 2", "64 16 8 2", "32 32 8 2", "32 16 8 2", "32 16 4 2",
                              "16 16 4 2"],
    ("half", "by_key", 256): ["32 32 8 2", "32 32 8 1", "32 16 8 1", "16 16 8 2", "16 16 4 2",
                              "16 16 8 1"],
    ("single", "forward", 64): ["64 32 8 2", "32 32 8 2", "32 16 8 2", "32 16 8 1", "16 16 4 1"],
    ("single", "forward", 128): ["32 32 8 2", "32 16 8 2", "32 16 8 1", "16 16 8 1", "16 16 4 1"],
    ("single", "forward", 256): ["32 16 8 1", "16 16 8 1", "16 16 16 1", "16 16 4 1"],
    ("single", "by_query", 64): ["64 32 8 2", "32 32 8 2", "32 32 8 1", "32 16 8 1", "16 16 4 1",
                                 "16 16 8 1"],
    ("single", "by_query", 128): ["32 16 8 1", "16 16 8 1", "16 16 16 1", "16 16 4 1"],
    ("single", "by_query", 256): ["16 16 8 1", "16 16 16 1", "16 16 4 1"],
    ("single", "by_key", 64): ["64 32 8 2", "64 32 8 1", "32 32 8 2", "32 32 8 1", "32 16 8 1",
                               "16 16 4 1", "16 16 8 1"],
    ("single", "by_key", 128): ["32 32 8 1", "32 16 8 1", "16 16 8 1", "16 16 16 1", "16 16 4 1"],
    ("single", "by_key", 256): ["16 16 8 1", "16 16 16 1", "16 16 4 1"],
}  # fmt: skip
"""Rows, columns, warps and stages, the fastest first as far as one can tell without a device."""
DOUBLE = ("16 16 8 1", "16 16 8 1")
"""Of float64, whose kernels spill on some devices whatever the tile."""


def choose(arch, group, kernel, step, segments, dim, folder):
    """Return the first tile that does, for all that share it; None if none does."""
    dtypes = [name for name, own in _plan.GROUPS.items() if own == group]
    for words in PREFERENCES[group, kernel, dim]:
        tile = _plan.Tile(*map(int, words.split()))
        instances = (
            kernels_triton.Instance(kernel, dtype, step, causal, segments, dim)
            for dtype in reversed(dtypes)  # bfloat16 takes the most registers
            for causal in (True, False)
        )
        if all(
            kernels_triton.fault(kernels_triton.compile_one(arch, x, folder, tile)) is None
            for x in instances
        ):
            return tuple(tile)
    return None


HEAD = '''"""The frozen table of tiles, made by ``tools/choose_tiles.py``.

By generation of the device, and (kernel, dtypes, whether the weight is a step, whether there are
segments): rows, columns, warps and stages for each class of head dims.
"""

TILES = {'''


def main():
    """Choose every tile and write the table."""
    tables = {}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(mp_context=context) as pool:
        for arch in kernels_triton.ARCHITECTURES:
            for kernel in ("forward", "by_query", "by_key"):
                for group, step, segments in itertools.product(
                    ("half", "single", "double"), (False, True), (False, True)
                ):
                    row = tables.setdefault(arch, {})
                    if group == "double":
                        row[kernel, group, step, segments] = [
                            tuple(map(int, x.split())) for x in DOUBLE
                        ]
                        continue
                    row[kernel, group, step, segments] = [
                        pool.submit(choose, arch, group, kernel, step, segments, dim, folder)
                        for dim in _plan.CLASSES
                    ]
        lines = [HEAD]
        for arch, table in tables.items():
            lines.append(f"    {arch}: {{")
            for key, found in table.items():
                tiles = tuple(x if isinstance(x, tuple) else x.result() for x in found)
                print(arch, *key, *tiles, flush=True)
                lines.append(f"        {key!r}: {tiles!r},")
            lines.append("    },")
        lines.append("}")
    text = "\n".join(lines).replace("'", '"') + "\n"
    (kernels_triton.FOLDER / "_tiles.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
