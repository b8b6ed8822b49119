"""The command line: results, exit statuses, one-line errors, files that are whole or not there."""

import argparse
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest

import plsh
from plsh import byte_model, registry
from plsh.backend import Capabilities, Harness
from plsh.cli import archive, calibrate, common, cost, demo, main, plan, run, text
from plsh.methods import resolve
from plsh.reference import ReferenceBackend
from plsh.testing.oracle import oracle

COMMANDS = ("demo", "run", "backends", "plan")


@pytest.fixture
def refused(call):
    """Run a command that must fail: status 2, nothing on stdout, one line; return the line."""

    def run_main(*argv):
        got = call(*argv)
        assert got.status == 2
        assert got.out == ""
        assert got.err.count("\n") == 1
        assert got.err.startswith(f"plsh {argv[0]}: error: ")
        return got.err

    return run_main


@pytest.fixture
def spawn():
    """Return a function that starts ``python -m plsh`` as this session would import it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    started = []

    def start(*argv, program=("-m", "plsh")):
        process = subprocess.Popen(
            [sys.executable, *program, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def inputs(batch=2, heads=4, kv_heads=2, len_q=40, len_k=40, dim=8, value_dim=6, dtype="float32"):
    rng = np.random.default_rng(3)
    shapes = {
        "q": (batch, heads, len_q, dim),
        "k": (batch, kv_heads, len_k, dim),
        "v": (batch, kv_heads, len_k, value_dim),
    }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def qkv(tmp_path):
    path = tmp_path / "qkv.npz"
    np.savez(path, **inputs())
    return path


def load(path):
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [(), ("attend",)])
def test_without_a_known_command_the_help_is_shown_with_status_2(call, argv):
    got = call(*argv)
    assert (got.status, got.out) == (2, "")
    assert all(f"  {name} " in got.err for name in COMMANDS)
    assert got.err.splitlines()[-1].startswith("plsh: error: ")


def test_version_is_that_of_the_package(call):
    got = call("--version")
    assert (got.status, got.out, got.err) == (0, f"plsh {plsh.__version__}\n", "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_written_to_in_vain(monkeypatch, capsys, qkv, tmp_path, stream):
    target = tmp_path / "o.npz"
    run = ("run", "--input", str(qkv), "--output", str(target))
    calls = [(0, run), (0, (*run, "--progress")), (2, ("x",))]
    if stream == "stdout":
        calls.append((0, ("demo", "--generate", "1")))
    for status, argv in calls:
        with monkeypatch.context() as closed:
            closed.setattr(sys, stream, None)  # as after 2>&-
            assert main(argv) == status
            assert getattr(sys, stream) is None
        got = capsys.readouterr()
        quiet = status == 0 and "--progress" not in argv
        assert (got.out == "") == (stream == "stdout" or status == 2)
        assert (got.err == "") == (stream == "stderr" or quiet)
    assert target.is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(call, command):
    got = call(command, "--help")
    assert (got.status, got.err) == (0, "")
    example = re.split("examples?:", got.out)[-1]
    lines = [line.split() for line in example.splitlines() if f"plsh {command} " in line]
    assert lines
    for line in lines:
        assert call(*line[1:], "--help").status == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("run",), "the following arguments are required: --input, --output"),
        (("run", "--inp", "x"), "required: --input"),
        (("plan", "--length", "0"), "--length: must be an integer from 1 to 1073741824, got '0'"),
        (("plan", "--length", "many"), "must be an integer"),
        (("plan", "--length", "9", "--slopes", "1,x"), "must be numbers with commas"),
        (("demo", "--heads", "0"), "--heads: must be an integer >= 1, got '0'"),
        (("demo", "--seed", "-1"), "must be an integer from 0"),
        (("demo", "--quick"), "unrecognized arguments: --quick"),
        (("run", "--input", "a", "--output", "b", "--width", "1,"), "must be an integer"),
        (("run", "--input", "a", "--output", "b", "--method", "alibi"), "invalid choice: 'alibi'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(call, argv, message):
    got = call(*argv)
    assert (got.status, got.out) == (2, "")
    assert message in got.err
    assert got.err.count("\n") == 1


def test_an_interrupt_gives_130_and_no_traceback(call, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "embed", interrupt)
    got = call("demo", "--length", "8", "--heads", "2")
    assert (got.status, got.err) == (130, "")


def test_memory_that_runs_out_is_one_line(refused, monkeypatch):
    def exhaust(*args):
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr(demo, "load_text", exhaust)
    assert "out of memory: Unable to allocate" in refused("demo", "--length", "8")


def test_a_full_disk_behind_the_output_is_one_line(capsys, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["backends"]) == 2
    assert capsys.readouterr().err == "plsh: error: [Errno 28] No space left on device\n"


def test_a_reader_that_leaves_ends_the_program_quietly(spawn):
    process = spawn("demo", "--length", "128", "--heads", "2")
    first = process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert first.startswith("text: ")
    assert process.stderr.read() == ""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_control_c_ends_the_program_quietly(spawn):
    # A shell may start this session with the signal ignored, which children inherit.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from plsh.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = ("--length", "100000", "--exact-length", "100000", "--heads", "1", "--head-dim", "4")
    process = spawn("demo", *argv, program=("-c", program))
    assert process.stdout.readline().startswith("text: ")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == ""


def test_the_module_runs_as_a_program(spawn, qkv, tmp_path):
    process = spawn("run", "--input", str(qkv), "--output", str(tmp_path / "out.npz"), "--causal")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'out.npz'}: out (2, 4, 40, 6) from q (2, 4, 40, 8)")
    expected = plsh.attention(**inputs(), causal=True)
    np.testing.assert_array_equal(load(tmp_path / "out.npz")["out"], expected)


# --- run: the result ------------------------------------------------------------------------------

RUNS = {
    "defaults": ((), {}),
    "exact": (("--method", "exact"), {"method": "exact"}),
    "causal": (("--causal",), {"causal": True}),
    "samples": (("--samples", 3), {"method": plsh.PositionalLSH(3)}),
    "sampler": (("--sampler", "iid"), {"method": plsh.PositionalLSH(sampler="iid")}),
    "seed": (("--seed", "7"), {"method": plsh.PositionalLSH(seed=7)}),
    "seeds": (("--seed", "7,1,2"), {"method": plsh.PositionalLSH(seed=(7, 1, 2))}),
    "window": (("--method", "window"), {"method": "window"}),
    "width": (("--method", "window", "--width", 5), {"method": plsh.Window(5)}),
    "widths": (("--method", "window", "--width", "5,0,9,2"), {"method": plsh.Window((5, 0, 9, 2))}),
    "tol": (("--method", "window", "--tol", 0.3), {"method": plsh.Window(tol=0.3)}),
    "scale": (("--scale", 0.7), {"scale": 0.7}),
    "offsets": (("--q-offset", 9, "--k-offset", "4"), {"q_offset": 9, "k_offset": 4}),
    "row offsets": (
        ("--q-offset", "3,9", "--k-offset", "3,0", "--causal"),
        {"q_offset": (3, 9), "k_offset": (3, 0), "causal": True},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_equals_one_call_of_attention(call, qkv, tmp_path, name):
    """Row by row, yet bit for bit (U031: and each option changes the result)."""
    argv, options = RUNS[name]
    target = tmp_path / "out.npz"
    got = call("run", "--input", qkv, "--output", target, "--lse", *argv)
    assert (got.status, got.err) == (0, "")
    out, lse = plsh.attention(**inputs(), return_lse=True, **options)
    held = load(target)
    assert sorted(held) == ["lse", "out"]
    np.testing.assert_array_equal(held["out"], out)
    np.testing.assert_array_equal(held["lse"], lse)
    if name != "defaults":
        assert not np.array_equal(out, plsh.attention(**inputs()))


def test_run_is_right_by_the_oracle(call, tmp_path):
    arrays = inputs(dtype="float64")
    slopes = np.array([0.0, 0.1, 0.5, 3.0])
    np.savez(tmp_path / "in.npz", slopes=slopes, **arrays)
    argv = ("--input", tmp_path / "in.npz", "--output", tmp_path / "o.npz", "--method", "exact")
    assert call("run", *argv, "--causal", "--lse").status == 0
    expected = oracle(**arrays, slopes=slopes, causal=True)
    np.testing.assert_allclose(load(tmp_path / "o.npz")["out"], expected.out, rtol=1e-12)
    np.testing.assert_allclose(load(tmp_path / "o.npz")["lse"], expected.lse, rtol=1e-12)


@pytest.mark.parametrize("argv", [("--method", "exact"), ("--method", "window", "--tol", "0.05")])
def test_slopes_per_batch_row_share_one_band(call, tmp_path, argv):
    """Row by row the widths by tol would differ; the result must not."""
    slopes = np.array([[0.5, 0.1, 1.0, 0.3], [0.05, 0.8, 0.3, 0.9]])
    np.savez(tmp_path / "in.npz", slopes=slopes, **inputs())
    target = tmp_path / "o.npz"
    assert call("run", "--input", tmp_path / "in.npz", "--output", target, *argv).status == 0
    method = plsh.Exact() if len(argv) == 2 else plsh.Window(tol=0.05)
    expected = plsh.attention(**inputs(), slopes=slopes, method=method)
    np.testing.assert_array_equal(load(target)["out"], expected)


@pytest.mark.parametrize("pair", [False, True])
def test_segment_ids_come_from_the_file(call, tmp_path, pair):
    len_q = 30 if pair else 40
    arrays = inputs(len_q=len_q)
    ids_k = np.repeat([[0, 1, -1], [0, 0, 2]], [15, 15, 10], axis=1)
    ids_q = ids_k[:, :len_q]
    named = {"segment_ids_q": ids_q, "segment_ids_k": ids_k} if pair else {"segment_ids": ids_k}
    np.savez(tmp_path / "in.npz", **named, **arrays)
    target = tmp_path / "o.npz"
    argv = ("--input", tmp_path / "in.npz", "--output", target, "--q-offset", 0)
    assert call("run", *argv).status == 0
    ids = (ids_q, ids_k)
    expected = plsh.attention(**arrays, segment_ids=ids, q_offset=0)
    np.testing.assert_array_equal(load(target)["out"], expected)
    assert not np.array_equal(expected, plsh.attention(**arrays, q_offset=0))


def test_layout_bshd_is_read_and_written(call, tmp_path):
    arrays = {name: x.swapaxes(1, 2) for name, x in inputs().items()}
    ids = np.repeat([[0, 1], [0, 0]], 20, axis=1)
    np.savez(tmp_path / "in.npz", segment_ids=ids, **arrays)
    target = tmp_path / "o.npz"
    argv = ("--input", tmp_path / "in.npz", "--output", target, "--layout", "bshd")
    assert call("run", *argv).status == 0
    expected = plsh.attention(**inputs(), segment_ids=ids)
    np.testing.assert_array_equal(load(target)["out"], expected.swapaxes(1, 2))


@pytest.mark.parametrize("batch", [None, 0, 1])
def test_batch_axis_may_be_absent_or_empty(call, tmp_path, batch):
    arrays = inputs(batch=2 if batch is None else batch)
    if batch is None:
        arrays = {name: x[0] for name, x in arrays.items()}
    np.savez(tmp_path / "in.npz", **arrays)
    target = tmp_path / "o.npz"
    assert call("run", "--input", tmp_path / "in.npz", "--output", target, "--lse").status == 0
    out, lse = plsh.attention(**arrays, return_lse=True)
    assert load(target)["out"].dtype == np.float32
    np.testing.assert_array_equal(load(target)["out"], out)
    np.testing.assert_array_equal(load(target)["lse"], lse)


def test_foreign_byte_order_and_compression_are_read(call, tmp_path, qkv):
    foreign = {name: x.astype(x.dtype.newbyteorder()) for name, x in inputs().items()}
    np.savez_compressed(tmp_path / "in.npz", **foreign)
    assert call("run", "--input", tmp_path / "in.npz", "--output", tmp_path / "o").status == 0
    np.testing.assert_array_equal(load(tmp_path / "o")["out"], plsh.attention(**inputs()))


def test_the_report_names_shapes_method_backend_and_seconds(call, qkv, tmp_path):
    argv = ("--input", qkv, "--output", tmp_path / "o.npz", "--backend", "reference")
    out = call("run", *argv, "--method", "window", "--tol", 0.01).out
    assert out.count("\n") == 1
    assert "q (2, 4, 40, 8), k (2, 2, 40, 8), v (2, 2, 40, 6) float32" in out
    assert "; window tol=0.01; backend reference; " in out
    assert out.endswith(" s\n")


def test_progress_is_one_line_a_batch_row(call, qkv, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as where it is not installed
    argv = ("run", "--input", qkv, "--output", tmp_path / "o.npz")
    lines = ["plsh run: batch row 1/2", "plsh run: batch row 2/2"]
    assert call(*argv, "--progress").err.splitlines() == lines
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert call(*argv).err.splitlines() == lines
    assert call(*argv, "--no-progress").err == ""


def test_progress_is_a_bar_where_tqdm_is_installed(call, qkv, tmp_path, monkeypatch):
    class Bar:
        steps = 0

        def __init__(self, total, desc, file):
            assert (total, desc) == (2, "plsh run: batch row")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, count):
            Bar.steps += count

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    got = call("run", "--input", qkv, "--output", tmp_path / "o.npz", "--progress")
    assert (got.status, got.err, Bar.steps) == (0, "", 2)


# --- run: a backend of another array library ------------------------------------------------------


class Boxed(ReferenceBackend):
    """The reference backend on another library's arrays only: they must be moved to it."""

    name = "boxed"
    rounds = False

    def capabilities(self):
        return Capabilities(arrays=("array-api",), gradients=None)

    def harness(self):
        import array_api_strict as strict

        def asarray(x, dtype, device=None):
            dtype = dtype.replace("float64", "float32") if self.rounds else dtype
            return strict.asarray(np.array(x, dtype=dtype))

        return Harness(
            asarray=asarray, to_numpy=lambda x: np.from_dlpack(x), synchronize=lambda x: None
        )


@pytest.fixture
def boxed():
    import array_api_strict  # noqa: F401 - its absence is the fixture's to say, not the command's

    backend = Boxed()
    plsh.register_backend(backend)
    return backend


def test_a_backend_of_another_library_gets_its_own_arrays(call, boxed, tmp_path):
    ids = np.repeat([[0, 1], [0, 0]], 20, axis=1)
    np.savez(tmp_path / "in.npz", segment_ids=ids, **inputs())
    argv = ("--input", tmp_path / "in.npz", "--output", tmp_path / "o.npz", "--backend", "boxed")
    got = call("run", *argv, "--method", "exact")
    assert (got.status, got.err) == (0, "")
    assert "backend boxed" in got.out
    expected = plsh.attention(**inputs(), segment_ids=ids, method="exact", backend="reference")
    np.testing.assert_allclose(load(tmp_path / "o.npz")["out"], expected, rtol=1e-5, atol=1e-6)


def test_a_library_that_narrows_the_dtype_is_refused(refused, boxed, tmp_path):
    boxed.rounds = True
    np.savez(tmp_path / "in.npz", **inputs(dtype="float64"))
    argv = ("--input", tmp_path / "in.npz", "--output", tmp_path / "o.npz", "--backend", "boxed")
    assert "backend 'boxed' turns float64 into float32 here" in refused("run", *argv)
    assert not (tmp_path / "o.npz").exists()


def test_demo_leaves_out_memory_that_it_cannot_see(call, boxed):
    got = call("demo", "--length", 40, "--heads", 2, "--head-dim", 4, "--backend", "boxed")
    assert got.status == 0
    assert all(row[2] == "-" for row in rows_of(got.out)[0])


# --- run: refusals --------------------------------------------------------------------------------


def bad_files():
    """Yield (name, contents or arrays, what the message says)."""
    arrays = inputs()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    whole = buffer.getvalue()
    flipped = bytearray(whole)
    flipped[whole.index(b"NUMPY") + 400] ^= 255
    single = io.BytesIO()
    np.save(single, arrays["q"])
    foreign = io.BytesIO()
    with zipfile.ZipFile(foreign, "w") as file:
        for name in "qkv":
            file.writestr(name, "text")
    huge = io.BytesIO()
    with zipfile.ZipFile(huge, "w") as file:
        header = io.BytesIO()
        declared = {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 20, 1 << 20)}
        np.lib.format.write_array_header_1_0(header, declared)
        for name in "qkv":
            file.writestr(f"{name}.npy", header.getvalue())
    yield "empty", b"", "is not an .npz archive"
    yield "text", b"q,k,v\n1,2,3\n", "is not an .npz archive"
    yield "truncated", whole[: len(whole) // 2], "or was cut short"
    yield "flipped bit", bytes(flipped), "array q of"
    yield "one npy", single.getvalue(), "is one .npy array"
    yield "another zip", foreign.getvalue(), "array q of"
    yield "a petabyte", huge.getvalue(), "array q of"
    yield "missing", {"q": arrays["q"], "k": arrays["k"]}, "lacks v; it holds q, k"
    yield "missing all", {}, "lacks q, k, v; it holds no arrays"
    yield "unknown", arrays | {"mask": arrays["q"]}, "holds mask, which would be ignored"
    yield "objects", arrays | {"q": np.array([1, None])}, "Object arrays cannot be loaded"
    yield "lone ids", arrays | {"segment_ids_q": np.zeros((2, 40), int)}, "must hold segment_ids"
    both = {f"segment_ids{side}": np.zeros((2, 40), int) for side in ("", "_q", "_k")}
    yield "both ids", arrays | both, "must hold segment_ids, or both"
    yield "ids shape", arrays | {"segment_ids": np.zeros((2, 39), int)}, "shape (2, 40), got (2, 39"
    yield "ids dtype", arrays | {"segment_ids": np.zeros((2, 40))}, "segment_ids must be integers"
    yield "nan slope", arrays | {"slopes": [1, np.nan, 1, 1]}, "finite and >= 0, got nan"
    yield "negative slope", arrays | {"slopes": [1, -1.0, 1, 1]}, "finite and >= 0, got -1.0"
    yield "slopes shape", arrays | {"slopes": np.ones(3)}, "(H,) = (4,) or (B, H) = (2, 4), got (3,"
    yield "lsh row slopes", arrays | {"slopes": np.ones((2, 4))}, "need method 'exact' or 'window'"
    yield "complex", {n: x.astype(complex) for n, x in arrays.items()}, "got complex128"
    yield "integers", {n: x.astype(int) for n, x in arrays.items()}, "got int64"
    yield "dtypes", arrays | {"v": arrays["v"].astype("f8")}, "one dtype, got float32, float32, fl"
    yield "rank", arrays | {"q": arrays["q"][0, 0]}, "q must have shape (batch, heads, len, dim)"
    yield "batch", inputs(batch=2) | {"k": inputs(batch=3)["k"]}, "one batch size, got q (2, 4, 40"
    yield "lengths", arrays | {"v": inputs(len_k=39)["v"]}, "k and v must have one length"
    yield "dims", arrays | {"k": inputs(dim=7)["k"]}, "one head dim D, got q (2, 4, 40, 8)"
    yield "groups", inputs(heads=3), "must be a multiple of the heads of k and v (2)"
    yield "corner", inputs(len_k=50), "q_offset=10 aligns the last query with the last key"


@pytest.mark.parametrize(
    ("contents", "message"), [pytest.param(*x[1:], id=x[0]) for x in bad_files()]
)
def test_a_bad_input_is_one_line_that_names_the_file(refused, tmp_path, contents, message):
    """U122: the argument, what came and what was expected; nothing is written."""
    path = tmp_path / "in.npz"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    else:
        np.savez(path, **contents)
    line = refused("run", "--input", path, "--output", tmp_path / "o.npz")
    assert message in line
    assert str(path) in line
    assert os.listdir(tmp_path) == ["in.npz"]


def test_an_input_that_is_not_there_or_a_directory_is_one_line(refused, tmp_path):
    argv = ("--output", tmp_path / "o.npz", "--input")
    assert "cannot read" in refused("run", *argv, tmp_path / "absent.npz")
    assert "cannot read" in refused("run", *argv, tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--method", "window", "--samples", 4),
            "--samples needs --method lsh, got --method window",
        ),
        (("--method", "exact", "--sampler", "iid"), "--sampler needs --method lsh"),
        (("--method", "exact", "--seed", 0), "--seed needs --method lsh"),
        (("--tol", 0.1), "--tol needs --method window, got --method lsh"),
        (("--method", "exact", "--width", 0), "--width needs --method window"),
        (("--method", "window", "--width", 3, "--tol", 0.1), "give --width or --tol, not both"),
        (("--method", "window", "--tol", 1.5), "tol must lie in (0, 1), got 1.5"),
        (("--method", "window", "--tol", "nan"), "tol must lie in (0, 1), got nan"),
        (("--method", "window", "--width", "1,2"), "one width per head (4), got 2"),
        (("--method", "window", "--width=-1"), "width must be >= 0"),
        (("--seed=-1",), "seed"),
        (("--scale", "inf"), "scale must be finite, got inf"),
        (("--q-offset", "1,2,3"), "q_offset must be an int or 2 ints, got"),
        (("--k-offset", "1,2,3"), "k_offset must be an int or 2 ints"),
        (("--k-offset=-4",), "visible positions"),
        (("--layout", "bshd"), "got 4 queries and 2 keys"),
        (("--backend", "cuda"), "no backend 'cuda'; registered: "),
    ],
)
def test_options_that_do_not_fit_are_refused(refused, qkv, tmp_path, argv, message):
    """U122, U031: an option is obeyed or refused, never ignored."""
    assert message in refused("run", "--input", qkv, "--output", tmp_path / "o.npz", *argv)
    assert os.listdir(tmp_path) == ["qkv.npz"]


def test_a_backend_that_cannot_run_says_why(refused, qkv, tmp_path, monkeypatch, boxed):
    """U022, U119: the reason is in the message, whether it is absent or refuses the call."""
    argv = ("run", "--input", qkv, "--output", tmp_path / "o.npz", "--backend", "boxed")
    monkeypatch.setattr(Boxed, "can_run", lambda self, request: "it is Sunday")
    assert "backend 'boxed' can't run this: it is Sunday" in refused(*argv)
    monkeypatch.setattr(Boxed, "spec_version", "99.0")
    assert "backend 'boxed' is not available: it implements spec 99.0" in refused(*argv)


# --- run: the output file -------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["attention", "savez"])
def test_a_failure_leaves_the_old_output_and_nothing_else(
    call, qkv, tmp_path, monkeypatch, where, failure
):
    target = tmp_path / "out.npz"
    target.write_bytes(b"precious")

    def fail(*args, **kwargs):
        if where == "savez":
            args[0].write(b"half")
        raise failure("no")

    monkeypatch.setattr(*((common, "attention") if where == "attention" else (np, "savez")), fail)
    argv = ("run", "--input", qkv, "--output", target)
    if failure is RuntimeError:  # a fault of the program itself is not hidden
        with pytest.raises(RuntimeError):
            call(*argv)
    else:
        assert call(*argv).status == {KeyboardInterrupt: 130, MemoryError: 2}[failure]
    assert target.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "qkv.npz"]


def test_a_failure_in_a_later_batch_row_writes_nothing(refused, qkv, tmp_path, monkeypatch):
    true, calls = common.attention, []

    def fail_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("q must be kinder,\ngot that")
        return true(*args, **kwargs)

    monkeypatch.setattr(common, "attention", fail_second)
    line = refused("run", "--input", qkv, "--output", tmp_path / "o.npz")
    assert f"{qkv}: q must be kinder, got that" in line
    assert os.listdir(tmp_path) == ["qkv.npz"]


def test_a_full_disk_is_one_line_and_leaves_nothing(refused, qkv, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.os, "fsync", fail)
    line = refused("run", "--input", qkv, "--output", tmp_path / "o.npz")
    assert "cannot write --output" in line
    assert "No space left on device" in line
    assert os.listdir(tmp_path) == ["qkv.npz"]


def test_an_output_that_cannot_be_written_is_found_out_first(refused, qkv, tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("computed before the output was checked")

    monkeypatch.setattr(common, "attention", never)
    argv = ("run", "--input", qkv, "--output")
    assert "there is no directory" in refused(*argv, tmp_path / "no" / "o.npz")
    assert "there is no directory" in refused(*argv, qkv / "o.npz")
    assert "is not a regular file" in refused(*argv, tmp_path)
    assert "is the input" in refused(*argv, qkv)
    assert "is the input" in refused(*argv, tmp_path / "." / "x" / ".." / "qkv.npz")
    monkeypatch.setattr(archive.os, "access", lambda path, mode: False)  # root may write anywhere
    assert "is not writable" in refused(*argv, tmp_path / "o.npz")
    monkeypatch.setattr(archive.os, "access", lambda path, mode: path != tmp_path / "o.npz")
    (tmp_path / "o.npz").touch()
    assert "o.npz exists and is not writable" in refused(*argv, tmp_path / "o.npz")
    (tmp_path / "o.npz").unlink()
    assert os.listdir(tmp_path) == ["qkv.npz"]


@pytest.mark.skipif(os.name == "nt", reason="links need privileges on Windows")
def test_links_are_seen_through(call, refused, qkv, tmp_path):
    (tmp_path / "same.npz").symlink_to(qkv)
    assert "is the input" in refused("run", "--input", qkv, "--output", tmp_path / "same.npz")
    os.link(qkv, tmp_path / "twin.npz")
    assert "is the input" in refused("run", "--input", qkv, "--output", tmp_path / "twin.npz")
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.npz"
    link.symlink_to(tmp_path / "real" / "out.npz")
    assert call("run", "--input", qkv, "--output", link).status == 0
    assert link.is_symlink()
    assert os.listdir(tmp_path / "real") == ["out.npz"]
    if os.path.exists(os.devnull):
        assert "not a regular file" in refused("run", "--input", qkv, "--output", os.devnull)


# --- backends -------------------------------------------------------------------------------------


def test_backends_lists_what_is_registered(call):
    got = call("backends")
    assert (got.status, got.err) == (0, "")
    head, *lines = got.out.splitlines()
    assert head.split() == [
        "name", "available", "arrays", "dtypes", "methods", "gradients", "reason",
    ]  # fmt: skip
    infos = plsh.backends()
    assert [line.split()[0] for line in lines] == [info.name for info in infos]
    for line, info in zip(lines, infos, strict=True):
        assert line.split()[1] == ("yes" if info.available else "no")
        assert info.reason in line
        if info.capabilities is not None:
            assert ",".join(info.capabilities.methods) in line


def test_backends_as_json_has_every_capability(call):
    rows = json.loads(call("backends", "--json").out)
    for row, info in zip(rows, plsh.backends(), strict=True):
        assert (row["name"], row["available"], row["reason"]) == (
            info.name,
            info.available,
            info.reason,
        )
        if info.capabilities is not None:
            assert tuple(row["capabilities"]["arrays"]) == info.capabilities.arrays
            assert row["capabilities"]["max_head_dim"] == info.capabilities.max_head_dim


def test_a_broken_backend_is_listed_with_its_reason(call, monkeypatch):
    """U119: it breaks neither the others nor the table."""
    broken = registry._Entry(failure=OSError("libcuda.so.1:\nno such file"))
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, "broken": broken})
    got = call("backends")
    assert got.status == 0
    (line,) = (line for line in got.out.splitlines() if line.startswith("broken"))
    assert line.split()[1] == "no"
    assert "libcuda.so.1" in line
    row = next(r for r in json.loads(call("backends", "--json").out) if r["name"] == "broken")
    assert row["capabilities"] is None


def test_no_backend_at_all_is_said(call, monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {})
    got = call("backends")
    assert got.status == 0
    assert "pip install -e ." in got.out


# --- cost -----------------------------------------------------------------------------------------


def recipe(slopes, samples, sampler="stratified", seed=0):
    method = plsh.PositionalLSH(samples, sampler=sampler, seed=seed)
    return resolve(method, slopes, slopes, len(slopes)).weight


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 30])
def test_window_pairs_are_those_within_the_width(n, causal):
    distance = np.arange(n)[:, None] - np.arange(n)
    for width in (0, 1, 5, n, 2**31 - 1):
        seen = (np.abs(distance) <= width) & ((distance >= 0) | (not causal))
        assert cost.window_pairs(n, width, causal) == seen.sum()
    assert cost.window_pairs(n, n, causal) == cost.dense_pairs(n, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_widest_window_is_the_widest_within_the_pairs(causal):
    n = 30
    for pairs in (30, 31, 100, 300, 465, 900):
        width = cost.widest_window(pairs, n, causal)
        assert cost.window_pairs(n, width, causal) <= pairs
        assert width == n - 1 or cost.window_pairs(n, width + 1, causal) > pairs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 65, 200])
def test_lsh_pairs_are_those_of_the_masks(n, causal, monkeypatch):
    monkeypatch.setattr(cost, "_LABELS", 200)  # so that positions come in many parts
    slopes = (0.5, 0.03, 0.0)
    weight = recipe(slopes, 5, seed=4)
    counts = cost.lsh_pairs(weight, n, causal)
    blocks = plsh.PartitionSet(weight.labels(0, n))
    for h, count in enumerate(counts):
        mean = blocks.mean_mask(h)
        mean = np.tril(mean) if causal else mean
        assert count.distinct == np.count_nonzero(mean)
        assert count.scored == round(5 * mean.sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "sigma"), [(1, 3.0), (40, 1e-3), (40, 3.0), (300, 64.0), (300, 1e5), (300, 1e9)]
)
def test_expected_pairs_are_the_sum_of_the_weights(n, sigma, causal):
    distance = np.arange(n)[:, None] - np.arange(n)
    with np.errstate(under="ignore"):
        weight = np.exp(-np.abs(distance) / sigma)
    exact = 7 * (np.tril(weight) if causal else weight).sum()
    assert cost.expected_lsh_pairs(n, 7, sigma, causal) == pytest.approx(exact, rel=1e-7)


def test_slope_zero_is_expected_to_score_everything():
    assert cost.expected_lsh_pairs(50, 3, np.inf, causal=True) == 3 * cost.dense_pairs(50, True)
    assert cost.expected_lsh_pairs(0, 3, 2.0, causal=False) == 0


def test_drawn_pairs_scatter_about_the_expected():
    n, samples, slope = 400, 16, 0.05
    drawn = [
        cost.lsh_pairs(recipe((slope,), samples, "iid", seed), n, causal=True)[0].scored
        for seed in range(60)
    ]
    mean, spread = np.mean(drawn), np.std(drawn, ddof=1) / len(drawn) ** 0.5
    assert abs(mean - cost.expected_lsh_pairs(n, samples, 1 / slope, True)) < 4 * spread


def test_break_even_with_dense_is_two_sigma_s():
    """Theory: a head of one sigma breaks even near n = 2 sigma s, causal or not."""
    for causal in (False, True):

        def pairs(n, causal=causal):
            return cost.expected_lsh_pairs(n, 16, 256.0, causal)

        n = cost.break_even(pairs, 1, causal)
        assert n == pytest.approx(2 * 256 * 16, rel=0.05)
        assert pairs(n) < cost.dense_pairs(n, causal)
        assert pairs(n - 1) >= cost.dense_pairs(n - 1, causal)
    assert cost.break_even(lambda n: cost.dense_pairs(n, True), 1, causal=True) is None


# --- text -----------------------------------------------------------------------------------------


def test_embedding_depends_on_neither_length_nor_head_count():
    tokens = np.frombuffer(text.default_text()[:200], dtype=np.uint8)
    whole = text.embed(tokens, 3, 8)
    part = text.embed(tokens[:50], 2, 8)
    for a, b in zip(whole, part, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a[:, :2, :50], b, rtol=1e-5, atol=1e-6)


def test_embedding_sees_three_bytes_and_values_one():
    data = b"xxabc--yyabc"
    q, k, v = text.embed(np.frombuffer(data, dtype=np.uint8), 2, 8)
    for x in (q, k):
        np.testing.assert_allclose(x[0, :, 4], x[0, :, 11], rtol=1e-5, atol=1e-6)  # "abc" twice
        assert not np.allclose(x[0, :, 2], x[0, :, 9])  # "xxa" against "yya"
    np.testing.assert_array_equal(v[0, :, 2], v[0, :, 9])
    assert not np.allclose(v[0, 0, 2], v[0, 1, 2])


def test_logits_have_a_standard_deviation_of_about_one():
    tokens = np.frombuffer(text.default_text()[:1000], dtype=np.uint8)
    q, k, _ = text.embed(tokens, 8, 32)
    logits = q @ k.swapaxes(-1, -2) / 32**0.5
    assert np.std(logits) == pytest.approx(1, abs=0.15)


def test_default_text_is_that_of_python_itself():
    from pydoc_data.topics import topics

    first = topics[min(topics)].encode()
    assert text.default_text().startswith(first)
    assert text.load_text(None, 100).tokens.tobytes() == first[:100]
    assert text.load_text(None, 100).note == "text: pydoc_data.topics"


def test_python_without_its_topics_asks_for_a_text(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    assert "pass --text FILE" in refused("demo")


# --- demo -----------------------------------------------------------------------------------------


def rows_of(out):
    """Parse the tables of the demo: for each, rows of (method, seconds, MiB, Mpairs, error)."""
    tables = []
    for line in out.splitlines():
        cells = line.rsplit(maxsplit=4)
        if line.startswith("method "):
            tables.append([])
        elif tables and len(cells) == 5 and cells[0].startswith(("exact ", "window ", "lsh ")):
            tables[-1].append((cells[0].strip(), *cells[1:]))
        elif tables and len(cells) == 5 and cells[0] == "exact":
            tables[-1].append(tuple(cells))
    return tables


NAMES = [
    "exact",
    "window tol=1e-06",
    "window at the bandwidth of lsh samples=16",
    "window at the pairs of lsh samples=16",
    "lsh samples=4 stratified",
    "lsh samples=16 iid",
    "lsh samples=16 stratified",
    "lsh samples=64 stratified",
]


@pytest.fixture(scope="module")
def small_demo():
    """One run of the demo, both tables: (what it printed, its rows)."""
    out, standard = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        assert main(["demo", "--length", "700", "--exact-length", "500", "--head-dim", "8"]) == 0
    finally:
        sys.stdout = standard
    return out.getvalue(), rows_of(out.getvalue())


def test_demo_prints_every_method_at_both_lengths(small_demo):
    out, (near, far) = small_demo
    assert [row[0] for row in near] == NAMES
    assert [row[0] for row in far] == NAMES[1:]
    assert "\nlength 500: error against exact ALiBi in float64\n" in out
    assert "\nlength 700: exact is left out" in out
    assert far[0][-1] == "yardstick"
    assert "beats positional LSH at equal\narithmetic and at equal bandwidth: " in out
    assert "randomised training masks." in out
    for row in near + far:
        assert float(row[1]) >= 0
        assert float(row[2]) > 0


def test_demo_errors_are_those_of_the_oracle(small_demo):
    _, (near, _) = small_demo
    tokens = text.load_text(None, 500).tokens
    q, k, v = text.embed(tokens, 8, 8)
    slopes = plsh.alibi_slopes(8)
    exact = oracle(q, k, v, slopes=slopes, causal=True).out
    methods = {
        "exact": plsh.Exact(),
        "lsh samples=4 stratified": plsh.PositionalLSH(4),
        "lsh samples=16 iid": plsh.PositionalLSH(sampler="iid"),
        "lsh samples=64 stratified": plsh.PositionalLSH(64),
    }
    for name, *_, error in near:
        if name not in methods:
            continue
        out = plsh.attention(q, k, v, method=methods[name], causal=True)
        expected = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        assert float(error) == pytest.approx(expected, rel=0.06 if expected > 1e-5 else 1)


def test_demo_pairs_are_those_of_the_methods(small_demo):
    _, (near, _) = small_demo
    mega = {row[0]: float(row[3]) for row in near}
    assert mega["exact"] == pytest.approx(8 * 500 * 501 / 2 / 1e6, abs=0.005)
    weight = recipe(tuple(plsh.alibi_slopes(8)), 16)
    masks = plsh.PartitionSet(weight.labels(0, 500))
    count = sum(np.count_nonzero(np.tril(masks.mean_mask(h))) for h in range(8)) / 1e6
    assert mega["lsh samples=16 stratified"] == pytest.approx(count, abs=0.005)
    assert mega["window at the pairs of lsh samples=16"] <= count + 0.005
    pairs = sum(cost.window_pairs(500, width, causal=True) for width in weight.bandwidths)
    assert mega["window at the bandwidth of lsh samples=16"] == pytest.approx(
        pairs / 1e6, abs=0.005
    )


def test_what_the_demo_says_of_window_and_lsh_holds(small_demo):
    """Theory: at equal arithmetic, and more so at equal bandwidth, the window wins; stratified
    beats iid; more samples help."""
    _, tables = small_demo
    for table in tables:
        error = {row[0]: float(row[-1]) for row in table if row[-1] != "yardstick"}
        assert (
            error["window at the bandwidth of lsh samples=16"]
            < error["window at the pairs of lsh samples=16"]
            < error["lsh samples=16 stratified"]
        )
        assert error["lsh samples=16 stratified"] < error["lsh samples=4 stratified"]
    assert error["lsh samples=16 stratified"] < error["lsh samples=16 iid"]


def test_demo_takes_a_text_and_says_when_it_repeats_it(call, tmp_path):
    path = tmp_path / "poem.txt"
    path.write_bytes(b"So much depends upon\n")
    argv = ("demo", "--text", path, "--heads", 2, "--head-dim", 4, "--seed", 5)
    got = call(*argv, "--length", 60)
    assert got.status == 0
    assert f"text: {path}, whose 21 bytes are repeated to 60\n" in got.out
    assert len(rows_of(got.out)) == 1  # short enough for exact
    again = call(*argv, "--length", 60)
    errors = [[row[-1] for row in rows_of(x.out)[0]] for x in (got, again)]
    assert errors[0] == errors[1]
    assert "repeated" not in call(*argv, "--length", 20).out


def bits_of(out):
    """Parse the table of the byte model: bits by (method, backend)."""
    lines = out.partition("\nunder ")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [line.rsplit(maxsplit=4) for line in lines]
    return {(row[0].strip(), row[1]): float(row[4]) for row in rows}


def test_demo_runs_the_byte_model_under_each_method(call, tmp_path, boxed):
    path = tmp_path / "text"
    path.write_bytes(text.default_text()[:150])
    argv = ("demo", "--text", path, "--length", 150, "--backend", "numpy,boxed", "--seed", 3)
    got = call(*argv)
    assert (got.status, got.err) == (0, "")
    model, tokens = byte_model.load(), path.read_bytes()
    found = bits_of(got.out)
    methods = {
        "exact": plsh.Exact(),
        "window tol=1e-06": plsh.Window(),
        "lsh samples=4 stratified seed=3": plsh.PositionalLSH(4, seed=3),
        "lsh samples=16 iid seed=3": plsh.PositionalLSH(16, sampler="iid", seed=3),
    }
    for name, method in methods.items():
        logits = model.logits(tokens, model.attention(method)).astype(np.float64)
        chance = np.exp(logits[:-1]) / np.exp(logits[:-1]).sum(-1, keepdims=True)
        expected = np.mean([-np.log2(p[t]) for p, t in zip(chance, tokens[1:], strict=True)])
        assert found[name, "numpy"] == pytest.approx(expected, abs=2e-4)
        assert found[name, "boxed"] == pytest.approx(expected, abs=2e-4)
    # Then the methods attend with its last layer's q, k, v.
    errors = {row[0]: float(row[-1]) for row in rows_of(got.out)[0]}
    layers = []
    exact = model.attention("exact")
    model.logits(tokens, lambda *given: layers.append(given[1:]) or exact(*given))
    options = {"slopes": model.slopes, "causal": True}
    lsh = plsh.attention(*layers[-1], method=plsh.PositionalLSH(4, seed=3), **options)
    true = oracle(*layers[-1], **options).out
    error = np.linalg.norm(lsh - true) / np.linalg.norm(true)
    assert errors["lsh samples=4 stratified"] == pytest.approx(error, rel=0.06)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_demo_continues_a_text(call, method):
    argv = ("demo", "--generate", 20, "--prompt", "import os", "--method", method)
    got = call(*argv, "--temperature", 0)
    assert (got.status, got.err) == (0, "")
    assert "import os" in got.out
    assert "28 positions" in got.out
    options = {"window": plsh.Window(), "exact": plsh.Exact(), "lsh": plsh.PositionalLSH(seed=0)}
    cache = byte_model.Cache(byte_model.load(), options[method], trim=False)
    expected = bytes(byte_model.generate(cache, b"import os", 20, temperature=0))
    assert f"import os{expected.decode(errors='replace')}\n" in got.out


def test_demo_continues_any_bytes(call):
    argv = ("demo", "--generate", 4, "--temperature", 0, "--prompt", os.fsdecode(b"caf\xe9"))
    cache = byte_model.Cache(byte_model.load(), "window")
    expected = b"caf\xe9" + bytes(byte_model.generate(cache, b"caf\xe9", 4, temperature=0))
    assert f"\n{expected.decode(errors='replace')}\n" in call(*argv).out


def test_demo_says_which_backends_can_not_continue_a_text(refused, boxed):
    line = refused("demo", "--generate", 3, "--backend", "boxed")
    assert "--generate needs a --backend of NumPy arrays, got boxed" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--prompt", "text"), "--prompt needs --generate N"),
        (("--method", "exact"), "--method needs --generate N"),
        (("--temperature", 0), "--temperature needs --generate N"),
        (("--generate", 3, "--length", 64), "--length goes without --generate"),
        (("--generate", 3, "--exact-length", 64), "--exact-length goes without --generate"),
        (("--generate", 3, "--text", "a"), "--text goes without --generate"),
        (("--generate", 3, "--heads", 2), "--heads goes without --generate"),
        (("--generate", 3, "--head-dim", 2), "--head-dim goes without --generate"),
        (("--generate", 3, "--backend", "numpy,reference"), "takes one --backend"),
        (("--generate", 3, "--prompt", ""), "--prompt must have a byte or more"),
        (("--generate", 3, "--backend", "nope"), "no backend 'nope'"),
        (("--backend", "numpy,numpy"), "must be different names with commas between them"),
        (("--backend", ","), "must be different names with commas between them, got ','"),
    ],
)
def test_demo_refuses_what_would_have_no_effect(refused, argv, words):
    assert words in refused("demo", *argv)


def test_demo_seed_changes_lsh_only(call):
    argv = ("demo", "--length", 64, "--heads", 2, "--head-dim", 4)
    one, two = (rows_of(call(*argv, "--seed", s).out)[0] for s in (1, 2))
    changed = {a[0] for a, b in zip(one, two, strict=True) if a[3:] != b[3:]}
    assert {"lsh samples=4 stratified", "lsh samples=16 iid"} <= changed
    assert not {"exact", "window tol=1e-06"} & changed


def test_demo_prints_a_row_as_soon_as_it_is_known(capsys, monkeypatch):
    true = demo._measure

    def third_fails(caller, data, name, *rest):
        if name.startswith("lsh"):
            raise KeyboardInterrupt
        return true(caller, data, name, *rest)

    monkeypatch.setattr(demo, "_measure", third_fails)
    assert main(["demo", "--length", "64", "--heads", "2"]) == 130
    assert [row[0] for row in rows_of(capsys.readouterr().out)[0]] == NAMES[:4]


def test_an_unusable_text_is_one_line(refused, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert f"--text {empty} is empty" in refused("demo", "--text", empty)
    assert "cannot read --text" in refused("demo", "--text", tmp_path / "absent.txt")
    assert "cannot read --text" in refused("demo", "--text", tmp_path)


def test_demo_refuses_a_backend_it_does_not_know(refused):
    assert "no backend 'cuda'" in refused("demo", "--backend", "cuda")


@pytest.mark.slow
def test_the_default_demo_runs_to_its_end(call):
    got = call("demo")
    assert (got.status, got.err) == (0, "")
    near, far = rows_of(got.out)
    assert f"length {demo.EXACT_LENGTH}" in got.out
    assert f"length {demo.LENGTH}" in got.out
    assert [row[0] for row in near] == NAMES
    error = {row[0]: row[-1] for row in far}
    for window in NAMES[2:4]:
        assert float(error[window]) < float(error["lsh samples=16 stratified"])
    assert float(got.out.partition("float64: ")[2].rpartition("float64: ")[2].split()[0]) < 1e-5


# --- plan -----------------------------------------------------------------------------------------


def plan_json(call, *argv):
    got = call("plan", "--json", "--no-calibrate", *argv)
    assert (got.status, got.err) == (0, "")
    report = json.loads(got.out)
    return report, {row["name"]: row for row in report["methods"]}


@pytest.mark.parametrize("causal", [False, True])
def test_plan_counts_what_the_methods_do(call, causal):
    argv = ("--length", 300, "--slopes", "0.5,0.02", "--samples", 8, "--seed", 3, "--tol", 0.01)
    argv += ("--head-dim", 16, "--value-dim", 4) + (("--causal",) if causal else ())
    report, rows = plan_json(call, *argv)
    dense = 2 * (300 * 301 // 2 if causal else 300 * 300)
    assert rows["exact"]["pairs"] == dense
    assert rows["exact"]["bandwidth"] == [299, 299]
    assert rows["exact"]["break_even"] is None
    assert rows["window"]["bandwidth"] == plsh.theory.window_width([0.5, 0.02], 0.01).tolist()
    masks = plsh.PartitionSet(recipe((0.5, 0.02), 8, seed=3).labels(0, 300))
    means = [masks.mean_mask(h) for h in range(2)]
    means = [np.tril(x) if causal else x for x in means]
    assert rows["lsh"]["pairs"] == sum(round(8 * x.sum()) for x in means)
    assert rows["lsh"]["distinct_pairs"] == sum(np.count_nonzero(x) for x in means)
    assert rows["lsh"]["label_bytes"] == masks.labels().nbytes
    assert np.all(np.array(rows["lsh"]["bandwidth"]) >= masks.bandwidth())
    for row in rows.values():
        assert row["flops"] == 2 * (16 + 4) * row["pairs"]
    q = np.zeros((1, 2, 300, 16), dtype="float32")
    v = np.zeros((1, 2, 300, 4), dtype="float32")
    assert report["memory"] == {"inputs": 2 * q.nbytes + v.nbytes, "output": v.nbytes}


def test_plan_error_bounds_are_those_of_theory(call):
    report, _ = plan_json(call, "--length", 4096, "--slopes", "0.1,0", "--delta", 0.05)
    bounds = report["bounds"]
    assert bounds["slopes"] == [0.1]  # slope 0 has no error
    sigma = 1 / float(np.float32(0.1))  # MTH-4
    error = plsh.theory.spectral_error_bound
    assert bounds["lsh_spectral_error_expected"] == [error(4096, 16, sigma)]
    assert bounds["lsh_spectral_error_at_delta"] == [error(4096, 16, sigma, 0.05)]
    assert bounds["lsh_block_size_at_delta"] == [plsh.theory.block_size_bound(sigma, 16, 0.05)]


def test_plan_bounds_the_bias_matrices_that_are_used():
    """The window's spectral error and the norm, against the matrices themselves."""
    args = argparse.Namespace(length=200, samples=16, tol=1e-2, delta=0.01)
    bounds = plan._bounds((0.2,), args)
    distance = np.abs(np.arange(200)[:, None] - np.arange(200))
    weight = np.exp(-0.2 * distance)
    kept = weight * (distance <= plsh.theory.window_width(0.2, 1e-2))
    assert np.linalg.norm(weight - kept, 2) < bounds["window_spectral_error"][0]
    assert np.linalg.norm(weight, 2) == pytest.approx(bounds["spectral_norm"][0], rel=0.01)
    assert np.linalg.norm(weight, 2) < bounds["spectral_norm"][0]
    masks = plsh.RandomBinning(5.0).sample(16, 200, sampler="iid", seed=1)
    error = np.linalg.norm(masks.mean_mask(0) - weight, 2)
    assert error < bounds["lsh_spectral_error_expected"][0]
    several = [
        plsh.RandomBinning(5.0).sample(16, 40, sampler="iid", seed=s).mean_mask(0)
        for s in range(200)
    ]
    assert np.std(several, axis=0).max() < bounds["lsh_weight_std"] * 1.25


def test_plan_of_a_long_sequence_is_an_expectation(call):
    _, rows = plan_json(call, "--length", 2**30, "--causal", "--heads", 4)
    lsh = rows["lsh"]
    assert lsh["distinct_pairs"] is None
    sigma = 1 / plsh.alibi_slopes(4)
    assert lsh["pairs"] == pytest.approx(
        16 * 2**30 * np.sum(1 / (1 - np.exp(-1 / sigma))), rel=1e-6
    )
    out = call("plan", "--length", 2**30, "--causal", "--heads", 4, "--no-calibrate").out
    assert f"about {lsh['pairs']:.3e}" in out


def test_plan_in_words_has_each_method_and_bound(call):
    argv = ("--length", 1000, "--dtype", "float16", "--causal", "--sampler", "iid")
    got = call("plan", *argv, "--no-calibrate")
    assert (got.status, got.err) == (0, "")
    out = got.out
    assert "length 1000, 8 heads of slopes 0.00390625 to 0.5, head dims 64 and 64, float16" in out
    assert "inputs 2.93 MiB, output 1000 KiB" in out
    for start in ("exact  ", "window tol=1e-06 ", "lsh samples=16 iid seed=0 "):
        assert any(line.startswith(start) for line in out.splitlines())
    for word in ("bandwidth min / median / max", "break-even n", "labels", "flops"):
        assert word in out
    assert "seconds" not in out
    assert "every weight left out is below 1e-06" in out
    assert "with probability below 0.01" in out


@pytest.mark.parametrize("slopes", ["0", "1e-300,0", "1e300,0.5", "0.25"])
@pytest.mark.parametrize("length", [1, 2, 1000])
def test_plan_has_an_answer_for_extreme_slopes(call, slopes, length):
    report, rows = plan_json(call, "--length", length, "--slopes", slopes)
    assert all(max(row["bandwidth"]) < length for row in rows.values())
    assert report["slopes"] == [float(x) for x in slopes.split(",")]
    assert call("plan", "--length", length, "--slopes", slopes, "--no-calibrate").status == 0


def test_plan_takes_for_0_what_lsh_takes_for_0(call):
    """MTH-4: the blocks are those of the slope in float32."""
    report, rows = plan_json(call, "--length", 100, "--slopes", "1e-300")
    assert report["bounds"]["slopes"] == []
    assert rows["lsh"]["bandwidth"] == [99]
    assert (
        "lsh     slope 0 has no error"
        in call("plan", "--length", 100, "--slopes", "1e-300", "--no-calibrate").out
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--heads", 3, "--slopes", "0.5,0.25"), "slopes must have shape (H,) = (3,), got (2,)"),
        (("--slopes=-1",), "finite and >= 0, got -1.0"),
        (("--slopes", "nan"), "finite and >= 0, got nan"),
        (("--tol", 0), "tol must lie in (0, 1), got 0.0"),
        (("--delta", 1), "delta"),
        (("--seed=-1",), "seed"),
    ],
)
def test_plan_refuses_what_it_cannot_plan(refused, argv, message):
    """U122."""
    assert message in refused("plan", "--length", 100, *argv)


# --- plan: seconds --------------------------------------------------------------------------------


def whole(n):
    """All queries of a call."""
    return n


@pytest.mark.parametrize(("by_token", "by_pair"), [(3e-6, 2e-9), (3e-6, 0.0), (0.0, 2e-9)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_line_of_seconds_is_found_exactly(by_token, by_pair, causal):
    """A fake clock that obeys the model; the prediction is its answer far beyond what was run."""

    def pairs(n):
        return 8 * cost.dense_pairs(n, causal)

    ran = []

    def run(n):
        ran.append(n)
        return by_token * n + by_pair * pairs(n)

    line = calibrate.fit(run, whole, pairs, 1 << 20)
    assert line.seconds(1 << 20, pairs(1 << 20)) == pytest.approx(
        by_token * (1 << 20) + by_pair * pairs(1 << 20), rel=1e-9
    )
    short, long = line.lengths
    assert long == max(ran) == 4 * short
    assert calibrate._LONG_SECONDS / 16 < run(long) <= calibrate._LONG_SECONDS


@pytest.mark.parametrize("causal", [False, True])
def test_exact_is_predicted_from_its_last_queries(monkeypatch, causal):
    """A fake clock that obeys the model; the pairs of a part of the queries are counted right."""
    slopes, by_token, by_pair = (0.5, 0.25, 0.1), 3e-6, 2e-9

    def seconds(n, queries):
        seen = np.arange(n) < n - np.arange(queries)[:, None] if causal else np.ones((queries, n))
        return by_token * queries + by_pair * 3 * np.count_nonzero(seen)

    monkeypatch.setattr(calibrate.Timer, "__call__", lambda self, method, *size: seconds(*size))
    args = argparse.Namespace(
        length=5000, causal=causal, head_dim=2, value_dim=2, dtype="float32", measure=True
    )
    timer = calibrate.Timer(
        common.Caller(None), calibrate.Shape(slopes, 2, 2, args.dtype, args.causal)
    )
    row = plan._row(plsh.Exact(), slopes, args, timer)
    assert row.timed_lengths == (1250, 5000)
    assert row.predicted_seconds == pytest.approx(row.measured_seconds, rel=1e-9)
    assert row.measured_seconds == pytest.approx(by_token * 5000 + by_pair * row.pairs)


@pytest.mark.parametrize(
    ("seconds", "predicted"),
    [
        ({256: 0.1, 1024: 0.2}, 0.8),  # costs less a token: nothing but tokens
        ({256: 0.1, 1024: 9.0}, 9.0 * 16),  # grows faster than the pairs: nothing but pairs
        ({256: 0.1, 1024: 0.4}, 1.6),
    ],
)
def test_neither_term_of_the_line_is_negative(seconds, predicted):
    line = calibrate.fit(seconds.__getitem__, whole, lambda n: n * n, 4096)
    assert min(line.by_token, line.by_pair) >= 0
    assert line.lengths == (256, 1024)
    assert line.seconds(4096, 4096**2) == pytest.approx(predicted, rel=1e-12)


def test_the_fastest_of_several_calls_counts():
    clock = iter([0.03, 0.02, 0.05] * 2)
    line = calibrate.fit(lambda n: next(clock), whole, whole, 100)
    assert line.lengths == (25, 100)
    assert line.seconds(100, 100) == pytest.approx(0.02)


@pytest.mark.parametrize("length", [1, 2, 5, 1023, 1500])
def test_a_short_length_is_timed_itself(length):
    line = calibrate.fit(lambda n: 1e-6 * n, whole, lambda n: n * n, length)
    assert line.lengths[1] == length
    assert line.seconds(length, length**2) == pytest.approx(1e-6 * length)


def test_slow_calls_are_not_repeated():
    ran = []
    calibrate.fit(lambda n: ran.append(n) or 1.0, whole, lambda n: n * n, 1 << 20)
    assert sorted(ran) == [256, 1024]


@pytest.fixture
def fake_clock(monkeypatch):
    """Let every call take a second for a million queries; return the calls (method, n, queries)."""
    calls = []

    def call_timer(self, method, n, queries):
        calls.append((plsh.methods.method_name(method), n, queries))
        return 1e-6 * queries

    monkeypatch.setattr(calibrate.Timer, "__call__", call_timer)
    return calls


def test_plan_predicts_seconds_and_says_from_what(call, fake_clock):
    out = call("plan", "--length", 200000, "--heads", 2, "--causal").out
    head, *rows = out.splitlines()[3:7]
    assert head.endswith("  seconds (predicted)")
    assert [row.split()[-1] for row in rows] == ["0.2"] * 3
    assert "backend numpy, from short calls timed now:\nexact at " in out
    assert "(of exact, the last 256 queries)" in out
    report = json.loads(call("plan", "--length", 200000, "--heads", 2, "--json").out)
    assert report["backend"] == "numpy"
    for row in report["methods"]:
        assert row["predicted_seconds"] == pytest.approx(0.2)
        assert row["measured_seconds"] is None
        assert {(row["name"], n) for n in row["timed_lengths"]} <= {
            timed[:2] for timed in fake_clock
        }
    assert max(queries for *_, queries in fake_clock) < 200000


def test_plan_measures_what_it_can_afford(call, fake_clock):
    argv = ("plan", "--heads", 1, "--measure", "--head-dim", 4)
    out = call(*argv, "--length", 200000).out
    head, *rows = out.splitlines()[3:7]
    assert head.split()[-2:] == ["measured", "ratio"]
    assert [row.split()[-3:] for row in rows] == [["0.2", "0.2", "1.00"]] * 3
    assert {(name, 200000, 200000) for name in ("exact", "window", "lsh")} <= set(fake_clock)
    fake_clock.clear()
    for length, dim in ((100_000_000, 4), (1_000_000, 1 << 10)):  # 100 s; 15 GiB
        out = call(*argv, "--length", length, "--head-dim", dim).out
        assert [row.split()[-2:] for row in out.splitlines()[4:7]] == [["-", "-"]] * 3
        assert length not in {queries for *_, queries in fake_clock}


def test_plan_without_calibration_times_nothing(call, fake_clock):
    report = json.loads(call("plan", "--length", 100, "--no-calibrate", "--json").out)
    assert report["backend"] is None
    for row in report["methods"]:
        assert row["predicted_seconds"] is row["measured_seconds"] is row["timed_lengths"] is None
    assert fake_clock == []
    got = call("plan", "--length", 100, "--no-calibrate", "--measure")
    assert (got.status, got.out) == (2, "")
    assert "not allowed with argument" in got.err


def test_plan_times_the_call_that_is_asked_for(call, monkeypatch):
    true, seen = calibrate.attention, []

    def watched(q, k, v, **options):
        seen.append((q, k, v, options))
        return true(q, k, v, **options)

    monkeypatch.setattr(calibrate, "attention", watched)
    argv = ("--length", 40, "--slopes", "0.5,0.1,0", "--head-dim", 6, "--value-dim", 3)
    argv += ("--dtype", "float16", "--causal", "--backend", "reference", "--samples", 5)
    assert call("plan", *argv).status == 0
    methods = [plsh.Exact(), plsh.Window(tol=1e-6), plsh.PositionalLSH(5)]
    assert list(dict.fromkeys(options["method"] for *_, options in seen)) == methods
    for q, k, v, options in seen:
        n = k.shape[2]
        assert n in (10, 40)
        assert options["q_offset"] == 0
        assert q.dtype == k.dtype == v.dtype == np.float16
        assert (q.shape, k.shape, v.shape) == ((1, 3, n, 6), (1, 3, n, 6), (1, 3, n, 3))
        assert options["slopes"] == (0.5, 0.1, 0.0)
        assert (options["causal"], options["backend"]) == (True, "reference")


def test_plan_times_a_backend_of_another_library(call, boxed, refused):
    argv = ("plan", "--length", 20, "--heads", 1, "--head-dim", 2, "--backend", "boxed")
    out = call(*argv, "--measure").out
    assert "backend boxed" in out
    assert all(float(row.split()[-3]) > 0 for row in out.splitlines()[4:7])
    boxed.rounds = True
    assert "turns float64 into float32 here" in refused(*argv, "--dtype", "float64")
    assert "no backend 'cuda'" in refused("plan", "--length", 20, "--backend", "cuda")


def test_a_dtype_that_numpy_lacks_cannot_be_timed(refused, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    argv = ("plan", "--length", 20, "--dtype", "bfloat16")
    assert "bfloat16 calls cannot be timed here: " in refused(*argv)
    assert "; pass --no-calibrate" in refused(*argv)
    assert call(*argv, "--no-calibrate").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("method", "length"),
    [
        (plsh.PositionalLSH(), 8192),
        (plsh.PositionalLSH(), 32768),
        (plsh.Window(tol=1e-6), 8192),
        (plsh.Window(tol=1e-6), 32768),
        (plsh.Exact(), 4096),
    ],
    ids=str,
)
def test_predicted_seconds_are_within_twice_the_measured(method, length, causal):
    """One of several tries: others may use the machine too."""
    slopes = tuple(plsh.alibi_slopes(8))
    args = argparse.Namespace(
        length=length, causal=causal, samples=16, head_dim=64, value_dim=64, dtype="float32"
    )
    args.measure = True
    shape = calibrate.Shape(slopes, 64, 64, "float32", causal)
    ratios = []
    for _ in range(4):
        row = plan._row(method, slopes, args, calibrate.Timer(common.Caller(None), shape))
        ratios.append(row.measured_seconds / row.predicted_seconds)
        if 0.5 < ratios[-1] < 2:
            return
    raise AssertionError(f"measured / predicted: {ratios}")


def test_defaults_of_run_are_those_of_attention():
    parser = argparse.ArgumentParser()
    run.add_command(parser.add_subparsers(parser_class=common.Parser))
    args = parser.parse_args(["run", "--input", "a", "--output", "b"])
    parameters = inspect.signature(plsh.attention).parameters
    for name in ("method", "causal", "scale", "q_offset", "k_offset", "layout", "backend"):
        assert getattr(args, name) == parameters[name].default, name
