"""A network of your own, trained as you train it, then made Bayesian, saved, calibrated, served and asked.

The data are the 1,797 handwritten digits (8 × 8 pixels) that come with dubito. Run it in an empty folder:

    python examples/own_cnn.py

It writes cnn.safetensors, which holds the network's structure too: the server needs no line of this file.
"""

import argparse
import subprocess
import time
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dubito.models import bayesianize, save
from dubito.models.manifest import Card, Image, Input
from dubito.service.client import Client

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20, help="of the plain network, and again of the Bayesian one")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()
torch.manual_seed(0)

# 1. Data: 1,200 digits to train on, 397 to calibrate with, 200 to ask about.
with np.load(str(files("dubito.training").joinpath("digits.npz"))) as data:
    pixels, labels = data["x"], data["y"]
order = np.random.default_rng(0).permutation(len(pixels))
train, held, test = order[:1200], order[1200:1597], order[1597:]
x = torch.from_numpy(pixels[:, None] / 16).float()  # (1797, 1, 8, 8), in [0, 1]: the darkest pixel is 16
y = torch.from_numpy(labels).long()


# 2. Your network, and your training loop.
class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(64 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.first(x)))
        x = self.pool(torch.relu(self.second(x)))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def batches() -> list[Tensor]:
    return list(torch.from_numpy(train)[torch.randperm(len(train))].split(100))


net = CNN()
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(options.epochs):
    for rows in batches():
        optimiser.zero_grad()
        cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
print(f"plain network: {(net(x[test]).argmax(1) == y[test]).float().mean():.1%} of the test digits are right")

# 3. Make it Bayesian. The posterior starts at the trained weights; the loss is the one above plus the KL divergence.
network = bayesianize(net, "ffg-u", inducing=16, lam_share=0.1, sigma_max=0.2, spread=0.1)
optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(options.epochs):
    for rows in batches():
        optimiser.zero_grad()
        loss = cross_entropy(network(x[rows]), y[rows]) + network.kl() / len(train)
        loss.backward()
        optimiser.step()

# 4. Save it with a card that says what goes in and what the classes are called, then calibrate it on digits held out.
card = Card(
    input=Input(shape=(1, 8, 8), image=Image(mean=(0.0,), std=(16 / 255,))),  # of pixels / 255
    labels=("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
)
save(network, "cnn.safetensors", card=card)
np.savez("held.npz", x=pixels[held][..., None], y=labels[held])
calibrate = ["dubito", "calibrate", "cnn.safetensors", "--data", "npz:held.npz", "--coverage", "0.99"]
subprocess.run([*calibrate, "--out", "cnn.safetensors"], check=True)

# 5. Serve it, and ask it about test digits and about noise.
server = subprocess.Popen(
    ["dubito", "serve", "cnn.safetensors", "--port", str(options.port), "--set", "log_level=warning"]
)
try:
    with Client(f"http://localhost:{options.port}") as client:
        while server.poll() is None and not client.ready():
            time.sleep(0.2)
        digits = client.predict("cnn", x[test].numpy(), samples=20, seed=0)
        noise = client.predict("cnn", np.random.default_rng(1).random((200, 1, 8, 8), np.float32), samples=20, seed=0)
finally:
    server.terminate()
    server.wait()
right, size = (digits["class"] == y[test].numpy()).mean(), digits["prediction_set"].sum(1).mean()
print(f"served: {right:.1%} of the test digits are right; their prediction sets hold {size:.2f} classes")
for name, reply in (("digits", digits), ("noise", noise)):
    doubt = reply["mutual_information"].mean()
    print(f"{name}: mutual information {doubt:.3f} nats, {reply['ood'].mean():.1%} flagged as out of distribution")
