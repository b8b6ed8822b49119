"""The call path under compilers and transforms: torch.compile, torch.func, fake tensors, jax.jit.

Nothing between `plsh.attention` and its backend may draw, lock, read a context variable, scan
entry points or read the values of a framework's array: each of those breaks ``fullgraph=True``.
"""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import opaque_backend
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import plsh
from plsh import registry

B, H, N, D, DV = 2, 4, 40, 8, 5
SLOPES = (0.5, 0.25, 0.1, 0.0)
IDS = torch.tensor([[0] * 20 + [1] * 15 + [-1] * 5, [0] * 40])


@pytest.fixture(autouse=True)
def _opaque(monkeypatch):
    """Register the opaque backend for one test, and forget what was compiled before."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    plsh.register_backend(opaque_backend.BACKEND)
    torch._dynamo.reset()


def tensors(batch=B, heads=H, n=N, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, n, dim, generator=make, dtype=torch.float32).to(dtype)
        for dim in (D, D, DV)
    ]


def compiled(f, backend="aot_eager"):
    return torch.compile(f, fullgraph=True, backend=backend)


def call(q, k, v, **keywords):
    return plsh.attention(q, k, v, backend="opaque", **keywords)


# --- a first-ever call, in a fresh process ---

FIRST_CALL = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", r".torch\\.jit\\.script(_method)?. is deprecated")
import torch, plsh, opaque_backend
plsh.register_backend(opaque_backend.BACKEND)
q, k, v = (torch.randn(2, 4, 40, d, generator=torch.Generator().manual_seed(d)) for d in (8, 8, 5))
def f(q, k, v):
    return plsh.attention(q, k, v, method={method!r}, causal=True, backend="opaque")
first = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
assert torch.equal(first, f(q, k, v)), "compiled differs from eager"
assert torch.allclose(
    first, plsh.attention(q, k, v, method={method!r}, causal=True, backend="reference")
), "opaque differs from reference"
print("compiled")
"""


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_first_ever_call_of_a_process_compiles_in_one_graph(method):
    """U070. No cache is warm and no lazy import has run yet."""
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL.format(method=method)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here)},
        timeout=300,
    )
    assert done.stdout == "compiled\n", done.stderr


# --- every option ---

OPTIONS = {
    "exact": {"method": "exact"},
    "window": {"method": "window"},
    "Exact()": {"method": plsh.Exact()},
    "Window(tol)": {"method": plsh.Window(tol=1e-3)},
    "Window(width)": {"method": plsh.Window(5)},
    "Window(width per head)": {"method": plsh.Window([1, 2, 3, 4])},
    "lsh by object": {"method": plsh.PositionalLSH(8, seed=3)},
    "iid, seed of layer and step": {"method": plsh.PositionalLSH(4, sampler="iid", seed=(1, 2, 3))},
    "family": {"method": plsh.PositionalLSH(4, family=plsh.RandomBinning((4.0, 5.0, 6.0, 7.0)))},
    "PartitionSet": {"method": plsh.RandomBinning(4.0).sample(4, N, seed=1)},
    "slopes tuple": {"slopes": SLOPES},
    "slopes list": {"slopes": list(SLOPES)},
    "slopes number": {"slopes": 0.25},
    "slopes per row, window": {"method": "window", "slopes": [list(SLOPES), [0.3] * H]},
    "slopes tensor, exact": {"method": "exact", "slopes": torch.tensor(SLOPES)},
    "slopes 0-d tensor, exact": {"method": "exact", "slopes": torch.tensor(0.5)},
    "slopes (B, H) tensor, exact": {"method": "exact", "slopes": torch.tensor([SLOPES] * B)},
    "slopes tensor, width": {"method": plsh.Window(7), "slopes": torch.tensor(SLOPES)},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "offsets": {"q_offset": 100, "k_offset": 90, "causal": True},
    "offsets per row": {"q_offset": (5, 7), "k_offset": (5, 3)},
    "offsets tensor": {"q_offset": torch.tensor([1, 2]), "k_offset": torch.tensor(3)},
    "offsets tensor, exact": {"method": "exact", "q_offset": torch.tensor([1, 2])},
    "segment_ids": {"segment_ids": IDS},
    "segment_ids pair, exact": {"method": "exact", "segment_ids": (IDS, IDS)},
    "return_lse": {"return_lse": True},
    "bshd": {"layout": "bshd", "return_lse": True},
    "everything": {
        "method": plsh.PositionalLSH(5, seed=(7, 1), head_ids=(4, 5, 6, 7)),
        "slopes": SLOPES,
        "causal": True,
        "scale": 0.5,
        "q_offset": (5, 7),
        "k_offset": (5, 3),
        "segment_ids": (IDS, IDS),
        "layout": "bshd",
        "return_lse": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_compiles_in_one_graph_and_equals_eager(name):
    """U070, U072: the blocks of the compiled call are those of the eager one, bit for bit."""
    keywords = OPTIONS[name]
    arrays = tensors()
    if keywords.get("layout") == "bshd":
        arrays = [x.transpose(1, 2) for x in arrays]
    f = functools.partial(call, **keywords)
    got, eager = compiled(f)(*arrays), f(*arrays)
    peer = plsh.attention(*arrays, backend="reference", **keywords)
    if not keywords.get("return_lse"):
        got, eager, peer = (got,), (eager,), (peer,)
    for compiled_, eager_, peer_ in zip(got, eager, peer, strict=True):
        torch.testing.assert_close(compiled_, eager_, rtol=0, atol=0)
        torch.testing.assert_close(compiled_, peer_)


def test_methods_may_be_built_inside_the_compiled_function():
    def f(q, k, v):
        method = plsh.PositionalLSH(4, seed=(3, 1), head_ids=(0, 1, 2, 3))
        lsh = call(q, k, v, method=method, slopes=tuple(2.0**-h for h in range(H)))
        return lsh + call(q, k, v, method=plsh.Window(tol=1e-2))

    arrays = tensors()
    torch.testing.assert_close(compiled(f)(*arrays), f(*arrays), rtol=0, atol=0)


def test_call_without_batch_axis_compiles():
    arrays = [x[0] for x in tensors()]
    torch.testing.assert_close(compiled(call)(*arrays), call(*arrays), rtol=0, atol=0)


def test_lengths_as_tensors_compile():
    """U070. Segment ids are made from lengths inside the graph."""

    def f(q, k, v, lengths):
        return call(q, k, v, segment_ids=plsh.segments_from_lengths(lengths, N))

    for lengths in (torch.tensor([3, 7]), torch.tensor([[30, 10], [4, 0]])):
        arrays = [*tensors(), lengths]
        torch.testing.assert_close(compiled(f)(*arrays), f(*arrays), rtol=0, atol=0)


# --- recompilation ---


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_changing_length_and_batch_compile_at_most_twice(method):
    """U069: shapes stay symbolic through every check."""
    frames = CompileCounter()
    f = compiled(functools.partial(call, method=method, causal=True), frames)
    for n in range(200, 1000, 185):
        arrays = tensors(batch=2 + n % 4, n=n)
        for x in arrays:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(f(*arrays), call(*arrays, method=method, causal=True))
    assert frames.frame_count <= 2


def test_unmarked_lengths_recompile_once():
    """The first other length makes it symbolic; no later length compiles again."""
    frames = CompileCounter()
    f = compiled(call, frames)
    for n in (40, 51, 64, 99):
        f(*tensors(n=n))
    assert frames.frame_count == 2


@pytest.mark.parametrize("method", ["exact", plsh.Window(tol=0.01), plsh.PositionalLSH(3, seed=1)])
def test_dynamic_numbers_pass_the_checks(method):
    """``dynamic=True`` makes floats symbolic, which have no attributes, and a module's too."""
    frames = CompileCounter()

    def f(q, k, v, slope, tol):
        given = plsh.Window(tol=tol) if isinstance(method, plsh.Window) else method
        return call(q, k, v, method=given, slopes=slope, scale=slope, q_offset=1, causal=True)

    run = torch.compile(f, fullgraph=True, dynamic=True, backend=frames)
    for n in (33, 64, 99):
        torch.testing.assert_close(run(*tensors(n=n), 0.25, 0.01), f(*tensors(n=n), 0.25, 0.01))
    assert frames.frame_count <= 2


@pytest.mark.parametrize(
    "keywords",
    [
        {"slopes": list(SLOPES)},
        {"method": plsh.PositionalLSH(4, family=plsh.RandomBinning((3.0, 4.0, 5.0, 9.0)))},
        {"method": plsh.RandomBinning((3.0, 4.0, 5.0, 9.0)).sample(5, 100)},
        {"method": plsh.Window([3, 4, 5, 9])},
        {"method": plsh.PositionalLSH(4, head_ids=(7, 5, 3, 1))},
    ],
    ids=str,
)
def test_numbers_for_each_head_pass_where_every_size_is_a_symbol(keywords):
    run = torch.compile(
        functools.partial(call, **keywords), fullgraph=True, dynamic=True, backend="eager"
    )
    for n in (33, 64):
        torch.testing.assert_close(run(*tensors(n=n)), call(*tensors(n=n), **keywords))


def test_decoding_step_recompiles_once():
    """A growing q_offset is an operand: it becomes symbolic, as lengths do."""
    frames = CompileCounter()
    f = compiled(lambda q, k, v, at: call(q, k, v, q_offset=at, causal=True), frames)
    for n in (40, 41, 42, 43):
        q, k, v = tensors(n=n)
        whole = call(q, k, v, causal=True)
        torch.testing.assert_close(f(q[:, :, -1:], k, v, n - 1), whole[:, :, -1:])
    assert frames.frame_count <= 2


def test_seed_that_changes_each_step_recompiles_once_and_changes_the_blocks():
    """U072."""
    frames = CompileCounter()

    def f(q, k, v, step):
        return call(q, k, v, method=plsh.PositionalLSH(8, seed=(5, step)))

    run = compiled(f, frames)
    arrays = tensors()
    outputs = [run(*arrays, step) for step in (2, 3, 5, 7)]
    for step, out in zip((2, 3, 5, 7), outputs, strict=True):
        torch.testing.assert_close(out, f(*arrays, step), rtol=0, atol=0)
    assert not torch.equal(outputs[0], outputs[1])
    assert frames.frame_count <= 2


# --- what is refused under a trace, and how ---


def test_compile_check_can_fail():
    """A backend that draws on the call path (the reference, under lsh) does break the graph."""
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda q, k, v: plsh.attention(q, k, v, backend="reference"))(*tensors())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"slopes": torch.tensor(SLOPES)}, "slopes must be concrete under lsh"),
        (
            {"slopes": torch.tensor(SLOPES), "method": "window"},
            r"pass Window\(width\), which needs no slopes",
        ),
        ({"slopes": np.array(SLOPES)}, "slopes must be concrete, and torch.compile traces a NumPy"),
        ({"scale": np.float32(0.5)}, "scale must be concrete, and torch.compile traces a NumPy"),
        ({"k_offset": np.int64(3)}, "k_offset must be concrete, and torch.compile traces a NumPy"),
        ({"slopes": (-1.0, 1.0, 1.0, 1.0)}, r"slopes must be finite and >= 0, got -1\.0"),
    ],
)
def test_refusal_keeps_its_message_under_torch_compile(keywords, message):
    """U077. A value that can't be read is refused by name; one that can is checked."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(functools.partial(call, **keywords))(*tensors())


def test_shapes_are_checked_and_values_not_touched_under_make_fx():
    """U077: with fake values behind the tracer."""

    def f(q, k, v, slopes):
        return call(q, k, v, method="exact", slopes=slopes)

    arrays = [*tensors(), torch.tensor(SLOPES)]
    graph = make_fx(f, tracing_mode="fake")(*arrays)
    torch.testing.assert_close(graph(*arrays), f(*arrays))
    with pytest.raises(ValueError, match=r"slopes must have shape \(H,\) = \(4,\)"):
        make_fx(f, tracing_mode="fake")(*tensors(), torch.ones(3))
    with pytest.raises(TypeError, match="slopes must be concrete under lsh, got a traced array"):
        make_fx(lambda q, k, v, m: call(q, k, v, slopes=m), tracing_mode="fake")(*arrays)


# --- detection on tracers and fakes (U120) ---


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_fake_and_meta_tensors_give_shape_and_dtype(method):
    """U120, U071. No data exists that could be touched."""
    with FakeTensorMode():
        q, k, v = (torch.empty(B, H, N, d, dtype=torch.bfloat16) for d in (D, D, DV))
        out, lse = call(q, k, v, method=method, return_lse=True)
    assert (out.shape, out.dtype) == ((B, H, N, DV), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((B, H, N), torch.float32)
    meta = call(*(x.to("meta") for x in tensors()), method=method)
    assert (meta.shape, meta.device.type) == ((B, H, N, DV), "meta")


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_torch_func_transforms_run_through_the_reference(method):
    """U120."""
    q, k, v = tensors()

    def f(q):
        return plsh.attention(q, k, v, method=method, backend="reference")

    q_leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(q_leaf).sum(), q_leaf)
    torch.testing.assert_close(torch.func.grad(lambda q: f(q).sum())(q), expected)
    tangent = torch.ones_like(q)
    _, slope = torch.func.jvp(f, (q,), (tangent,))
    _, back = torch.func.vjp(f, q)
    torch.testing.assert_close(slope.sum(), (back(torch.ones(B, H, N, DV))[0] * tangent).sum())


def test_torch_func_grad_with_respect_to_slopes():
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05])

    def f(m):
        return plsh.attention(q, k, v, method="exact", slopes=m, backend="reference").sum()

    leaf = slopes.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(f)(slopes), expected)
    with pytest.raises(ValueError, match="slopes require grad, and no gradient flows through"):
        torch.func.grad(lambda m: plsh.attention(q, k, v, slopes=m, backend="reference").sum())(
            slopes
        )


# --- jax.jit: the peer is NumPy, as eager JAX compiles every shape of block for itself ---

SMALL = 16
LSH = plsh.PositionalLSH(2, seed=1)


def jax_arrays(dtype="float32"):
    return [jnp.asarray(x.numpy()).astype(dtype) for x in tensors(heads=2, n=SMALL)]


def reference(q, k, v, **keywords):
    return plsh.attention(q, k, v, backend="reference", **keywords)


def on_numpy(arrays, **keywords):
    return reference(*(np.asarray(x) for x in arrays), **keywords)


def close(x, y):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", ["exact", plsh.Window(6)], ids=["exact", "width"])
@pytest.mark.parametrize("slopes", [[0.5, 0.0], [[0.5, 0.0], [0.1, 2.0]]], ids=["(H,)", "(B, H)"])
def test_slopes_may_be_traced_under_jit(method, slopes):
    """U077."""
    arrays = jax_arrays()
    f = jax.jit(lambda q, k, v, m: reference(q, k, v, method=method, slopes=m))
    close(f(*arrays, jnp.asarray(slopes)), on_numpy(arrays, method=method, slopes=slopes))


@pytest.mark.parametrize("shape", [(), (B,)])
def test_offsets_may_be_traced_under_jit_when_exact(shape):
    arrays, keywords = jax_arrays(), {"method": "exact", "causal": True, "k_offset": 3}
    f = jax.jit(lambda q, k, v, at: reference(q, k, v, q_offset=at, **keywords))
    close(f(*arrays, jnp.full(shape, 7)), on_numpy(arrays, q_offset=7, **keywords))


@pytest.mark.parametrize("method", ["exact", "window", LSH], ids=["exact", "window", "lsh"])
def test_segment_ids_may_be_traced_under_jit(method):
    arrays, ids = jax_arrays(), np.array([[0] * 6 + [1] * 8 + [-1] * 2, [0] * 16])
    f = jax.jit(lambda q, k, v, ids: reference(q, k, v, method=method, segment_ids=ids))
    close(f(*arrays, jnp.asarray(ids)), on_numpy(arrays, method=method, segment_ids=ids))


def test_traced_slopes_where_blocks_need_them_are_refused_with_the_alternative():
    arrays, slopes = jax_arrays(), jnp.asarray([0.5, 0.1])
    with pytest.raises(TypeError, match=r"slopes must be concrete under lsh.*a PartitionSet"):
        jax.jit(lambda m: reference(*arrays, slopes=m))(slopes)
    with pytest.raises(TypeError, match=r"slopes must be concrete under Window\(tol.*\(width\)"):
        jax.jit(lambda m: reference(*arrays, slopes=m, method="window"))(slopes)


def test_concrete_jax_slopes_are_read_under_lsh():
    """A device array is read once, also where q, k, v are traced."""
    arrays = jax_arrays()
    slopes = jnp.asarray([0.5, 0.1])
    f = jax.jit(lambda q, k, v: reference(q, k, v, method=LSH, slopes=slopes))
    close(f(*arrays), on_numpy(arrays, method=LSH, slopes=np.float32([0.5, 0.1])))


def test_traced_offsets_under_lsh_are_refused_by_the_reference():
    arrays = jax_arrays()
    message = r"'reference' can't run this.*q_offset is traced"
    with pytest.raises(plsh.UnsupportedByBackendError, match=message):
        jax.jit(lambda at: reference(*arrays, q_offset=at))(jnp.asarray(3))


def test_jax_transforms_run_through_the_reference():
    """U120: jit of grad, vmap over a batch of calls, shard_map."""
    arrays = jax_arrays()

    def loss(q):
        return reference(q, *arrays[1:], method=LSH, causal=True).sum()

    def loss_on_numpy(step):
        q, k, v = (np.asarray(x, dtype="float64") for x in arrays)
        q[0, 0, 5, 0] += step
        return on_numpy([q, k, v], method=LSH, causal=True).sum()

    slope = (loss_on_numpy(1e-5) - loss_on_numpy(-1e-5)) / 2e-5
    close(jax.jit(jax.grad(loss))(arrays[0])[0, 0, 5, 0], slope)

    exact = functools.partial(reference, method="exact")
    stacked = jax.jit(jax.vmap(exact))(*(jnp.stack([x, 2 * x]) for x in arrays))
    close(stacked[1], on_numpy([2 * x for x in arrays], method="exact"))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.jit(jax.shard_map(exact, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    close(sharded(*arrays), on_numpy(arrays, method="exact"))


# --- result types (U078) ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scale_of_any_number_type_keeps_the_dtype_of_q_in_and_out_of_jit(dtype):
    """U078."""
    arrays = jax_arrays(dtype)
    expected = reference(*arrays, method="exact", scale=2.0)
    for scale in (2, np.float32(2), np.float64(2), np.int64(2), np.array(2.0), np.array(2)):
        eager = reference(*arrays, method="exact", scale=scale)
        assert eager.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(eager, expected)
    traced = jax.jit(functools.partial(reference, method="exact", scale=np.float64(2)))(*arrays)
    assert traced.dtype == jnp.dtype(dtype)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        traced.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=tolerance
    )


def test_equal_method_objects_share_one_trace():
    """Methods are static arguments that hash and compare by value."""
    traces = []

    @functools.partial(jax.jit, static_argnames="method")
    def f(q, k, v, method):
        traces.append(method)
        return reference(q, k, v, method=method)

    for _ in range(2):
        f(*jax_arrays(), method=plsh.PositionalLSH(2, seed=(1, 2)))
        f(*jax_arrays(), method=plsh.Window([3, 4]))
    assert len(traces) == 2
