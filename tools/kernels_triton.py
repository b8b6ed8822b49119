"""How `compile_all.py` compiles the Triton kernels of the torch backend; no GPU is used.

An instance is a kernel for a dtype, a kind of weight, causal or not, with segments or not, and a
bound of the head dims, with the tile that the frozen table gives it. 16 samples, as by default.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

FOLDER = ROOT / "backends" / "plsh_torch" / "cuda"
SOURCES = ("_band.py", "_forward.py", "_backward.py", "_diagonals.py", "_plan.py", "_tiles.py")
TABLE = ROOT / "tests" / "gpu" / "triton.tsv"
ARCHITECTURES = (80, 90, 100)
SHARED = {80: 99, 90: 227, 100: 227}
"""KiB of shared memory that one program may have, by generation of tiles: 8.6 and 8.9 have 99."""
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
COLUMNS = (
    "arch", "kernel", "dtype", "weight", "causal", "segments", "dim", "rows", "columns", "warps",
    "stages", "registers", "spills", "shared", "products",
)  # fmt: skip
PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
"""Instructions of the tensor cores."""


class Instance(NamedTuple):
    """What is compiled."""

    kernel: str
    dtype: str
    step: bool
    causal: bool
    segments: bool
    dim: int


def digest():
    """Return the digest of the sources that the table is made from."""
    text = "".join((FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)
    return hashlib.sha256(text.encode()).hexdigest()


def missing():
    """Return what the machine lacks, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton must be installed: pip install triton"
    return None


def wanted(arch):
    """Return the instances, the same for all architectures."""
    from plsh_torch.cuda import _plan

    return [
        Instance(kernel, dtype, step, causal, segments, dim)
        for kernel in ("forward", "by_query", "by_key")
        for dtype in DTYPES
        for step in (False, True)
        for causal in (False, True)
        for segments in (False, True)
        for dim in _plan.CLASSES
        if dim <= _plan.MAX_DIMS[dtype]
    ]


def is_rare(instance):
    """Whether ``--quick`` leaves an instance out."""
    return instance.segments or instance.dtype == "float64"


def arguments(instance, tile):
    """Return the types, the constants and the attributes of a kernel's arguments, as of a call."""
    import triton.language as tl
    from plsh_torch.cuda import _call

    tokens, acc = DTYPES[instance.dtype], "fp64" if instance.dtype == "float64" else "fp32"
    pointers = dict.fromkeys(
        ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"), tokens
    )
    pointers |= dict.fromkeys(("lse", "logs", "terms"), acc) | {"by_slope": "fp64", "order": "i32"}
    if instance.step:
        pointers |= {"width": "i64", "shift": "i64", "diagonals": "u8"}
    else:
        pointers |= {"slopes": "fp64", "bandwidths": "i32"}
    if instance.segments:
        pointers |= {"q_ids": "i64", "k_ids": "i64"}
    absent = {"q_offsets", "k_offsets", "labels", "q_ids", "k_ids", "slopes", "bandwidths", "width",
              "shift", "diagonals"}  # fmt: skip
    wide = instance.dtype in ("float32", "float64")
    constants = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DIM": instance.dim,
        "VALUE_DIM": instance.dim,
        "CAUSAL": instance.causal,
        "STEP": instance.step,
        "SEGMENTED": instance.segments,
        "SAMPLES": 16,
        "CHUNKED": False,
        "PRECISION": "ieee" if wide else "tf32",
        "APART": wide,
        "FACTORED": instance.dtype != "float16",
        "SPREAD": instance.dtype != "float16" or instance.step,
        "DEAD": instance.segments,
        "COUNTED": tl.float32 if instance.dtype == "float32" else tl.float16,
        "ACC": tl.float64 if acc == "fp64" else tl.float32,
    }
    doubles = {"factor", "after", "scale", "unit", "mean"}
    types, values, attributes = {}, {}, {}
    for i, name in enumerate(_call.arguments(instance.kernel)):
        aligned = False
        if name in constants:
            types[name], values[i,] = "constexpr", constants[name]
        elif name in pointers:
            types[name], aligned = f"*{pointers[name]}", True
        elif name in absent:
            types[name], values[i,] = "constexpr", None
        elif re.fullmatch("(q|k|v|do)_d", name):  # contiguous
            types[name], values[i,] = "constexpr", 1
        else:
            types[name] = "i64" if name in doubles else "i32"
            aligned = bool(re.fullmatch("(q|k|v|do)_[bhn]|(value_)?dim", name))
        if aligned:
            attributes[i,] = [["tt.divisibility", 16]]
    return types, values, attributes


def compile_one(arch, instance, folder, tile=None):
    """Compile an instance; return its row, or raise with the compiler's words.

    `tile` in place of that of the frozen table.
    """
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    import triton
    from plsh_torch.cuda import _call, _plan
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, dtype, step, _, segments, dim = instance
    if tile is None:
        tile = _plan.tile_for(kernel, dtype, step, segments, dim, arch)
    types, values, attributes = arguments(instance, tile)
    source = ASTSource(_call.KERNELS[instance.kernel], types, values, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    text = made.asm["ptx"]
    path = Path(folder) / ("-".join(map(str, (arch, *instance, *tile))) + ".ptx")
    path.write_text(text, encoding="utf-8")
    target = re.search(r"\.target (\w+)", text).group(1)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin" / (
        "ptxas-blackwell" if arch >= 100 else "ptxas"
    )  # fmt: skip
    command = [str(ptxas), "-v", "--gpu-name", target, str(path), "-o", str(path) + ".o"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if registers is None or spills is None:
        raise RuntimeError(f"{' '.join(command)}\n{said}")
    products = [name for name in PRODUCTS if name in text]
    return (
        arch,
        instance.kernel,
        instance.dtype,
        "step" if instance.step else "decay",
        int(instance.causal),
        int(instance.segments),
        instance.dim,
        *tile,
        int(registers.group(1)),
        int(spills.group(1)) + int(spills.group(2)),
        made.metadata.shared,
        "+".join(products) or "none",
    )


def fault(row):
    """Return what is wrong with a row of the table, or None."""
    found = dict(zip(COLUMNS, row, strict=True))
    if found["spills"] and found["dtype"] != "float64":
        return f"spills {found['spills']} bytes"
    if found["shared"] > SHARED[found["arch"]] * 1024:
        return f"needs {found['shared']} bytes of shared memory"
    if found["dtype"] in ("float16", "bfloat16") and found["products"] == "none":
        return "makes no products on the tensor cores"
    return None
