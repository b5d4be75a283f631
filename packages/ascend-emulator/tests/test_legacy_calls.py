# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Calls of legacy graph operators (aclop) by their C functions, and what they refuse."""

import ctypes
from ctypes import byref, c_char_p, c_float, c_int64, c_uint8, c_void_p

import pytest
import torch


@pytest.fixture
def acl():
    torch.npu.current_device()
    library = ctypes.CDLL("libascendcl.so")
    for name in ("aclCreateTensorDesc", "aclCreateDataBuffer", "aclopCreateAttr"):
        getattr(library, name).restype = c_void_p
    return library


def graph_call(acl, name, inputs, outputs, attributes=None, version=""):
    """Execute a graph operator on tensors, as torch_npu's OpCommand does, and return its status."""

    def described(tensors):
        descriptions, buffers = [], []
        for tensor in tensors:
            dims = (c_int64 * tensor.dim())(*tensor.shape)
            code = {torch.float32: 0, torch.int64: 9}[tensor.dtype]
            descriptions.append(acl.aclCreateTensorDesc(code, tensor.dim(), dims, 2))
            if not tensor.is_npu:
                assert acl.aclSetTensorPlaceMent(c_void_p(descriptions[-1]), 1) == 0
            buffers.append(
                acl.aclCreateDataBuffer(c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
            )
        return (c_void_p * len(tensors))(*descriptions), (c_void_p * len(tensors))(*buffers)

    torch.npu.synchronize()
    given, outputs_described = described(inputs), described(outputs)
    call = getattr(acl, f"aclopCompileAndExecute{version}")
    status = call(
        name,
        len(inputs),
        *given,
        len(outputs),
        *outputs_described,
        c_void_p(attributes),
        0,
        0,
        None,
        None,
    )
    assert acl.aclrtSynchronizeDevice() == 0
    return status


def test_both_calls_execute_a_graph_operator(acl):
    for version in ("", "V2"):
        y = torch.zeros(2, 3, device="npu")
        assert (
            graph_call(
                acl, b"Fill", [torch.tensor([2, 3]), torch.tensor(7.0)], [y], version=version
            )
            == 0
        )
        assert y.cpu().unique().tolist() == [7]


def test_identity_copies_values(acl):
    x, y = torch.randn(3, 5).npu(), torch.zeros(3, 5, device="npu")
    assert graph_call(acl, b"Identity", [x], [y], version="V2") == 0
    assert torch.equal(x.cpu(), y.cpu())


def test_tensors_that_do_not_fit_are_refused(acl):
    acl.aclGetRecentErrMsg.restype = c_char_p
    x, y, z = (torch.ones(shape, device="npu") for shape in ((2, 3), (3, 3), (5, 3)))
    assert graph_call(acl, b"ConcatD", [x, y], [z]) == 0
    for given, output_shape, message in (
        ([x, y], y, "y has shape [3, 3]; it must be [5, 3]"),
        ([x, y[:, :2].contiguous()], z, "x has shapes [2, 3] and [3, 2]"),
        ([x, y[0]], z, "x has shapes [2, 3] and [3]"),
        ([x, y.long()], z, "x is Long (DT_INT64)"),
        ([], z, "N is 0 for 0 tensors"),
    ):
        assert graph_call(acl, b"ConcatD", given, [output_shape]) != 0
        assert f"ConcatD: {message}" in acl.aclGetRecentErrMsg().decode()
    assert graph_call(acl, b"Identity", [x], [y]) != 0
    assert "Identity: y has shape [3, 3]" in acl.aclGetRecentErrMsg().decode()


def test_an_attribute_that_is_not_computed_is_refused(acl):
    acl.aclGetRecentErrMsg.restype = c_char_p
    x, y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    numbers, counts = (c_int64 * 1)(3), (ctypes.c_int * 1)(1)
    setters = {
        b"Bool": (c_uint8(1),),
        b"Int": (c_int64(1),),
        b"Float": (c_float(1),),
        b"String": (b"text",),
        b"DataType": (1,),
        b"ListBool": (1, (c_uint8 * 1)(1)),
        b"ListInt": (1, numbers),
        b"ListFloat": (1, (c_float * 1)(1)),
        b"ListListInt": (1, counts, (c_void_p * 1)(ctypes.addressof(numbers))),
    }
    for kind, value in setters.items():
        attributes = acl.aclopCreateAttr()
        assert getattr(acl, f"aclopSetAttr{kind.decode()}")(c_void_p(attributes), kind, *value) == 0
        assert graph_call(acl, b"Mish", [x], [y], attributes) != 0
        assert (
            f"Mish: attribute {kind.decode()} is not computed" in acl.aclGetRecentErrMsg().decode()
        )
        acl.aclopDestroyAttr(c_void_p(attributes))


def test_the_storage_of_a_description_is_kept(acl):
    dims = (c_int64 * 2)(16, 16)
    description = c_void_p(acl.aclCreateTensorDesc(0, 2, dims, 2))
    assert acl.aclSetTensorShape(description, 4, byref((c_int64 * 4)(1, 1, 16, 16))) == 0
    acl.aclDestroyTensorDesc.restype = None
    acl.aclDestroyTensorDesc(description)
