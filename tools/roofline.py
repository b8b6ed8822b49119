"""Say what limits each CUDA kernel on an H100 or H200, from the compiler's own report.

    python tools/roofline.py            # prints the tables of docs/cupy-roofline.md
    python tools/roofline.py --write    # and puts them there

For each 64 x 64 pairs: multiply-adds, exponentials, bytes of shared memory and from the L2 cache,
and instructions, each in clocks of one multiprocessor that does nothing else. The largest is the
roof; it holds as far as enough warps fit to cover the others. Registers, shared memory and
instructions are those of ``tests/gpu/kernels.tsv``.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "gpu" / "kernels.tsv"
PAGE = ROOT / "docs" / "cupy-roofline.md"
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"

# A multiprocessor of compute capability 9.0, per clock (CUDA C++ programming guide, arithmetic
# instructions and technical specifications; H100 data sheet: 989 Tflop/s dense on 132 of them at
# 1.83 GHz, of which mma.sync reaches 63 %, arXiv 2402.13499).
PEAKS = {"float64": 64, "float32": 128, "tensor": 2048}
MMA_SYNC = 0.63
EXPONENTIALS, SHARED, ISSUED = 16, 128, 4
CLOCKS = 132 * 1.83e9
L2, H100, H200 = (rate / CLOCKS for rate in (5.5e12, 3.35e12, 4.8e12))
"""Bytes per clock of the L2 cache and of the two memories that one of 132 gets when all read."""
REGISTERS, SHARED_BYTES, WARPS = 65536, 227 * 1024, 64
COLUMNS = 64
PAIRS = COLUMNS * COLUMNS
SIZES = {"float16": 2, "float32": 4, "float64": 8}


class Work(NamedTuple):
    """What 64 x 64 pairs take of one multiprocessor, in clocks; None where it was not counted."""

    products: float
    exp: float
    shared: float
    L2: float
    issue: int | None


class Kernel(NamedTuple):
    """A row of the compiler's report."""

    kernel: str
    dtype: str
    step: bool
    dim: int
    rows: int
    registers: int
    shared: int
    instructions: int

    @property
    def tensor(self):
        """Whether its products are those of tensor cores."""
        return self.kernel.endswith("_tensor")

    @property
    def kind(self):
        """The kernel that does the same without tensor cores."""
        return self.kernel.removesuffix("_tensor")

    @property
    def threads(self):
        """Threads of a block."""
        return 2 * self.rows if self.tensor else 256

    @property
    def products(self):
        """Inner products over dims, and sums over tokens, of a visited tile, in widths of dim."""
        return {"forward": (1, 1), "backward_queries": (2, 1), "backward_keys": (2, 2)}[self.kind]

    @property
    def own_fragments(self):
        """How often a warp reads its own rows of a tile: for each part of the columns anew."""
        parts = 1 if self.dim <= 64 else 2
        return {"forward": 1, "backward_queries": 1 + 2, "backward_keys": 2 * parts}[self.kind]

    @property
    def peak(self):
        """Multiply-adds a clock of the cores that it uses."""
        return PEAKS["tensor" if self.tensor else self.dtype]

    @property
    def multiply_adds(self):
        """Those of 64 x 64 pairs, without the counts."""
        return PAIRS * self.dim * sum(self.products)

    @property
    def blocks(self):
        """Blocks that one multiprocessor holds."""
        return min(
            REGISTERS // (-(-self.registers // 8) * 8 * self.threads),
            SHARED_BYTES // (self.shared + 1024),
            WARPS * 32 // self.threads,
        )

    def work(self, samples=16):
        """Return the clocks of 64 x 64 pairs, D = Dv = dim."""
        inner, outer = self.products
        share = COLUMNS / self.rows  # of a visited tile
        once = self.tensor or self.kernel == "forward"  # else for each product anew
        loaded = share * COLUMNS * self.dim * (2 if once else inner + outer)
        if self.tensor:
            counts = PAIRS * 16 * -(-samples // 16) if self.step else 0
            fragments = self.own_fragments + (inner + outer) * COLUMNS // 16
            reads = COLUMNS // 16 * self.dim // 16 * 512 * fragments
            return Work(
                (self.multiply_adds + counts) / (MMA_SYNC * self.peak),
                PAIRS / EXPONENTIALS,
                (reads + loaded * 2) / SHARED,
                loaded * SIZES[self.dtype] / L2,
                self.instructions * (COLUMNS // 16) // ISSUED,
            )
        wide = 8 if self.dtype == "float64" else 4
        m, n = self.rows // 16, 4  # pairs of a thread; 16 of 256 threads share rows, 16 columns
        # A warp reads two groups' rows, each once for its lanes, and sixteen lanes' columns.
        reads = 0
        for count, across in ((inner, n), (outer, self.dim // 16)):
            reads += PAIRS * self.dim * count * wide * (2 * m + 16 * across) / (32 * m * across)
        return Work(
            self.multiply_adds / self.peak,
            PAIRS / EXPONENTIALS,
            (reads + loaded * wide) / SHARED,
            loaded * SIZES[self.dtype] / L2,
            None,
        )


def kernels():
    """Return the kernels of sm_90 with head dims up to 128.

    bfloat16 is as float16, which without tensor cores is as float32, but for the bytes it loads.
    """
    _, header, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = dict(zip(header.split("\t"), line.split("\t"), strict=True))
        if row["arch"] != "90" or row["dtype"] == "bfloat16" or int(row["dim"]) > 128:
            continue
        numbers = ("dim", "rows", "registers", "shared", "instructions")
        step = row["weight"] == "step"
        found = Kernel(row["kernel"], row["dtype"], step, *(int(row[name]) for name in numbers))
        if found.kernel != "backward_slopes" and found.tensor == (found.dtype == "float16"):
            yield found


def line_of(*cells):
    """Return a line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |\n"


def head_of(*names):
    """Return the head of a table."""
    return line_of(*names) + "|" + "---|" * len(names) + "\n"


def tables():
    """Return both tables."""
    named = ("kernel", "dtype", "weight", "D", "rows")
    held = head_of(*named, "registers", "shared KB", "blocks", "warps", "occupancy")
    done = head_of(
        *named, "Mflop", "products", "exp", "shared", "L2", "issue", "limit", "of peak",
        "HBM below, H100", "H200",
    )  # fmt: skip
    for x in kernels():
        name = (x.kernel, x.dtype, "step" if x.step else "decay", x.dim, x.rows)
        warps = x.blocks * x.threads // 32
        held += line_of(
            *name, x.registers, f"{x.shared / 1024:.0f}", x.blocks, warps, f"{warps / WARPS:.0%}"
        )
        if x.step and not x.tensor:  # as under a decay weight
            continue
        work = x.work()
        roof = max(clocks or 0 for clocks in work)
        moved = (4 if x.kernel.startswith("forward") else 6) * x.dim * SIZES[x.dtype]
        done += line_of(
            *name,
            f"{2e-6 * x.multiply_adds:.2f}",
            *("" if clocks is None else f"{clocks:.0f}" for clocks in work),
            work._fields[work.index(roof)],
            f"{x.multiply_adds / x.peak / roof:.0%}",
            *(f"{moved / rate / (roof / PAIRS):.0f}" for rate in (H100, H200)),
        )
    return f"{held}\n{done}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them into the page")
    made = tables()
    print(made, end="")
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}{made}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
