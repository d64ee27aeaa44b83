"""Weights that you have: a network of torchvision or timm and its .pth file, given a posterior without training, then
served and asked about pictures.

No pretrained weights are fetched here: the network is first trained on some of the handwritten digits that come with
dubito, drawn as pictures of 32 × 32 pixels. Skip that part with a file of your own. Run it in an empty folder:

    python examples/weights.py
    python examples/weights.py --network timm/vit_tiny_patch16_224
"""

import argparse
import base64
import subprocess
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--network", default="torchvision/resnet18", help="torchvision/NAME or timm/NAME")
parser.add_argument("--epochs", type=int, help="of the plain network: 4, or 12 of timm's")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()
torch.manual_seed(0)


# 1. Pictures: 1,000 digits to train with, 500 others as PNG in a folder for each class, 50 to ask about.
def picture(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Image.Image:
    """From 8 × 8 numbers up to 16 to a picture in colour."""
    return (
        Image.fromarray((pixels * 15.9375).astype(np.uint8)).resize((32, 32), Image.Resampling.BILINEAR).convert("RGB")
    )


with np.load(str(files("dubito.training").joinpath("digits.npz"))) as data:
    pictures, labels = [picture(one) for one in data["x"]], torch.from_numpy(data["y"]).long()
order = np.random.default_rng(0).permutation(len(pictures)).tolist()
train, held, asked = order[:1000], order[1000:1500], order[-50:]
for i in held:
    folder = Path("pictures", NAMES[labels[i]])
    folder.mkdir(parents=True, exist_ok=True)
    pictures[i].save(folder / f"{i}.png")

# 2. A trained network and its weights, as you have them.
package, _, name = options.network.partition("/")
epochs = options.epochs or (12 if package == "timm" else 4)
net: nn.Module
if package == "timm":
    import timm

    sizes: dict[str, Any] = {"img_size": 32} if "vit" in name else {}
    net = timm.create_model(name, num_classes=10, **sizes)
else:
    import torchvision

    net = torchvision.models.get_model(name, num_classes=10)
x = torch.stack([torch.from_numpy(np.array(one)) for one in pictures]).permute(0, 3, 1, 2) / 255  # (1797, 3, 32, 32)
optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(epochs):
    for rows in torch.tensor(train)[torch.randperm(len(train))].split(50):
        optimiser.zero_grad()
        loss = cross_entropy(net(x[rows]), labels[rows])
        loss.backward()
        optimiser.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}", flush=True)
torch.save(net.state_dict(), "network.pth")
Path("classes.txt").write_text("\n".join(NAMES))  # in the order of the network's outputs

# 3. One command: a posterior over the last layer, a temperature, OOD thresholds and prediction sets, on pictures that
# the network has not seen. It says first how often the network is right on them.
laplace = ["dubito", "laplace", "network.pth", "--network", options.network, "--labels", "classes.txt"]
laplace += ["--data", "folder:pictures", "--input-size", "32", "--normalise", "unit", "--out", "model.safetensors"]
subprocess.run(laplace, check=True)

# 4. Serve it, and ask it about pictures: they are resized and normalised as the artifact says.
server = subprocess.Popen(
    ["dubito", "serve", "model.safetensors", "--port", str(options.port), "--set", "log_level=warning"]
)
images = []
for i in asked:
    pictures[i].save("asked.png")
    images.append(base64.b64encode(Path("asked.png").read_bytes()).decode())
try:
    with httpx.Client(base_url=f"http://localhost:{options.port}", timeout=60) as http:
        while server.poll() is None:
            try:
                if http.get("/readyz").is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        reply = http.post("/v1/models/model/predict", json={"images": images, "seed": 0}).json()
finally:
    server.terminate()
    server.wait()
rows = reply["predictions"]
right = np.mean([row["label"] == NAMES[labels[i]] for row, i in zip(rows, asked, strict=True)])
print(f"served: {right:.1%} of {len(asked)} pictures are right")
print(f"the first, of class {NAMES[labels[asked[0]]]}: {rows[0]}")
