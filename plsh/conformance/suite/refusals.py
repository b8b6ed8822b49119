"""What `attention` and `attention_vjp` refuse, by name, whichever backend would run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import plsh
from plsh import attention, attention_vjp, testing
from plsh.conformance.doubles import Recorder, Unreadable, registered, widest

METHODS = ("exact", "window", "lsh")
Q, K, V = (2, 4, 6, 3), (2, 2, 6, 3), (2, 2, 6, 5)
BLOCKS = plsh.PartitionSet([[[0, 0, 0, 3, 3, 3]]])


class Refusal(NamedTuple):
    """What is changed in a right call, and the error that names it."""

    change: Callable[[Any], dict[str, Any]]
    error: type[Exception]
    words: tuple[str, ...]


def of(shape, subject, dtype=None):
    return subject.array(np.ones(shape), dtype or widest(subject))


def alien(subject, shape, dtype="float32"):
    """Return an array of another kind."""
    return Unreadable(shape, dtype) if subject.kind == "numpy" else np.ones(shape, dtype)


def right_call(subject):
    q, k, v = (of(shape, subject) for shape in (Q, K, V))
    return {"q": q, "k": k, "v": v, "method": subject.capabilities.methods[0]}


def other_float(subject):
    return "float32" if widest(subject) != "float32" else "float64"


def refused(ids, name, change, error, *words, needs=()):
    """Make a parameter: `change` gives the arguments that break a rule."""
    given = change if callable(change) else lambda subject: change
    marks = [pytest.mark.requirement(*ids.split(), "ERR-1", "ERR-2", "ERR-4")]
    marks += [pytest.mark.needs(*needs)] if needs else []
    return pytest.param(Refusal(given, error, words), id=name, marks=marks)


def arrays(name, shape):
    """Give one of q, k, v another shape."""
    return lambda s: {name: of(shape, s)}


def numbers(name, value, dtype):
    """Give an argument as an array of q's kind."""
    return lambda s: {name: s.array(np.asarray(value), dtype)}


def ids(value, dtype="int32"):
    return lambda s: {"segment_ids": s.array(np.asarray(value), dtype)}


def torch_tensor(name, device="cpu", **options):
    def change(subject):
        import torch

        x = right_call(subject).get(name, torch.zeros(4))
        return {name: x.to(device) if device != "cpu" else torch.ones(4, **options)}

    return change


ROWS = np.zeros((2, 6), int)
LSH = {"method": "lsh"}

ARRAYS = [
    refused("ATT-2", "q a list", {"q": [[[[1.0]]]]}, TypeError, "q", "array", "list"),
    refused("ATT-2", "k None", {"k": None}, TypeError, "k", "array", "NoneType"),
    refused("ATT-2", "k of another kind", lambda s: {"k": alien(s, K)}, TypeError, "k", "kind"),
    refused("ATT-2", "v of another kind", lambda s: {"v": alien(s, V)}, TypeError, "v = ", "kind"),
    refused("ATT-2", "k of another dtype", lambda s: {"k": of(K, s, other_float(s))}, TypeError,
            "k", "dtype", "float"),
    refused("ATT-2", "v of another dtype", lambda s: {"v": of(V, s, other_float(s))}, TypeError,
            "v", "dtype", "float"),
    refused("ATT-2", "integers", lambda s: dict(zip("qkv", (of(x, s, "int32") for x in (Q, K, V)),
            strict=True)), TypeError, "dtype", "int32"),
    refused("ATT-2", "bools", lambda s: dict(zip("qkv", (of(x, s) > 0 for x in (Q, K, V)),
            strict=True)), TypeError, "dtype", "bool"),
    refused("ATT-2", "k on another device", torch_tensor("k", "meta"), ValueError, "device", "meta",
            needs=("kind:torch",)),
    refused("ATT-3", "q a number", arrays("q", ()), ValueError, "q", "shape", "()"),
    refused("ATT-3", "q of rank 1", arrays("q", (3,)), ValueError, "q", "shape", "(3,)"),
    refused("ATT-3", "k of rank 2", arrays("k", (6, 3)), ValueError, "k", "shape", "(6, 3)"),
    refused("ATT-3", "v of rank 5", arrays("v", (1, *V)), ValueError, "v", "shape", "(1, 2, 2"),
    refused("ATT-3", "q without batch", arrays("q", Q[1:]), ValueError, "batch", str(Q[1:])),
    refused("ATT-3", "v without batch", arrays("v", V[1:]), ValueError, "batch", str(V[1:])),
    refused("ATT-3", "k of another batch", arrays("k", (1, 2, 6, 3)), ValueError, "batch", "(1, 2"),
    refused("ATT-3", "v of another batch", arrays("v", (3, 2, 6, 5)), ValueError, "batch", "(3, 2"),
    refused("ATT-3", "v of other heads", arrays("v", (2, 1, 6, 5)), ValueError, "v", "head"),
    refused("ATT-3", "v of another length", arrays("v", (2, 2, 7, 5)), ValueError, "v", "length"),
    refused("ATT-3", "k of another head dim", arrays("k", (2, 2, 6, 4)), ValueError, "k",
            "head dim"),
    refused("ATT-3", "no head dim", lambda s: {"q": of((2, 4, 6, 0), s), "k": of((2, 2, 6, 0), s)},
            ValueError, "head dim", ">= 1", "(2, 4, 6, 0)"),
    refused("ATT-4 ATT-3", "heads no multiple", arrays("q", (2, 3, 6, 3)), ValueError, "multiple",
            "3", "2"),
    refused("ATT-4 ATT-3", "heads without key heads",
            lambda s: {"k": of((2, 0, 6, 3), s), "v": of((2, 0, 6, 5), s)}, ValueError, "multiple"),
]  # fmt: skip

OPTIONS = [
    refused("ATT-8", "an unknown name", {"method": "flash"}, TypeError, "method", "flash"),
    refused("ATT-8", "no name", {"method": 3}, TypeError, "method", "3"),
    refused("ATT-8", "a class", {"method": plsh.Exact}, TypeError, "method", "Exact"),
    refused("ATT-8", "partitions of other heads",
            {"method": plsh.PartitionSet([[[0] * 6]] * 3), "slopes": None}, ValueError, "heads",
            "3"),
    refused("ATT-9", "slopes of another kind", lambda s: {"slopes": alien(s, (4,))}
            if s.kind == "numpy" else {"slopes": Unreadable((4,)), "method": "exact"}
            if s.kind != "array-api" else {"slopes": (None,) * 4}, TypeError, "slopes"),
    refused("ATT-9", "too many slopes", {"slopes": [1.0] * 5}, ValueError, "slopes", "(4,)", "5"),
    refused("ATT-9", "slopes of key heads", {"slopes": np.ones(2)}, ValueError, "slopes", "(2,)"),
    refused("ATT-9", "own slopes of key heads", numbers("slopes", [1.0, 1.0], "float32"),
            ValueError,
            "slopes", "(2,)"),
    refused("ATT-9", "slopes of batch rows", {"slopes": np.ones((4, 2))}, ValueError, "slopes"),
    refused("ATT-9", "slopes of another batch", {"slopes": np.ones((3, 4))}, ValueError, "slopes"),
    refused("ATT-9", "ragged slopes", {"slopes": [[1.0] * 4, [1.0] * 3]}, ValueError, "slopes"),
    refused("ATT-9", "slopes of rank 3", {"slopes": np.ones((1, 2, 4))}, ValueError, "slopes"),
    refused("ATT-9", "a negative slope", {"slopes": [1.0, -0.5, 1.0, 1.0]}, ValueError, "slopes",
            "-0.5"),
    refused("ATT-9", "a negative slope of a row", {"slopes": -np.eye(2, 4)}, ValueError, "slopes"),
    refused("ATT-9", "slope NaN", {"slopes": float("nan")}, ValueError, "slopes", "nan"),
    refused("ATT-9", "slope infinity", {"slopes": np.full(4, np.inf)}, ValueError, "slopes", "inf"),
    refused("ATT-9", "a bool as slope", {"slopes": True}, TypeError, "slopes", "True"),
    refused("ATT-9", "bools as slopes", {"slopes": np.ones(4, bool)}, TypeError, "slopes", "bool"),
    refused("ATT-9", "own bools as slopes", lambda s: {"slopes": of(4, s) > 0}, TypeError, "slopes",
            "bool"),
    refused("ATT-9", "complex slopes", {"slopes": np.ones(4, complex)}, TypeError, "slopes",
            "complex"),
    refused("ATT-9", "words as slopes", {"slopes": "steep"}, TypeError, "slopes", "steep"),
    refused("ATT-11", "a row of slopes per batch row", LSH | {"slopes": np.ones((2, 4))},
            ValueError,
            "slopes", "(4,)", "exact"),
    refused("ATT-11", "slopes that want gradients", lambda s: LSH | torch_tensor(
            "slopes", requires_grad=True)(s), ValueError, "slopes", "grad", "exact",
            needs=("kind:torch",)),
    refused("ATT-11", "slopes of a family", {"slopes": 0.5, "method": plsh.PositionalLSH(
            family=plsh.RandomBinning((2.0,) * 4))}, ValueError, "slopes", "None"),
    refused("ATT-11", "slopes of partitions", {"slopes": 0.5, "method": BLOCKS}, ValueError,
            "slopes", "None"),
    refused("ATT-5", "a layout unknown", {"layout": "bnhd"}, ValueError, "layout", "bnhd"),
    refused("ATT-5", "a layout no name", {"layout": None}, TypeError, "layout", "None"),
    refused("ATT-7", "return_lse a number", {"return_lse": 1}, TypeError, "return_lse", "1"),
    refused("ATT-12", "causal a number", {"causal": 1}, TypeError, "causal", "1"),
    refused("ATT-12", "causal None", {"causal": None}, TypeError, "causal", "None"),
    refused("ATT-13", "scale NaN", {"scale": float("nan")}, ValueError, "scale", "nan"),
    refused("ATT-13", "scale infinity", {"scale": -np.inf}, ValueError, "scale", "inf"),
    refused("ATT-13", "scale beyond any float", {"scale": 10**400}, ValueError, "scale"),
    refused("ATT-13", "scale beyond float32", lambda s: {"scale": 1e39, **dict(zip("qkv", (
            of(x, s, "float32") for x in (Q, K, V)), strict=True))}, ValueError, "scale",
            "float32"),
    refused("ATT-13", "scale a bool", {"scale": True}, TypeError, "scale", "True"),
    refused("ATT-13", "scale a word", {"scale": "auto"}, TypeError, "scale", "auto"),
    refused("ATT-13", "scale complex", {"scale": 1j}, TypeError, "scale", "1j"),
    refused("ATT-13", "scale per head", {"scale": np.ones(4)}, TypeError, "scale"),
    refused("ATT-13", "scale an array of another library", lambda s: {"scale": Unreadable(())},
            TypeError, "scale"),
]  # fmt: skip

TOKENS = [
    refused("ATT-15", "lengths that differ", arrays("q", (2, 4, 4, 3)), ValueError, "q_offset=2",
            "q_offset=0", "4", "6"),
    refused("ATT-15", "lengths that differ, k_offset", lambda s: {"q": of((2, 4, 4, 3), s),
            "k_offset": 10}, ValueError, "q_offset=12", "q_offset=10"),
    refused("ATT-15", "a float offset", {"k_offset": 2.0}, TypeError, "k_offset", "2.0"),
    refused("ATT-15", "a bool offset", {"q_offset": True}, TypeError, "q_offset", "True"),
    refused("ATT-15", "a word", {"q_offset": "end"}, TypeError, "q_offset", "end"),
    refused("ATT-15", "k_offset None", {"k_offset": None}, TypeError, "k_offset", "None"),
    refused("ATT-15", "float offsets", {"q_offset": np.ones(2)}, TypeError, "q_offset", "float64"),
    refused("ATT-15", "own float offsets", numbers("q_offset", [1.0, 2.0], "float32"), TypeError,
            "q_offset", "float32"),
    refused("ATT-15", "own bools", lambda s: {"k_offset": of(2, s) > 0}, TypeError, "k_offset",
            "bool"),
    refused("ATT-15", "bools among offsets", {"k_offset": [True, 1]}, TypeError, "k_offset",
            "True"),
    refused("ATT-15", "offsets of another batch", {"k_offset": [1, 2, 3]}, ValueError, "k_offset",
            "2 ints", "3"),
    refused("ATT-15", "own offsets of another batch", numbers("q_offset", [1, 2, 3], "int32"),
            ValueError, "q_offset", "(3,)"),
    refused("ATT-15", "offsets without batch", lambda s: {"q": of(Q[1:], s), "k": of(K[1:], s),
            "v": of(V[1:], s), "k_offset": [1, 2]}, ValueError, "k_offset", "batch"),
    refused("ATT-15", "an offset of 2^30", {"q_offset": 2**30}, ValueError, "q_offset", "2**30"),
    refused("ATT-15", "an offset of -2^30", {"k_offset": -(2**30)}, ValueError, "k_offset",
            "2**30"),
    refused("ATT-15", "one offset of 2^30", {"k_offset": [0, 2**30]}, ValueError, "k_offset"),
    refused("ATT-16", "queries beyond the axis", {"q_offset": 2**30 - 5}, ValueError, "q_offset",
            "2**30", "6"),
    refused("ATT-16", "keys beyond the axis", {"k_offset": [0, 2**30 - 1], "q_offset": 0},
            ValueError, "k_offset", "2**30"),
    refused("ATT-16", "keys before every block", LSH | {"k_offset": -1, "q_offset": 0}, ValueError,
            "k_offset", "blocks", "-1"),
    refused("ATT-16", "queries before every block", LSH | {"k_offset": 0, "q_offset": -1},
            ValueError, "q_offset", "blocks", "-1"),
    refused("ATT-16", "keys past the partitions", {"method": BLOCKS, "k_offset": 1, "q_offset": 0},
            ValueError, "[0, 6)"),
    refused("ATT-16", "queries past the partitions", {"method": BLOCKS, "q_offset": 1}, ValueError,
            "[0, 6)", "add one number"),
    refused("ATT-16", "a visible token among padding", lambda s: LSH | {"k_offset": -2,
            "segment_ids": np.array([[-1, 0, 0, 0, 0, 0]] * 2)}, ValueError, "blocks",
            "negative segment_ids", needs=("kind:numpy",)),
    refused("ATT-19", "a list of ids", {"segment_ids": [[0] * 6] * 2}, TypeError, "segment_ids"),
    refused("ATT-19", "three arrays", {"segment_ids": (ROWS, ROWS, ROWS)}, TypeError,
            "segment_ids"),
    refused("ATT-19", "half a pair", lambda s: {"segment_ids": (of((2, 6), s, "int32"), None)},
            TypeError, "segment_ids", "pair"),
    refused("ATT-19", "ids of another kind", lambda s: {"segment_ids": alien(s, (2, 6), "int32")},
            TypeError, "segment_ids", "like q"),
    refused("ATT-19", "float ids", ids(ROWS, "float32"), TypeError, "segment_ids", "float32"),
    refused("ATT-19", "bool ids", lambda s: {"segment_ids": of((2, 6), s) > 0}, TypeError,
            "segment_ids", "bool"),
    refused("ATT-19", "uint64 ids", ids(ROWS, "uint64"), TypeError, "segment_ids", "uint64"),
    refused("ATT-19", "ids of another batch", ids(ROWS[:1]), ValueError, "segment_ids", "(2, 6)",
            "(1, 6)"),
    refused("ATT-19", "ids of another length", ids(ROWS[:, 1:]), ValueError, "segment_ids",
            "(2, 5)"),
    refused("ATT-19", "ids without batch", ids(ROWS[0]), ValueError, "segment_ids", "(6,)"),
    refused("ATT-19", "ids with a batch too many", lambda s: {"q": of(Q[1:], s), "k": of(K[1:], s),
            "v": of(V[1:], s), **ids(ROWS[:1])(s)}, ValueError, "segment_ids", "(1, 6)"),
    refused("ATT-19", "one array for two lengths", lambda s: {"q": of((2, 4, 4, 3), s),
            "q_offset": 0, **ids(ROWS)(s)}, ValueError, "segment_ids", "queries", "(2, 4)"),
    *(
        refused("ATT-23", keyword, {keyword: 0.5}, TypeError, keyword, why)
        for keyword, why in (
            ("dropout_p", "n x n"), ("dropout", "n x n"), ("attn_mask", "n x n"),
            ("mask", "n x n"), ("bias", "n x n"), ("attn_bias", "n x n"), ("softcap", "softcap"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", [*ARRAYS, *OPTIONS, *TOKENS])
def test_wrong_argument_is_refused_alike_by_every_backend(case, subject):
    arguments = right_call(subject) | case.change(subject)
    idle, errors = Recorder(), set()
    with registered(idle):
        for name in (subject.name, "reference", idle.name):
            for function, more in ((attention, ()), (attention_vjp, (None, None))):
                if more and "return_lse" in arguments:
                    continue
                operands = (arguments[name] for name in "qkv")
                options = {x: y for x, y in arguments.items() if x not in ("q", "k", "v")}
                with pytest.raises(case.error) as caught:
                    function(*operands, *more, backend=name, **options)
                errors.add((type(caught.value), str(caught.value)))
    ((error, message),) = errors
    assert error is case.error
    assert all(word in message for word in case.words), message
    assert not idle.asked


@pytest.mark.requirement("ERR-2", "ATT-2")
def test_the_call_that_is_changed_is_right(subject):
    assert subject.attention(**right_call(subject)).shape == (2, 4, 6, 5)


@pytest.mark.requirement("ATT-24", "CNV-7")
def test_options_are_given_by_name(subject):
    call = right_call(subject)
    with pytest.raises(TypeError):
        attention(call["q"], call["k"], call["v"], call["method"])


@pytest.mark.requirement("ATT-22")
def test_no_name_means_the_backend_of_the_arrays_else_the_reference(subject):
    call = right_call(subject)
    own, general = Recorder(name=subject.kind.replace("-", "_")), Recorder(name="reference")
    own.name = subject.kind if subject.kind.isidentifier() else own.name
    only = registered(own, general, without=(own.name, "reference"))
    with only, pytest.raises(AssertionError, match="must not be asked"):
        attention(**call)
    kind_has_a_name = own.name == subject.kind
    assert (len(own.calls), len(general.calls)) == (int(kind_has_a_name), int(not kind_has_a_name))
    only = registered(general, without=(subject.kind, "reference"))
    with only, pytest.raises(AssertionError, match="'reference' must not"):
        attention(**call)


@pytest.mark.requirement("ATT-22")
def test_a_name_is_a_demand(subject):
    recorder = Recorder(subject.backend)
    call = right_call(subject)
    with registered(recorder):
        out = attention(**call, backend=recorder.name)
    assert len(recorder.calls) == 1
    testing.assert_equal_to_rounding(out, subject.attention(**call))
    for name in (3, b"numpy", subject.backend):
        with pytest.raises(TypeError, match="backend must be a name or None"):
            attention(**call, backend=name)


@pytest.mark.requirement("ATT-22", "CNV-6", "ERR-2")
def test_a_backend_for_other_arrays_never_runs(subject):
    other = "cupy" if subject.kind != "cupy" else "torch"
    narrow = Recorder(capabilities=plsh.backend.Capabilities(arrays=(other,)))
    with registered(narrow), pytest.raises(TypeError, match=r"takes .* arrays.*q = .*k = .*v = "):
        attention(**right_call(subject), backend=narrow.name)
    assert not narrow.calls
    taken = subject.capabilities.arrays
    for kind, make in {"numpy": np.ones, "array-api": Unreadable}.items():
        if kind in taken:
            continue
        with pytest.raises(TypeError, match=r"takes .*nothing is converted implicitly"):
            attention(*(make(x) for x in (Q, K, V)), method="exact", backend=subject.name)


def vjp_call(subject, **changed):
    call = right_call(subject)
    rows = "float64" if widest(subject) == "float64" else "float32"
    out, lse = of((2, 4, 6, 5), subject), of(Q[:3], subject, rows)
    call |= {"output": (out, lse), "grad_out": out, "grad_lse": lse}
    return call | changed


VJP = {
    "output an array": (lambda s: {"output": of((2, 4, 6, 5), s)}, TypeError, "output"),
    "output without lse": (lambda s: {"output": (of((2, 4, 6, 5), s),)}, TypeError, "output"),
    "lse None": (lambda s: {"output": (of((2, 4, 6, 5), s), None)}, TypeError, "output.lse"),
    "out of another shape": (
        lambda s: {"output": (of(Q, s), vjp_call(s)["grad_lse"])}, ValueError, "output.out"),
    "lse of another shape": (
        lambda s: {"output": (of((2, 4, 6, 5), s), of((2, 6, 4), s))}, ValueError, "output.lse"),
    "out of another kind": (
        lambda s: {"output": (alien(s, (2, 4, 6, 5)), of(Q[:3], s))}, TypeError, "output.out"),
    "grad_out None": (lambda s: {"grad_out": None}, TypeError, "grad_out"),
    "grad_out a number": (lambda s: {"grad_out": 1.0}, TypeError, "grad_out"),
    "grad_out of another shape": (lambda s: {"grad_out": of(Q, s)}, ValueError, "grad_out"),
    "grad_out that broadcasts": (
        lambda s: {"grad_out": of((1, 4, 6, 5), s)}, ValueError, "grad_out"),
    "grad_out of another kind": (
        lambda s: {"grad_out": alien(s, (2, 4, 6, 5))}, TypeError, "grad_out"),
    "grad_lse of another shape": (
        lambda s: {"grad_lse": of((2, 4, 6, 1), s)}, ValueError, "grad_lse"),
    "grad_lse of another kind": (lambda s: {"grad_lse": alien(s, Q[:3])}, TypeError, "grad_lse"),
}  # fmt: skip


@pytest.mark.requirement("ATT-25", "ERR-1", "ERR-4")
@pytest.mark.parametrize("case", VJP)
def test_wrong_argument_of_attention_vjp_is_refused(case, subject):
    change, error, word = VJP[case]
    able = Recorder()
    names = {able.name} | ({subject.name} if subject.capabilities.gradients == "vjp" else set())
    with registered(able):
        for name in names:
            with pytest.raises(error, match=word) as caught:
                attention_vjp(**vjp_call(subject, **change(subject)), backend=name)
            assert type(caught.value) is error
    assert not able.calls


@pytest.mark.requirement("ATT-25", "BCK-7")
def test_attention_vjp_needs_a_declared_vjp(subject):
    for gradients, said in ((None, "no gradient"), ("autograd", "autograd")):
        declared = plsh.backend.Capabilities((subject.kind,), gradients=gradients)
        unable = Recorder(capabilities=declared)
        with registered(unable), pytest.raises(plsh.UnsupportedByBackendError, match=said):
            attention_vjp(**vjp_call(subject), backend=unable.name)
        assert not unable.calls
    if subject.capabilities.gradients != "vjp":
        with pytest.raises(plsh.UnsupportedByBackendError, match=subject.name):
            attention_vjp(**vjp_call(subject), backend=subject.name)
