"""`plsh_torch.ALiBiAttention` and `plsh_torch.scaled_dot_product_attention`."""

import copy
import functools
import math
import pickle
import warnings

import pytest
import torch
from plsh_torch import ALiBiAttention, scaled_dot_product_attention
from torch._dynamo.testing import CompileCounterWithBackend

import plsh


@pytest.fixture(autouse=True)
def _compiled_afresh():
    torch._dynamo.reset()


def tensors(*lead, n=30, heads=4, kv_heads=4, dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    lead = lead or (2,)
    return [
        torch.randn(*lead, h, n, d, generator=make).to(dtype)
        for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, 6))
    ]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- the module ---


@pytest.mark.parametrize("method", ["exact", "window", "lsh", plsh.Window(5)], ids=str)
def test_module_equals_the_function(method):
    q, k, v = tensors()
    got = ALiBiAttention(4, method=method, seed=3, layer=2)(q, k, v, return_lse=True)
    if method == "lsh":
        method = plsh.PositionalLSH(seed=(3, 2))
    want = plsh.attention(q, k, v, method=method, causal=True, return_lse=True, backend="torch")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_and_steps_have_blocks_of_their_own():
    """Layers with one seed would share their cuts at every depth."""
    q, k, v = tensors()
    outputs = [
        ALiBiAttention(4, method="lsh", seed=seed, layer=layer)(q, k, v, step=step)
        for seed, layer, step in ((0, 0, None), (0, 1, None), (1, 0, None), (0, 0, 0), (0, 0, 1))
    ]
    for i, a in enumerate(outputs):
        assert not any(torch.equal(a, b) for b in outputs[:i])
    method = plsh.PositionalLSH(seed=(0, 0, 1))
    same(outputs[-1], plsh.attention(q, k, v, method=method, causal=True, backend="torch"))


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", torch.float16], ids=str)
def test_slopes_survive_casts(cast, learn):
    """U002: a buffer and a parameter, bit for bit, beside layers that are cast."""
    attend = ALiBiAttention(6, method="exact", learn_slopes=learn)
    model = torch.nn.ModuleDict({"attend": attend, "project": torch.nn.Linear(3, 3)})
    before = attend.slopes.detach().clone()
    grad = before / 3
    if learn:
        attend.slopes.grad = grad.clone()
    model = getattr(model, cast)() if isinstance(cast, str) else model.to(cast)
    assert model["project"].weight.dtype != torch.float32
    same(attend.slopes.detach(), before)
    assert (
        attend.slopes is dict([*model.named_parameters(), *model.named_buffers()])["attend.slopes"]
    )
    if learn:
        same(attend.slopes.grad, grad)
    q, k, v = tensors(heads=6, kv_heads=3, dtype=torch.float16)
    assert attend(q, k, v).dtype == torch.float16


@pytest.mark.parametrize("method", ["exact", "window", "lsh", plsh.Window(9)], ids=str)
def test_slopes_written_assigned_or_swapped_are_those_used(method):
    """In place, as an attribute, and by ``torch.func.functional_call``."""
    tokens = tensors()
    want = ALiBiAttention(4, method=method, slopes=0.5)(*tokens)
    attend = ALiBiAttention(4, method=method)
    before = attend(*tokens)
    swapped = {"slopes": torch.full((4,), 0.5)}
    same(torch.func.functional_call(attend, swapped, tuple(tokens)), want)
    same(attend(*tokens), before)
    attend.slopes.fill_(0.5)
    same(attend(*tokens), want)
    with torch.inference_mode():  # whose tensors count no changes
        attend = ALiBiAttention(4, method=method)
        attend.slopes.fill_(0.5)
        same(attend(*tokens), want)
    attend = ALiBiAttention(4, method=method)
    attend.slopes = torch.full((4,), 0.5)
    same(torch.compile(attend, fullgraph=True, backend="eager")(*tokens), want)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
@pytest.mark.parametrize(
    "bad", [torch.tensor([0.1, -1, 0, 0]), torch.full((4,), math.nan)], ids=str
)
def test_slopes_that_come_later_are_checked_too(method, bad):
    attend = ALiBiAttention(4, method=method)
    with pytest.raises(ValueError, match="slopes must be finite and >= 0"):
        attend.slopes = bad
    with pytest.raises(ValueError, match="slopes must be finite and >= 0"):
        attend.load_state_dict({"slopes": bad})
    with pytest.raises(ValueError, match=r"slopes must have shape \(H,\) = \(4,\), got \(3,\)"):
        attend.slopes = torch.ones(3)
    with pytest.raises(RuntimeError, match="size mismatch for slopes"):
        attend.load_state_dict({"slopes": torch.ones(3)})
    same(attend(*tensors()), ALiBiAttention(4, method=method)(*tensors()))


def test_learned_slopes_get_gradients_in_half_precision_too():
    attend = ALiBiAttention(4, method=plsh.Window(9), learn_slopes=True).half()
    q, k, v = tensors(dtype=torch.float16)
    attend(q, k, v).float().square().sum().backward()
    assert attend.slopes.grad.dtype == torch.float32
    assert attend.slopes.grad.abs().min() > 0


def test_state_moves_by_state_dict_deepcopy_and_pickle():
    """Loaded slopes fix the widths and blocks of the next call."""
    q, k, v = tensors()
    for method in ("lsh", "window"):
        own = ALiBiAttention(4, method=method, slopes=[0.5, 0.1, 0.2, 0.0])
        want = own(q, k, v)
        other = ALiBiAttention(4, method=method)
        assert not torch.equal(other(q, k, v), want)
        other.load_state_dict(own.state_dict())
        for m in (other, copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            same(m(q, k, v), want)


@pytest.mark.parametrize("learn", [False, True])
def test_loaded_slopes_are_float32_too(learn):
    """``assign=True`` takes the dtype that comes, and a module on meta has no values to read."""
    attend = ALiBiAttention(4, method="exact", learn_slopes=learn)
    state = {name: x.half() for name, x in attend.state_dict().items()}
    other = ALiBiAttention(4, method="exact", slopes=0.3, learn_slopes=learn)
    other.load_state_dict(state, assign=True)
    same(other.slopes.detach(), attend.slopes.detach().half().float())
    other = ALiBiAttention(4, method="exact", slopes=0.3, learn_slopes=learn).to("meta")
    with pytest.warns(UserWarning, match="no-op"):
        other.load_state_dict(attend.state_dict())
    other.load_state_dict(attend.state_dict(), assign=True)
    same(other(*tensors()), attend(*tensors()))


def test_a_step_that_changes_compiles_at_most_twice():
    """U072: forward and training, steps as plain integers."""
    attend = ALiBiAttention(4, method="lsh", layer=1)
    arrays = [x.requires_grad_() for x in tensors()]
    frames = CompileCounterWithBackend("aot_eager")
    run = torch.compile(attend, fullgraph=True, backend=frames)
    for step in (0, 1, 2, 10, 2**33):
        got, want = run(*arrays, step=step), attend(*arrays, step=step)
        same(got, want)
        a, b = (torch.autograd.grad(x.square().sum(), arrays) for x in (got, want))
        for x, y in zip(a, b, strict=True):
            same(x, y)
    assert frames.frame_count <= 3  # 0, 1 and every other integer


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_module_exports(method):
    """U073."""
    attend = ALiBiAttention(4, method=method)
    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(attend, tuple(tensors(n=17)), dynamic_shapes={
        "q": {2: n}, "k": {2: n}, "v": {2: n},
    })  # fmt: skip
    for length in (2, 100):
        same(program.module()(*tensors(n=length)), attend(*tensors(n=length)))


def test_families_and_partition_sets_carry_their_widths():
    q, k, v = tensors()
    family = plsh.RandomBinning(7.0)
    attend = ALiBiAttention(4, method=plsh.PositionalLSH(4, family=family, seed=9))
    assert attend.slopes is None
    method = plsh.PositionalLSH(4, family=family, seed=(0, 0))
    same(attend(q, k, v), plsh.attention(q, k, v, method=method, causal=True, backend="torch"))
    table = family.sample(3, 30)
    got = ALiBiAttention(4, method=table).half()(q, k, v)
    same(got, plsh.attention(q, k, v, method=table, causal=True, backend="torch"))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"learn_slopes": True}, ValueError, r"learn_slopes needs method='exact' or Window\(width"),
        ({"learn_slopes": True, "method": "lsh"}, ValueError, "no gradient flows through random"),
        ({"slopes": [1.0]}, ValueError, r"slopes must have shape \(H,\) = \(4,\), got \(1,\)"),
        ({"slopes": -1.0}, ValueError, "slopes must be finite and >= 0"),
        ({"slopes": 1.0, "method": plsh.RandomBinning(3.0).sample(2, 9)}, ValueError, "carries"),
        ({"slopes": torch.ones(4, device="meta")}, ValueError, "slopes must have values"),
        ({"learn_slopes": 1, "method": "exact"}, TypeError, "learn_slopes must be True or False"),
        ({"method": "linear"}, TypeError, "method must be one of"),
        ({"method": 3}, TypeError, "method must be"),
        ({"method": plsh.Window([3, 4])}, ValueError, "width"),
        ({"layout": "bnhd"}, ValueError, "layout must be"),
        ({"scale": math.nan}, ValueError, "scale must be"),
        ({"causal": 1}, TypeError, "causal must be"),
        ({"seed": -1}, ValueError, r"seed must lie in \[0, 2\*\*64\), got -1"),
        ({"layer": "a"}, TypeError, "layer must be an integer, got 'a'"),
        ({"heads": 0}, ValueError, r"heads must lie in \[1, "),
    ],
)
def test_bad_settings_are_refused_by_name(keywords, error, message):
    with pytest.raises(error, match=message):
        ALiBiAttention(**{"heads": 4} | keywords)


def test_a_subclass_may_have_a_forward_of_its_own():
    class Projected(ALiBiAttention):
        def __init__(self):
            super().__init__(4)
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x):
            return super().forward(*self.project(x).chunk(3, -1))

    assert Projected()(tensors()[0]).shape == (2, 4, 30, 8)


def test_the_largest_slopes_are_those_of_the_function():
    tokens = tensors()
    for method in ("exact", "window", "lsh"):
        want = plsh.attention(*tokens, method=method, slopes=[1e300] * 4, causal=True)
        torch.testing.assert_close(ALiBiAttention(4, method=method, slopes=1e300)(*tokens), want)


def test_a_step_means_nothing_without_blocks():
    with pytest.raises(ValueError, match="step draws new blocks under lsh only"):
        ALiBiAttention(4)(*tensors(), step=1)
    with pytest.raises(TypeError, match=r"step must be an integer, got 1\.5"):
        ALiBiAttention(4, method="lsh")(*tensors(), step=1.5)


# --- the function ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(30, 30), (7, 30), (30, 7)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_slope_zero_is_torchs_own_function(lead, lengths, causal):
    """Any leading axes; is_causal aligns the first tokens, as torch does."""
    len_q, len_k = lengths
    q, k, v = (x if lead else x[0] for x in tensors(*lead))
    q, k, v = q[..., :len_q, :], k[..., :len_k, :], v[..., :len_k, :]
    keywords = {"is_causal": causal, "scale": 0.3}
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **keywords)
    for method in ("window", "lsh", "exact"):
        got = scaled_dot_product_attention(q, k, v, slopes=0.0, method=method, **keywords)
        torch.testing.assert_close(got, want)


def test_grouped_heads_need_the_flag_as_in_torch():
    q, k, v = tensors(kv_heads=2)
    got = scaled_dot_product_attention(q, k, v, None, 0.0, True, None, True, slopes=0.0)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)
    for flag in ("no", 2, None):
        with pytest.raises(TypeError, match=f"enable_gqa must be a bool, got {flag!r}"):
            scaled_dot_product_attention(q, k, v, enable_gqa=flag)


def test_biases_are_those_of_a_dense_mask():
    q, k, v = tensors()
    at = torch.arange(30)
    slopes = torch.tensor(plsh.alibi_slopes(4), dtype=torch.float32)
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, method="exact"), want)


with warnings.catch_warnings(action="ignore"):
    NESTED = torch.nested.nested_tensor([torch.ones(4, 9, 8)] * 2)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"attn_mask": torch.ones(30, 30, dtype=torch.bool)}, TypeError, "attn_mask must be None"),
        ({"dropout_p": 0.1}, TypeError, "dropout_p must be 0, got 0.1.*drop from the output"),
        ({"query": torch.ones(30, 8)}, ValueError, r"query must have shape \(..., H, L, E\)"),
        ({"key": torch.ones(3, 4, 30, 8)}, ValueError, "the same leading axes"),
        ({"key": [1.0]}, TypeError, "key must be a torch tensor, got list"),
        ({"key": NESTED}, TypeError, "key must be a dense tensor, got a nested one; pad it"),
        ({"slopes": [0.1]}, ValueError, "slopes must have shape"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_remedy(keywords, error, message):
    call = dict(zip(("query", "key", "value"), tensors(), strict=True))
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**call | keywords)


def test_function_compiles_and_trains():
    """U070."""
    arrays = [x.requires_grad_() for x in tensors()]
    f = functools.partial(scaled_dot_product_attention, is_causal=True)
    run = torch.compile(f, fullgraph=True, backend="aot_eager")
    a, b = (torch.autograd.grad(g(*arrays).square().sum(), arrays) for g in (run, f))
    for x, y in zip(a, b, strict=True):
        same(x, y)
