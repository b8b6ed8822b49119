"""`plsh.bench` and ``plsh bench``: peers are right, times are synchronised, figures are honest."""

import ast
import csv
import io
import json
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import plsh
from plsh import bench
from plsh.cli import main
from plsh.testing import harness_for, oracle

CASE = bench.Case(600, heads=3, head_dim=8)  # more than a block of rows of dense NumPy
METHODS = (plsh.Exact(), plsh.Window(tol=0.5), plsh.PositionalLSH(4))
QUICK = ("--length", "64,128", "--heads", "2", "--dims", "8", "--repeat", "1")


@pytest.fixture(autouse=True)
def _equal_threads(monkeypatch):
    """The suite holds OpenMP to one thread (conftest.py), which the command refuses."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(capsys):
    def run(*argv):
        status = main(["bench", *map(str, argv)])
        captured = capsys.readouterr()
        return types.SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def refused(call):
    """Run a command that must fail: status 2, nothing on stdout, one line; return the line."""

    def run(*argv):
        got = call(*argv)
        assert (got.status, got.out, got.err.count("\n")) == (2, "", 1), got
        assert got.err.startswith("plsh bench: error: ")
        return got.err

    return run


# --- peers and errors ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["numpy-dense", "sdpa-mask", "sdpa-dim", "jax-bias"])
def test_peers_compute_exact_alibi(name, causal):
    case = bench.Case(600, heads=3, head_dim=8, causal=causal)
    peer = bench.PEERS[name]
    if not causal and peer.causal_only:
        assert "causal" in peer.reason(case)
        return
    inputs = case.inputs()
    got = peer.runner(case).output()
    want = oracle(inputs.q, inputs.k, inputs.v, slopes=case.slopes, causal=causal).out
    assert np.abs(got - want).max() < 2e-5


def test_plain_sdpa_is_another_function_and_its_error_says_so():
    inputs = CASE.inputs()
    out = bench.PEERS["sdpa-plain"].runner(CASE).output()
    assert bench.error(out, bench.exact_rows(CASE, inputs)) > 0.1
    want = oracle(inputs.q, inputs.k, inputs.v, slopes=(0, 0, 0), causal=True).out
    assert np.abs(out - want).max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flex", "flex-window"])
def test_flex_attention_computes_alibi_within_its_window(name):
    case = bench.Case(300, heads=2, head_dim=16)
    runner = bench.PEERS[name].runner(case)
    assert bench.error(runner.output(), bench.exact_rows(case, case.inputs())) < 1e-5
    assert not runner.has_gradients  # on the CPU it has no backward


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_the_yardsticks_are_those_of_the_dense_oracle(method, causal):
    case = bench.Case(50, heads=2, head_dim=4, causal=causal, dtype="float64")
    inputs = case.inputs()
    rows = bench.sampled(50)
    dense = oracle(inputs.q, inputs.k, inputs.v, slopes=case.slopes, causal=causal).out[0]
    np.testing.assert_allclose(bench.exact_rows(case, inputs), dense[:, rows], rtol=1e-12)
    out = bench.ours("reference", method, case).output()
    assert bench.error(out, bench.own_rows(case, inputs, method)) < 1e-12
    approximate = bench.error(out, bench.exact_rows(case, inputs))
    assert (approximate < 1e-12) == (method == plsh.Exact())


def test_error_sees_one_wrong_row():
    case = bench.Case(50, heads=2, head_dim=4)
    rows = bench.exact_rows(case, case.inputs())
    out = bench.ours("numpy", plsh.Exact(), case).output()
    out[0, 1, bench.sampled(50)[3]] = 0
    assert bench.error(out, rows) > 0.01


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_training_of_ours_gives_the_gradients_of_the_oracle(backend):
    case = bench.Case(64, heads=2, head_dim=8)
    inputs = case.inputs()
    runner = bench.ours(backend, plsh.Exact(), case)
    want = oracle(
        inputs.q, inputs.k, inputs.v, slopes=case.slopes, causal=True, grad_out=inputs.grad_out
    )
    for name, got in zip("qkv", runner.training(), strict=True):
        got = runner.harness.to_numpy(got)
        np.testing.assert_allclose(got, getattr(want, name), atol=2e-5)


def test_peers_and_plsh_run_on_equal_threads():
    import torch

    torch.set_num_threads(1)
    bench.PEERS["sdpa-mask"].runner(bench.Case(16, heads=1, head_dim=4))
    assert torch.get_num_threads() == int(bench.facts()["threads"])


# --- timing ---


def test_calls_wait_for_their_work():
    """U132: each call ends in the harness's synchronisation, of all that it returns."""
    waited = []
    numpy = harness_for("numpy")
    harness = types.SimpleNamespace(
        asarray=numpy.asarray, devices=("cpu",), jit=None, synchronize=waited.append
    )
    case = bench.Case(4, heads=1, head_dim=2)
    runner = bench.Runner("x", harness, case, lambda q, k, v: v, lambda q, k, v, g: (q, k, v))
    assert runner.forward() is waited[0]
    assert len(runner.training()) == 3
    assert len(waited) == 4


def test_times_are_warm_in_turn_and_of_one_call():
    calls = []

    def slow():
        time.sleep(0.2 if not calls else 0.03)  # a first call that compiles
        calls.append("slow")

    def quick():
        calls.append("quick")
        time.sleep(0.001)

    times = bench.in_turn({"slow": slow, "quick": quick}, 3)
    assert 0.03 <= times["slow"].fastest <= times["slow"].seconds <= times["slow"].slowest
    assert times["slow"].fastest < 0.1
    assert 0.001 <= times["quick"].fastest < 0.01
    order = [name for name, after in zip(calls, [*calls[1:], ""], strict=True) if name != after]
    assert order == ["slow", "quick"] * 4  # warm-up and three turns


def test_dense_time_grows_with_the_square_of_the_length():
    """U132: what measured dispatch would not grow."""
    dense = bench.PEERS["numpy-dense"]
    runners = {n: dense.runner(bench.Case(n, heads=1, head_dim=8)) for n in (512, 2048)}
    times = bench.in_turn({str(n): r.forward for n, r in runners.items()}, 5)
    assert times["2048"].fastest > 4 * times["512"].fastest


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [True, False])
def test_floor_visits_every_pair_of_weight_and_few_others(method, causal):
    import importlib

    blocks = importlib.import_module("plsh.bench.floor").blocks
    case = bench.Case(1000, heads=3, causal=causal)
    weight = plsh.methods.resolve(method, None, case.slopes, 3).weight
    at = np.arange(1000)
    apart = np.abs(at[:, None] - at)
    if isinstance(method, plsh.PositionalLSH):
        labels = weight.labels(0, 1000)
        seen = (labels[:, :, :, None] == labels[:, :, None, :]).any(axis=1)
    else:
        seen = np.stack([apart <= width for width in weight.bandwidths])
    seen &= (at[:, None] >= at) | (not causal)
    counts = blocks(method, case, 64)
    for head, count in enumerate(counts):
        tiles = np.pad(seen[head], (0, 24)).reshape(16, 64, 16, 64).any(axis=(1, 3)).sum()
        assert tiles <= count <= tiles + 2 * 16  # blocks are aligned to tiles, and may be half full


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_floor_runs_on_each_library(kind):
    case = bench.Case(200, heads=2, head_dim=8)
    bench.floor(plsh.Window(tol=1e-2), case, harness_for(kind))()


PEAK = """
import numpy as np
from plsh import bench
print(bench.host_peak(lambda: np.ones((64 << 20) // 8).sum()))
"""


def test_host_peak_sees_what_a_call_holds_for_a_moment():
    # The mark is the process's: here a thread of an earlier test could end, and free its scratch.
    done = subprocess.run(
        [sys.executable, "-c", PEAK], check=True, capture_output=True, text=True, timeout=120
    )
    found = ast.literal_eval(done.stdout)
    assert found is None or (64 << 20) * 0.9 < found < (64 << 20) * 1.5
    assert bench.device_peak(lambda: None) in (None, 0)


# --- break-even and growth ---


@pytest.mark.parametrize(
    ("ratios", "length", "words"),
    [
        ((0.25, 1.0, 4.0), 512, "interpolated between 512 and 1024"),
        ((0.5, 2.0, 4.0), 256 * 2**0.5, "interpolated between 256 and 512"),
        ((2.0, 0.5, 2.0), 512 * 2**0.5, "interpolated between 512 and 1024"),
        ((2.0, 3.0, 4.0), None, "below n = 256, the shortest"),
        ((0.5, 0.6, 1.0), None, "not up to n = 1024, the longest"),
    ],
)
def test_break_even_is_where_plsh_wins_from_then_on(ratios, length, words):
    found = bench.break_even((256, 512, 1024), ratios)
    assert found.length == (None if length is None else pytest.approx(length))
    assert words in found.words


def test_growth_is_the_exponent():
    lengths = np.array([100, 200, 800])
    assert bench.growth(lengths, 3e-9 * lengths**1.5) == pytest.approx(1.5)


# --- compare ---


def measured(monkeypatch, seconds):
    """Let times be a function of name and length instead of the machine's."""
    module = sys.modules["plsh.bench.report"]

    def in_turn(calls, repeat):
        length = next(iter(calls.values())).__self__._arrays[0].shape[2]
        return {name: bench.Timing(*[seconds(name, length)] * 3) for name in calls}

    monkeypatch.setattr(module, "in_turn", in_turn)


def test_a_peer_predicted_to_be_too_slow_is_left_out_and_said_so(monkeypatch):
    measured(monkeypatch, lambda name, n: 1e-4 * n if name == "plsh" else 1e-6 * n**2)
    cases = [bench.Case(n, heads=1, head_dim=4) for n in (50, 200, 400)]
    rows = bench.compare("numpy", plsh.Window(4), cases, ["numpy-dense"], limit=0.05)
    peers = [row for row in rows if row.name == "numpy-dense"]
    assert [row.timing is None for row in peers] == [False, False, True]
    assert "over the limit of 0.05 s" in peers[2].note
    assert [row.ratio for row in peers[:2]] == [pytest.approx(0.5), pytest.approx(2.0)]


def test_a_peer_that_does_not_fit_in_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(sys.modules["plsh.bench.report"], "free_bytes", lambda device: 1 << 20)
    cases = [bench.Case(512, heads=2, head_dim=4)]
    rows = bench.compare("numpy", plsh.Window(4), cases, ["sdpa-mask"], repeat=1)
    assert "GiB" in rows[1].note
    assert rows[1].timing is None


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch):
    def broken(case):
        raise RuntimeError("no kernel\nfor this")

    peer = bench.Peer("broken", "numpy", "", broken, 0)
    monkeypatch.setitem(bench.PEERS, "broken", peer)
    rows = bench.compare("numpy", plsh.Window(4), [CASE], ["broken"], repeat=1)
    assert rows[1].note == "it failed: RuntimeError: no kernel"


# --- the command ---


def test_the_table_has_an_error_beside_each_time_and_the_break_even(call):
    got = call(*QUICK)
    assert (got.status, got.err) == (0, "")
    lines = got.out.splitlines()
    assert "window tol=1e-06, backend numpy on cpu: 2 heads of dim 8, float32, causal" in lines[0]
    assert "threads" in lines[1]
    table = [line.split() for line in lines if line.startswith(("64", "128"))]
    assert [cells[:3] for cells in table] == [
        [n, "forward", name] for n in ("64", "128") for name in ("plsh", "numpy-dense")
    ]
    for cells in table:
        assert 0 < float(cells[6]) < 1e-5
    assert any(line.startswith("break-even with numpy-dense, forward: ") for line in lines)
    assert "grows as n^" in got.out


def test_json_has_the_machine_and_every_number(call):
    got = json.loads(call(*QUICK, "--method", "lsh", "--samples", "4", "--training", "--json").out)
    assert got["machine"]["plsh"] == plsh.__version__
    assert (got["method"], got["head_dim"], got["dtype"]) == (
        "lsh samples=4 stratified seed=0",
        8,
        "float32",
    )
    ours = [row for row in got["measurements"] if row["what"] == "plsh"]
    assert [(row["length"], row["work"]) for row in ours] == [
        (n, work) for n in (64, 128) for work in ("forward", "training")
    ]
    for row in ours:
        assert 0 < row["fastest"] <= row["seconds"] <= row["slowest"]
        assert row["error"] > 1e-3  # lsh is an approximation, and says so
    missing = [row for row in got["measurements"] if row["seconds"] is None]
    assert [row["note"] for row in missing] == ["it has no gradients here"] * 2
    assert set(got["growth"]) == {"forward", "training"}


def test_csv_is_read_by_a_csv_reader(call):
    rows = list(csv.DictReader(io.StringIO(call(*QUICK, "--csv").out)))
    assert [row["what"] for row in rows] == ["plsh", "numpy-dense"] * 2
    for row in rows:
        assert float(row["seconds"]) > 0
        assert float(row["error"]) < 1e-5
    assert float(rows[1]["ratio"]) == pytest.approx(
        float(rows[1]["seconds"]) / float(rows[0]["seconds"])
    )


def test_png_is_a_picture(call, tmp_path):
    path = tmp_path / "gain.png"
    got = call(*QUICK, "--png", path)
    assert got.status == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_only_png_needs_matplotlib(call, refused, monkeypatch, tmp_path):
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises
    assert call(*QUICK).status == 0
    line = refused(*QUICK, "--png", tmp_path / "x.png")
    assert "--png needs matplotlib; pip install 'plsh[bench]'" in line
    assert list(tmp_path.iterdir()) == []


def test_a_single_length_is_reached_by_powers_of_two(call):
    got = json.loads(call("--length", 600, "--heads", 1, "--dims", 4, "--repeat", 1, "--json").out)
    assert sorted({row["length"] for row in got["measurements"]}) == [256, 512, 600]


def test_backends_of_other_libraries_and_peers_across_them(call):
    got = call(*QUICK, "--backend", "torch", "--against", "sdpa-mask,numpy-dense", "--no-causal")
    assert (got.status, got.err) == (0, "")
    assert "not causal" in got.out
    assert "break-even with sdpa-mask, forward" in got.out
    assert "break-even with numpy-dense, forward" in got.out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_is_computed_in_itself(call, dtype):
    """JAX needs a setting for float64, which the command holds."""
    import jax  # noqa: F401 - its absence is the test's to say, not the command's

    bound = {"float16": 1e-3, "bfloat16": 1e-2, "float64": 1e-12}[dtype]
    options = ("--method", "exact", "--against", "numpy-dense", "--json")
    got = json.loads(call(*QUICK, "--backend", "jax", "--dtype", dtype, *options).out)
    for row in got["measurements"]:
        assert bound / 1e4 < row["error"] < bound


def test_the_examples_of_the_help_parse(call):
    text = call("--help").out.partition("example:")[2].replace("\\\n", "")
    examples = [line.split()[2:] for line in text.splitlines() if "plsh bench" in line]
    assert len(examples) == 2
    for argv in examples:
        assert call(*argv, "--help").status == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--length", "0"), ("--length", "integer from 1", "'0'")),
        (("--length", "64,x"), ("--length", "'x'")),
        (("--heads", "0"), ("--heads", ">= 1", "'0'")),
        (("--dims", "1.5"), ("--dims", "'1.5'")),
        (("--dtype", "int8"), ("--dtype", "float32", "'int8'")),
        (("--against", "flash"), ("--against", "sdpa-mask", "'flash'")),
        (("--limit", "nan"), ("--limit", "> 0", "'nan'")),
        (("--repeat", "-1"), ("--repeat", ">= 1")),
        (("--device", "cuda:9"), ("--device", "cpu", "'cuda:9'")),
        (("--backend", "nobody"), ("nobody", "numpy")),
        (("--samples", "4"), ("--samples needs --method lsh, got --method window",)),
        (("--tol", "2"), ("tol must lie in (0, 1), got 2.0",)),
        (("--width", "3,4,5"), ("width", "3", "2")),
        (("--backend", "reference", "--training"), ("--training", "reference")),
        (("--against", "sdpa-dim", "--no-causal"), ("--against sdpa-dim", "causal", "leave it")),
        (("--png", "/nowhere/x.png"), ("--png /nowhere/x.png", "directory")),
        (("--json", "--csv"), ("--csv", "--json")),
    ],
)
def test_errors_name_the_argument_the_rule_and_what_came(refused, argv, words):
    line = refused(*QUICK, *argv)
    for word in words:
        assert word in line


def test_inputs_that_cannot_fit_are_refused_before_they_are_drawn(refused):
    line = refused("--length", 2**30, "--heads", 4096)
    assert "GiB are free; make one smaller" in line


def test_unequal_threads_are_refused(refused, monkeypatch):
    count = int(bench.facts()["threads"])
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(count + 1))
    line = refused(*QUICK)
    assert f"OPENBLAS_NUM_THREADS={count + 1}" in line
    assert "unset it" in line
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(count))
    assert bench.thread_conflict() is None


def test_command_in_a_fresh_process_imports_no_other_framework():
    code = (
        "import sys; from plsh.cli import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'jax', 'matplotlib'} & set(sys.modules)), status)"
    )
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    argv = [sys.executable, "-W", "error", "-c", code, "bench", *QUICK]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    assert done.stderr == ""
    assert done.stdout.endswith("[] 0\n")
