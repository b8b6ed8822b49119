"""Faulty backends, to test the conformance suite: each is the model with one realistic fault.

A mutant is `plsh.testing.model.ModelBackend` with a method overridden by what kernels get wrong.
The suite must fail for each, in quick mode, with every one of the requirements that it names.
"""

from . import _calls, _contract, _gradients, _kernel, _weights
from ._mutant import KINDS, Mutant

__all__ = ["KINDS", "MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(
        (
            *_weights.MUTANTS,
            *_kernel.MUTANTS,
            *_gradients.MUTANTS,
            *_contract.MUTANTS,
            *_calls.MUTANTS,
        ),
        key=lambda one: KINDS.index(one.kind),
    )
)
"""All of them, kind by kind."""
