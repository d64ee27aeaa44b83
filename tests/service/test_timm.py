"""A network of timm by its name: from a .pth file through `dubito laplace` to a served answer."""

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dubito.cli import app
from tests.few import few
from tests.service.conftest import Serve

NAME, SIDE, LABELS = "test_resnet", 32, ("ant", "bee", "cat")  # a small one, which timm has for its own tests
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
NOTHING = ["--prior-precision", "1e12", "--no-temperature"]  # the posterior has no width, and the logits stay


@pytest.mark.slow
def test_the_answer_is_the_networks_own(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the posterior adds nothing, to all five digits that float32 gives after a pass in another order."""
    timm = pytest.importorskip("timm", reason="NOT RUN: timm is not installed (pip install 'dubito[timm]')")
    torch.manual_seed(0)
    net = timm.create_model(NAME, num_classes=len(LABELS)).eval()
    with torch.no_grad():
        net.fc.weight.mul_(50)  # else all answers are near a third
    torch.save(net.state_dict(), tmp_path / "w.pth")
    pixels = np.random.default_rng(0).integers(0, 256, (120, SIDE, SIDE, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        place = tmp_path / "pictures" / LABELS[i % len(LABELS)]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{i}.png")
    few(monkeypatch)
    out = tmp_path / "m.safetensors"
    of = ["laplace", f"timm/{NAME}", "--weights", tmp_path / "w.pth", "--data", f"folder:{tmp_path}/pictures"]
    inputs = ["--input-size", SIDE, "--normalise", "imagenet", "--select", "last-layer", "--force", "--out", out]
    done = CliRunner().invoke(app, [str(word) for word in (*of, *inputs, *NOTHING)])
    assert done.exit_code == 0, done.exception
    x = (torch.from_numpy(pixels[:4]) / 255 - MEAN) / STD
    with torch.no_grad():
        expected = net(x.permute(0, 3, 1, 2)).softmax(-1)
    assert expected.std() > 0.1
    url = serve(out).url
    assert httpx.get(f"{url}/v1/models/m", timeout=60).json()["architecture"] == "custom"  # it needs no timm
    for i, p in enumerate(expected.tolist()):
        content = (tmp_path / "pictures" / LABELS[i % len(LABELS)] / f"{i}.png").read_bytes()
        reply = httpx.post(f"{url}/v1/models/m/predict", content=content, headers={"content-type": "image/png"})
        (row,) = reply.json()["predictions"]
        assert row["probabilities"] == pytest.approx(p, abs=1e-5)
        assert row["label"] == LABELS[int(np.argmax(p))]
        assert row["prediction_set"]
