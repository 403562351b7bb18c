"""Kept calls on a device: captured, on several streams, with another device as the current one."""

import pytest
import torch
from kept_forms import CALLS, afresh, drawn, forget, moved, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _nothing_known():
    forget()


@pytest.mark.parametrize("call", CALLS)
def test_a_kept_call_is_captured(call):
    t = drawn(call, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(t)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call(t)
    with torch.no_grad():
        for x in t.values():
            if x.is_floating_point():
                x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert same(made, afresh(call, t))


@pytest.mark.parametrize("call", CALLS)
def test_two_streams_in_turns(call):
    t = drawn(call, "cuda")
    want = call(t)
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            got.append(call(t))
    torch.cuda.synchronize()
    assert all(same(g, want) for g in got)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("call", CALLS)
def test_another_device_is_the_current_one(call):
    t = drawn(call, "cuda:0")
    want = [call(t) for _ in range(2)][1]
    there = moved(t, "cuda:1")
    for tensors in (t, there, t, there):
        for index in range(2):
            with torch.cuda.device(index):
                made = call(tensors)
            assert made[0].device == next(iter(tensors.values())).device
            assert same([x.cpu() for x in made], [x.cpu() for x in want])
