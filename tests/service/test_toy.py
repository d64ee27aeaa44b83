"""The posterior that CONTRIBUTING adds, as it is printed there: one file and one line, trained, saved, served."""

import re
import sys
from pathlib import Path

import httpx
import pytest
import torch
import torch.nn.functional as F

from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import export
from dubito.models import bayesianize, build, load, posteriors, save
from dubito.models.manifest import Card, Input
from dubito.models.posteriors.dictionary import POSTERIORS
from dubito.models.predictions.uncertainty import Classified
from dubito.models.report import report, show
from tests import forked
from tests.service.conftest import Starter

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().partition("## Add a posterior")[2]
FILE, LINE = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.S | re.M)[:2]
METHOD, PLACE = re.findall(r'"([^"]+)"', LINE)
ADDED = f"""
from dubito.models import posteriors
from dubito.models.posteriors.dictionary import POSTERIORS
posteriors.__path__.append({{folder!r}})
POSTERIORS[{METHOD!r}] = {PLACE!r}
{forked.DUBITO}
"""


def test_the_toy_of_contributing_is_trained_saved_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = PLACE.partition(":")[0]
    (tmp_path / f"{module.rpartition('.')[2]}.py").write_text(FILE)
    monkeypatch.setattr(posteriors, "__path__", [*posteriors.__path__, str(tmp_path)])
    monkeypatch.setitem(POSTERIORS, METHOD, PLACE)
    monkeypatch.delitem(sys.modules, module, raising=False)

    torch.manual_seed(0)
    network = bayesianize(build("mlp", inputs=3, hidden=[8], outputs=2), METHOD, prior_scale=2.0)
    x = torch.randn(64, 3)
    y = (x[:, 0] > 0).long()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = F.cross_entropy(network(x), y) + network.kl() / 4096
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]

    file = tmp_path / "toy.safetensors"
    manifest = save(network.eval(), file, card=Card(input=Input(shape=(3,)), labels=("left", "right")))
    model = load(file)
    expected = model.predict(x[:4], 16, 3).summary
    assert isinstance(expected, Classified)
    assert expected.mutual_information.min() > 0
    show(report(manifest, model.network, file.stat().st_size), manifest.layers)
    assert f"{METHOD}: Gaussian with one standard deviation" in capsys.readouterr().out
    with pytest.raises(ExportError, match=f"layer '1': {METHOD} layers cannot be exported"):
        export(model)

    starter = Starter(tmp_path, ADDED.format(folder=str(tmp_path)))
    try:
        url = f"{starter(file).url}/v1/models/toy"
        assert httpx.get(url, timeout=60).json()["methods"] == [METHOD]
        reply = httpx.post(f"{url}/predict", json={"inputs": x[:4].tolist(), "samples": 16, "seed": 3}, timeout=60)
    finally:
        starter.close()
    rows = [row["probabilities"] for row in reply.json()["predictions"]]
    assert rows == [pytest.approx(p, abs=1e-5) for p in expected.probabilities.tolist()]
