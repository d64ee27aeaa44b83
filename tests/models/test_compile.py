"""Networks that torch.compile follows: whole, and with the weights of each layer in that layer."""

import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize

METHODS = ("ffg-u", "fcg-w", "whvi", "ensemble-w", "fcg-u", "ensemble-u", "ffg-w")


@pytest.mark.slow  # the compiler takes seconds
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_a_pass_that_is_followed_is_the_same_pass(method: str) -> None:
    """Layers that are alike but for their draws are not taken for each other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    network, x = bayesianize(net, method, inducing=4), torch.randn(6, 4)

    def loss(x: Tensor) -> Tensor:
        return network.sample(x, 2).square().mean() + 1e-3 * network.kl(None)

    def with_gradients(loss: object, seed: int) -> list[Tensor]:
        assert callable(loss)
        network.zero_grad()
        torch.manual_seed(seed)
        found = loss(x)
        found.backward()
        return [found.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    followed = torch.compile(loss, backend="eager", fullgraph=True)
    for seed in range(2):
        torch.testing.assert_close(with_gradients(followed, seed), with_gradients(loss, seed))
