"""Compile every CUDA kernel offline with nvcc and table what each needs of a multiprocessor.

    python tools/compile_all.py                      # all architectures; rewrites the table
    python tools/compile_all.py --arch 90 --jobs 4   # one, printed only

Fails where a kernel warns or spills registers. The table, ``tests/gpu/kernels.tsv``, begins with
the digest of the sources, by which a test sees that it is theirs.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from plsh_cupy import _plan, _source  # noqa: E402

TABLE = ROOT / "tests" / "gpu" / "kernels.tsv"
ARCHITECTURES = (75, 80, 90, 100, 120)
COLUMNS = ("arch", "kernel", "dtype", "weight", "dim", "rows", "registers", "spills", "shared")
SHARED = {75: 64, 80: 163, 90: 227, 100: 227, 120: 99}
"""KiB of dynamic shared memory that one block may have, by compute capability."""


def digest():
    """Return the digest of all sources as they are compiled."""
    text = "".join(_source.source_of(i) for arch in ARCHITECTURES for i in wanted(arch))
    return hashlib.sha256((text + repr(_source.OPTIONS)).encode()).hexdigest()


def wanted(arch):
    """Return the instances that an architecture can hold; for 75 of float32 and float64 only."""
    limits = _plan.Limits(SHARED[arch] * 1024, 2**31 - 1)
    return [
        instance
        for instance in _plan.instances(limits)
        if instance.shared_bytes(instance.dim, instance.dim) <= limits.shared_bytes
        and (arch != 75 or instance.dtype in ("float32", "float64"))
    ]


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
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", help="compute capability, such as 90")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="compile kernels whose name holds this")
    arguments = parser.parse_args()
    if shutil.which("nvcc") is None:
        sys.exit("nvcc must be on PATH; install the CUDA toolkit")
    work = [
        (arch, instance)
        for arch in arguments.arch or ARCHITECTURES
        for instance in wanted(arch)
        if arguments.only in instance.kernel
    ]
    lines = ["\t".join(COLUMNS)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        rows = pool.map(lambda item: compile_one(*item, folder), work)
        for row in rows:
            lines.append("\t".join(map(str, row)))
            print(lines[-1], flush=True)
            failed += row[7] > 0
    if failed:
        sys.exit(f"{failed} kernels spill registers")
    if arguments.arch is None and not arguments.only:
        TABLE.write_text(f"# {digest()}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
