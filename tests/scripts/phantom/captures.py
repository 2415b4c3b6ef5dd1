"""Checks that captures of CUDA graphs refuse the same calls on the simulated GPU as on a card."""

import os
import threading
import traceback
import warnings

import torch
from torch import nn

CAPTURING = "operation not permitted when stream is capturing"


def in_a_child(case):
    """Runs a case in its own process, because torch's allocator is not usable after a failed capture."""
    child = os.fork()
    if child == 0:
        try:
            case()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case


def item(x):
    x.sum().item()


def branch(x):
    if (x > 0).all():
        pass


def synchronize(x):
    torch.cuda.synchronize()


def synchronize_the_stream(x):
    torch.cuda.current_stream().synchronize()


def query_the_stream(x):
    torch.cuda.current_stream().query()


def query_an_event(x):
    x.before.query()


def query_a_captured_event(x):
    event = torch.cuda.Event()
    event.record()
    event.query()


def wait_for_uncaptured_work(x):
    with torch.cuda.stream(x.side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(x.side)


def leave_a_fork(x):
    x.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(x.side):
        x.add_(1)


def refused(act, words):
    x = torch.ones(1000, device="cuda")
    x.before, x.side = torch.cuda.Event(), torch.cuda.Stream()
    x.before.record()
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)
            try:
                act(x)
            except RuntimeError as error:
                said += str(error)
                raise
    except RuntimeError as error:
        said += str(error)
    assert words in said, f"{act.__name__}: {said}"
    # The device itself is usable after the failed capture.
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    x.sum().item()


def refused_elsewhere(mode):
    """Returns True if another thread is forbidden to allocate while this one captures."""
    refusals = []

    def allocate():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            refusals.append(str(error))

    x = torch.ones(1000, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            x.add_(1)
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
    except RuntimeError:
        assert refusals
    return bool(refusals)


def modes():
    assert not refused_elsewhere("thread_local")
    assert not refused_elsewhere("relaxed")
    assert refused_elsewhere("global")


def permitted():
    """Calls that a card permits: allocations, joined side streams, copies that take place at the launch."""
    side = torch.cuda.Stream()
    source = torch.arange(8).pin_memory()
    target = torch.zeros(8, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            big.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        target.copy_(source, non_blocking=True)
    source.fill_(5)
    graph.replay()
    assert target.tolist() == [5] * 8, target
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32)).cuda()
    example = torch.randn(8, 32, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (example,))
    for _ in range(3):
        graphed(torch.randn(8, 32, device="cuda", requires_grad=True)).sum().backward()


def graph_memory():
    """An instantiated graph takes the estimated 128 KiB, and 10 KiB for each node, until it is destroyed."""
    x = torch.ones(64, device="cuda")

    def capture(nodes, pool=None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = x
            for _ in range(nodes):
                y = y.relu()
        return graph

    first = capture(50)
    before = torch.cuda.mem_get_info()[0]
    graphs = [capture(50, first.pool()) for _ in range(100)]
    taken = before - torch.cuda.mem_get_info()[0]
    assert abs(taken - 100 * (128 + 50 * 10) * 1024) < 4 << 20, taken
    graphs.clear()
    left = before - torch.cuda.mem_get_info()[0]
    assert abs(left) < 4 << 20, left
    # A cuBLAS product is a node, too.
    graph = torch.cuda.CUDAGraph()
    matrix = torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings(), torch.cuda.graph(graph):
        warnings.simplefilter("error")
        matrix @ matrix


for act, words in (
    (item, CAPTURING),
    (branch, CAPTURING),
    (synchronize, CAPTURING),
    (synchronize_the_stream, CAPTURING),
    (query_the_stream, CAPTURING),
    (query_an_event, CAPTURING),
    (query_a_captured_event, "operation not permitted on an event last recorded in a capturing stream"),
    (wait_for_uncaptured_work, "dependency created on uncaptured work in another stream"),
    (leave_a_fork, "capturing stream has unjoined work"),
):
    in_a_child(lambda act=act, words=words: refused(act, words))
in_a_child(modes)
in_a_child(permitted)
in_a_child(graph_memory)
print("ok")
