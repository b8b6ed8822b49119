"""A minimal backend of plsh: NumPy, one page. Its entry point is in pyproject.toml."""

import numpy as np

from plsh.backend import AttentionOutput, Availability, Capabilities
from plsh.testing import harness_for


class ExampleBackend:
    """Positional LSH, a few queries at a time against all keys; a real backend skips far keys."""

    name, spec_version = "example", "1.1"

    def availability(self):
        """Say whether it can be used here; the absence of a library would be a reason not to."""
        return Availability(True)

    def capabilities(self):
        """Declare what it can do; the core refuses the rest."""
        return Capabilities(arrays=("numpy",), dtypes=("float32", "float64"), methods=("lsh",))

    def can_run(self, request):
        """Return why it refuses a call that the declaration allows, or None."""
        offsets = request.arrays.q_offset, request.arrays.k_offset
        return None if all(isinstance(x, int) for x in offsets) else "its rows share one offset"

    def attend(self, q, k, v, request):
        """Compute attention of checked arrays (B, H, N, D): no n x n array is ever formed."""
        k, v = (np.repeat(x, q.shape[1] // max(x.shape[1], 1), axis=1) for x in (k, v))
        ids = request.arrays.segment_ids or tuple(np.zeros((len(x), x.shape[2])) for x in (q, k))
        pad_q, pad_k = ((x < 0)[:, None, :, None] for x in ids)
        q, k, v = np.where(pad_q, 0, q), np.where(pad_k, 0, k), np.where(pad_k, 0, v)
        tiles = [self.rows(q, k, v, ids, request, i) for i in range(0, max(q.shape[2], 1), 16)]
        return AttentionOutput(*(np.concatenate(x, axis=2) for x in zip(*tiles, strict=True)))

    def rows(self, q, k, v, ids, request, i):
        """Attend from 16 queries, i and on; return out (B, H, n, Dv) and lse (B, H, n)."""
        q, of_q, of_k = q[:, :, i : i + 16], ids[0][:, i : i + 16, None], ids[1][:, None, :]
        first, start = request.arrays.q_offset + i, request.arrays.k_offset
        label_q = request.labels(first, first + q.shape[2])  # (H or 1, s, n)
        label_k = request.labels(start, start + k.shape[2])  # (H or 1, s, Nk)
        weight = (label_q[..., :, None] == label_k[..., None, :]).mean(axis=1)[None]
        weight = weight * ((of_q == of_k) & (of_q >= 0))[:, None]  # (B, H, n, Nk)
        if request.static.causal:
            weight = np.tril(weight, first - start)  # a key's position is at most the query's
        with np.errstate(divide="ignore"):  # log 0 is -inf: no weight, or no key at all
            scores = request.static.scale * (q @ np.swapaxes(k, -1, -2)) + np.log(weight)
            top = scores.max(axis=-1, keepdims=True, initial=np.finfo(q.dtype).min)
            p = np.exp(scores - top)
            total = p.sum(axis=-1, keepdims=True)
            lse = (np.log(total) + top)[..., 0].astype(q.dtype)
        return (p @ v / np.where(total > 0, total, 1)).astype(q.dtype), lse

    def harness(self):
        """Return the handles for tests and benchmarks."""
        return harness_for("numpy")


BACKEND = ExampleBackend()
