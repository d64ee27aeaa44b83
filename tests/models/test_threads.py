"""Decompositions by one thread: the same bits on any number of cores, and nothing of the caller's is changed."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dubito.models import bayesianize
from dubito.models.numerics.threads import by_one_thread
from dubito.models.predictions.resident import tensors_in
from tests import forked

FORKED = """
import os, torch
from dubito.models.numerics.threads import by_one_thread
ask = by_one_thread(torch.get_num_threads)
assert ask() == 1
child = os.fork()
if child == 0:
    os._exit(0 if ask() == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u"])
def test_factors_have_the_same_bits_by_any_number_of_threads(method: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(128, 96, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 700))
    seen = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        network = bayesianize(plain, method, inducing=16, lam_max=0.1)
        seen.append([t.clone() for t in tensors_in(network.factors())])
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_the_caller_keeps_its_threads() -> None:
    torch.set_num_threads(3)
    inner = by_one_thread(torch.get_num_threads)
    outer = by_one_thread(lambda: (torch.get_num_threads(), inner()))
    assert outer() == (1, 1)
    assert torch.get_num_threads() == 3
    other: list[int] = []
    thread = threading.Thread(target=lambda: other.extend([torch.get_num_threads(), inner()]))
    thread.start()
    thread.join()
    assert other == [3, 1]


def test_gradients_modes_and_errors_are_those_of_the_caller() -> None:
    square = by_one_thread(torch.square)
    x = torch.tensor([3.0], requires_grad=True)
    square(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 6.0
    with torch.no_grad():
        assert not square(x).requires_grad
    with torch.inference_mode():
        assert square(x).is_inference()
    with pytest.raises(RuntimeError, match="positive-definite"):
        by_one_thread(torch.linalg.cholesky)(-torch.eye(2))
    assert square(torch.ones(2, device="meta")).is_meta  # nothing to compute: no thread is asked


def test_a_forked_process_makes_a_thread_of_its_own() -> None:
    done = forked.run(code=FORKED)
    assert (done.returncode, done.stdout) == (0, "both\n"), done.stderr
