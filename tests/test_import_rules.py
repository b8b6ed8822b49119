"""Who may import whom: design rules read from the source, not from a running process."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FRAMEWORKS = {"torch", "jax", "jaxlib", "cupy", "triton", "flax", "transformers", "tensorflow"}
PUBLIC = {
    "plsh",
    "plsh.backend",
    "plsh.compat",
    "plsh.partition",
    "plsh.testing",
    "plsh.testing.harness_for",
    "plsh.theory",
    "plsh.tiles",
    "plsh.weights",
}
DRIVERS = ("plsh.testing.harness", "plsh.conformance.suite", "plsh.bench.peers", "plsh.study")
"""Drive the arrays of each framework, and import it inside the functions that do."""
MATHS = {
    "plsh.alibi",
    "plsh.hashing",
    "plsh.methods",
    "plsh.partition",
    "plsh.reduction",
    "plsh.segments",
    "plsh.theory",
    "plsh.tiles",
    "plsh.validation",
    "plsh.weights",
}


def module_name(path: pathlib.Path, root: pathlib.Path) -> str:
    """Return the dotted name of a source file under a source root."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """Return the absolute names that a module imports, at the top or inside a function.

    ``from a import b`` gives a.b as well as a, since b may be a module.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, node.module] if node.module else parts)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in _LOADERS
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


_LOADERS = {"import_module", "__import__"}


def violations(module: str, imported: set[str], modules: set[str]) -> list[str]:
    """Return the rules that a module breaks by what it imports; `modules` are those that exist."""
    broken = []
    roots = {name.partition(".")[0] for name in imported}
    ours = {name for name in imported if name in modules}
    third = "array_api_compat" in roots
    if third and module != "plsh.compat":
        broken.append("only plsh.compat imports array_api_compat")
    if module.startswith("plsh.") or module == "plsh":
        backends = sorted(r for r in roots if r.startswith("plsh_"))
        if backends:
            broken.append(f"plsh imports no backend, found {backends}")
        if roots & FRAMEWORKS and not module.startswith(DRIVERS):
            broken.append(f"plsh imports no framework, found {sorted(roots & FRAMEWORKS)}")
    if module in MATHS and ours & {"plsh.registry", "plsh.reference", "plsh.attention", "plsh.cli"}:
        broken.append("core maths imports neither the registry nor anything above it")
    if module == "plsh.testing.oracle" and ours:
        broken.append(f"the oracle imports nothing of plsh, found {sorted(ours)}")
    if module.startswith("plsh_"):
        package = module.partition(".")[0]
        others = sorted(r for r in roots if r.startswith("plsh_") and r != package)
        if others:
            broken.append(f"a backend imports no other, found {others}")
        private = sorted(n for n in ours if n.partition(".")[0] == "plsh" and n not in PUBLIC)
        if private:
            broken.append(f"a backend imports public names only, found {private}")
    return broken


def tree() -> dict[str, tuple[str, bool]]:
    """Return source and whether it is a package, of every module of the distribution."""
    found = {}
    for root, packages in ((ROOT, ["plsh"]), (ROOT / "backends", ["plsh_*"])):
        for pattern in packages:
            for package in sorted(root.glob(pattern)):
                for path in sorted(package.rglob("*.py")):
                    name = module_name(path, root)
                    found[name] = (path.read_text(encoding="utf-8"), path.name == "__init__.py")
    return found


TREE = tree()


@pytest.mark.parametrize("module", TREE)
def test_module_imports_only_what_it_may(module):
    source, is_package = TREE[module]
    assert violations(module, imports(source, module, is_package), set(TREE)) == []


def test_no_module_under_backends_hides_a_framework():
    """A package named torch there would shadow the real one, since backends/ is a source root."""
    names = {path.stem for path in (ROOT / "backends").iterdir()}
    assert not names & (FRAMEWORKS | set(sys.stdlib_module_names))
    assert not (ROOT / "backends" / "__init__.py").exists()


def test_the_tree_was_read():
    assert {"plsh", "plsh.reference", "plsh.testing.oracle", "plsh.cli"} <= set(TREE)
    assert set(TREE) >= MATHS


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("plsh.hashing", "from . import registry", "core maths imports neither"),
        ("plsh.weights", "from .registry import find", "core maths imports neither"),
        ("plsh.reduction", "def f():\n    import torch", "plsh imports no framework"),
        ("plsh.reference", "import jax.numpy as jnp", "plsh imports no framework"),
        ("plsh.cli.demo", "from plsh_numpy import BACKEND", "plsh imports no backend"),
        ("plsh.cli.demo", "import importlib\nimportlib.import_module('cupy')", "no framework"),
        ("plsh.segments", "from array_api_compat import device", "only plsh.compat imports"),
        ("plsh_numpy", "import array_api_compat.numpy", "only plsh.compat imports"),
        ("plsh.testing.oracle", "from ..hashing import words", "the oracle imports nothing"),
        ("plsh.testing.oracle", "from plsh import alibi_slopes", "the oracle imports nothing"),
        ("plsh.testing.oracle", "from . import inputs", "the oracle imports nothing"),
        ("plsh_torch.ops", "from plsh.registry import find", "public names only"),
        ("plsh_torch.ops", "from plsh import validation", "public names only"),
        ("plsh_torch", "from plsh_numpy._band import tile", "a backend imports no other"),
    ],
)
def test_rules_can_fail(module, source, rule):
    """The check of the checks: each rule is broken once and seen."""
    known = set(TREE) | {module}
    broken = violations(module, imports(source, module, is_package=False), known)
    assert any(rule in text for text in broken), broken


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plsh.compat", "import array_api_compat"),
        ("plsh.attention", "from . import compat, registry"),
        ("plsh_torch.ops", "import torch\nfrom plsh.backend import Request\nfrom . import _band"),
        ("plsh_torch.ops", "from plsh import UnsupportedByBackendError\nfrom plsh import compat"),
    ],
)
def test_rules_allow_what_they_should(module, source):
    assert violations(module, imports(source, module, is_package=False), set(TREE)) == []
