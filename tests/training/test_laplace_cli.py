"""`dubito train` with subnetwork-laplace and `dubito laplace`: from data to an artifact, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dubito.models import build, load
from dubito.models.errors import DubitoError
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.uncertainty import Classified
from dubito.training.config import Data, Laplace, Network
from dubito.training.posthoc import from_weights
from tests.few import GRID
from tests.small_models import mlp
from tests.training.test_train import refused, run

pytestmark = pytest.mark.usefixtures("few_requests")
QUICK = [
    "--set=network.arguments={hidden=[12]}",
    "--set=network.architecture=mlp",
    "--set=fit.pretrain_epochs=0",
    "--set=fit.likelihood_epochs=0",
    "--set=fit.warmup_epochs=0",
    "--set=fit.epochs=4",
    "--set=fit.lr=0.02",
    "--set=data.calibration=0.2",
]
LAPLACE = ["--set=posterior.method=subnetwork-laplace"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two overlapping classes of eight numbers."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    x = (rng.standard_normal((400, 8)) + 0.8 * y[:, None]).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "two.npz"
    np.savez(path, x=x, y=y)
    return path


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "plain.safetensors"
    told = run(
        "train",
        f"npz:{data}",
        "--out",
        out,
        *QUICK,
        "--set=posterior.method=deterministic",
        "--set=posterior.options={}",
    )
    assert told.exit_code == 0, told.exception
    return out


def test_prediction_sets_are_made_as_asked_for(data: Path, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "l.safetensors"
    asked = ("--sets", "raps", "--per", "class", "--coverage", "0.8", "--false-positive-rate", "0.1")
    told = run("laplace", plain, "--data", f"npz:{data}", "--out", out, *asked)
    assert told.exit_code == 0, told.exception
    calibration = load(out).card.calibration
    assert calibration is not None
    assert (calibration.coverage, calibration.false_positive_rate) == (0.8, 0.1)
    assert calibration.sets is not None
    assert calibration.sets.score == "raps"
    assert calibration.classes is not None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--sets", "best"), "--sets is best; expected aps, raps or probability"),
        (("--coverage", "1.5"), "--coverage is 1.5; expected a share between 0 and 1"),
        (("--per", "age"), "--per is age; expected class or group"),
        (("--per", "group"), "group"),
    ],
)
def test_prediction_sets_that_cannot_be_are_refused(
    asked: tuple[str, str], said: str, data: Path, plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "l.safetensors"
    assert said in refused("laplace", plain, "--data", f"npz:{data}", "--out", out, *asked)
    assert not out.exists()


def test_a_recipe_goes_the_whole_way(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "l.safetensors"
    told = run("train", f"npz:{data}", "--out", out, "--json", *QUICK, *LAPLACE, "--set=posterior.options={size=40}")
    assert told.exit_code == 0, told.exception
    found = json.loads(told.stdout)
    model = load(out)
    entry, calibration = model.manifest.subnetwork, model.card.calibration
    assert isinstance(entry, SubnetworkEntry)
    assert calibration is not None
    assert (entry.size, entry.select) == (40, "variance")
    assert (calibration.method, model.method) == ("probit", "probit")
    assert calibration.closed is not None
    assert {"entropy", "max_probability", "energy"} == set(calibration.closed.thresholds) - {"knn"}
    assert set(calibration.quantiles) == {0, *GRID}
    assert calibration.auto is not None
    assert 0 <= found["changed"] <= 1
    assert found["parameters"] == 8 * 12 + 12 + 12 * 2 + 2 + 40 * 41 // 2
    shown = run("inspect", out)
    for said in ("subnetwork-laplace", "S = 40 weights of the largest variance", "unless told, probit", "chosen in:"):
        assert said in " ".join(shown.stdout.split())
    measured = json.loads(run("evaluate", out, "--data", f"npz:{data}", "--json").stdout)
    assert (measured["method"], measured["samples"]) == ("probit", 0)
    assert "mutual_information" not in measured
    assert measured["changed"] == found["changed"]
    drawn = json.loads(run("evaluate", out, "--data", f"npz:{data}", "--json", "--samples", "8").stdout)
    assert (drawn["method"], drawn["samples"]) == ("sampling", 8)
    assert drawn["mutual_information"] > 0
    other = tmp_path / "s.safetensors"
    assert run("calibrate", out, "--data", f"npz:{data}", "--out", other, "--method", "sampling").exit_code == 0
    assert load(other).method == "sampling"
    assert "nothing to prune" in refused("prune", out, "--keep", "0.5", "--out", other)


def test_of_an_artifact_that_was_trained_before(plain: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "l.safetensors"
    told = run("laplace", plain, "--data", f"npz:{data}", "--out", out, "--size", "30", "--select", "magnitude")
    assert told.exit_code == 0, told.exception
    before, model = load(plain), load(out)
    assert isinstance(model.manifest.subnetwork, SubnetworkEntry)
    assert model.manifest.subnetwork.select == "magnitude"
    for name, p in before.network.net.named_parameters():
        assert torch.equal(p, model.network.net.get_parameter(name))  # nothing was trained
    assert model.card.provenance.data_hash == before.card.provenance.data_hash  # the same parts as in training
    x = torch.randn(6, 8)
    mean, closed = model.predict(x, 0).summary, model.predict(x).summary
    assert isinstance(mean, Classified)
    assert isinstance(closed, Classified)
    assert (closed.probabilities != mean.probabilities).any(1).all()
    torch.testing.assert_close(closed.energy, mean.energy)
    assert (closed.probabilities.argmax(-1) == mean.probabilities.argmax(-1)).double().mean() >= 0.5
    told = run("predict", out, _npy(tmp_path, x), "--json")
    found = json.loads(told.stdout)
    assert found["method"] == "probit"
    assert found["predictions"][0]["mutual_information"] is None
    assert "not known" in run("predict", out, _npy(tmp_path, x)).stdout
    assert json.loads(run("predict", out, _npy(tmp_path, x), "--samples", "5", "--json").stdout)["method"] == "sampling"


def _npy(folder: Path, x: torch.Tensor) -> Path:
    np.save(folder / "x.npy", x.numpy())
    return folder / "x.npy"


def test_of_anybodys_state_dict(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with np.load(data) as rows:
        x, y = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])
    net = build("mlp", inputs=8, outputs=2)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    weights, out = tmp_path / "weights.safetensors", tmp_path / "l.safetensors"
    save_file(net.state_dict(), weights)
    told = run("laplace", weights, "--arch", "mlp", "--data", f"npz:{data}", "--out", out, "--size", "20")
    assert told.exit_code == 0, told.exception
    model = load(out)
    assert torch.equal(model.network.net.get_parameter("1.weight"), net.get_parameter("1.weight"))
    assert model.card.metrics["accuracy"] > 0.7


def test_of_a_state_dict_that_predicts_numbers(tmp_path: Path) -> None:
    """In the targets' own units; the noise of the targets is what the errors on the validation part say."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3)).astype(np.float32)
    y = 100 + x @ np.array([3.0, -2.0, 1.0]) + 0.5 * rng.standard_normal(500)
    table = tmp_path / "t.csv"
    np.savetxt(table, np.column_stack([x, y]), delimiter=",", header="a,b,c,price", comments="")
    net = mlp(3, 1)
    with torch.no_grad():
        net.get_parameter("1.weight").copy_(torch.tensor([[3.0, -2.0, 1.0]]))
        net.get_parameter("1.bias").fill_(100.0)
    weights, out = tmp_path / "weights.safetensors", tmp_path / "l.safetensors"
    save_file(net.state_dict(), weights)
    model = from_weights(
        weights,
        Network(architecture="mlp", arguments={"hidden": []}),
        Data(name=f"csv:{table}"),
        out,
        Laplace(prior_precision=1.0),
        task="regression",
    )
    noise = model.network.noise
    assert noise is not None
    assert float(noise().detach()) == pytest.approx(0.5, rel=0.4)  # of 25 residuals
    assert model.card.metrics["rmse"] == pytest.approx(0.5, rel=0.3)


class Ids(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.long()).mean(1))  # type: ignore[no-any-return]


class Computed(nn.Module):
    """Computes with numbers of its own by a function that is not on the list."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.head, self.numbers = nn.Linear(8, outputs), torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.special.i0e(x) * self.numbers)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "said"), [("Ids", "takes token ids"), ("Computed", "answers differently")])
def test_networks_that_could_not_be_served_are_refused_before_the_work(
    kind: str, said: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = tmp_path / "weights.safetensors", tmp_path / "l.safetensors"
    network = Network(architecture=f"{__name__}:{kind}")
    save_file(build(network.architecture).state_dict(), weights)
    with pytest.raises(DubitoError, match=said):
        from_weights(weights, network, Data(name=f"npz:{data}"), out, Laplace(size=5), force=True)
    assert "prior precision" not in capsys.readouterr().err  # which is chosen in the work


def test_labels_that_begin_at_one_are_to_be_renumbered(data: Path, tmp_path: Path) -> None:
    with np.load(data) as rows:
        np.savez(tmp_path / "one.npz", x=rows["x"], y=rows["y"] + 1)
    weights = tmp_path / "weights.safetensors"
    save_file(build("mlp", inputs=8, outputs=2).state_dict(), weights)
    told = refused("laplace", weights, "--arch", "mlp", "--data", f"npz:{tmp_path}/one.npz", "--out", tmp_path / "l")
    assert "run to 2; expected 0 to 1" in told
    assert "subtract 1 where it begins at 1" in told


def test_what_is_refused(plain: Path, data: Path, tmp_path: Path) -> None:
    out, of = tmp_path / "l.safetensors", ["--data", f"npz:{data}"]
    assert "has 134 weights" in refused("laplace", plain, *of, "--out", out, "--size", "1000000")
    assert "--select" in refused("laplace", plain, *of, "--out", out, "--select", "best")
    last = ["--select", "last-layer", "--size", "27"]
    assert "the last layer has 26 weights" in refused("laplace", plain, *of, "--out", out, *last)
    assert "expected probit or sampling" in refused("laplace", plain, *of, "--out", out, "--method", "guess")
    assert "takes inputs of shape (8,), which are no pictures" in refused(
        "laplace", plain, *of, "--out", out, "--mean", "0.5", "--std", "1"
    )
    weights = tmp_path.parent / "plain.pt"
    torch.save(load(plain).network.net.state_dict(), weights)
    assert "name that one: --network NAME" in refused("laplace", weights, *of, "--out", out)
    assert "no architecture" in refused("laplace", weights, "--arch", "nothing", *of, "--out", out)
    assert "it has nothing, where the network has 5.weight" in refused(
        "laplace", weights, "--arch", "mlp", *of, "--out", out
    )
    assert "--weights FILE" in refused("laplace", "torchvision/resnet18", *of, "--out", out)
    assert "is no file" in refused("laplace", "resnet.pth", *of, "--out", out)
    assert "NET alone names" in refused("laplace", "mlp", "--weights", weights, "--arch", "mlp", *of, "--out", out)
    recipe: list[str | Path] = ["train", f"npz:{data}", "--out", out, *QUICK, *LAPLACE]
    assert "has 134 weights" in refused(*recipe, "--set=posterior.options={size=200}")
    assert not list(tmp_path.iterdir())  # refused before the work
    assert "there is no inducing" in refused(*recipe, "--set=posterior.options={inducing=3}")
    assert "posterior.layers" in refused(*recipe, "--set=posterior.options={}", "--set=posterior.layers={x={}}")
    assert "'probit'" in refused("train", f"npz:{data}", "--out", out, "--set=calibrate.method=probit")
    assert "closed form" in refused("calibrate", plain, *of, "--out", out, "--method", "probit")
    assert "closed form" in refused("evaluate", plain, *of, "--method", "probit")
    assert "takes no draws" in refused("evaluate", plain, *of, "--method", "probit", "--samples", "3")
    assert not out.exists()


def test_counted(tmp_path: Path) -> None:
    told = run("count", "resnet18-cifar", "--method", "subnetwork-laplace", "--size", "1000", "--json")
    found = json.loads(told.stdout)
    assert found["parameters"] == found["deterministic"] + 1000 * 1001 // 2
    assert "expected no more" in refused("count", "lenet", "--method", "subnetwork-laplace", "--size", "100000")
