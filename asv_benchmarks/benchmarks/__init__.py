"""Benchmarks of plsh for asv: what is measured lies in `plsh.bench`, here are the parameters."""

import os

# Before a library reads them: each takes a thread for every processor that the process may use, so
# that plsh and its peers have equally many. Restrict all alike by `asv run --cpu-affinity`.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.pop(_name, None)
