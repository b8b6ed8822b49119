"""The conformance suite: whether a backend does what the standard says, requirement by requirement.

``plsh conformance NAME``, or ``python -m plsh.conformance NAME``, tests a registered backend;
`plsh.conformance.runner.run` does it from Python. It needs the extra ``conformance``.
"""
