"""The public names: which there are, their arguments in order with defaults, and their docs."""

import dataclasses
import inspect
import pickle
import re

import numpy as np
import pytest

import plsh

REQUIRED = inspect.Parameter.empty
KEYWORDS = {
    "method": "lsh",
    "slopes": None,
    "causal": False,
    "scale": None,
    "q_offset": None,
    "k_offset": 0,
    "segment_ids": None,
    "layout": "bhsd",
}

# Per callable: (positional parameters, keyword-only parameters), each with its default.
SIGNATURES = {
    "attention": (
        {"q": REQUIRED, "k": REQUIRED, "v": REQUIRED},
        KEYWORDS | {"return_lse": False, "backend": None},
    ),
    "attention_vjp": (
        {
            "q": REQUIRED,
            "k": REQUIRED,
            "v": REQUIRED,
            "output": REQUIRED,
            "grad_out": REQUIRED,
            "grad_lse": None,
        },
        KEYWORDS | {"backend": None},
    ),
    "Exact": ({}, {}),
    "Window": ({"width": None}, {"tol": None}),
    "PositionalLSH": (
        {"samples": 16},
        {"sampler": "stratified", "seed": 0, "family": None, "head_ids": None},
    ),
    "RandomBinning": ({"sigma": REQUIRED}, {}),
    "PowerLawBinning": ({"r1": REQUIRED, "r2": REQUIRED}, {}),
    "IndependentCuts": ({"sigma": REQUIRED}, {}),
    "FixedBlocks": ({"width": REQUIRED}, {}),
    "alibi_slopes": ({"heads": REQUIRED, "max_bias": 8.0}, {}),
    "segments_from_lengths": ({"lengths": REQUIRED, "n": REQUIRED}, {}),
    "AttentionOutput": ({"out": REQUIRED, "lse": REQUIRED}, {}),
    "Gradients": ({"q": REQUIRED, "k": REQUIRED, "v": REQUIRED, "slopes": REQUIRED}, {}),
    "merge": ({"outputs": REQUIRED}, {"layout": "bhsd"}),
    "backends": ({}, {}),
    "register_backend": ({"backend": REQUIRED}, {}),
}

OTHERS = {
    "Partition",
    "PartitionSet",
    "reduction",
    "theory",
    "BackendUnavailableError",
    "UnknownBackendError",
    "UnsupportedByBackendError",
    "__version__",
}


def signature(function):
    """Return ({positional: default}, {keyword-only: default}); ``**refused`` left out."""
    positional, keyword = {}, {}
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            positional[p.name] = p.default
        elif p.kind is p.KEYWORD_ONLY:
            keyword[p.name] = p.default
        else:
            assert (p.kind, p.name) == (p.VAR_KEYWORD, "refused")
    return positional, keyword


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_pinned(name):
    positional, keyword = signature(getattr(plsh, name))
    expected_positional, expected_keyword = SIGNATURES[name]
    assert list(positional.items()) == list(expected_positional.items())
    assert list(keyword.items()) == list(expected_keyword.items())


def test_sample_of_a_family_is_pinned():
    positional, keyword = signature(plsh.RandomBinning.sample)
    assert positional == {"self": REQUIRED, "samples": REQUIRED, "n": REQUIRED}
    assert list(keyword.items()) == [
        ("start", 0),
        ("seed", 0),
        ("sampler", None),
        ("head_ids", None),
    ]


def test_all_lists_the_public_names_and_no_other():
    assert set(plsh.__all__) == set(SIGNATURES) | OTHERS
    assert plsh.__all__ == sorted(plsh.__all__)
    modules = {n for n in vars(plsh) if inspect.ismodule(getattr(plsh, n))}
    visible = {n for n in vars(plsh) if not n.startswith("_")} - modules
    assert visible == {n for n in plsh.__all__ if n != "__version__"} - modules


def test_theory_names_are_there():
    assert set(plsh.theory.__all__) >= {
        "psi",
        "spectral_error_bound",
        "samples_for",
        "block_size_bound",
        "output_error_bound",
        "window_width",
        "truncation_error_bound",
    }


def test_partition_members_are_there():
    partition = plsh.Partition(0, 4, [0, 2, 4])
    members = {n for n in dir(partition) if not n.startswith("_")}
    assert members == {"start", "stop", "edges", "labels", "sizes", "mask", "intersect"}
    table = plsh.RandomBinning(4.0).sample(2, 8)
    members = {n for n in dir(table) if not n.startswith("_")}
    assert members >= {"heads", "samples", "start", "stop", "labels", "bandwidth", "mean_mask"}
    assert isinstance(table[0, 1], plsh.Partition)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (plsh.UnknownBackendError, ValueError),
        (plsh.BackendUnavailableError, ImportError),
        (plsh.UnsupportedByBackendError, NotImplementedError),
    ],
)
def test_errors_are_of_their_builtin_kinds(error, base):
    assert error.__bases__ == (base,)


# --- values: hash, compare, pickle, print, and can't be changed ---

VALUES = [
    plsh.Exact(),
    plsh.Window(7),
    plsh.Window([1, 2]),
    plsh.Window(np.array([1, 2])),
    plsh.Window(tol=1e-3),
    plsh.PositionalLSH(8, seed=(1, 2), head_ids=[3, 4]),
    plsh.PositionalLSH(8, sampler=None, family=plsh.FixedBlocks(8)),
    plsh.RandomBinning(np.array([1.0, 2.0])),
    plsh.PowerLawBinning(1.5, [0.1, 0.2]),
    plsh.IndependentCuts(float("inf")),
    plsh.FixedBlocks(8),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_method_is_a_frozen_value(value):
    names = vars(plsh)
    again = eval(repr(value), {n: names[n] for n in plsh.__all__} | {"inf": float("inf")})
    for copy in (again, pickle.loads(pickle.dumps(value)), dataclasses.replace(value)):
        assert copy == value
        assert hash(copy) == hash(value)
    assert not hasattr(value, "__dict__")
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, 1)
    with pytest.raises((AttributeError, TypeError)):
        value.another = 1


def test_different_values_differ():
    assert len(set(VALUES)) == len(VALUES) - 1  # the two ways to write widths 1, 2


# --- docs ---

PUBLIC = {n: getattr(plsh, n) for n in plsh.__all__ if n not in {"__version__", "theory"}}
PUBLIC |= {f"theory.{n}": getattr(plsh.theory, n) for n in plsh.theory.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_its_sections_and_names_a_requirement(name):
    thing = PUBLIC[name]
    doc = inspect.getdoc(thing)
    assert doc
    assert re.search(r"Spec: [A-Z]{3}-\d+", doc), "no requirement is named"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return
    parameters = [n for n in inspect.signature(thing).parameters if n not in {"refused", "kwargs"}]
    assert "Examples\n--------\n>>> " in doc or "Examples\n--------\n" in doc
    assert ">>> " in doc
    if parameters:
        assert "Parameters\n----------\n" in doc
        section = doc.partition("Parameters\n----------\n")[2].partition("\n\n")[0]
        named = set(re.findall(r"\w+", " ".join(re.findall(r"^(\S.*?)(?: :|$)", section, re.M))))
        assert set(parameters) <= named, set(parameters) - named
    returns = inspect.signature(thing).return_annotation
    if inspect.isfunction(thing) and returns not in (None, "None"):
        assert "Returns\n-------\n" in doc


def test_attention_says_honestly_what_each_method_is_for():
    """The second sentence of its docstring: the window is the better approximation of ALiBi."""
    body = inspect.getdoc(plsh.attention).split("\n\n")[1]
    assert 'method ``"window"`` beats ``"lsh"`` at equal arithmetic' in body
