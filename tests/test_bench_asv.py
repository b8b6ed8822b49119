"""``asv_benchmarks/``: pinned, the same whatever is installed, and able to find a regression."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from plsh import bench

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUITE = ROOT / "asv_benchmarks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FACTOR = 1.5
"""That `asv continuous` is given; README.md of the suite says what it was measured from."""
CELL = r"times.Forward.time_forward\('numpy', '(lsh|window)', 1024, 'float32', True\)"


def config():
    """Read asv's configuration; its comments stand on lines of their own."""
    lines = (SUITE / "asv.conf.json").read_text(encoding="utf-8").splitlines()
    return json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))


def script(name):
    """Import a script of the suite."""
    spec = importlib.util.spec_from_file_location(f"asv_{name}", SUITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- configuration ---


def test_versions_are_those_of_the_tests():
    """U133."""
    pinned = dict(r.partition(";")[0].split("==") for r in PROJECT["optional-dependencies"]["test"])
    for name, versions in config()["matrix"]["req"].items():
        assert len(versions) == 1, f"{name} must be pinned to one version"
        assert pinned.get(name, versions[0]) == versions[0], name
    assert {"numpy", "torch", "jax"} <= set(config()["matrix"]["req"])
    assert any(r.startswith("asv>=") for r in PROJECT["optional-dependencies"]["bench"])


def test_build_and_install_are_stated():
    """U133: asv's defaults have changed between releases."""
    assert {"build_command", "install_command", "uninstall_command"} <= set(config())


def test_every_module_has_a_threshold():
    thresholds = config()["regressions_thresholds"]
    modules = {p.stem for p in (SUITE / "benchmarks").glob("*.py")} - {"__init__", "common"}
    for module in modules:
        assert any(re.match(pattern, f"{module}.X.time_x") for pattern in thresholds), module


# --- the benchmarks ---

LIST = """
import sys
sys.path.insert(0, sys.argv[1])
if "blocked" in sys.argv:
    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {"torch", "jax", "cupy"}:
                raise ModuleNotFoundError(name=name)
    sys.meta_path.insert(0, Blocker())
import inspect, importlib
for name in ("accuracy", "memory", "ratios", "times"):
    module = importlib.import_module(f"benchmarks.{name}")
    for label, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ == module.__name__ and hasattr(cls, "params"):
            print(name, label, cls.params, cls.param_names)
            assert isinstance(cls.params, tuple) and len(cls.params) == len(cls.param_names)
"""


def listed(*options):
    done = subprocess.run(
        [sys.executable, "-c", LIST, str(SUITE), *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parameters_do_not_depend_on_what_is_installed():
    """Else the history of every backend would begin anew with each that is added."""
    whole = listed()
    assert whole == listed("blocked")
    for name in ("numpy", "torch", "jax", "cupy", "sdpa-mask", "sdpa-dim", "flex-window"):
        assert f"{name}'" in whole
    for name in bench.PEERS:
        assert f"{name}'" in whole, f"no ratio to {name}"


def test_an_absent_backend_is_shown_as_not_applicable():
    code = (
        f"import sys; sys.path.insert(0, {str(SUITE)!r})\n"
        "import plsh\n"
        "from plsh.backend import Availability\n"
        "numpy = [b for b in plsh.backends() if b.name == 'numpy'][0]\n"
        "plsh.backends = lambda: [type(numpy)('numpy', False, 'absent', None)]\n"
        "from benchmarks import times, ratios, memory, accuracy\n"
        "cells = ((times.Forward, ('numpy', 'lsh', 1024, 'float32', True)),\n"
        "         (times.Small, ('numpy', 'lsh')), (times.First, ('torch', 'lsh')),\n"
        "         (ratios.Peers, ('cupy, sdpa-mask', 'lsh', 'forward')),\n"
        "         (ratios.Floor, ('jax', 'lsh')),\n"
        "         (memory.Host, ('numpy', 'lsh', 8192, 'forward')),\n"
        "         (accuracy.Error, ('numpy', 'lsh', 'float32', True)))\n"
        "for cls, args in cells:\n"
        "    try:\n"
        "        cls().setup(*args)\n"
        "    except NotImplementedError:\n"
        "        print('n/a')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "n/a\n" * 7, done.stderr


def test_another_commit_than_asv_says_is_not_measured():
    """U134: a set-up once measured the wrong commit for weeks."""
    code = f"import sys; sys.path.insert(0, {str(SUITE)!r}); import benchmarks.common"
    env = os.environ | {"ASV_COMMIT": "0" * 40}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    assert f"asv says {'0' * 40}" in done.stderr


def test_every_time_ends_in_a_synchronised_call():
    """U132: each time_* calls a `Runner`, which waits, or what has no device to wait for."""
    for path in (SUITE / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("time_"):
                body = ast.unparse(node.body[-1])
                assert re.fullmatch(
                    r"self\.runner\.(forward|training)\(\)|self\.family\.sample\(.*\)\.labels\(\)",
                    body,
                ), f"{path.name}: {body}"


def test_only_setup_says_not_applicable():
    """asv takes a NotImplementedError of a body for a failure."""
    for path in (SUITE / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and re.match("time_|track_|peakmem_", node.name):
                called = {
                    getattr(call.func, "id", "")
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call)
                }
                assert not called & {"need", "runner"}, f"{path.name}: {node.name}"


# --- results ---


def results_file(folder, commit, values):
    machine = folder / "machine"
    machine.mkdir(parents=True)
    content = {
        "commit_hash": commit,
        "result_columns": ["result", "params"],
        "results": {f"b{i}": [value, []] for i, value in enumerate(values)},
    }
    (machine / "0123-env.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("values", "options", "status"),
    [
        ([[1.0, float("nan"), 2.0], [3.0]], ("--expect", "3"), 0),
        ([[1.0]], (), 0),
        ([[1.0]], ("--expect", "2"), 1),
        ([[float("nan")]], (), 1),
        ([[1.0, None]], (), 1),
        ([None], (), 1),
        ([], (), 1),
    ],
)
def test_a_gate_that_measures_nothing_fails(values, options, status, tmp_path):
    """U134: n/a is no result, null is a failure."""
    results_file(tmp_path, "abc", values)
    argv = [sys.executable, SUITE / "results.py", "abc", "--results", tmp_path, *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    facts = json.loads((tmp_path / "machine" / "facts" / "abc.json").read_text(encoding="utf-8"))
    assert facts["threads"].isdigit()


def test_results_of_another_commit_do_not_count(tmp_path):
    results_file(tmp_path, "abc", [[1.0]])
    argv = [sys.executable, SUITE / "results.py", "def", "--results", tmp_path]
    assert subprocess.run(argv, capture_output=True, timeout=60).returncode == 1


def test_a_published_page_loads_nothing_from_elsewhere(monkeypatch):
    offline = script("offline")
    page = (
        '<script src="https://code.jquery.com/jquery-3.3.1.min.js" integrity="sha256-x" '
        'crossorigin="anonymous" onerror="js_load_failure()"></script>'
        '<link rel="stylesheet" href="https://cdn.jsdelivr.net/b/bootstrap.min.css" integrity="y">'
    )
    assert offline.rewrite(page) == (
        '<script src="vendor/jquery-3.3.1.min.js"></script>'
        '<link rel="stylesheet" href="vendor/bootstrap.min.css">'
    )
    with pytest.raises(SystemExit, match=r"unknown\.js"):
        offline.rewrite('<script src="https://elsewhere/unknown.js"></script>')


# --- the regression flow ---

SLOWER = """

_attend = type(BACKEND).attend


def _twice(self, *args):
    _attend(self, *args)
    return _attend(self, *args)


type(BACKEND).attend = _twice
"""


def command(*argv, cwd, env=None):
    return subprocess.run(
        [str(arg) for arg in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=1200
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A scratch repository of this tree, measured with NumPy alone, and its environment."""
    root = tmp_path_factory.mktemp("asv")
    tree = root / "plsh"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "env", "html", "results", "build", "dist", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, tree, ignore=ignore)
    own = config() | {"pythons": [f"{sys.version_info.major}.{sys.version_info.minor}"]}
    for name in ("torch", "jax"):
        own["matrix"]["req"].pop(name)
    (tree / "asv_benchmarks" / "asv.conf.json").write_text(json.dumps(own), encoding="utf-8")
    # asv keeps the machine's name in the home folder; pip's settings stay where they are.
    env = os.environ | {"HOME": str(root)}
    env.setdefault("XDG_CONFIG_HOME", str(pathlib.Path.home() / ".config"))
    env |= {
        f"GIT_{who}_{what}": "scratch"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    for argv in (
        ("git", "init", "--quiet", "--initial-branch=main"),
        ("git", "add", "--all"),
        ("git", "commit", "--quiet", "--message=base"),
    ):
        done = command(*argv, cwd=tree, env=env)
        assert done.returncode == 0, done.stderr
    done = command(
        sys.executable, "-m", "asv", "machine", "--yes", cwd=tree / "asv_benchmarks", env=env
    )
    assert done.returncode == 0, done.stderr
    return tree, env


def continuous(clone):
    """Compare the last two commits, as README.md of the suite says."""
    tree, env = clone
    return command(
        *(sys.executable, "-m", "asv", "continuous", "--show-stderr", "--factor", FACTOR),
        *("--interleave-rounds", "-a", "rounds=4", "--bench", CELL, "HEAD~1", "HEAD"),
        cwd=tree / "asv_benchmarks",
        env=env,
    )


@pytest.mark.slow
def test_unchanged_pairs_are_not_flagged_and_a_planted_slowdown_is(clone):
    """U134, U135: five A/A pairs, then the backend computes everything twice.

    Needs a quiet machine: where other work stops or starves it, times say nothing.
    """
    tree, env = clone
    for i in range(5):
        argv = ("git", "commit", "--quiet", "--allow-empty", f"--message=same {i}")
        assert command(*argv, cwd=tree, env=env).returncode == 0
        done = continuous(clone)
        assert done.returncode == 0, f"pair {i}\n{done.stdout}{done.stderr}"
        assert "BENCHMARKS NOT SIGNIFICANTLY CHANGED" in done.stdout
    with (tree / "backends" / "plsh_numpy" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(SLOWER)
    assert (
        command("git", "commit", "--quiet", "--all", "--message=slow", cwd=tree, env=env).returncode
        == 0
    )
    done = continuous(clone)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PERFORMANCE DECREASED" in done.stdout
