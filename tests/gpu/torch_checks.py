"""What only a GPU shows of the PyTorch backends: values, compilers, graphs, streams, devices.

Run by ``torch.sh``; its name keeps it out of a run of all tests, which have no GPU.
"""

from dataclasses import replace

import pytest
import torch
from laws import SLOPES, inputs
from test_torch_backend import LONG, TorchCall, check_torch
from test_torch_varlen import CROSSED as VARLEN
from test_torch_varlen import VarlenCall

import plsh
from plsh import testing

METHODS = ("exact", "window", "lsh")
WIDE = [
    TorchCall(method, (2, 1), (200, 200), dims, 1, causal, dtype=dtype, flatter=16.0)
    for method, causal in (("exact", True), ("lsh", False))
    for dims in ((16, 24), (128, 100), (256, 130))
    for dtype in ("float16", "bfloat16", "float32")
]
"""Every class of head dims on the tensor cores, of bfloat16, too, which no interpreter runs."""


def on_gpu(case):
    """Return a call whose tensors are on the device."""

    class GpuCall(type(case)):
        def arrays(self):
            return [x.cuda() for x in super().arrays()]

        def keywords(self):
            found = super().keywords()
            ids = found["segment_ids"]
            if ids is not None:
                moved = tuple(x.cuda() for x in (ids if isinstance(ids, tuple) else (ids,)))
                found["segment_ids"] = moved if len(moved) == 2 else moved[0]
            return found

    return GpuCall(**{name: getattr(case, name) for name in type(case).__dataclass_fields__})


@pytest.mark.parametrize("case", [*LONG, *WIDE], ids=str)
def test_call_equals_oracle(case):
    check_torch(on_gpu(case))


@pytest.mark.parametrize("case", VARLEN[::3], ids=str)
def test_reduction_equals_oracle(case):
    """In half precision, which is what torch's variable-length kernel takes."""
    assert isinstance(case, VarlenCall)
    half = case.dtype if case.dtype in ("float16", "bfloat16") else "bfloat16"
    check_torch(on_gpu(replace(case, dtype=half)))


def tokens(n=300, dtype=torch.float16, **shape):
    arrays = inputs(n, dtype="float32", **shape)
    return [torch.tensor(x, device="cuda", dtype=dtype, requires_grad=True) for x in arrays]


def everything(q, k, v, method="exact", call=plsh.attention, **keywords):
    """Return out, lse and the gradients by q, k and v."""
    output = call(q, k, v, method=method, slopes=SLOPES, return_lse=True, **keywords)
    loss = (output.out * output.out.detach().cos()).sum()
    return (*output, *torch.autograd.grad(loss, (q, k, v)))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_call_twice_is_bit_equal(method):
    given = tokens()
    for a, b in zip(everything(*given, method), everything(*given, method), strict=True):
        testing.assert_identical(a, b)


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_replays_the_call(method):
    """On new tokens in the same memory."""
    given = tokens()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        everything(*given, method)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = everything(*given, method)
    with torch.no_grad():
        for x in given:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(found, everything(*given, method), strict=True):
        testing.assert_identical(a, b)


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_stream_is_used(method):
    """Work that the caller has queued on it comes first."""
    given = tokens()
    want = everything(*given, method)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(50_000_000)
        late = [(x + 0).requires_grad_() for x in given]
    with torch.cuda.stream(stream):
        got = everything(*late, method)
    stream.synchronize()
    for a, b in zip(got, want, strict=True):
        testing.assert_identical(a, b)


def test_a_call_waits_for_nothing():
    """No copy back to the host, forward or backward, once tables are there."""
    given = tokens()
    for method in METHODS:
        everything(*given, method)
        torch.cuda.set_sync_debug_mode("error")
        try:
            everything(*given, method)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", METHODS)
def test_compiled_equals_eager(method):
    given = tokens()

    @torch.compile(fullgraph=True)
    def attend(q, k, v):
        return plsh.attention(q, k, v, method=method, slopes=SLOPES, causal=True)

    want = plsh.attention(*given, method=method, slopes=SLOPES, causal=True)
    testing.assert_identical(attend(*given), want)


def test_tf32_only_where_torch_allows_it():
    """Errors of a hundredth of a percent, or of float32."""
    q, k, v = tokens(dtype=torch.float32)
    want = plsh.attention(*(x.cpu() for x in (q, k, v)), method="exact", slopes=SLOPES)
    errors = []
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            got = plsh.attention(q, k, v, method="exact", slopes=SLOPES)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        errors.append(float((got.cpu() - want).abs().max()))
    assert errors[0] < 1e-5 < errors[1] < 1e-2


def test_a_row_beyond_two_to_the_31_elements():
    """U025: offsets of 64 bits, in 5 GiB of bfloat16."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    n = (1 << 31) // (8 * 128) + 4096
    q = torch.randn(1, 8, n, 128, device="cuda", dtype=torch.bfloat16)
    call = {"method": plsh.Window(64), "causal": True, "slopes": [0.5] * 8}
    got = plsh.attention(q, q, q, **call)[:, :, -100:]
    last = q[:, :, -200:]
    want = plsh.attention(last, last, last, **call)[:, :, -100:]
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
