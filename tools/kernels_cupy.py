"""How `compile_all.py` compiles the CUDA kernels of the CuPy backend: offline, with nvcc.

Of kernels on tensor cores the instructions of the loop over visited tiles are counted, too, in
what cuobjdump, a program of the CUDA toolkit that Triton brings along, makes of the machine code.
"""

import bisect
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from plsh_cupy import _plan, _source  # noqa: E402

TABLE = ROOT / "tests" / "gpu" / "kernels.tsv"
ARCHITECTURES = (75, 80, 90, 100, 120)
COLUMNS = (
    "arch", "kernel", "dtype", "weight", "dim", "rows", "registers", "spills", "shared",
    "instructions",
)  # fmt: skip
SHARED = {75: 64, 80: 163, 90: 227, 100: 227, 120: 99}
"""KiB of dynamic shared memory that one block may have, by compute capability."""


def digest():
    """Return the digest of all sources as they are compiled."""
    text = "".join(_source.source_of(i) for arch in ARCHITECTURES for i in wanted(arch))
    return hashlib.sha256((text + repr(_source.OPTIONS)).encode()).hexdigest()


def missing():
    """Return what the machine lacks, or None."""
    if shutil.which("nvcc") is None:
        return "nvcc must be on PATH; install the CUDA toolkit"
    if importlib.util.find_spec("triton") is None:
        return "Triton must be installed, for its cuobjdump: pip install triton"
    return None


def instructions_of(cubin):
    """Return the instructions of the smallest loop that holds all products of tensor cores, or 0.

    That is the loop over visited tiles.
    """
    folder = Path(importlib.util.find_spec("triton").origin).parent
    command = [folder / "backends/nvidia/bin/cuobjdump", "-sass", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    places = [int(place, 16) for place, _ in lines]
    products = [place for place, (_, what) in zip(places, lines, strict=True) if "MMA" in what]
    if not products:
        return 0
    found = len(lines)
    for place, (_, what) in zip(places, lines, strict=True):
        back = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", what)
        begin = place if back is None else int(back.group(1), 16)
        if begin <= products[0] and products[-1] <= place:
            found = min(found, bisect.bisect(places, place) - bisect.bisect_left(places, begin))
    return found


def wanted(arch):
    """Return the instances that an architecture can hold; for 75 of float32 and float64 only."""
    limits = _plan.Limits(SHARED[arch] * 1024, 2**31 - 1, tensor=arch >= 80)
    return [
        instance
        for instance in _plan.instances(limits)
        if instance.shared_bytes(instance.dim, instance.dim) <= limits.shared_bytes
        and (arch != 75 or instance.dtype in ("float32", "float64"))
    ]


def is_rare(instance):
    """Leave none out: they compile in a minute."""
    return False


def compile_one(arch, instance, folder):
    """Compile an instance; return its row, or raise with the compiler's words."""
    source = (
        Path(folder)
        / f"{arch}-{instance.kernel}-{instance.dtype}-{instance.step}.{instance.dim}.cu"
    )
    source.write_text(_source.source_of(instance), encoding="utf-8")
    command = [
        "nvcc",
        *_source.OPTIONS,
        f"-arch=sm_{arch}",
        "--cubin",
        "-Werror=all-warnings",
        "-Xptxas=-v,-warn-spills",
        *("-o", str(source.with_suffix(".cubin")), str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if registers is None or spills is None:
        raise RuntimeError(f"{' '.join(command)}\n{said}")
    return (
        arch,
        instance.kernel,
        instance.dtype,
        "step" if instance.step else "decay",
        instance.dim,
        instance.rows,
        int(registers.group(1)),
        int(spills.group(1)) + int(spills.group(2)),
        instance.shared_bytes(instance.dim, instance.dim),
        instructions_of(source.with_suffix(".cubin")) if instance.tensor else 0,
    )


def fault(row):
    """Return what is wrong with a row of the table, or None."""
    found = dict(zip(COLUMNS, row, strict=True))
    if found["spills"]:
        return f"spills {found['spills']} bytes"
    if found["kernel"].endswith("_tensor") and not found["instructions"]:
        return "is without the tensor cores"
    return None
