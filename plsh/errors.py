"""The errors of the library: four outcomes of naming a backend, four types.

Bad arguments raise ``TypeError`` or ``ValueError`` before any backend is asked, so they read the
same whichever backend would have run.
"""

__all__ = ["BackendUnavailableError", "UnknownBackendError", "UnsupportedByBackendError"]


class UnknownBackendError(ValueError):
    """No backend of that name is registered. Spec: ERR-1."""


class BackendUnavailableError(ImportError):
    """The backend is registered and cannot be used here; its cause is chained. Spec: ERR-1."""


class UnsupportedByBackendError(NotImplementedError):
    """The backend works and cannot serve this call. Spec: ERR-1."""
