"""A minimal backend of plsh: NumPy, dense, one page. Its entry point is in pyproject.toml."""

import numpy as np

from plsh.backend import AttentionOutput, Availability, Capabilities, Harness


class ExampleBackend:
    """Positional LSH from the n x n weights, which a real backend must not form."""

    name = "example"
    spec_version = "1.0"

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
        """Compute attention of checked arrays (B, H, N, D)."""
        static, arrays = request.static, request.arrays
        first_q, first_k = arrays.q_offset, arrays.k_offset
        k, v = (np.repeat(x, static.heads // static.kv_heads, axis=1) for x in (k, v))
        label_q = request.labels(first_q, first_q + q.shape[2])  # (H or 1, s, Nq)
        label_k = request.labels(first_k, first_k + k.shape[2])  # (H or 1, s, Nk)
        weight = (label_q[..., :, None] == label_k[..., None, :]).mean(axis=1)[None]  # (1, H, …)
        if static.causal:
            ahead = np.arange(q.shape[2])[:, None] + first_q - first_k
            weight = weight * (np.arange(k.shape[2])[None, :] <= ahead)
        if arrays.segment_ids is not None:
            of_q, of_k = arrays.segment_ids[0][:, :, None], arrays.segment_ids[1][:, None, :]
            weight = weight * ((of_q == of_k) & (of_q >= 0))[:, None]
        with np.errstate(divide="ignore"):  # log 0 is -inf: no weight, or no key at all
            scores = static.scale * (q @ np.swapaxes(k, -1, -2)) + np.log(weight)
            top = scores.max(axis=-1, keepdims=True, initial=np.finfo(q.dtype).min)
            p = np.exp(scores - top)
            total = p.sum(axis=-1, keepdims=True)
            lse = (np.log(total) + top)[..., 0]
        out = p @ v / np.where(total > 0, total, 1)
        return AttentionOutput(out.astype(q.dtype), lse.astype(q.dtype))

    def harness(self):
        """Return the handles for tests and benchmarks."""
        return Harness(lambda x, dtype, device=None: np.asarray(x, dtype), np.array, lambda x: None)


BACKEND = ExampleBackend()
