"""The tests of the suite: one module a chapter or subject, run by ``plsh conformance``."""
