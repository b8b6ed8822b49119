"""The edges of causality and of widths at every alignment that a tile may have."""

import itertools

import numpy as np
import pytest

from plsh.conformance.suite.common import assert_same, join, make, rows
from plsh.methods import Window

TILES = (16, 32, 48, 64, 96, 128, 256)
EDGES = sorted({edge for tile in TILES for edge in (tile - 2, tile - 1, tile, tile + 1)})


@pytest.mark.requirement("ATT-12", "ATT-18")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_a_query_sees_no_key_that_was_written_ahead(method, subject):
    """Decoding against a buffer of keys that is filled further than the query."""
    whole = make(subject, 300, method=method, batch=1, causal=True)
    expected = whole.output(subject)
    for at in EDGES:
        query = slice(at, at + 1)
        got = whole.cut(queries=query).output(subject)
        assert_same(subject, whole.dtype, got, rows(expected, query))
        prefix = whole.cut(queries=query, keys=slice(0, at + 1)).output(subject)
        assert_same(subject, whole.dtype, got, prefix)


@pytest.mark.requirement("ATT-12", "ATT-14")
@pytest.mark.parametrize("method", ["exact", "window"])
@pytest.mark.parametrize("edge", [tile + d for tile in (16, 32, 64) for d in (-2, -1, 0, 1)])
def test_causality_is_exact_where_tiles_of_queries_and_keys_are_apart(method, edge, subject):
    problem = make(subject, 4, 130, method=method, batch=1, causal=True, q_offset=edge)
    problem.check(subject)


@pytest.mark.requirement("MTH-2", "MEM-3")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_width_ends_where_it_says_at_every_edge_of_a_tile(causal, subject):
    """With q = 0 and one-hot values, a row of the output is the row of weights."""
    problem = make(subject, 300, method="window", batch=1, heads=4, kv_heads=4, causal=causal)
    flat = problem.but(q=0 * problem.q, slopes=(0.0,) * 4, v=np.ones_like(problem.v))
    apart = np.arange(300)[:, None] - np.arange(300)[None, :]
    for part in range(0, len(EDGES), 4):
        widths = (EDGES[part : part + 4] + EDGES)[:4]
        got = flat.but(method=Window(tuple(widths))).output(subject)
        seen = [(np.abs(apart) <= w) & ((apart >= 0) | (not causal)) for w in widths]
        counts = np.array([s.sum(axis=1) for s in seen])
        found = np.exp(got.lse[0].astype(np.float64))
        assert np.array_equal(np.rint(found), counts), widths


@pytest.mark.requirement("ATT-18", "MEM-3")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_cuts_at_the_edges_of_tiles_change_nothing(method, causal, subject):
    whole = make(subject, 200, method=method, batch=1, causal=causal)
    cuts = [0, 14, 15, 62, 63, 65, 127, 190, 200]
    parts = [whole.cut(queries=slice(a, b)).output(subject) for a, b in itertools.pairwise(cuts)]
    assert_same(subject, whole.dtype, join(parts), whole.output(subject))
