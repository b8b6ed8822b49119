"""What a backend is handed: static parts, operands, weights as recipes."""

import numpy as np
import pytest

import plsh
from plsh import attention, compat, registry
from plsh.backend import AttentionOutput, Capabilities
from plsh.conformance.doubles import (
    METHODS,
    OBJECTS,
    SLOPES,
    Recorder,
    Unreadable,
    handed,
    problem,
    registered,
    widest,
)
from plsh.weights import UNLIMITED, DecayWeight, StepWeight, TableWeight


@pytest.mark.requirement("BCK-12")
@pytest.mark.parametrize("method", METHODS)
def test_the_static_part_is_a_value_without_arrays_and_lengths(method, subject):
    dtype, slopes = widest(subject), SLOPES
    q, k, v, *_ = problem(subject, dtype)
    longer = problem(subject, dtype, 35, shape=(3, 4, 2))[:3]
    ids = subject.array(np.zeros((2, 21)), "int32")

    def static(*arrays, **options):
        made = {"method": OBJECTS[method], "slopes": slopes, "causal": True, **options}
        return handed(subject, *arrays, **made)[3].static

    one = static(q, k, v)
    same = [static(q, k, v), static(*longer), static(q, k, v, segment_ids=ids, k_offset=7)]
    if method != "lsh":
        same.append(static(q, k, v, slopes=0.75))
    assert all(x == one and hash(x) == hash(one) for x in same)
    others = [
        static(q, k, v, causal=False),
        static(q, k, v, scale=0.25),
        static(q, k, v[..., :3]),
        static(q, v[:, :1, ...], v[:, :1, ...]),
    ]
    if method == "lsh":
        others += [static(q, k, v, slopes=0.75), static(q, k, v, method=plsh.PositionalLSH(5))]
    if method == "window":
        others.append(static(q, k, v, method=plsh.Window(5)))
    assert all(x != one for x in others)
    assert (one.method, one.causal, one.scale) == (method, True, 0.5)
    assert (one.heads, one.kv_heads, one.head_dim, one.value_dim) == (4, 2, 4, 4)
    assert (one.dtype, one.array_kind) == (dtype, subject.kind)
    assert others[2].value_dim == 3
    assert others[1].scale == 0.25


@pytest.mark.requirement("BCK-12", "BCK-10")
@pytest.mark.parametrize("method", METHODS)
def test_operands_are_numbers_tuples_or_arrays(method, subject):
    q, k, v, *_ = problem(subject, widest(subject))
    options = {"method": OBJECTS[method], "slopes": list(SLOPES)}
    arrays = handed(subject, q, k, v, **options)[3].arrays
    assert arrays.slopes == (None if method == "lsh" else SLOPES)
    assert (arrays.q_offset, arrays.k_offset) == (0, 0)
    assert (arrays.segment_ids, arrays.labels) == (None, None)
    ids = subject.array(np.zeros((2, 21)), "int32")
    options |= {"q_offset": np.int64(4), "k_offset": np.array(3), "segment_ids": ids}
    arrays = handed(subject, q, k, v, **options)[3].arrays
    assert [type(x) for x in (arrays.q_offset, arrays.k_offset)] == [int, int]
    assert (arrays.q_offset, arrays.k_offset) == (4, 3)
    assert [tuple(x.shape) for x in arrays.segment_ids] == [(2, 21), (2, 21)]
    turned = [compat.swap_heads(x[0, ...]) for x in (q, k, v)]  # no batch axis, bshd
    options = {"method": OBJECTS[method], "slopes": SLOPES, "segment_ids": ids[0, ...]}
    *found, request = handed(subject, *turned, layout="bshd", **options)
    for x, y in zip(found, (q, k, v), strict=True):
        np.testing.assert_array_equal(subject.host(x), subject.host(y[:1, ...]))
    assert [tuple(x.shape) for x in request.arrays.segment_ids] == [(1, 21), (1, 21)]


@pytest.mark.requirement("BCK-12", "BCK-14")
@pytest.mark.needs("method:exact")
@pytest.mark.may_refuse
def test_operands_of_batch_rows_are_tuples_or_arrays(subject):
    q, k, v, *_ = problem(subject, widest(subject))
    rows = (SLOPES, SLOPES[::-1])
    options = {"method": "exact", "slopes": np.array(rows), "q_offset": np.array([3, 4])}
    arrays = handed(subject, q, k, v, k_offset=[1, 2], **options)[3].arrays
    assert (arrays.slopes, arrays.q_offset, arrays.k_offset) == (rows, (3, 4), (1, 2))
    own = {
        x: subject.array(np.array(y), "int32") for x, y in (("q_offset", 3), ("k_offset", [1, 2]))
    }
    own["slopes"] = subject.array(np.array(SLOPES), "float32")
    arrays = handed(subject, q, k, v, method="exact", **own)[3].arrays
    if subject.kind == "numpy":  # its values are known: numbers
        assert (arrays.slopes, arrays.q_offset, arrays.k_offset) == (SLOPES, 3, (1, 2))
    else:
        assert all(getattr(arrays, name) is x for name, x in own.items())


@pytest.mark.requirement("BCK-13")
@pytest.mark.parametrize("method", ["exact", "window"])
def test_a_decay_is_handed_as_its_bandwidths(method, subject):
    q, k, v, *_ = problem(subject, widest(subject))
    request = handed(subject, q, k, v, method=OBJECTS[method], slopes=SLOPES)[3]
    widths = (UNLIMITED,) * 4 if method == "exact" else (9, 3, 30, 0)
    assert request.static.weight == DecayWeight(widths)
    with pytest.raises(TypeError, match="lsh"):
        request.labels(0, 5)


@pytest.mark.requirement("BCK-13", "HSH-4", "HSH-10")
@pytest.mark.needs("method:lsh")
def test_lsh_is_handed_as_a_recipe(subject):
    q, k, v, *_ = problem(subject, widest(subject))
    request = handed(subject, q, k, v, method=OBJECTS["lsh"], slopes=SLOPES)[3]
    weight = request.static.weight
    assert isinstance(weight, StepWeight)
    assert (weight.samples, weight.seed, weight.head_ids) == (5, 2, (0, 1, 2, 3))
    labels = request.labels(-3, 50)
    assert (labels.dtype, labels.shape, labels.flags.writeable) == (np.int32, (4, 5, 53), False)
    np.testing.assert_array_equal(labels, weight.labels(-3, 50))
    np.testing.assert_array_equal(labels[2], request.labels(-3, 50, 2))
    np.testing.assert_array_equal(labels[..., :3], labels[..., 3:4].repeat(3, axis=-1))
    start, end = weight.bounds(np.arange(-3, 50))
    assert (start.dtype, start.shape, end.dtype) == (np.int32, (4, 5, 53), np.int32)
    i = np.arange(53) - 3
    for p in (3, 20, 40):  # the count by a pivot: a product of two 0/1 matrices
        after, before = i[p:] < end[..., p, None], i[3 : p + 1] >= start[..., p, None]
        count = np.einsum("hsi,hsj->hij", after.astype(int), before.astype(int))
        shared = labels[..., p:, None] == labels[..., None, 3 : p + 1]
        np.testing.assert_array_equal(count, shared.sum(axis=1))
    for h, width in enumerate(weight.bandwidths):
        apart = np.abs(i[:, None] - i[None, :])[3:, 3:]
        equal = labels[h, :, 3:, None] == labels[h, :, None, 3:]
        assert np.max(np.where(equal, apart, 0)) <= width


@pytest.mark.requirement("BCK-13", "BCK-12", "MTH-6")
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
def test_partitions_are_handed_as_labels(subject):
    q, k, v, *_ = problem(subject, widest(subject))
    for heads in (1, 4):
        table = plsh.FixedBlocks((6.0,) * heads).sample(2, 40, start=3)
        request = handed(subject, q, k, v, method=table, k_offset=5)[3]
        weight, labels = request.static.weight, request.arrays.labels
        assert isinstance(weight, TableWeight)
        assert (weight.samples, weight.start, weight.stop) == (2, 3, 43)
        assert len(weight.bandwidths) == 4
        assert (compat.dtype_name(labels), labels.shape) == ("int32", (heads, 2, 40))
        np.testing.assert_array_equal(labels, table.labels())
        np.testing.assert_array_equal(request.labels(5, 30), table.labels()[..., 2:27])
        np.testing.assert_array_equal(request.labels(5, 30, 3), table.labels()[-1, :, 2:27])
        outside = request.labels(1, 45)
        np.testing.assert_array_equal(outside[..., :2], table.labels()[..., [0, 0]])
        np.testing.assert_array_equal(outside[..., -2:], table.labels()[..., [-1, -1]])


@pytest.mark.requirement("BCK-15", "CNV-5")
@pytest.mark.parametrize("weight", ["exact", "window", "lsh", "set"])
def test_the_call_path_draws_nothing_and_reads_nothing(weight, subject, monkeypatch):
    """Arrays that cannot be read go through the core to a backend, and back."""
    out, lse = Unreadable((2, 4, 6, 5)), Unreadable((2, 4, 6))

    class Idle(Recorder):
        def attend(self, *call):
            self.calls.append(call)
            return AttentionOutput(out, lse)

    def used(*arguments, **keywords):
        raise AssertionError("the call path does what only making a weight may do")

    idle = Idle(capabilities=Capabilities(("array-api",)))
    methods = {**OBJECTS, "set": plsh.RandomBinning((3.0,)).sample(2, 100)}
    q, k, v = (Unreadable(shape) for shape in ((2, 4, 6, 3), (2, 2, 6, 3), (2, 2, 6, 5)))
    options = {"segment_ids": Unreadable((2, 6), "int32"), "causal": True}
    options |= {"q_offset": Unreadable((2,), "int64"), "k_offset": Unreadable((), "int32")}
    if weight in ("exact", "window"):
        options["slopes"] = Unreadable((4,))
    monkeypatch.setattr(registry, "entry_points", used)
    monkeypatch.setattr(plsh.weights, "_draw", used)
    monkeypatch.setattr(StepWeight, "labels", used)  # from a cache, under a lock
    monkeypatch.setattr(np.random, "Philox", used)
    with registered(idle):
        output = attention(
            q, k, v, method=methods[weight], return_lse=True, backend=idle.name, **options
        )
    assert output.out is out
    assert output.lse is lse
    ((*arrays, request),) = idle.calls
    assert all(x is y for x, y in zip(arrays, (q, k, v), strict=True))
    assert request.arrays.q_offset is options["q_offset"]
