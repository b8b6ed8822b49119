"""Threads of a call: results do not depend on them, and they leave all settings as they were."""

import subprocess
import sys
import threading

import numpy as np
import plsh_torch._call as call_module
import plsh_torch._threads as threads
import pytest
import torch
from laws import NAMES, inputs
from test_torch_backend import ENVIRONMENT, TILED, Settings, assert_all_same, everything, ours

SOON = TILED | {"THREADS_PAY": 0, "SEGMENT": 64, "TOGETHER": 1 << 12}
"""Settings that cut short calls into many parts, for threads."""


class Threads:
    """Sets torch's number of threads, and sets it back."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *error):
        torch.set_num_threads(self.before)


def elsewhere(f):
    """Call f in a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(f()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("method", NAMES)
def test_results_do_not_depend_on_the_number_of_threads(method):
    """U092: forward and backward, bit for bit, in tiles and in whole heads."""
    tokens = inputs(300, dtype="float32")
    for values in (SOON, SOON | {"SMALL": 1 << 40}, {}):
        with Settings(**values):
            found = []
            for count in (1, 2, 5):
                with Threads(count):
                    found.append(everything(*tokens, method, causal=True))
        for other in found[1:]:
            assert_all_same(other, found[0], units=0)


def test_work_is_shared_and_each_thread_works_alone():
    """As many threads as torch's operations may take, each with operations of one thread."""
    seen = []
    met = threading.Barrier(3, timeout=30)

    def work(job, scratch):
        met.wait()
        seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))

    with Threads(3), torch.no_grad():
        threads.run(work, range(3), 3)
        after = torch.get_num_threads()
    assert len({ident for ident, *_ in seen}) == 3
    assert all((count, grad) == (1, False) for _, count, grad in seen)
    assert after == 3


@pytest.mark.parametrize("fails", [False, True])
def test_settings_of_the_caller_and_of_new_threads_are_as_before(fails):
    """The number of threads of operations, here and in threads to come, and modes."""

    def work(job, scratch):
        if fails:
            raise ZeroDivisionError(job)

    with Threads(3):
        before = (torch.get_num_threads(), elsewhere(torch.get_num_threads))
        if fails:
            with pytest.raises(ZeroDivisionError):
                threads.run(work, range(9), 2)
        else:
            threads.run(work, range(9), 2)
            with Settings(**SOON):
                everything(*inputs(150), "lsh")
        assert (torch.get_num_threads(), elsewhere(torch.get_num_threads)) == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_fault_in_a_thread_ends_the_call(monkeypatch):
    """What has not begun need not be done; nothing hangs."""
    done = []

    def fail(group, *args):
        done.append(group)
        raise ZeroDivisionError

    monkeypatch.setattr(call_module, "forward", fail)
    with Settings(**SOON), Threads(2), pytest.raises(ZeroDivisionError):
        ours(*inputs(3000, batch=1))
    assert len(done) <= 2


def test_without_a_way_to_set_a_thread_the_caller_works(monkeypatch):
    """As on a system whose libraries do not say how: on torch's own threads."""
    want = everything(*inputs(300), "lsh")
    monkeypatch.setattr(threads, "_setters", lambda: None)
    monkeypatch.setattr(threads, "ThreadPoolExecutor", None)
    with Settings(**SOON):
        assert_all_same(everything(*inputs(300), "lsh"), want, units=256)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_the_caller_hold(mode):
    """Results of threads are the caller's: written to in any mode, and to train with after."""
    q, k, v = map(torch.tensor, inputs(300, dtype="float32"))
    want = ours(q, k, v, "window").out
    with Settings(**SOON), Threads(2):
        with mode():
            got = ours(q, k, v, "window").out
            assert got.is_inference() == (mode is torch.inference_mode)
            got.add_(0)
        torch.testing.assert_close(got, want)
        leaf = q.clone().requires_grad_()  # on tables made in that mode
        torch.autograd.grad(ours(leaf, k, v, "window").out.sum(), leaf)


FORKED = """
import os, threading, time, warnings
warnings.simplefilter("ignore")
import torch, plsh, plsh_torch._call as call, plsh_torch._threads as _threads
call.THREADS_PAY, call.SEGMENT = 0, 64
torch.set_num_threads(2)
x = [torch.ones(1, 2, 400, 16) for _ in range(3)]
def run():
    return plsh.attention(*x, method="lsh", causal=True, backend="torch").sum().item()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return run()
want = run()
loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork")
assert [x.item() for batch in loader for x in batch] == [want] * 2
child = os.fork()
if not child:
    os._exit(0 if run() == want and torch.get_num_threads() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
last = threading.Thread(target=time.sleep, args=(0.3,))  # as if it still cleaned up
last.start()
_threads._helpers.append(last.native_id)
child = os.fork()
if not child:
    os._exit(0)
assert not last.is_alive() and os.waitpid(child, 0)[1] == 0
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks where torch may")
def test_a_forked_process_computes_after_its_parent_has():
    """Threads do not outlive a call, so that a data loader's worker has none to wait for.

    The system may be slower to see them off than Python: a fork must wait for that. Of 200 forks
    after calls with 16 threads on 2 cores, 10 children hung in MKL's allocator before it did.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )
    assert done.stdout == "done\n", done.stderr


def test_a_part_is_a_row_of_a_head_with_its_own_bounds():
    """A long call is cut by heads and segments; no part waits for another."""
    q, k, v = map(torch.tensor, inputs(300, batch=1))
    caught = []
    init = call_module.Call.__init__

    def spy(self, *args):
        init(self, *args)
        caught.append(self)

    with pytest.MonkeyPatch.context() as patch, Settings(**SOON):
        patch.setattr(call_module.Call, "__init__", spy)
        ours(q, k, v, "exact")
        parts = list(caught[0].parts())
    assert len(parts) == 4 * -(-300 // 64)
    assert {(p.rows.start, p.keys.start) for p in parts} == {(0, 0), (0, 1)}
    assert np.ptp([p.pairs for p in parts[:4]]) == 0
