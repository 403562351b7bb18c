"""What is kept without tensors is described to the library as the tensors it stands for."""

import ctypes

import torch
from talea._linear_cross_entropy import _late
from talea._linear_cross_entropy._rests import Rests, RestsLike


def test_a_rest_is_described_as_the_tensor_it_stands_for():
    dx, dw = torch.empty(3, 5, dtype=torch.uint8), torch.empty(7, dtype=torch.int32)
    like = RestsLike([("dx_rest", dx), ("dw_rest", dw)])
    assert like.offsets == [0, 256] and like.bytes == 512
    freed, place = [], dx.data_ptr()
    rests = Rests(like, dx.device, place)
    said = _late._LateCall(rests()).struct
    meant = _late._LateCall({"dx_rest": dx, "dw_rest": dw}).struct
    assert said.dw_rest.data == place + 256
    said.dw_rest.data = dw.data_ptr()
    assert bytes(ctypes.string_at(ctypes.byref(said), ctypes.sizeof(said))) == bytes(
        ctypes.string_at(ctypes.byref(meant), ctypes.sizeof(meant))
    )
    rests.__del__(freed.append)
    assert freed == [place]
    Rests.__del__, kept = lambda self: None, Rests.__del__  # it was never PyTorch's to free
    del rests
    Rests.__del__ = kept
