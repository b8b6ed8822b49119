"""Tools for tests of backends: seeded inputs, the float64 oracle, and measured assertions."""

from .asserts import (
    BACKWARD,
    FORWARD,
    Measured,
    PlainResult,
    assert_attention_close,
    assert_equal_to_rounding,
    assert_gradients_close,
    assert_identical,
    assert_output_close,
    plain_attention,
)
from .harness import double_precision, harness_for
from .inputs import AttentionInputs, make_inputs, round_to
from .oracle import OracleResult, decay_weight, oracle, step_weight, visibility

__all__ = [
    "BACKWARD",
    "FORWARD",
    "AttentionInputs",
    "Measured",
    "OracleResult",
    "PlainResult",
    "assert_attention_close",
    "assert_equal_to_rounding",
    "assert_gradients_close",
    "assert_identical",
    "assert_output_close",
    "decay_weight",
    "double_precision",
    "harness_for",
    "make_inputs",
    "oracle",
    "plain_attention",
    "round_to",
    "step_weight",
    "visibility",
]
