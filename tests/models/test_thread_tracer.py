"""A network is traced while other threads compute: a server loads one model while it answers with others."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from dubito.models.traced import TracedCall
from dubito.models.tracing.thread_tracer import ThreadTracer
from dubito.models.tracing.trace import trace

CALL, ATTRIBUTE = nn.Module.__call__, nn.Module.__getattr__
LIMIT = 60  # seconds


class Scaled(nn.Module):
    """Stops in the midst of its forward method, where the test does something else."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.scale, self.pause = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), pause

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        y: Tensor = self.linear(x) * self.scale
        return y


def in_a_thread(work: Callable[[], None]) -> Callable[[], None]:
    """Starts it; what is returned waits for its end, and raises what it has raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> None:
        thread.join(LIMIT)
        assert not thread.is_alive()
        for error in errors:
            raise error

    return join


def test_other_threads_run_the_same_network_and_others_meanwhile() -> None:
    begun, go_on = threading.Event(), threading.Event()
    tracing = threading.current_thread()

    def pause() -> None:
        if threading.current_thread() is not tracing:
            return
        begun.set()
        assert go_on.wait(LIMIT)

    torch.manual_seed(0)
    net, x, inner = Scaled(pause), torch.rand(2, 4), nn.Linear(4, 3)
    other = nn.Sequential(inner, nn.ReLU())
    expected = [(x @ net.linear.weight.T + net.linear.bias) * net.scale, (x @ inner.weight.T + inner.bias).relu()]
    found: list[Tensor] = []

    def elsewhere() -> None:
        try:
            assert begun.wait(LIMIT)
            assert nn.Module.__call__ is not CALL  # else this test shows nothing
            found.extend(one(x) for one in (net, other))
            assert type(net.scale) is nn.Parameter
        finally:
            go_on.set()

    join = in_a_thread(elsewhere)
    graph = ThreadTracer().trace(net)
    join()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [(node.op, node.name) for node in graph.nodes] == [
        ("placeholder", "x"),
        ("call_module", "linear"),
        ("get_attr", "scale"),
        ("call_function", "mul"),
        ("output", "output"),
    ]
    traced = fx.GraphModule(net, graph)
    torch.testing.assert_close(traced(x), expected[0])


def test_two_threads_trace_one_after_the_other_and_leave_torch_as_it_was() -> None:
    running, most = 0, 0
    together = threading.Barrier(2)

    def pause() -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        threading.Event().wait(0.05)
        running -= 1

    graphs: list[fx.Graph] = []

    def work() -> None:
        net = Scaled(pause)
        together.wait(LIMIT)
        graphs.append(ThreadTracer().trace(net))

    for join in [in_a_thread(work) for _ in range(2)]:
        join()
    assert most == 1
    assert [len(graph.nodes) for graph in graphs] == [5, 5]
    assert (nn.Module.__call__, nn.Module.__getattr__) == (CALL, ATTRIBUTE)


class Padded(nn.Module):
    """Asks torch for zeros, and Python for a length: both are replaced while it is traced."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.pause = nn.Linear(4, 4), pause

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        y: Tensor = self.linear(x) + torch.zeros(len(x), 1)
        return y


def test_what_is_replaced_besides_is_put_back_by_each_of_two_threads() -> None:
    together = threading.Barrier(2)
    zeros = torch.zeros
    found: list[tuple[TracedCall, ...]] = []
    elsewhere: list[bool] = []

    def pause() -> None:
        threading.Event().wait(0.05)
        # on the meta device sizes are recorded too, but not those of a thread that traces nothing
        in_a_thread(lambda: elsewhere.append(type(torch.zeros(2, device="meta")) is Tensor))()

    def work() -> None:
        net = Padded(pause)
        together.wait(LIMIT)
        found.append(trace(net, (4,))[0].calls)

    for join in [in_a_thread(work) for _ in range(2)]:
        join()
    assert found[0] == found[1]
    assert any("zeros" in str(call.of) for call in found[0])
    assert elsewhere
    assert all(elsewhere)
    assert torch.zeros is zeros
    assert "len" not in globals()


def test_a_network_that_cannot_be_traced_leaves_torch_as_it_was() -> None:
    def pause() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ThreadTracer().trace(Scaled(pause))
    assert (nn.Module.__call__, nn.Module.__getattr__) == (CALL, ATTRIBUTE)
