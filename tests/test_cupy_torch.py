"""CUDA tensors of PyTorch in the CuPy backend: no copy, torch's stream and allocator, no autograd.

On stand-ins for torch and CuPy; the kernels run in the emulator. What only a GPU can show is in
``tests/gpu``.
"""

import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import plsh_cupy
import pytest
from cuda_emulator.fake_torch import fake_torch
from emulated import BACKEND as EMULATED
from emulated import (
    host_arrays,
    on_the_backend,
    put_stand_in,
    register_here,
    request,
    requests,
)

import plsh
from plsh import testing

BACKEND = plsh_cupy.BACKEND


@pytest.fixture
def torch(monkeypatch, tmp_path):
    """A stand-in in torch's place, and one in CuPy's."""
    return put_torch(monkeypatch, tmp_path)


def put_torch(monkeypatch, folder):
    """Put a fresh stand-in in torch's place, with `cupy` in CuPy's; return it."""
    cupy = put_stand_in(monkeypatch, folder)
    torch = fake_torch(cupy)
    torch.cupy = cupy
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def on(torch, index=0, arrays=None):
    return [torch.Tensor(x.copy(), index) for x in (host_arrays() if arrays is None else arrays)]


@pytest.mark.parametrize("name", list(requests()))
def test_results_are_those_of_the_emulated_backend(name, torch):
    """Bit for bit; contiguous tensors of torch."""
    asked = requests(lambda x: torch.Tensor(x.copy()), "torch")[name]
    made = on_the_backend(BACKEND, on(torch), asked)
    expected = on_the_backend(EMULATED, host_arrays(), requests()[name])
    for a, b in zip(made, expected, strict=True):
        assert type(a) is torch.Tensor
        assert a.host.flags.c_contiguous
        testing.assert_identical(a.host, b)


def test_tensors_are_read_where_they_lie(torch):
    """No copy of any kind: torch allocates the results and what one call needs, CuPy nothing."""
    arrays = on(torch)
    call = request(kind="torch")
    on_the_backend(BACKEND, arrays, call)  # loads kernels and tables
    torch.cupy.log.clear()
    output = BACKEND.attend(*arrays[:3], call)
    assert [entry[0] for entry in torch.cupy.log] == ["allocate"] * 2 + ["launch"]
    arrays[0].host[...] = 0  # what the kernels read is this memory
    arrays[1].host[...] = 0
    again = BACKEND.attend(*arrays[:3], call)
    assert not np.array_equal(again.out.host, output.out.host)
    assert {entry[0] for entry in torch.cupy.log} == {"allocate", "launch"}


def test_strides_of_a_view_are_torchs_own(torch):
    """Those of torch count numbers, those of the kernels bytes."""
    arrays = on(torch)
    views = on(torch, arrays=[np.repeat(x, 2, axis=2) for x in host_arrays()])
    views = [x[:, :, ::2] for x in views]
    assert all(x.stride() != y.stride() for x, y in zip(views, arrays, strict=True))
    results = (on_the_backend(BACKEND, given, request(kind="torch")) for given in (arrays, views))
    for a, b in zip(*results, strict=True):
        testing.assert_identical(a.host, b.host)


def test_work_goes_to_the_device_and_stream_of_torch(torch):
    """U082, U083: device 1 while 0 is current, not CuPy's stream; both stay as they were."""
    torch.streams = {0: 40, 1: 41}
    with torch.cupy.cuda.ExternalStream(7, 1):
        made = on_the_backend(BACKEND, on(torch, 1), request(kind="torch"))
    assert torch.cuda.current_device() == 0
    assert torch.cupy.cuda.Device.stack == []
    assert all(x.device.index == 1 for x in made)
    placed = {e[1:3] for e in torch.cupy.log if e[0] in ("launch", "upload")}
    assert placed == {(1, 41)}
    assert {e[1:] for e in torch.cupy.log if e[0] == "allocate"} == {(1, 41)}


def test_the_current_device_is_restored_after_an_error(torch):
    """U082."""
    torch.cupy.broken = "error: expected a declaration"
    with pytest.raises(RuntimeError, match="expected a declaration"):
        on_the_backend(BACKEND, on(torch, 1), request(kind="torch"))
    assert torch.cuda.current_device() == 0
    assert torch.cupy.cuda.Device.stack == []


def test_tables_of_cupy_and_torch_are_apart(torch):
    """Each frees its memory in the order of its own streams."""
    on_the_backend(BACKEND, on(torch), request(kind="torch"))
    uploads = sum(entry[0] == "upload" for entry in torch.cupy.log)
    arrays = [torch.cupy.ndarray(x, 0) for x in host_arrays()]
    on_the_backend(BACKEND, arrays, request())
    assert sum(entry[0] == "upload" for entry in torch.cupy.log) == 2 * uploads > 0


def test_a_graph_of_torch_is_recorded_warm_only(torch):
    """U083: as one of CuPy."""
    torch.streams = {0: 5}
    arrays, call = on(torch), request(kind="torch")
    torch.cupy.capturing.add(5)
    with pytest.raises(RuntimeError, match="make the same call once before"):
        on_the_backend(BACKEND, arrays, call)
    torch.cupy.capturing.clear()
    on_the_backend(BACKEND, arrays, call)
    torch.cupy.capturing.add(5)
    torch.cupy.log.clear()
    on_the_backend(BACKEND, arrays, call)
    assert {entry[0] for entry in torch.cupy.log} == {"allocate", "launch"}
    with pytest.raises(RuntimeError, match=r"a table of this call is not on the device"):
        on_the_backend(BACKEND, arrays, requests(kind="torch")["table on the host"])


def test_bfloat16_needs_no_package(torch, monkeypatch):
    """U084: tensors are passed by address, so that ml_dtypes is not imported."""
    given = [x.astype(ml_dtypes.bfloat16) for x in host_arrays()]
    asked = request(kind="torch")
    asked = replace(asked, static=replace(asked.static, dtype="bfloat16"))
    expected = on_the_backend(EMULATED, given, asked)
    tensors = [torch.Tensor(x.view(np.uint16), 0, torch.bfloat16) for x in given]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # an import fails
    made = on_the_backend(BACKEND, tensors, asked)
    assert [x.dtype for x in made] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 3 + [
        torch.float32
    ]
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_array_equal(a.host, b.view(a.host.dtype))


# --- through the public call ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_public_call_takes_tensors(layout, torch):
    """In either layout, with and without a batch axis; the gradients too."""
    name = register_here()
    for batched in (True, False):
        given = [x if batched else x[0] for x in host_arrays()]
        given = [x.swapaxes(-3, -2) if layout == "bshd" else x for x in given]
        call = {"method": "window", "causal": True, "layout": layout}
        tensors = on(torch, arrays=given)
        output = plsh.attention(*tensors[:3], return_lse=True, backend=name, **call)
        grads = plsh.attention_vjp(*tensors[:3], output, tensors[3], backend=name, **call)
        plsh.register_backend(EMULATED)
        call["backend"] = EMULATED.name
        want = plsh.attention(*given[:3], return_lse=True, **call)
        by = plsh.attention_vjp(*given[:3], want, given[3], **call)
        for a, b in zip((*output, *grads), (*want, *by), strict=True):
            testing.assert_identical(a.host, b)


def test_a_parameter_is_refused_with_both_ways_out(torch):
    """U085: nothing is recorded for autograd; without grad mode nothing would be."""
    name, tensors = register_here(), on(torch)
    tensors[1].requires_grad = True
    with pytest.raises(TypeError, match=r"k requires grad.*k\.detach\(\).*backend 'torch'"):
        plsh.attention(*tensors[:3], method="exact", backend=name)
    torch.grad_enabled = False
    plsh.attention(*tensors[:3], method="exact", backend=name)


def test_tensors_of_the_host_and_of_two_devices_are_refused(torch):
    """U085."""
    name = register_here()
    on_host = on(torch, None)
    with pytest.raises(TypeError, match=r"q must be on a CUDA device.*q = q\.cuda\(\)"):
        plsh.attention(*on_host[:3], backend=name)
    q, k, v, _ = on(torch)
    with pytest.raises(ValueError, match="one device"):
        plsh.attention(q, k, on(torch, 1)[2], backend=name)
    slopes = torch.Tensor(np.ones(4, dtype="float32"), 1)
    with pytest.raises(ValueError, match="one device"):
        plsh.attention(q, k, v, method="exact", slopes=slopes, backend=name)
