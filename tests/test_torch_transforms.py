"""The torch backend under torch's transforms: compile, export, vmap, autocast, checkpointing."""

import functools
import subprocess
import sys

import pytest
import torch
from plsh_torch import _ops, _recipe
from test_torch_backend import ENVIRONMENT
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import plsh
from plsh import UnsupportedByBackendError

B, H, N, D, DV = 2, 4, 40, 8, 5
SLOPES = (0.5, 0.25, 0.1, 0.0)
IDS = torch.tensor([[0] * 20 + [1] * 15 + [-1] * 5, [0] * 40])
METHODS = ("exact", "window", "lsh")


@pytest.fixture(autouse=True)
def _compiled_afresh():
    torch._dynamo.reset()


def tensors(batch=B, heads=H, n=N, dtype=torch.float32, seed=0, grad=False):
    make = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, n, dim, generator=make).to(dtype).requires_grad_(grad)
        for dim in (D, D, DV)
    ]


def call(q, k, v, **keywords):
    return plsh.attention(q, k, v, backend="torch", **keywords)


def compiled(f, backend="aot_eager", **options):
    return torch.compile(f, fullgraph=True, backend=backend, **options)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def gradients(f, arrays, *more):
    """Return the output of f and its gradients by `arrays`, for a loss of every element."""
    out = f(*arrays, *more)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return (out, *torch.autograd.grad((out * weight).sum(), arrays))


# --- the operators ---

OPTIONS = {
    "exact": {"method": "exact", "causal": True},
    "window, slopes per row": {"method": "window", "slopes": [list(SLOPES), [0.3] * H]},
    "slopes tensor": {"method": plsh.Window(7), "slopes": torch.tensor(SLOPES, requires_grad=True)},
    "slopes (B, H) tensor": {
        "method": "exact",
        "slopes": torch.tensor([SLOPES] * B, requires_grad=True),
    },
    "lsh": {"method": plsh.PositionalLSH(5, seed=(2**64 - 1, 3)), "causal": True},
    "iid": {"method": plsh.PositionalLSH(4, sampler="iid", head_ids=(4, 5, 6, 2**64 - 1))},
    "power law": {
        "method": plsh.PositionalLSH(4, family=plsh.PowerLawBinning((1.0, 2.0, 3.0, 4.0), 0.5))
    },
    "cuts": {
        "method": plsh.PositionalLSH(4, family=plsh.IndependentCuts(9.0), sampler=None)
    },
    "PartitionSet": {"method": plsh.RandomBinning(4.0).sample(4, N, seed=1)},
    "offsets tensors": {"q_offset": torch.tensor([1, 2]), "k_offset": torch.tensor(3)},
    "everything": {
        "method": plsh.PositionalLSH(5, seed=(7, 1), head_ids=(4, 5, 6, 7)),
        "slopes": SLOPES,
        "causal": True,
        "scale": 0.5,
        "q_offset": (5, 7),
        "k_offset": (5, 3),
        "segment_ids": (IDS, IDS),
    },
}  # fmt: skip


def operands(monkeypatch, arrays, keywords):
    """Return the arguments that a call hands to the operator."""
    caught = []
    encode = _recipe.encode

    def spy(*args):
        caught.append(encode(*args))
        return caught[-1]

    with monkeypatch.context() as patch:
        patch.setattr("plsh_torch._attend.encode", spy)
        call(*arrays, **keywords)
    given, recipe = caught[0]
    return [*arrays, *given, *recipe]


@pytest.mark.parametrize("name", OPTIONS)
def test_operators_pass_opcheck(name, monkeypatch):
    """U071: schema, fakes with shapes and strides, autograd and tracing, of both operators."""
    arrays = tensors(grad=True)
    args = operands(monkeypatch, arrays, OPTIONS[name])
    torch.library.opcheck(_ops.attend, args)
    torch.library.opcheck(_ops.attend, operands(monkeypatch, tensors(grad=False), OPTIONS[name]))
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    out, lse = _ops.attend(*plain)
    by_slope = plain[3] is not None
    for wanted in ([True, True, True, by_slope], [False, True, False, False]):
        torch.library.opcheck(
            _ops.attend_backward,
            [*plain[:3], out, lse, torch.ones_like(out), torch.ones_like(lse), wanted, *plain[3:]],
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fakes_have_the_form_of_results(dtype, monkeypatch):
    """U071, U120: non-contiguous inputs, Nq != Nk, D != Dv, on fake and meta tensors."""
    q, k, v = tensors(dtype=dtype)
    arrays = [q.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :7], k, v]
    f = functools.partial(call, q_offset=33, return_lse=True)
    real = f(*arrays)
    meta = f(*(x.to("meta") for x in arrays))
    with FakeTensorMode() as mode:
        fake = f(*(mode.from_tensor(x) for x in arrays))
    for x in (meta, fake):
        for a, b in zip(x, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# --- torch.compile ---

FIRST_CALL = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", r".torch\\.jit\\.script(_method)?. is deprecated")
import {modules}
make = torch.Generator().manual_seed(0)
arrays = [torch.randn(2, 4, 40, d, generator=make, requires_grad={grad}) for d in (8, 8, 5)]
def f(q, k, v):
    return plsh.attention(q, k, v, method={method!r}, causal=True, backend="torch")
first = torch.compile(f, fullgraph=True, backend="aot_eager")(*arrays)
assert torch.equal(first, f(*arrays)), "compiled differs from eager"
if {grad}:
    a, b = (torch.autograd.grad(x.square().sum(), arrays) for x in (first, f(*arrays)))
    assert all(torch.equal(x, y) for x, y in zip(a, b))
print("compiled")
"""


@pytest.mark.parametrize(
    ("modules", "method", "grad"),
    [("torch, plsh", "window", False), ("plsh_torch, plsh, torch", "lsh", True)],
)
def test_first_ever_call_of_a_process_compiles_in_one_graph(modules, method, grad):
    """U070. No cache is warm, no operator registered, and no lazy import has run yet."""
    program = FIRST_CALL.format(modules=modules, method=method, grad=grad)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize("name", OPTIONS)
def test_option_compiles_in_one_graph_and_trains_as_eager(name):
    """U054, U070, U072: output and gradients are those of the eager call, bit for bit."""
    f = functools.partial(call, **OPTIONS[name])
    arrays = tensors(grad=True)
    for got, want in zip(gradients(compiled(f), arrays), gradients(f, arrays), strict=True):
        same(got, want)


@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_inductor_compiles_a_block_with_projections(train):
    """U070: linear, attention, linear."""
    torch.manual_seed(0)
    project = [torch.nn.Linear(32, 32) for _ in range(2)]

    def block(x):
        heads = project[0](x).unflatten(-1, (4, 8)).transpose(1, 2)
        out = call(heads, heads, heads, causal=True, method=plsh.PositionalLSH(8, seed=(1, 2)))
        return project[1](out.transpose(1, 2).flatten(2))

    x = torch.randn(2, 50, 32)
    fast = compiled(block, "inductor")
    if not train:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), block(x))
        return
    wanted = [p for layer in project for p in layer.parameters()]
    for got, want in zip(
        torch.autograd.grad(fast(x).square().sum(), wanted),
        torch.autograd.grad(block(x).square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("method", METHODS)
def test_changing_length_and_batch_compile_at_most_twice(method, grad):
    """U069."""
    frames = CompileCounterWithBackend("aot_eager") if grad else CompileCounter()
    eager = functools.partial(call, method=method, causal=True)
    f = compiled(eager, frames)
    for n in range(200, 1000, 185):
        arrays = tensors(batch=2 + n % 4, n=n, grad=grad)
        for x in arrays:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        if grad:
            for a, b in zip(gradients(f, arrays), gradients(eager, arrays), strict=True):
                same(a, b)
        else:
            same(f(*arrays), eager(*arrays))
    assert frames.frame_count <= 2


def test_unmarked_lengths_and_decoding_steps_recompile_once():
    frames = CompileCounter()
    f = compiled(lambda q, k, v, at: call(q, k, v, q_offset=at, causal=True), frames)
    for n in (40, 41, 42, 43):
        q, k, v = tensors(n=n)
        whole = call(q, k, v, causal=True)
        torch.testing.assert_close(f(q[:, :, -1:], k, v, n - 1), whole[:, :, -1:])
    assert frames.frame_count <= 2


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("as_tuple", [False, True], ids=["int", "tuple"])
def test_a_seed_that_changes_each_step_compiles_at_most_twice(as_tuple, grad):
    """U072: and draws the blocks of the eager call."""
    frames = CompileCounterWithBackend("aot_eager") if grad else CompileCounter()

    def f(q, k, v, step):
        seed = (5, 2, step) if as_tuple else step
        return call(q, k, v, method=plsh.PositionalLSH(8, seed=seed))

    run = compiled(f, frames)
    arrays = tensors(grad=grad)
    outputs = []
    for step in (2, 3, 5, 7, 2**40):
        if grad:
            found = gradients(run, arrays, step)
            for a, b in zip(found, gradients(f, arrays, step), strict=True):
                same(a, b)
            outputs.append(found[0])
        else:
            outputs.append(run(*arrays, step))
            same(outputs[-1], f(*arrays, step))
    assert not torch.equal(outputs[0], outputs[1])
    assert frames.frame_count <= 2


def test_seeds_up_to_the_largest_word_are_told_apart():
    arrays = tensors()
    seeds = (0, 1, 2**63 - 1, 2**63, 2**64 - 1, (2**64 - 1, 2**63), (1, 0))
    outputs = []
    for seed in seeds:
        method = plsh.PositionalLSH(4, seed=seed)
        outputs.append(call(*arrays, method=method))
        torch.testing.assert_close(
            outputs[-1], plsh.attention(*arrays, method=method, backend="reference")
        )
    for i, a in enumerate(outputs):
        assert not any(torch.equal(a, b) for b in outputs[:i])


def test_slopes_offsets_and_segments_may_be_made_in_the_graph():
    """U053, U070: learned slopes through softplus, lengths as tensors."""

    def f(q, k, v, raw, lengths):
        ids = plsh.segments_from_lengths(lengths, N)
        return call(
            q, k, v, method="exact", slopes=torch.nn.functional.softplus(raw), segment_ids=ids,
            q_offset=lengths, k_offset=lengths,
        )  # fmt: skip

    arrays, raw = tensors(grad=True), torch.zeros(H, requires_grad=True)
    lengths = torch.tensor([3, 40])
    run = compiled(f)
    for g in (f, run):
        (by_raw,) = torch.autograd.grad(g(*arrays, raw, lengths).square().sum(), raw)
        assert by_raw.abs().min() > 0
    same(run(*arrays, raw, lengths), f(*arrays, raw, lengths))


def test_learned_slopes_descend():
    """U053: five steps reduce a loss whose optimum is known."""
    q, k, v = tensors()
    want = call(q, k, v, method="exact", slopes=0.2)
    raw = torch.nn.Parameter(torch.full((H,), 0.6))
    optimiser = torch.optim.Adam([raw], lr=0.05)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = (call(q, k, v, method="exact", slopes=raw) - want).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
    assert losses == sorted(losses, reverse=True)
    assert (raw < 0.6).all()


# --- torch.export ---


@pytest.mark.parametrize("method", METHODS)
def test_export_with_a_dynamic_length(method):
    """U073: traced at 17; no branch on the length is baked in."""

    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v, method=method, causal=True)

    n = torch.export.Dim("n", min=2, max=4096)
    dynamic = ({2: n},) * 3
    program = torch.export.export(Block(), tuple(tensors(n=17)), dynamic_shapes=dynamic)
    for length in (2, 16, 64, 1000):
        arrays = tensors(n=length)
        same(program.module()(*arrays), call(*arrays, method=method, causal=True))


# --- torch.vmap ---


def stacked(f, *arrays):
    """Call f for each slice of the first axes."""
    return torch.stack([f(*x) for x in zip(*arrays, strict=True)])


@pytest.mark.parametrize(
    "method", [*METHODS, plsh.RandomBinning(4.0).sample(4, N, seed=1)], ids=str
)
@pytest.mark.parametrize("batched", [True, False])
def test_vmap_equals_a_loop(method, batched):
    """U075, U076: q alone, all of q, k, v, and vmap of vmap."""
    q, k, v = (torch.stack([x, 2 * x, x.flip(0)]) for x in tensors())
    if not batched:
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    f = functools.partial(call, method=method, causal=True)
    torch.testing.assert_close(torch.vmap(f)(q, k, v), stacked(f, q, k, v))
    alone = torch.vmap(f, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(alone, stacked(lambda x: f(x, k[0], v[0]), q))
    moved = torch.vmap(f, in_dims=(1, 0, 0), out_dims=1)(q.movedim(0, 1), k, v)
    torch.testing.assert_close(moved, stacked(f, q, k, v).movedim(0, 1))
    twice = torch.vmap(torch.vmap(f))(*(torch.stack([x, x + 1]) for x in (q, k, v)))
    torch.testing.assert_close(twice[1], stacked(f, *(x + 1 for x in (q, k, v))))


def test_vmap_over_operands_equals_a_loop():
    """U076: slopes, offsets, segment ids and partitions, with rows of their own and without."""
    q, k, v = tensors()
    cases = [
        ({"method": "exact"}, "slopes", torch.rand(3, H)),
        ({"method": plsh.Window(9)}, "slopes", torch.rand(3, B, H)),
        ({"method": "exact", "causal": True, "k_offset": 3}, "q_offset", torch.tensor([1, 5, 3])),
        ({"k_offset": (0, 2)}, "q_offset", torch.tensor([[1, 5], [3, 0], [9, 9]])),
        ({"slopes": [list(SLOPES), [0.3] * H], "method": "window"}, "segment_ids",
         torch.stack([IDS, IDS.flip(1), IDS * 0])),
    ]  # fmt: skip
    for keywords, name, values in cases:

        def f(x, keywords=keywords, name=name):
            return call(q, k, v, **keywords, **{name: x})

        torch.testing.assert_close(torch.vmap(f)(values), stacked(f, values))


def test_vmap_over_partitions_equals_a_loop():
    q, k, v = tensors()
    tables = [plsh.RandomBinning(4.0).sample(4, N, seed=s).labels() for s in range(3)]

    def f(labels):
        return call(q, k, v, method=plsh.PartitionSet.unchecked(labels, 0, N, 4, (N,)))

    values = torch.stack([torch.tensor(x) for x in tables])
    torch.testing.assert_close(torch.vmap(f)(values), stacked(f, values))


@pytest.mark.parametrize("shape", [(H,), (B, H)])
def test_vmap_of_grad_and_grad_of_vmap_equal_a_loop(shape):
    """U076: per-sample gradients, slopes shared and not."""
    arrays = [torch.stack([x, 2 * x]) for x in tensors()]
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(1))

    def loss(q, k, v, m):
        return call(q, k, v, method="exact", slopes=m, causal=True).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    looped = [grad(*(x[i] for x in arrays), slopes) for i in range(2)]
    mapped = torch.vmap(grad, in_dims=(0, 0, 0, None))(*arrays, slopes)
    for got, want in zip(mapped, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
    summed = torch.func.grad(
        lambda *x: torch.vmap(loss, in_dims=(0, 0, 0, None))(*x).sum(), argnums=(0, 1, 2, 3)
    )(*arrays, slopes)
    for got, want in zip(summed[:3], mapped, strict=False):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(summed[3], mapped[3].sum(dim=0))


def test_vmap_compiles():
    arrays = [torch.stack([x, 2 * x]) for x in tensors()]
    f = torch.vmap(functools.partial(call, causal=True))
    same(compiled(f)(*arrays), f(*arrays))


def test_torch_func_transforms_of_the_first_order_run():
    """U061: vjp and jacrev; functorch refuses what `register_autograd` makes."""
    q, k, v = (x.double() for x in tensors(batch=1, n=6))
    f = functools.partial(call, method="exact")
    g = functools.partial(plsh.attention, method="exact", backend="reference")
    jacobian = functools.partial(torch.func.jacrev, argnums=(0, 1, 2))
    for got, want in zip(jacobian(f)(q, k, v), jacobian(g)(q, k, v), strict=True):
        torch.testing.assert_close(got, want)


# --- what is refused ---


def test_double_backward_is_refused_and_names_who_can():
    """U060: through autograd and torch.func; never wrong numbers."""
    arrays = tensors(grad=True)
    first = torch.autograd.grad(call(*arrays).square().sum(), arrays, create_graph=True)
    with pytest.raises(UnsupportedByBackendError, match=r"no second derivative.*'reference'"):
        torch.autograd.grad(first[0].sum(), arrays)

    def loss(q):
        return call(q, *(x.detach() for x in arrays[1:])).square().sum()

    with pytest.raises(UnsupportedByBackendError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(arrays[0].detach())


def test_forward_mode_is_refused_and_names_who_can():
    """U061."""
    q, k, v = tensors()
    with pytest.raises(UnsupportedByBackendError, match=r"no forward-mode derivative.*'reference'"):
        torch.func.jvp(lambda q: call(q, k, v), (q,), (q,))
    out, pull = torch.func.vjp(lambda q: call(q, k, v), q)
    with pytest.raises(UnsupportedByBackendError, match="jvp"):  # of the gradient, by its cotangent
        torch.func.jvp(pull, (out,), (out,))
    with pytest.raises(UnsupportedByBackendError, match="no forward-mode"):  # over reverse mode
        torch.func.hessian(lambda q: call(q, k, v).sum())(q)
    slopes = torch.tensor(SLOPES)
    with pytest.raises(UnsupportedByBackendError, match="no forward-mode"):
        torch.func.jvp(lambda m: call(q, k, v, method="exact", slopes=m), (slopes,), (slopes,))


def test_families_of_the_users_own_are_refused_and_named():
    """An operator takes the parameters of a family, not its code."""

    class Mine(plsh.RandomBinning):
        pass

    method = plsh.PositionalLSH(4, family=Mine(4.0))
    with pytest.raises(UnsupportedByBackendError, match=r"takes the families .*, got Mine; pass"):
        call(*tensors(), method=method)


def test_tensors_elsewhere_are_refused():
    """U085: no implicit copies; a fake device is enough to ask."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(B, H, N, D, device="xpu")
        with pytest.raises(
            UnsupportedByBackendError, match=r"runs on CPU and CUDA tensors, got xpu.*\.cpu"
        ):
            call(q, q, q)


def test_cuda_tensors_pass_through_the_operators_fakes():
    """Shapes, dtypes and devices of the results, as compilers ask for them; no GPU is needed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(B, H, N, D, device="cuda", dtype=torch.bfloat16)
        out, lse = plsh.attention(q, q, q, method="exact", return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == (q.shape[:3], torch.float32, "cuda")


# --- settings of torch ---


@pytest.mark.parametrize("method", METHODS)
def test_autocast_leaves_the_dtype_of_the_inputs(method):
    """U064: float32 leaves under bfloat16 autocast; products inside stay in float32."""
    arrays = tensors(n=300, grad=True)
    f = functools.partial(call, method=method, causal=True)
    want = gradients(f, arrays)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(f, arrays)
    for a, b in zip(got, want, strict=True):
        same(a, b)
    layer = torch.nn.Linear(D, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = layer(tensors()[0])
        out = call(x, x, x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_gives_the_same_bits(method, reentrant):
    """U091: recomputation sees the same blocks."""
    arrays = tensors(n=300, grad=True)
    f = functools.partial(call, method=method, causal=True)
    out, *grads = gradients(f, arrays)
    got = checkpoint(f, *arrays, use_reentrant=reentrant)
    same(got, out)
    (got * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    for x, grad in zip(arrays, grads, strict=True):
        same(x.grad, grad)


@pytest.mark.parametrize("n", [N, 300])
def test_default_device_and_dtype_do_no_harm(n):
    """U090."""
    arrays = tensors(n=n, grad=True)
    f = functools.partial(call, segment_ids=torch.zeros(B, n, dtype=torch.int32))
    for method in METHODS:
        want = gradients(functools.partial(f, method=method), arrays)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        try:
            out = f(*arrays, method=method)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        same(out, want[0])


def test_inference_mode_and_training_may_alternate():
    """Memory that is kept between calls belongs to neither."""
    arrays = tensors(n=300, grad=True)
    want = gradients(call, arrays)
    for _ in range(2):
        with torch.inference_mode():
            same(call(*arrays), want[0])
        with torch.no_grad():
            same(call(*arrays), want[0])
        for a, b in zip(gradients(call, arrays), want, strict=True):
            same(a, b)


def test_generators_are_left_alone():
    """U099."""
    before = torch.get_rng_state()
    gradients(call, tensors(grad=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_importing_the_package_imports_no_torch():
    """Nor does asking what it can do; its names come lazily."""
    program = """
import sys, plsh_torch
state, declared = plsh_torch.BACKEND.availability(), plsh_torch.BACKEND.capabilities()
assert "torch" not in sys.modules and state.ok and declared.arrays == ("torch",)
plsh_torch.ALiBiAttention
assert "torch" in sys.modules
try:
    plsh_torch.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=60,
    )  # fmt: skip
    assert done.stdout == "module 'plsh_torch' has no attribute 'nothing'\n"
