"""What a prediction asks of a network that is ready to be drawn from."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from dubito.models.network.layers import Reading, Structure
from dubito.models.network.network import BayesianNetwork, Draws, InBlocks, Planner, Shared, Stock
from dubito.models.posteriors.protocol import Factors


class Prepared(Protocol):
    """The parts of a posterior that all draws share, of one network on one device: `BayesianNetwork.factors` makes it.

    `NetworkFactors` draws the weights of each layer by itself; `LinearisedFactors` moves some weights of a plain
    network along its Jacobian. Two more kinds would fit:

    - Global inducing points: weights are drawn layer after layer, each by what inducing inputs become under the draws
      of the layers before. They do not depend on the request, so such a kind extends `NetworkFactors`: its `stock`
      runs the inducing inputs through the network, its `outputs` passes that stock on in `Draws.stock`. It folds, and
      the weights of its draws may be made ahead. It is not `capturable` unless `stock` is captured, too.
    - Deep GPs have no weights: `layers` is empty, and so is `stock`. Normals are those of the inducing outputs of each
      layer, of which `outputs` makes functions that it evaluates at K·B rows, so it folds.
    """

    @property
    def device(self) -> torch.device: ...  # of activations

    @property
    def dtype(self) -> torch.dtype: ...  # of activations

    @property
    def structure(self) -> Structure: ...

    @property
    def form(self) -> nn.Module | None: ...  # the network in another form, with the same layers, to be run instead

    @property
    def layers(self) -> Mapping[str, Factors]:
        """Factors of the layers that have a posterior of their own, by name."""
        ...

    @property
    def read(self) -> Reading | None:
        """What is read off the features, in further columns of the outputs."""
        ...

    @property
    def normals(self) -> int:
        """Standard normals that one draw of the whole network needs."""
        ...

    @property
    def members(self) -> int:
        """The most members that any part cycles through; 0 where nothing does."""
        ...

    @property
    def random(self) -> bool:
        """False for a network whose every draw is the same."""
        ...

    @property
    def capturable(self) -> bool:
        """A pass can be captured as a graph that makes its draws from a seed and the number of the first one."""
        ...

    @property
    def folds(self) -> bool:
        """True: K draws of B inputs are K·B rows of a pass, and `outputs` has the columns of `read`.

        False: a pass of B rows serves all draws, and features are those of the mean, read once per request.
        """
        ...

    @property
    def closed_form(self) -> bool:
        """Outputs have a mean and a variance without draws: `moments`."""
        ...

    def outputs(self, network: BayesianNetwork, x: Tensor, draws: Draws, plan: Planner, rows: int) -> Tensor:
        """Logits or means of K draws, `rows` inputs at a time: (B, ...) -> (K, B, ...)."""
        ...

    def shared(self, network: BayesianNetwork, x: Tensor, most: int, in_blocks: InBlocks) -> Shared | None:
        """A function of draws and rows of the inputs that gives their outputs from what was computed here, once for all
        draws of a request, of which there are `most`. None: `outputs` computes all of it in each pass.

        `in_blocks` applies a function to the inputs, a block at a time.
        """
        ...

    def readings(self, network: BayesianNetwork, x: Tensor) -> Tensor:
        """The columns of `read` at the mean, (B, columns), where they are read once per request."""
        ...

    def moments(self, network: BayesianNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs in closed form, both (B, C)."""
        ...

    def stock(self, network: BayesianNetwork, draws: Draws) -> Stock:
        """Weights of the draws by layer, to be kept for requests to come; empty where draws are no layer's weights."""
        ...
