"""Tools for tests of backends."""
