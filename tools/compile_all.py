"""Compile every CUDA kernel offline and table what each needs of a multiprocessor; no GPU is used.

    python tools/compile_all.py                               # rewrites both tables
    python tools/compile_all.py --kernels triton              # of the torch backend alone
    python tools/compile_all.py --kernels cupy --arch 90      # one architecture, printed only

Fails where a kernel warns, spills registers, or in half precision does without the tensor cores.
The tables, ``tests/gpu/kernels.tsv`` and ``tests/gpu/triton.tsv``, begin with the digest of the
sources, by which tests see that they are theirs.
"""

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import kernels_cupy
import kernels_triton

BACKENDS = {"cupy": kernels_cupy, "triton": kernels_triton}


def compile_backend(backend, work, jobs):
    """Compile, print and return the rows of the table; and how many have a fault."""
    lines, failed = ["\t".join(backend.COLUMNS)], 0
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        made = [pool.submit(backend.compile_one, *item, folder) for item in work]
        for row in (x.result() for x in made):
            lines.append("\t".join(map(str, row)))
            fault = backend.fault(row)
            print(lines[-1], *([] if fault is None else [f": {fault}"]), flush=True)
            failed += fault is not None
    return lines, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", choices=BACKENDS, action="append", help="those of a backend")
    parser.add_argument("--arch", type=int, action="append", help="compute capability, such as 90")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="compile kernels whose name holds this")
    parser.add_argument(
        "--quick", action="store_true", help="of Triton, neither segments nor float64"
    )
    arguments = parser.parse_args()
    partly = arguments.arch or arguments.only or arguments.quick
    for name in arguments.kernels or BACKENDS:
        backend = BACKENDS[name]
        if (why := backend.missing()) is not None:
            sys.exit(why)
        work = [
            (arch, instance)
            for arch in arguments.arch or backend.ARCHITECTURES
            for instance in backend.wanted(arch)
            if arguments.only in instance.kernel
            and not (arguments.quick and backend.is_rare(instance))
        ]
        lines, failed = compile_backend(backend, work, arguments.jobs)
        print(f"{name}: {len(work)} kernels compiled, {failed} with a fault")
        if failed:
            sys.exit(1)
        if not partly:
            text = f"# {backend.digest()}\n" + "\n".join(lines) + "\n"
            backend.TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
