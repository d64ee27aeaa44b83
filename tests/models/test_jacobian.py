"""Jacobians at chosen weights against autograd's own, taken one input at a time over all weights."""

import pytest
import torch
from torch import Tensor, nn

from dubito.models.errors import PredictionError
from dubito.models.network import jacobian
from dubito.models.network.jacobian import Linearised, add_squares, layout


class Mixed(nn.Module):
    """Grouped, strided, dilated and circular convolutions, BatchNorm, a layer used twice, in-place ops, a parameter of
    no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3, stride=2, dilation=2, padding=1)
        self.short = nn.Conv2d(4, 4, 1, stride=2, bias=False)
        self.twice = nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular")
        self.layer_norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        x.relu_()
        y = self.b(x)
        y += self.short(x[..., 1:-1, 1:-1])
        y = self.twice(self.twice(y)).relu_()
        tokens = y.flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.layer_norm(tokens).mean(1) * self.scale)
        return out


class Turned(nn.Module):
    """A transformer that wants time first: where there are as many inputs as steps, shapes do not tell them apart."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=not first)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x.transpose(0, 1)).transpose(0, 1) if self.first else self.block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def mixed() -> Mixed:
    torch.manual_seed(0)
    net = Mixed().double().eval()
    assert net.norm.running_mean is not None
    assert net.norm.running_var is not None
    net.norm.running_mean.normal_()
    net.norm.running_var.uniform_(0.5, 2)
    return net


def brute(net: nn.Module, x: Tensor) -> Tensor:
    """(B, C, D): one input and one output at a time."""
    rows = []
    for one in x.split(1):
        f = net(one)[0]
        for c in range(len(f)):
            found = torch.autograd.grad(f[c], list(net.parameters()), retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat(
                    [
                        (torch.zeros_like(p) if g is None else g).flatten()
                        for p, g in zip(net.parameters(), found, strict=True)
                    ]
                )
            )
    return torch.stack(rows).view(len(x), -1, rows[0].numel())


@pytest.fixture(params=["by matrix", "by entry", "few at a time"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "by matrix":
        monkeypatch.setattr(jacobian, "SPARSE", 0)
    if request.param == "few at a time":
        monkeypatch.setattr(jacobian, "AT_ONCE", 50)
    return str(request.param)


def test_every_weight_of_every_kind_of_layer(way: str) -> None:
    net, x = mixed(), torch.randn(5, 2, 9, 9).double()
    J = brute(net, x)
    found = Linearised(net, x, torch.arange(J.shape[2]))
    torch.testing.assert_close(found.jacobian(), J)
    torch.testing.assert_close(found.outputs, net(x))
    assert found.tape.others == ["scale"]  # all but this by what the layers saw
    some = torch.randperm(J.shape[2], generator=torch.Generator().manual_seed(0))[:40].sort().values
    torch.testing.assert_close(Linearised(net, x, some).jacobian(), J[:, :, some])


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_squares_of_every_weight(way: str, order: torch.memory_format) -> None:
    net, x = mixed().to(memory_format=order), torch.randn(5, 2, 9, 9).double()
    J, v = brute(net, x), torch.randn(2, 5, 3).double()
    total = torch.zeros(J.shape[2]).double()
    add_squares(net, x, lambda f: v, total)
    torch.testing.assert_close(total, torch.einsum("nbc,bcd->nbd", v, J).square().sum((0, 1)))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("B", [3, 5])
def test_attention_and_time_first(first: bool, B: int) -> None:
    """Weights that attention uses past its layers, and rows that are steps, not inputs, although there are as many."""
    torch.manual_seed(0)
    net, x = Turned(first).double().eval(), torch.randn(B, 5, 4).double()
    J = brute(net, x)
    torch.testing.assert_close(Linearised(net, x, torch.arange(J.shape[2])).jacobian(), J)


def test_frozen_unused_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(2, 2)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(x).tanh())
            return out

    torch.manual_seed(0)
    net, x = Tied().double().eval(), torch.randn(4, 3).double()
    J = brute(net, x)
    for p in net.parameters():
        p.requires_grad_(False)
    with torch.inference_mode():
        found = Linearised(net, x[:], torch.arange(J.shape[2])).jacobian()
    torch.testing.assert_close(found, J)
    assert list(layout(net)) == ["one.weight", "one.bias", "two.bias", "unused.weight", "unused.bias"]


def test_a_weight_that_is_used_past_its_layer_too() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(nn.functional.linear(self.layer(x).tanh(), self.layer.weight))
            return out

    torch.manual_seed(0)
    net, x = Again().double().eval(), torch.randn(4, 3).double()
    J = brute(net, x)
    found = Linearised(net, x, torch.arange(J.shape[2]))
    torch.testing.assert_close(found.jacobian(), J)
    assert found.tape.others == ["layer.weight"]


def test_a_network_whose_rows_see_each_other_is_refused() -> None:
    with pytest.raises(PredictionError, match="normalises by the batch"):
        Linearised(mixed().train(), torch.randn(2, 2, 9, 9).double(), torch.arange(3))
