"""What is installed, built and shipped: this tree, the wheel, the sdist, a third-party backend."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import plsh

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUP = "plsh.backends"


def run(*command, cwd, path=(), **kwargs):
    """Run in a fresh process that sees `path` and none of this tree's source roots."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- this environment is this tree ---


def test_plsh_is_imported_from_this_tree():
    found = pathlib.Path(plsh.__file__).resolve()
    assert found.is_relative_to(ROOT), f"plsh is imported from {found}, not from {ROOT}"


def test_installed_entry_points_are_those_of_the_tree():
    """After a backend is added, an editable install is stale until it is made again."""
    stale = "does not match pyproject.toml: pip install -e ."
    declared = PROJECT["entry-points"][GROUP]
    installed = {
        p.name: p.value
        for p in importlib.metadata.distribution("plsh").entry_points
        if p.group == GROUP
    }
    for name in declared.keys() | installed.keys():
        module = declared.get(name, installed.get(name, "")).partition(":")[0]
        assert installed.get(name) == declared.get(name), f"entry point {name} ({module}) {stale}"
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"module {module} of entry point {name} {stale}"
        found = pathlib.Path(spec.origin).resolve()
        assert found.is_relative_to(ROOT), f"{module} is imported from {found}, not from {ROOT}"


def test_version_is_one():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["version"] == plsh.__version__ == importlib.metadata.version("plsh")
    assert f"## [{plsh.__version__}]" in changelog


# --- wheel and sdist ---


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build wheel and sdist once, from a copy, so that nothing stale in the tree gets in."""
    work = tmp_path_factory.mktemp("build")
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, work / "tree", ignore=ignore)
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist"),
        cwd=work / "tree",
    )
    (wheel,) = (work / "dist").glob("*.whl")
    (sdist,) = (work / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="session")
def target(built, tmp_path_factory):
    """Install the wheel into a folder of its own."""
    folder = tmp_path_factory.mktemp("target")
    pip_install(built[0], folder)
    return folder


def pip_install(what, folder, path=()):
    run(
        *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"),
        *("--no-index", "--disable-pip-version-check", "--target", folder, what),
        cwd=folder,
        path=path,
    )


def sources():
    """Return the files of the tree that the wheel must hold, by their path in it."""
    found = {}
    for root, pattern in ((ROOT, "plsh"), (ROOT / "backends", "plsh_*")):
        for package in root.glob(pattern):
            for path in package.rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    found[path.relative_to(root).as_posix()] = path
    return found


def test_wheel_holds_every_file_of_every_package(built):
    """Modules, py.typed, vectors, requirements, kernels: what is in the tree is in the wheel."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        for name, path in sources().items():
            assert name in names, f"{name} is missing from the wheel"
            assert wheel.read(name) == path.read_bytes()
    packages = {name.partition("/")[0] for name in names}
    assert {p for p in packages if not p.endswith(".dist-info")} == {
        name.partition("/")[0] for name in sources()
    }
    assert {f"{p}/py.typed" for p in packages if p.startswith("plsh") and "." not in p} <= names
    assert any(n.startswith("plsh/conformance/vectors/") and n.endswith(".json") for n in names)
    assert not any(n.startswith(("tests/", "spec/", "tools/")) for n in names)


def test_wheel_is_pure_and_names_license_entry_points_and_dependencies(built):
    """U128: nothing is compiled, frameworks are extras."""
    assert built[0].name == f"plsh-{plsh.__version__}-py3-none-any.whl"
    info = f"plsh-{plsh.__version__}.dist-info"
    with zipfile.ZipFile(built[0]) as wheel:
        metadata = wheel.read(f"{info}/METADATA").decode()
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: BSD-3-Clause\n" in metadata
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    needed = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert {n.partition(">")[0] for n in needed} == {"numpy", "array-api-compat"}
    for name, value in PROJECT["entry-points"][GROUP].items():
        assert f"{name} = {value}" in entry_points
    assert "plsh = plsh.cli:main" in entry_points


def test_sdist_holds_the_standard_and_the_tests(built):
    with tarfile.open(built[1]) as sdist:
        names = {n.partition("/")[2] for n in sdist.getnames()}
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "spec").rglob("*") if p.is_file()}
    here = {
        n for n in here if "__pycache__" not in n and ".egg-info" not in n and "/build/" not in n
    }
    assert "spec/README.md" in here
    assert here <= names, here - names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"} <= names
    assert set(sources()) <= {n.removeprefix("backends/") for n in names}
    assert "tests/test_packaging.py" in names


USE = """
import numpy as np, plsh
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 2, 50, 8)) for _ in range(3))
for method in ("exact", "window", "lsh"):
    assert plsh.attention(q, k, v, method=method, causal=True).shape == q.shape
print(plsh.__file__)
"""


def test_wheel_runs_from_outside_of_the_tree(target, tmp_path):
    where = run(sys.executable, "-W", "error", "-c", USE, cwd=tmp_path, path=[target])
    assert pathlib.Path(where.strip()).is_relative_to(target)


def test_command_line_of_the_wheel_runs_from_outside_of_the_tree(target, tmp_path):
    rows = json.loads(
        run(sys.executable, "-m", "plsh", "backends", "--json", cwd=tmp_path, path=[target])
    )
    assert {row["name"] for row in rows} >= set(PROJECT["entry-points"][GROUP])
    assert (target / "bin" / "plsh").exists() or (target / "Scripts").exists()


# --- a third-party backend ---

CALL = """
import numpy as np, plsh
(row,) = [b for b in plsh.backends() if b.name == "example"]
assert row.available and row.capabilities.methods == ("lsh",), row
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(2, h, 40, d)).astype("float32") for h, d in ((4, 8), (2, 8), (2, 5)))
ids = np.array([[0] * 20 + [1] * 15 + [-1] * 5] * 2)
for keywords in ({}, {"causal": True}, {"segment_ids": ids}, {"q_offset": 9, "k_offset": 3}):
    got = plsh.attention(q, k, v, backend="example", return_lse=True, **keywords)
    want = plsh.attention(q, k, v, backend="reference", return_lse=True, **keywords)
    for x, y in zip(got, want):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
try:
    plsh.attention(q, k, v, method="exact", backend="example")
except plsh.UnsupportedByBackendError as error:
    assert "it has no method 'exact'; able to: " in str(error), error
try:
    plsh.attention(q, k, v, q_offset=(1, 2), backend="example")
except plsh.UnsupportedByBackendError as error:
    assert "its rows share one offset" in str(error), error
print("served")
"""


def test_third_party_backend_installs_and_serves(target, tmp_path):
    """The example of the standard, installed for real: listed, called by name, refusing."""
    project = tmp_path / "example"
    shutil.copytree(ROOT / "spec" / "example_backend", project)
    folder = tmp_path / "site"
    folder.mkdir()
    pip_install(project, folder)
    printed = run(sys.executable, "-W", "error", "-c", CALL, cwd=tmp_path, path=[folder, target])
    assert printed == "served\n"


def test_example_backend_is_under_60_lines():
    source = ROOT / "spec" / "example_backend" / "plsh_example.py"
    assert len(source.read_text(encoding="utf-8").splitlines()) < 60


def test_example_backend_is_absent_where_it_is_not_installed():
    """Without this the test above could pass without installing anything."""
    assert "example" not in {b.name for b in plsh.backends()}
