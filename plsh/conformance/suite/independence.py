"""A call depends on its arguments only: on no call before it, and on none beside it."""

import sys
import threading

import numpy as np
import pytest

from plsh import attention_vjp
from plsh.backend import AttentionOutput
from plsh.conformance.suite.common import assert_same, bits, make
from plsh.partition import PartitionSet

FIRST = PartitionSet([[[0, 0, 2, 2, 2, 5]]])
SECOND = PartitionSet([[[0, 1, 1, 3, 3, 3]]])
"""Of one range, number of samples and bandwidth: as recipes they are equal."""


@pytest.mark.requirement("NUM-11", "MTH-6", "BCK-13")
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
def test_partitions_of_equal_form_are_told_apart(subject):
    problem = make(subject, 6, method="set", batch=1, heads=1, kv_heads=1).but(slopes=None)
    for blocks in (FIRST, SECOND, FIRST):
        problem.but(method=blocks).check(subject)


@pytest.mark.requirement("NUM-11", "ATT-9", "ATT-13")
@pytest.mark.parametrize("method", ["exact", "window"])
def test_operands_and_options_of_the_last_call_are_forgotten(method, subject):
    problem = make(subject, 20, method=method, batch=1)
    for changes in (
        {},
        {"slopes": (0.03125, 0.5, 0.0, 0.125)},
        {"q_offset": 7, "k_offset": 3},
        {"scale": -0.25},
        {"causal": True},
        {},
    ):
        problem.but(**changes).check(subject)


@pytest.mark.requirement("NUM-11", "BCK-11", "ATT-25")
@pytest.mark.needs("vjp")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_gradients_are_of_the_output_that_is_given(method, subject):
    """Two layers of a network: forward, forward, backward, backward."""
    layers = [make(subject, 40, method=method, seed=seed) for seed in (1, 2)]
    expected = [layer.gradients(subject) for layer in layers]
    arrays = [layer.arrays(subject) for layer in layers]
    outputs = [
        subject.attention(*x, return_lse=True, **layer.keywords(subject))
        for x, layer in zip(arrays, layers, strict=True)
    ]
    for i in (1, 0):
        found = attention_vjp(
            *arrays[i],
            outputs[i],
            *layers[i].cotangents(subject),
            backend=subject.name,
            **layers[i].keywords(subject),
        )
        own = tuple(None if x is None else subject.host(x) for x in found)
        assert_same(subject, layers[i].dtype, own, tuple(expected[i]))


@pytest.mark.requirement("NUM-11", "MEM-2")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_calls_beside_one_another_keep_their_options(method, subject):
    calls = [
        make(subject, 256, method=method, batch=1, seed=i, **options)
        for i, options in enumerate(
            ({"scale": 0.1}, {"scale": 1.0, "causal": True}, {"scale": -0.5, "q_offset": 9})
        )
    ]
    expected = [call.output(subject) for call in calls]
    grads = [call.gradients(subject) if subject.differentiates else None for call in calls]
    faults: list[BaseException] = []
    ready = threading.Barrier(len(calls))

    def work(i: int) -> None:
        try:
            ready.wait()
            for _ in range(3):
                bits(subject, calls[i].output(subject), expected[i])
                if subject.differentiates:
                    bits(subject, calls[i].gradients(subject), grads[i])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if faults:
        raise faults[0]


@pytest.mark.requirement("NUM-11", "BCK-10")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_an_output_stays_as_it_was_given(method, subject):
    problem = make(subject, 33, method=method)
    inputs, keywords = problem.arrays(subject), problem.keywords(subject)
    held = subject.attention(*inputs, return_lse=True, **keywords)
    before = AttentionOutput(*(np.array(subject.host(x)) for x in held))
    make(subject, 33, method=method, seed=5).output(subject)
    make(subject, 65, method=method, seed=6).output(subject)
    for x, y in zip(held, before, strict=True):
        assert np.array_equal(subject.host(x), y)
