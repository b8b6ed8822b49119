"""Wrong calls: each is refused by name, rule and what came, before any backend is asked."""

import importlib
import re
import warnings

import numpy as np
import pytest
import torch

import plsh
from plsh.backend import SPEC_VERSION, Availability, Capabilities, Harness

NAN, INF = float("nan"), float("inf")


def qkv(heads=4, kv_heads=2, n=6, dim=8, value_dim=5, batch=2, dtype="float32"):
    """Return q, k, v, which a keyword of a wrong call replaces in part."""
    rng = np.random.default_rng(0)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    return [rng.normal(size=(batch, h, n, d)).astype(dtype) for h, d in shapes]


def attend(q=None, k=None, v=None, **keywords):
    given = (q, k, v)
    arrays = [x if y is None else y for x, y in zip(qkv(), given, strict=True)]
    return plsh.attention(*arrays, **keywords)


def matrix():
    with pytest.warns(PendingDeprecationWarning):
        return np.matrix(np.zeros((3, 3)))


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype=dtype)


# Each row: the call, the type of the error, and its whole message (a snapshot).
ARRAYS = {
    "q is a list": (
        {"q": [[[1.0]]]},
        TypeError,
        "q must be an array, got list; pass numpy.asarray(q)",
    ),
    "k is None-like": (
        {"k": 3.0},
        TypeError,
        "k must be an array, got float; pass numpy.asarray(k)",
    ),
    "masked array": (
        {"v": np.ma.masked_array(zeros(2, 2, 6, 5))},
        TypeError,
        "v must be a plain array, got MaskedArray, whose mask or product rule would be ignored; "
        "pass numpy.asarray(v), and padding as segment_ids",
    ),
    "matrix": (
        {"q": matrix()},
        TypeError,
        "q must be a plain array, got matrix, whose mask or product rule would be ignored; pass "
        "numpy.asarray(q), and padding as segment_ids",
    ),
    "integers": (
        {"q": zeros(2, 4, 6, 8, dtype="int64")},
        TypeError,
        "q, k, v must have one dtype, got int64, float32, float32; cast them",
    ),
    "all integers": (
        {
            "q": zeros(2, 4, 6, 8, dtype="int32"),
            "k": zeros(2, 2, 6, 8, dtype="int32"),
            "v": zeros(2, 2, 6, 5, dtype="int32"),
        },
        TypeError,
        "q, k, v must have a dtype of ('float16', 'bfloat16', 'float32', 'float64'), got int32",
    ),
    "complex": (
        {x: zeros(2, 2, 6, 5, dtype="complex64") for x in "qkv"},
        TypeError,
        "q, k, v must have a dtype of ('float16', 'bfloat16', 'float32', 'float64'), got complex64",
    ),
    "mixed precision (U124)": (
        {"k": zeros(2, 2, 6, 8, dtype="float16"), "v": zeros(2, 2, 6, 5, dtype="float16")},
        TypeError,
        "q, k, v must have one dtype, got float32, float16, float16; cast them",
    ),
    "mixed kinds (U117)": (
        {"k": torch.zeros(2, 2, 6, 8)},
        TypeError,
        "q, k, v must be arrays of one kind, got numpy, torch, numpy; nothing is converted "
        "implicitly: k = k.detach().cpu().numpy()",
    ),
    "rank 2": (
        {"q": zeros(6, 8)},
        ValueError,
        "q must have shape (batch, heads, len, dim) or the same without batch, got (6, 8)",
    ),
    "rank 5": (
        {"v": zeros(1, 2, 2, 6, 5), "layout": "bshd"},
        ValueError,
        "v must have shape (batch, len, heads, dim) or the same without batch, got (1, 2, 2, 6, 5)",
    ),
    "rank 0": (
        {"k": np.float32(1)},
        ValueError,
        "k must have shape (batch, heads, len, dim) or the same without batch, got ()",
    ),
    "batch axis in one": (
        {"k": zeros(2, 6, 8)},
        ValueError,
        "q, k, v must all have a batch axis or all have none, got shapes (2, 4, 6, 8), (2, 6, 8), "
        "(2, 2, 6, 5)",
    ),
    "batch sizes": (
        {"q": zeros(3, 4, 6, 8)},
        ValueError,
        "q, k, v must have one batch size, got q (3, 4, 6, 8), k (2, 2, 6, 8), v (2, 2, 6, 5)",
    ),
    "k and v heads": (
        {"v": zeros(2, 4, 6, 5)},
        ValueError,
        "k and v must have one head count, got q (2, 4, 6, 8), k (2, 2, 6, 8), v (2, 4, 6, 5)",
    ),
    "k and v lengths": (
        {"v": zeros(2, 2, 7, 5)},
        ValueError,
        "k and v must have one length, got q (2, 4, 6, 8), k (2, 2, 6, 8), v (2, 2, 7, 5)",
    ),
    "head dims": (
        {"q": zeros(2, 4, 6, 16)},
        ValueError,
        "q and k must have one head dim D, got q (2, 4, 6, 16), k (2, 2, 6, 8), v (2, 2, 6, 5)",
    ),
    "no head dim": (
        {"q": zeros(2, 4, 6, 0), "k": zeros(2, 2, 6, 0)},
        ValueError,
        "q and k must have head dim D >= 1, got q (2, 4, 6, 0), k (2, 2, 6, 0), v (2, 2, 6, 5)",
    ),
    "Hq % Hkv": (
        {"q": zeros(2, 3, 6, 8)},
        ValueError,
        "the heads of q (3) must be a multiple of the heads of k and v (2), got q (2, 3, 6, 8), "
        "k (2, 2, 6, 8), v (2, 2, 6, 5) with layout='bhsd'",
    ),
    "no key heads": (
        {"k": zeros(2, 0, 6, 8), "v": zeros(2, 0, 6, 5)},
        ValueError,
        "the heads of q (4) must be a multiple of the heads of k and v (0), got q (2, 4, 6, 8), "
        "k (2, 0, 6, 8), v (2, 0, 6, 5) with layout='bhsd'",
    ),
}

OPTIONS = {
    "unknown layout": (
        {"layout": "sbhd"},
        ValueError,
        "layout must be one of ('bhsd', 'bshd'), got 'sbhd'",
    ),
    "layout of no string": (
        {"layout": ["bhsd"]},
        TypeError,
        "layout must be one of ('bhsd', 'bshd'), got ['bhsd']",
    ),
    "layout array": (
        {"layout": np.array(["bhsd", "bshd"])},
        TypeError,
        "layout must be one of ('bhsd', 'bshd'), got array(['bhsd', 'bshd'], dtype='<U4')",
    ),
    "causal as int": ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
    "causal as string": ({"causal": "no"}, TypeError, "causal must be a bool, got 'no'"),
    "return_lse as int": ({"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
    "unknown method": (
        {"method": "flash"},
        TypeError,
        "method must be one of ('exact', 'window', 'lsh'), Exact(), Window(), PositionalLSH() or "
        "a PartitionSet, got 'flash'",
    ),
    "method class": (
        {"method": plsh.Exact},
        TypeError,
        "method must be one of ('exact', 'window', 'lsh'), Exact(), Window(), PositionalLSH() or "
        "a PartitionSet, got <class 'plsh.methods.Exact'>",
    ),
    "method is a family": (
        {"method": plsh.RandomBinning(4.0)},
        TypeError,
        "method must be one of ('exact', 'window', 'lsh'), Exact(), Window(), PositionalLSH() or "
        "a PartitionSet, got RandomBinning(sigma=4.0)",
    ),
    "method is None": (
        {"method": None},
        TypeError,
        "method must be one of ('exact', 'window', 'lsh'), Exact(), Window(), PositionalLSH() or "
        "a PartitionSet, got None",
    ),
    "scale NaN": ({"scale": NAN}, ValueError, "scale must be finite, got nan"),
    "scale inf": ({"scale": -INF}, ValueError, "scale must be finite, got -inf"),
    "scale too large for a float": (
        {"scale": 10**400},
        ValueError,
        "scale must be finite, got inf",
    ),
    "scale bool": ({"scale": True}, TypeError, "scale must be a number, got True"),
    "scale numpy bool": (
        {"scale": np.True_},
        TypeError,
        f"scale must be a number, got {np.True_!r}",
    ),
    "scale string": ({"scale": "0.5"}, TypeError, "scale must be a number, got '0.5'"),
    "scale complex": ({"scale": 1j}, TypeError, "scale must be a number, got 1j"),
    "scale array": (
        {"scale": np.array([0.5])},
        TypeError,
        "scale must be a number, got array([0.5])",
    ),
    "scale tensor": (
        {"scale": torch.tensor(0.5)},
        TypeError,
        "scale must be a number (it is static), got a torch array; multiply q by it and pass "
        "scale=1.0",
    ),
    "backend no name": (
        {"backend": 3},
        TypeError,
        "backend must be a name or None, got 3",
    ),
}

SLOPES = {
    "NaN": ({"slopes": [1.0, NAN, 1, 1]}, ValueError, "slopes must be finite and >= 0, got nan"),
    "inf": (
        {"slopes": np.full(4, np.inf)},
        ValueError,
        "slopes must be finite and >= 0, got inf",
    ),
    "too large for a float": (
        {"slopes": 10**400},
        ValueError,
        f"slopes must be finite and >= 0, got {10**400}",
    ),
    "negative": ({"slopes": -0.5}, ValueError, "slopes must be finite and >= 0, got -0.5"),
    "negative, exact": (
        {"slopes": (0.5, -0.5, 1, 1), "method": "exact"},
        ValueError,
        "slopes must be finite and >= 0, got -0.5",
    ),
    "bool": ({"slopes": True}, TypeError, "slopes must be real numbers, got True"),
    "bools": ({"slopes": [True] * 4}, TypeError, "slopes must be real numbers, got True"),
    "numpy bools": (
        {"slopes": np.ones(4, bool)},
        TypeError,
        "slopes must be real numbers, got dtype bool",
    ),
    "string": ({"slopes": "0.5"}, TypeError, "slopes must be real numbers, got '0.5'"),
    "complex": (
        {"slopes": np.ones(4, complex)},
        TypeError,
        "slopes must be real numbers, got dtype complex128",
    ),
    "objects": (
        {"slopes": np.array([0.5] * 4, dtype=object)},
        TypeError,
        "slopes must be real numbers, got dtype object",
    ),
    "dict": ({"slopes": {0: 0.5}}, TypeError, "slopes must be real numbers, got {0: 0.5}"),
    "set": ({"slopes": {0.5}}, TypeError, "slopes must be real numbers, got {0.5}"),
    "too many": (
        {"slopes": [0.5] * 5},
        ValueError,
        "slopes must have shape (H,) = (4,) or (B, H) = (2, 4), got (5,)",
    ),
    "none": (
        {"slopes": []},
        ValueError,
        "slopes must have shape (H,) = (4,) or (B, H) = (2, 4), got (0,)",
    ),
    "per row, transposed": (
        {"slopes": np.ones((4, 2)), "method": "exact"},
        ValueError,
        "slopes must have shape (H,) = (4,) or (B, H) = (2, 4), got (4, 2)",
    ),
    "per row, one for all": (
        {"slopes": np.ones((1, 4)), "method": "exact"},
        ValueError,
        "slopes must have shape (H,) = (4,) or (B, H) = (2, 4), got (1, 4)",
    ),
    "three axes": (
        {"slopes": np.ones((2, 4, 1)), "method": "exact"},
        ValueError,
        "slopes must have shape (H,) = (4,) or (B, H) = (2, 4), got (2, 4, 1)",
    ),
    "ragged": (
        {"slopes": [[1.0] * 4, [1.0] * 3], "method": "exact"},
        ValueError,
        "slopes must be rectangular, got ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0))",
    ),
    "rows and numbers": (
        {"slopes": [1.0, [1.0], 1.0, 1.0], "method": "exact"},
        ValueError,
        "slopes must be rectangular, got (1.0, (1.0,), 1.0, 1.0)",
    ),
    "per row under lsh (U050)": (
        {"slopes": np.ones((2, 4))},
        ValueError,
        "slopes under lsh must have shape (H,) = (4,), got one row per batch row; per-batch "
        "slopes need method 'exact' or 'window'",
    ),
    "tensor for numpy q": (
        {"slopes": torch.ones(4)},
        TypeError,
        "slopes must be numbers, a NumPy array or a numpy array like q, got torch: "
        "slopes = slopes.detach().cpu().numpy()",
    ),
    "with a family": (
        {
            "slopes": 0.5,
            "method": plsh.PositionalLSH(family=plsh.RandomBinning(4.0)),
        },
        ValueError,
        "slopes must be None with RandomBinning, which carries its own widths",
    ),
    "with partitions": (
        {"slopes": 0.5, "method": plsh.RandomBinning(4.0).sample(4, 6)},
        ValueError,
        "slopes must be None with a PartitionSet, which carries its own widths",
    ),
}

OFFSETS = {
    "None with other lengths": (
        {"k": zeros(2, 2, 9, 8), "v": zeros(2, 2, 9, 5), "k_offset": 5},
        ValueError,
        "q_offset must be given when the lengths differ, got 6 queries and 9 keys; q_offset=8 "
        "aligns the last query with the last key (bottom-right, as a cache does), q_offset=5 the "
        "first with the first (top-left)",
    ),
    "float": (
        {"q_offset": 1.0},
        TypeError,
        "q_offset must be an int or one int per batch row, got 1.0",
    ),
    "bool": (
        {"k_offset": True},
        TypeError,
        "k_offset must be an int or one int per batch row, got True",
    ),
    "string": (
        {"k_offset": "3"},
        TypeError,
        "k_offset must be an int or one int per batch row, got '3'",
    ),
    "None": (
        {"k_offset": None},
        TypeError,
        "k_offset must be an int or one int per batch row, got None",
    ),
    "float array": (
        {"q_offset": np.array([1.0, 2.0])},
        TypeError,
        "q_offset must be integers, got dtype float64",
    ),
    "bool array": (
        {"q_offset": np.array([True, False])},
        TypeError,
        "q_offset must be integers, got dtype bool",
    ),
    "of three rows": (
        {"q_offset": (1, 2, 3)},
        ValueError,
        "q_offset must be an int or 2 ints, got (1, 2, 3)",
    ),
    "per head": (
        {"q_offset": np.ones((2, 4), int)},
        ValueError,
        "q_offset must be an int or 2 ints, got shape (2, 4)",
    ),
    "2^30": (
        {"q_offset": 2**30},
        ValueError,
        "q_offset must lie inside (-2**30, 2**30), got 1073741824",
    ),
    "2^100": (
        {"k_offset": 2**100},
        ValueError,
        f"k_offset must lie inside (-2**30, 2**30), got {2**100}",
    ),
    "runs past 2^30": (
        {"k_offset": 2**30 - 3, "q_offset": 0, "method": "exact"},
        ValueError,
        "k_offset must leave all positions below 2**30, got 1073741821 with 6 tokens",
    ),
    "negative under lsh": (
        {"q_offset": -2, "k_offset": -2},
        ValueError,
        "q_offset and k_offset must keep visible positions inside [0, 2**30), where blocks exist, "
        "got queries -2 … 3, keys -2 … 3; add one number to both offsets, or mark padding by "
        "negative segment_ids",
    ),
    "outside of the partitions": (
        {"method": plsh.RandomBinning(4.0).sample(4, 6, start=3), "k_offset": 4},
        ValueError,
        "q_offset and k_offset must keep visible positions inside [3, 9), where blocks exist, got "
        "queries 4 … 9, keys 4 … 9; add one number to both offsets, or mark padding by negative "
        "segment_ids",
    ),
    "tensor for numpy q": (
        {"q_offset": torch.tensor(3)},
        TypeError,
        "q_offset must be an int, 2 ints or a numpy array like q, got torch: "
        "q_offset = q_offset.detach().cpu().numpy()",
    ),
}

IDS = np.zeros((2, 6), dtype=int)
SEGMENTS = {
    "list": (
        {"segment_ids": [[0] * 6] * 2},
        TypeError,
        "segment_ids must be an integer array (B, N) or a pair of them, for queries and keys, "
        f"got {[[0] * 6] * 2!r}",
    ),
    "number": (
        {"segment_ids": 0},
        TypeError,
        "segment_ids must be an integer array (B, N) or a pair of them, for queries and keys, got "
        "0",
    ),
    "three": (
        {"segment_ids": (IDS[:1, :1],) * 3},
        TypeError,
        "segment_ids must be an integer array (B, N) or a pair of them, for queries and keys, got "
        f"{(IDS[:1, :1],) * 3!r}",
    ),
    "half a pair": (
        {"segment_ids": (IDS[:1, :1], None)},
        TypeError,
        "segment_ids must be an integer array (B, N) or a pair of them, for queries and keys, got "
        f"{(IDS[:1, :1], None)!r}",
    ),
    "floats": (
        {"segment_ids": IDS.astype(float)},
        TypeError,
        "segment_ids must be integers (equal ids see each other, a negative id is padding), got "
        "dtype float64",
    ),
    "too wide": (
        {"segment_ids": IDS.astype(np.uint64)},
        TypeError,
        "segment_ids must fit int64, got dtype uint64; cast them",
    ),
    "a mask": (
        {"segment_ids": IDS == 0},
        TypeError,
        "segment_ids must be integers (equal ids see each other, a negative id is padding), got "
        "dtype bool",
    ),
    "masked array": (
        {"segment_ids": np.ma.masked_array(IDS)},
        TypeError,
        "segment_ids must be a plain array, got MaskedArray, whose mask or product rule would be "
        "ignored; pass numpy.asarray(segment_ids), and padding as segment_ids",
    ),
    "other length": (
        {"segment_ids": IDS[:, :5]},
        ValueError,
        "segment_ids of the queries must have shape (2, 6), got (2, 5)",
    ),
    "keys of other length": (
        {"segment_ids": (IDS, IDS[:, :5])},
        ValueError,
        "segment_ids of the keys must have shape (2, 6), got (2, 5)",
    ),
    "no batch": (
        {"segment_ids": IDS[0]},
        ValueError,
        "segment_ids of the queries must have shape (2, 6), got (6,)",
    ),
    "per head": (
        {"segment_ids": np.zeros((2, 4, 6), int)},
        ValueError,
        "segment_ids of the queries must have shape (2, 6), got (2, 4, 6)",
    ),
    "tensor": (
        {"segment_ids": torch.zeros(2, 6, dtype=torch.int32)},
        TypeError,
        "segment_ids must be a numpy array like q, got torch: segment_ids.detach().cpu().numpy()",
    ),
}

FITS = {
    "widths of other heads": (
        {"method": plsh.Window([1, 2, 3])},
        ValueError,
        "method Window needs one width per head (4), got 3",
    ),
    "head_ids of other heads": (
        {"method": plsh.PositionalLSH(head_ids=[0, 1])},
        ValueError,
        "method needs one of head_ids per head (4), got 2",
    ),
    "family of other heads": (
        {"method": plsh.PositionalLSH(family=plsh.RandomBinning([1.0, 2.0]))},
        ValueError,
        "family RandomBinning has parameters for 2 heads, got 4",
    ),
    "partitions of other heads": (
        {"method": plsh.RandomBinning([1.0, 2.0]).sample(4, 6)},
        ValueError,
        "method must hold partitions of 1 or 4 heads, got 2",
    ),
}

CALLS = {
    f"{group}: {name}": row
    for group, rows in {
        "arrays": ARRAYS,
        "options": OPTIONS,
        "slopes": SLOPES,
        "offsets": OFFSETS,
        "segments": SEGMENTS,
        "method": FITS,
    }.items()
    for name, row in rows.items()
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_is_refused_by_name_rule_and_value(name):
    """U122, U050, U117, U124: a snapshot of every message."""
    keywords, kind, message = CALLS[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        attend(**keywords)
    assert str(caught.value) == message
    assert type(caught.value) is kind


@pytest.mark.parametrize("offset", [(3,), [3], np.array([3]), np.array([[3]])], ids=repr)
def test_offset_of_a_call_without_batch_is_one_int(offset):
    arrays = [x[0] for x in qkv()]
    with pytest.raises(
        ValueError, match=r"k_offset must be an int \(there is no batch axis\), got"
    ):
        plsh.attention(*arrays, k_offset=offset)


@pytest.mark.parametrize("name", ["k", "slopes", "q_offset", "k_offset", "segment_ids"])
def test_arrays_on_another_device_are_refused_and_never_copied(name):
    """U085. The meta device is one that every machine has."""
    q, k, v = (torch.from_numpy(x) for x in qkv())
    keywords = {
        "k": k,
        "slopes": torch.ones(4),
        "q_offset": torch.tensor(3),
        "k_offset": torch.tensor([3, 3]),
        "segment_ids": torch.zeros(2, 6, dtype=torch.int64),
    }
    keywords[name] = keywords[name].to("meta")
    k = keywords.pop("k")
    with pytest.raises(ValueError, match=r"must be on one device, got (cpu and )?meta"):
        plsh.attention(q, k, v, method="exact", **keywords)


class Spy:
    """A backend that takes everything and remembers whether it was asked."""

    name = "spy"
    spec_version = SPEC_VERSION
    asked = 0

    def availability(self):
        return Availability(True)

    def capabilities(self):
        return Capabilities(arrays=("numpy", "torch", "jax", "cupy", "array-api"))

    def can_run(self, request):
        self.asked += 1
        return "a spy computes nothing"

    def attend(self, q, k, v, request):
        raise AssertionError("can_run refused")

    def harness(self):
        return Harness(np.asarray, np.asarray, lambda x: None)


@pytest.mark.parametrize("name", [n for n, row in CALLS.items() if "backend" not in row[0]])
def test_error_is_the_same_for_every_backend_because_none_is_asked(name):
    spy = Spy()
    plsh.register_backend(spy)
    keywords, kind, message = CALLS[name]
    with pytest.raises(kind, match=re.escape(message)):
        attend(**keywords, backend="spy")
    assert spy.asked == 0


@pytest.mark.parametrize("backend", ["unavailable", "nobody"])
def test_wrong_argument_is_named_before_the_backend_is_sought(backend):
    with pytest.raises(ValueError, match="slopes must be finite"):
        attend(slopes=NAN, backend=backend)


def test_spy_is_asked_by_a_right_call():
    """Without this the test above could not fail."""
    spy = Spy()
    plsh.register_backend(spy)
    with pytest.raises(plsh.UnsupportedByBackendError, match="a spy computes nothing"):
        attend(backend="spy")
    assert spy.asked == 1


# --- method objects, families, helpers ---

CONSTRUCTORS = {
    "s = 0": (lambda: plsh.PositionalLSH(0), ValueError, "samples must be >= 1, got 0"),
    "s < 0": (lambda: plsh.PositionalLSH(-3), ValueError, "samples must be >= 1, got -3"),
    "s float": (lambda: plsh.PositionalLSH(8.0), TypeError, "samples must be an integer, got 8.0"),
    "s bool": (lambda: plsh.PositionalLSH(True), TypeError, "samples must be an integer, got True"),
    "s array": (
        lambda: plsh.PositionalLSH(np.array([8])),
        TypeError,
        "samples must be an integer, got array([8])",
    ),
    "seed float": (
        lambda: plsh.PositionalLSH(seed=1.5),
        TypeError,
        "seed must be made of integers, got 1.5",
    ),
    "seed None": (
        lambda: plsh.PositionalLSH(seed=None),
        TypeError,
        "seed must be made of integers, got None",
    ),
    "seed string": (
        lambda: plsh.PositionalLSH(seed="7"),
        TypeError,
        "seed must be made of integers, got '7'",
    ),
    "seed bool": (
        lambda: plsh.PositionalLSH(seed=(1, False)),
        TypeError,
        "seed must be made of integers, got False",
    ),
    "seed array of float": (
        lambda: plsh.PositionalLSH(seed=np.array(3.7)),
        TypeError,
        "seed must be made of integers, got array(3.7)",
    ),
    "seed negative": (
        lambda: plsh.PositionalLSH(seed=-1),
        ValueError,
        "seed must lie in [0, 2**64), got -1",
    ),
    "seed too large": (
        lambda: plsh.PositionalLSH(seed=2**64),
        ValueError,
        f"seed must lie in [0, 2**64), got {2**64}",
    ),
    "seed empty": (
        lambda: plsh.PositionalLSH(seed=()),
        ValueError,
        "seed must be an int or a non-empty tuple of ints, got an empty one",
    ),
    "seed generator": (
        lambda: plsh.PositionalLSH(seed=np.random),
        TypeError,
        f"seed must be made of integers, got {np.random!r}",
    ),
    "sampler": (
        lambda: plsh.PositionalLSH(sampler="sobol"),
        ValueError,
        "sampler must be one of ('iid', 'stratified'), got 'sobol'",
    ),
    "sampler number": (
        lambda: plsh.PositionalLSH(sampler=1),
        TypeError,
        "sampler must be one of ('iid', 'stratified'), got 1",
    ),
    "sampler of a family without": (
        lambda: plsh.PositionalLSH(family=plsh.FixedBlocks(8)),
        ValueError,
        "FixedBlocks draws no widths, so it has no sampler, got 'stratified'; pass sampler=None",
    ),
    "family class": (
        lambda: plsh.PositionalLSH(family=plsh.RandomBinning),
        TypeError,
        "family must be a hash family of plsh, got <class 'plsh.hashing.RandomBinning'>",
    ),
    "head_ids number": (
        lambda: plsh.PositionalLSH(head_ids=3),
        TypeError,
        "head_ids must be a sequence of ints, got 3",
    ),
    "head_ids floats": (
        lambda: plsh.PositionalLSH(head_ids=[0.5]),
        TypeError,
        "head_ids must be made of integers, got 0.5",
    ),
    "width and tol": (
        lambda: plsh.Window(3, tol=0.1),
        ValueError,
        "give width or tol, not both; got width=3, tol=0.1",
    ),
    "width float": (
        lambda: plsh.Window(3.0),
        TypeError,
        "width must be an int or one int per head, got 3.0",
    ),
    "width bool": (
        lambda: plsh.Window(True),
        TypeError,
        "width must be an int or one int per head, got True",
    ),
    "width negative": (
        lambda: plsh.Window(-1),
        ValueError,
        "width must be >= 0 tokens, got -1",
    ),
    "width nested": (
        lambda: plsh.Window([[1, 2], [3, 4]]),
        ValueError,
        "width must be an int or one int per head, got [[1, 2], [3, 4]]",
    ),
    "tol 0": (lambda: plsh.Window(tol=0), ValueError, "tol must lie in (0, 1), got 0"),
    "tol 1": (lambda: plsh.Window(tol=1), ValueError, "tol must lie in (0, 1), got 1"),
    "tol NaN": (lambda: plsh.Window(tol=NAN), ValueError, "tol must lie in (0, 1), got nan"),
    "tol string": (lambda: plsh.Window(tol="1e-6"), TypeError, "tol must be a number, got '1e-6'"),
    "tol bool": (lambda: plsh.Window(tol=True), TypeError, "tol must be a number, got True"),
    "sigma 0": (lambda: plsh.RandomBinning(0), ValueError, "sigma must be > 0, got 0.0"),
    "sigma negative": (
        lambda: plsh.RandomBinning(-2.0),
        ValueError,
        "sigma must be > 0, got -2.0",
    ),
    "sigma NaN": (lambda: plsh.RandomBinning(NAN), ValueError, "sigma must be > 0, got nan"),
    "sigma string": (
        lambda: plsh.RandomBinning("4"),
        TypeError,
        "sigma must be a number or one number per head, got '4'",
    ),
    "sigma bool": (
        lambda: plsh.IndependentCuts(True),
        TypeError,
        "sigma must be a number or one number per head, got True",
    ),
    "r1 infinite": (
        lambda: plsh.PowerLawBinning(INF, 1.0),
        ValueError,
        "r1 must be > 0 and finite, got inf",
    ),
    "r1 and r2 of other lengths": (
        lambda: plsh.PowerLawBinning([1.0, 2.0], [1.0, 2.0, 3.0]),
        ValueError,
        "parameters of PowerLawBinning must have one length, got [2, 3]",
    ),
    "block width 0": (
        lambda: plsh.FixedBlocks(0),
        ValueError,
        "width must be > 0 and finite, got 0.0",
    ),
    "n float": (
        lambda: plsh.RandomBinning(4.0).sample(4, 6.0),
        TypeError,
        "n must be an integer, got 6.0",
    ),
    "n negative": (
        lambda: plsh.RandomBinning(4.0).sample(4, -6),
        ValueError,
        "n must be >= 0, got -6",
    ),
    "start float": (
        lambda: plsh.RandomBinning(4.0).sample(4, 6, start=1.5),
        TypeError,
        "start must be an integer, got 1.5",
    ),
    "heads float": (
        lambda: plsh.alibi_slopes(8.0),
        TypeError,
        "heads must be an integer, got 8.0",
    ),
    "heads negative": (
        lambda: plsh.alibi_slopes(-1),
        ValueError,
        "heads must be >= 0, got -1",
    ),
    "max_bias NaN": (
        lambda: plsh.alibi_slopes(8, NAN),
        ValueError,
        "max_bias must be positive and finite, got nan",
    ),
    "lengths float": (
        lambda: plsh.segments_from_lengths([2.0], 4),
        TypeError,
        "lengths must be integers, got 2.0",
    ),
    "lengths above n (U040)": (
        lambda: plsh.segments_from_lengths([[3, 2]], 4),
        ValueError,
        "lengths of a row must add up to at most n = 4, got 5",
    ),
    "lengths negative": (
        lambda: plsh.segments_from_lengths([3, -1], 4),
        ValueError,
        "lengths must be >= 0, got -1",
    ),
    "lengths number": (
        lambda: plsh.segments_from_lengths(3, 4),
        TypeError,
        "lengths must be a sequence of ints, or one of sequences, got 3",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_wrong_value_is_refused_where_it_is_given(name):
    """U122: not later, in a call far from the mistake."""
    make, kind, message = CONSTRUCTORS[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert str(caught.value) == message
    assert type(caught.value) is kind


# --- keywords that do not exist ---


@pytest.mark.parametrize(
    "keyword", ["attn_mask", "mask", "dropout", "dropout_p", "bias", "window", "is_causal"]
)
def test_keyword_that_would_be_ignored_is_refused(keyword):
    """U029, U116: neither masks nor dropout exist; TypeError, never silence."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        attend(**{keyword: None})


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="takes 3 positional arguments"):
        plsh.attention(*qkv(), "exact")


# --- what is accepted, and means the same ---


def test_slopes_of_every_type_give_the_same_output():
    """U002: dtypes, containers and kinds; the values are exact in every dtype."""
    values = [0.5, 0.25, 0.125, 0.0]
    arrays = [torch.from_numpy(x) for x in qkv()]
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    same = [
        tuple(values),
        list(map(np.float32, values)),
        *(np.array(values, dtype=d) for d in ("float16", "float32", "float64")),
        *(torch.tensor(values, dtype=d) for d in dtypes),
    ]
    for method in ("exact", "window", "lsh"):
        expected = plsh.attention(*arrays, method=method, slopes=values, backend="reference")
        for slopes in same:
            out = plsh.attention(*arrays, method=method, slopes=slopes, backend="reference")
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_integer_and_scalar_slopes_are_numbers(method):
    """U002: 0-d arrays and ints serve all heads."""
    expected = attend(method=method, slopes=[1.0] * 4)
    for slopes in (
        1,
        1.0,
        np.float16(1),
        np.array(1.0),
        np.int64(1),
        [1, 1, 1, 1],
        np.ones(4, int),
    ):
        np.testing.assert_array_equal(attend(method=method, slopes=slopes), expected)


def test_slopes_of_a_square_batch_are_never_taken_per_row():
    """U050: B == H == 2, so (2,) is per head."""
    arrays = qkv(heads=2, batch=2)
    per_head = plsh.attention(*arrays, method="exact", slopes=[0.0, 3.0])
    rows = plsh.attention(*arrays, method="exact", slopes=[[0.0, 3.0]] * 2)
    np.testing.assert_array_equal(per_head, rows)


def test_offset_of_any_integer_type_is_the_same():
    expected = attend(q_offset=7, k_offset=3, causal=True)
    for seven in (np.int32(7), np.uint8(7), np.array(7), np.array([7, 7]), (7, 7), [7, np.int8(7)]):
        np.testing.assert_array_equal(attend(q_offset=seven, k_offset=3, causal=True), expected)


def test_padding_may_have_negative_positions_but_not_hidden_real_tokens():
    ids = np.array([[-1, -1, 0, 0, 0, 0]] * 2)
    assert np.isfinite(attend(q_offset=-2, k_offset=-2, segment_ids=ids)).all()
    with pytest.raises(ValueError, match="queries -1 … 2, keys -1 … 2"):
        attend(q_offset=-3, k_offset=-3, segment_ids=ids)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_no_wrong_value_hides_behind_an_empty_batch_or_length(method):
    for arrays in (qkv(batch=0), qkv(n=0)):
        assert plsh.attention(*arrays, method=method).size == 0
        if method != "lsh" and len(arrays[0]) == 0:
            assert plsh.attention(*arrays, method=method, slopes=np.ones((0, 4))).size == 0
        with pytest.raises(ValueError, match="slopes must be finite"):
            plsh.attention(*arrays, method=method, slopes=[-1.0] * 4)


# --- backends take their own arrays and convert nothing (U085, U117) ---


def test_named_backend_never_converts():
    """U085: what was given, and the line that converts it."""
    arrays = [torch.from_numpy(x) for x in qkv()]
    with pytest.raises(TypeError) as caught:
        plsh.attention(*arrays, backend="numpy")
    assert str(caught.value) == (
        "backend 'numpy' takes numpy arrays, got torch; nothing is converted implicitly: "
        "q = q.detach().cpu().numpy(); k = k.detach().cpu().numpy(); v = v.detach().cpu().numpy()"
    )


def convert(library, x):
    """Return a NumPy array as an array of a library."""
    if library == "numpy":
        return x
    if library == "torch":
        return torch.from_numpy(x)
    if library == "parameter":
        return torch.nn.Parameter(torch.from_numpy(x))
    name = "jax.numpy" if library == "jax" else "array_api_strict"
    return importlib.import_module(name).asarray(x)


@pytest.mark.parametrize("library", ["numpy", "torch", "parameter", "jax", "strict"])
def test_result_is_of_the_kind_that_came(library):
    """U117."""
    arrays = [convert(library, x) for x in qkv()]
    out = plsh.attention(*arrays, method="exact")
    assert isinstance(out, torch.Tensor if library == "parameter" else type(arrays[0]))
    assert out.dtype == arrays[0].dtype


def test_subclass_of_a_tensor_is_a_tensor():
    """U117."""

    class Named(torch.Tensor):
        pass

    arrays = [torch.from_numpy(x).as_subclass(Named) for x in qkv()]
    assert isinstance(plsh.attention(*arrays, method="exact"), Named)


def test_sparse_nested_and_float8_tensors_are_refused():
    arrays = [torch.from_numpy(x) for x in qkv()]
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor(list(arrays[0]))
    refused = r"must be a dense tensor, got a nested one; .* segment_ids"
    with pytest.raises(TypeError, match=f"q {refused}"):
        plsh.attention(nested, *arrays[1:])
    with pytest.raises(TypeError, match=f"segment_ids {refused}"):
        plsh.attention(*arrays, segment_ids=nested)
    for name in ("slopes", "q_offset"):
        bad = torch.ones(2, dtype=torch.int32).to_sparse()
        with pytest.raises(TypeError, match=rf"{name} must be a dense .*; pass {name}\.to_dense"):
            plsh.attention(*arrays, **{"method": "exact", name: bad})
    with pytest.raises(TypeError, match=r"q must be a dense tensor, got layout torch\.sparse_coo"):
        plsh.attention(arrays[0].to_sparse(), *arrays[1:])
    with pytest.raises(TypeError, match="q, k, v must have one dtype, got float8_e4m3fn, float32"):
        plsh.attention(arrays[0].to(torch.float8_e4m3fn), *arrays[1:])


# --- attention_vjp ---


def vjp_call(**changed):
    q, k, v = qkv()
    output = plsh.attention(q, k, v, method="exact", return_lse=True, backend="numpy")
    given = {"output": output, "grad_out": np.ones_like(output.out), "method": "exact"} | changed
    return plsh.attention_vjp(q, k, v, backend="numpy", **given)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        (
            {"output": zeros(2, 4, 6, 5)},
            TypeError,
            "output must be the AttentionOutput of plsh.attention(…, return_lse=True), got ndarray",
        ),
        (
            {"grad_out": zeros(2, 4, 6, 8)},
            ValueError,
            "grad_out must have shape (2, 4, 6, 5), got (2, 4, 6, 8)",
        ),
        (
            {"grad_out": torch.zeros(2, 4, 6, 5)},
            TypeError,
            "grad_out must be a numpy array like q, got torch",
        ),
        (
            {"grad_out": [1.0]},
            TypeError,
            "grad_out must be an array, got list; pass numpy.asarray(grad_out)",
        ),
        (
            {"grad_lse": zeros(2, 6, 4)},
            ValueError,
            "grad_lse must have shape (2, 4, 6), got (2, 6, 4)",
        ),
        (
            {"output": (zeros(2, 4, 6, 5), zeros(2, 4))},
            ValueError,
            "output.lse must have shape (2, 4, 6), got (2, 4)",
        ),
    ],
)
def test_wrong_vjp_call_is_refused(changed, kind, message):
    with pytest.raises(kind) as caught:
        vjp_call(**changed)
    assert str(caught.value) == message


def test_vjp_of_a_backend_without_one_names_the_alternative():
    q, k, v = qkv()
    output = plsh.attention(q, k, v, return_lse=True)
    with pytest.raises(plsh.UnsupportedByBackendError, match="the arrays' own autograd"):
        plsh.attention_vjp(q, k, v, output, output.out, backend="reference")
