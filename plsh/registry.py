"""The backends: found by entry points ``plsh.backends``, chosen by name or by the arrays.

Entry points are read once, when the package is imported. First-party backends load then, so that
a call neither scans nor imports; others load on first use. A backend that fails to load never
breaks the others: the failure is kept, listed, and chained to the error of whoever names it.
"""

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from .backend import SPEC_VERSION, Availability, Backend, Capabilities, Request
from .errors import BackendUnavailableError, UnknownBackendError, UnsupportedByBackendError

__all__ = ["BackendInfo", "backends", "register_backend"]

GROUP = "plsh.backends"
_METHODS = ("availability", "capabilities", "can_run", "attend", "harness")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A row of `backends`.

    Attributes
    ----------
    name : str
    available : bool
    reason : str
        Why it is not available; "" if it is.
    capabilities : Capabilities or None
        What it declares; None where it could not be loaded.
    """

    name: str
    available: bool
    reason: str
    capabilities: Capabilities | None


@dataclass(slots=True)
class _Entry:
    """A registered name: an entry point, and what loading it gave."""

    point: EntryPoint | None = None
    backend: Backend | None = None
    failure: BaseException | None = None

    def load(self) -> Backend | None:
        """Load once; a failure is remembered and not retried."""
        if self.backend is None and self.failure is None and self.point is not None:
            try:
                loaded = self.point.load()
                _check_backend(loaded, self.point.name)
                self.backend = loaded
            except Exception as error:  # any fault of a plug-in: ImportError, OSError, …
                self.failure = error
        return self.backend


_REGISTRY: dict[str, _Entry] = {}


def _is_first_party(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "plsh"


def _owner(point: EntryPoint) -> str:
    return "an unnamed distribution" if point.dist is None else point.dist.name


def discover(points: Iterable[EntryPoint]) -> dict[str, _Entry]:
    """Build the registry of entry points. Of two with one name ours wins, else the first by name.

    One entry point seen twice (a stale ``egg-info`` beside the installed one) counts once.
    """
    found: dict[str, _Entry] = {}
    ranked = sorted(points, key=lambda p: (p.name, not _is_first_party(p), _owner(p), p.value))
    for point in ranked:
        held = found.setdefault(point.name, _Entry(point))
        if held.point is not None and held.point.value != point.value:
            warnings.warn(
                f"backend {point.name!r} is registered by {_owner(held.point)} and by "
                f"{_owner(point)}; the first is used",
                RuntimeWarning,
                stacklevel=2,
            )
    for entry in found.values():
        # A backend whose own import brought plsh in is half made yet: it loads on first use.
        own = entry.point
        if own is not None and _is_first_party(own) and own.module not in sys.modules:
            entry.load()
    return found


def register_backend(backend: Backend) -> None:
    """Register a backend object under its name, for this process.

    Parameters
    ----------
    backend : Backend
        An object with the methods of `plsh.backend.Backend`. Installed packages use an entry point
        of group ``plsh.backends`` instead; what such an entry point gives may be registered again.

    Raises
    ------
    TypeError
        A part of the contract is missing.
    ValueError
        Another backend of that name is registered.

    Notes
    -----
    Spec: BCK-2.

    Examples
    --------
    >>> register_backend(object())
    Traceback (most recent call last):
        ...
    TypeError: backend.name must be an identifier, got None
    """
    _check_backend(backend, None)
    held = _REGISTRY.get(backend.name)
    if held is None:
        _REGISTRY[backend.name] = _Entry(backend=backend)
    elif held.load() is not backend:
        raise ValueError(f"backend {backend.name!r} is registered already; take another name")


def _check_backend(backend: object, expected: str | None) -> None:
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"backend.name must be an identifier, got {name!r}")
    if expected is not None and name != expected:
        raise TypeError(f"backend.name must equal its entry point's {expected!r}, got {name!r}")
    missing = [m for m in _METHODS if not callable(getattr(backend, m, None))]
    if not isinstance(getattr(backend, "spec_version", None), str):
        missing.append("spec_version")
    if missing:
        raise TypeError(f"backend {name!r} lacks {', '.join(missing)} of plsh.backend.Backend")
    declared = backend.capabilities()  # type: ignore[attr-defined]
    if not isinstance(declared, Capabilities):
        raise TypeError(f"backend {name!r} must declare a Capabilities, got {declared!r}")
    if declared.gradients == "vjp" and not callable(getattr(backend, "vjp", None)):
        raise TypeError(f"backend {name!r} declares gradients 'vjp' and lacks the method vjp")


def availability(backend: Backend) -> Availability:
    """Ask a backend whether it can be used; another major of the spec is a reason not to."""
    theirs, ours = backend.spec_version.partition(".")[0], SPEC_VERSION.partition(".")[0]
    if theirs != ours:
        return Availability(
            False,
            f"it implements spec {backend.spec_version}, plsh has {SPEC_VERSION}; "
            f"install a {backend.name} backend for spec {ours}",
        )
    try:
        state = backend.availability()
        if not isinstance(state, Availability):
            raise TypeError(f"it must return an Availability, got {state!r}")
        return state
    except Exception as error:  # the contract forbids it, and a plug-in must not break the list
        return Availability(False, f"its availability() raises {error!r}", error)


def backends() -> list[BackendInfo]:
    """List the registered backends: name, whether usable here, why not, capabilities.

    Returns
    -------
    list of BackendInfo
        By name. Loads the backends that are not loaded yet, and no framework.

    Notes
    -----
    Spec: BCK-3.

    Examples
    --------
    >>> [b.available for b in backends() if b.name == "reference"]
    [True]
    """
    rows = []
    for name in sorted(_REGISTRY):
        entry = _REGISTRY[name]
        backend = entry.load()
        if backend is None:
            rows.append(BackendInfo(name, False, f"it fails to load: {entry.failure!r}", None))
            continue
        state = availability(backend)
        rows.append(BackendInfo(name, state.ok, state.reason, backend.capabilities()))
    return rows


def find(name: str | None, kind: str) -> Backend:
    """Return the backend of that name, or for None the one for a kind of arrays.

    A kind without a backend of its own goes to ``reference``, which takes any array.
    """
    if name is None:
        name = kind if kind in _REGISTRY else "reference"
    elif not isinstance(name, str):
        raise TypeError(f"backend must be a name or None, got {name!r}")
    entry = _REGISTRY.get(name)
    if entry is None:
        raise UnknownBackendError(_unknown(name))
    backend = entry.load()
    if backend is None:
        raise BackendUnavailableError(
            f"backend {name!r} is registered and fails to load: {entry.failure!r}; "
            "mend or uninstall the package that provides it"
        ) from entry.failure
    state = availability(backend)
    if not state.ok:
        raise BackendUnavailableError(
            f"backend {name!r} is not available: {state.reason}"
        ) from state.cause
    return backend


def _unknown(name: str) -> str:
    if not _REGISTRY:
        return (
            f"no backend {name!r}: none is registered, so plsh is not installed (running from a "
            "source tree?); pip install -e ."
        )
    return f"no backend {name!r}; registered: {', '.join(sorted(_REGISTRY))}"


def require(backend: Backend, request: Request) -> None:
    """Raise unless the backend declares and accepts the request."""
    reason = _refusal(backend, request)
    if reason is None:
        return
    able = [
        name
        for name, entry in sorted(_REGISTRY.items())
        if entry.backend is not None
        and entry.backend is not backend
        and _undeclared(entry.backend, request) is None
    ]
    who = f"able to: {', '.join(able)}" if able else "no other loaded backend declares it either"
    raise UnsupportedByBackendError(f"backend {backend.name!r} can't run this: {reason}; {who}")


def _refusal(backend: Backend, request: Request) -> str | None:
    reason = _undeclared(backend, request) or backend.can_run(request)
    if reason is not None and not isinstance(reason, str):
        raise TypeError(
            f"can_run of backend {backend.name!r} must return None or a reason, got {reason!r}"
        )
    return reason


def _undeclared(backend: Backend, request: Request) -> str | None:
    """Return the first thing about the request that the backend does not declare."""
    declared, static = backend.capabilities(), request.static
    if static.array_kind not in declared.arrays:
        return f"it takes {', '.join(declared.arrays)} arrays, not {static.array_kind}"
    if static.dtype not in declared.dtypes:
        return f"it has no dtype {static.dtype}"
    if static.method not in declared.methods:
        return f"it has no method {static.method!r}"
    limit = declared.max_head_dim
    if limit is not None and max(static.head_dim, static.value_dim) > limit:
        return f"head dims go up to {limit}, got {static.head_dim} and {static.value_dim}"
    return None


def load_installed() -> None:
    """Register what is installed. `plsh` does so once its own names are there to be imported."""
    _REGISTRY.update(discover(entry_points(group=GROUP)))
