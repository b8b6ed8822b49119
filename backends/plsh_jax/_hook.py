"""Tell JAX of `PartitionSet` as soon as both are there, without importing JAX.

``jax.jit(f)(partitions)`` meets the set before any function of plsh runs. So the type is registered
when plsh is imported, if JAX is there by then, else when JAX is.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_soon() -> None:
    """Register now if JAX is imported, else right after its import."""
    if sys.modules.get("jax") is not None:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from ._partitions import register

    register()


class _Finder(MetaPathFinder):
    """Finds jax as the others do, and wraps its loader; it is gone once jax is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of jax; None for every other module."""
        if name != "jax":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Registers once jax is loaded; in all else the loader that it holds."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as ever."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then register."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [x for x in sys.meta_path if not isinstance(x, _Finder)]
        _register()
