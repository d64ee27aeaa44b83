"""Networks by name, and by other packages' names."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dubito.models import build
from dubito.models.conversion.architectures import architecture_of, input_of, names
from dubito.models.errors import ArchitectureError
from dubito.models.numerics.parameters import count
from tests import forked


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", (784,), 784 * 400 + 400 + 400 * 400 + 400 + 4010),
        ("lenet", (1, 28, 28), 61_706),  # the textbook's LeNet-5
        ("convnet", (1, 28, 28), 9 * 32 + 32 + 9 * 32 * 64 + 64 + 49 * 64 * 128 + 128 + 1290),
        ("resnet8", (3, 32, 32), 27 * 32 + 6 * 288 * 32 + 330),  # [Ober21, section 3.4]
        ("resnet18-cifar", (3, 32, 32), 11_173_962),
        ("resnet50-cifar", (3, 32, 32), 23_520_842),  # [Ritter21, table 9]
    ],
)
def test_ours_have_the_known_sizes_and_run(name: str, shape: tuple[int, ...], parameters: int) -> None:
    net = build(name).eval()
    assert count(net) == parameters
    declared = input_of(architecture_of(net))
    assert declared is not None
    assert declared.shape == shape
    assert net(torch.randn(1, *shape)).shape == (1, 10)


def test_with_groups_no_picture_depends_on_its_batch() -> None:
    net = build("resnet18-cifar", groups=16).train()
    norms = [m for m in net.modules() if isinstance(m, (nn.GroupNorm, nn.modules.batchnorm._BatchNorm))]
    assert {type(m) for m in norms} == {nn.GroupNorm}
    assert count(net) == 11_173_962
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(net(x)[:1], net(x[:1]))


@pytest.mark.parametrize(
    "name", ["resnet18", "googlenet", "inception_v3", "efficientnet_b0", "swin_t", "vit_b_16", "regnet_x_400mf"]
)
def test_torchvision_classifiers_are_built_by_name(name: str) -> None:
    with torch.device("meta"):
        net = build(f"torchvision/{name}", classes=7)
    assert [p for p in net.parameters() if p.dim() == 2][-1].shape[0] == 7
    assert architecture_of(net).arguments == {"classes": 7}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet19-cifar", {}, "no architecture 'resnet19-cifar'; there are: mlp, lenet"),
        ("torchvision/nothing", {}, "torchvision has no classifier 'nothing'"),
        ("torchvision/deeplabv3_resnet50", {}, "no classifier"),
        ("lenet", {"hidden": 3}, "lenet: .*'hidden'; it takes"),
        ("convnet", {"size": 28, "stages": [4] * 5}, "size is 28; expected at least 32"),
        ("resnet18-cifar", {"groups": 24}, "groups is 24; expected a divisor of 64"),
        ("mlp", {"hidden": [0]}, "hidden is 0; expected 1 to"),
        ("mlp", {"inputs": 1 << 40}, "inputs is"),
        ("mlp", {"hidden": [1] * 1000}, "hidden has 1000 entries"),
        ("mlp", {"activation": "sine"}, "activation is 'sine'; expected one of relu"),
        ("mlp", {"outputs": "ten"}, "mlp cannot be built with {'outputs': 'ten'}"),
    ],
)
def test_mistakes_are_named(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        build(name, **arguments)  # type: ignore[arg-type]


PLUGIN = """
from torch import nn
def build_it(width: int = 3) -> nn.Module:
    return nn.Linear(width, 2)
def not_a_module() -> int:
    return 3
"""


def test_other_packages_add_their_own(tmp_path: Path) -> None:
    """Through the entry point group, as an installed package would: metadata beside a module on the path."""
    (tmp_path / "their_package.py").write_text(PLUGIN)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dubito.architectures]\ntheirs = their_package:build_it\nodd = their_package:not_a_module\n"
    )
    script = """
import torch
from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.architectures import names
from dubito.models.errors import ArchitectureError
assert "theirs" in names()
net = build("theirs", width=5)
assert net.in_features == 5
save(bayesianize(net, "ffg-w"), "a.safetensors")
model = load("a.safetensors")
assert model.manifest.architecture.name == "theirs"
model.predict(torch.randn(2, 5), 3)
try:
    build("odd")
except ArchitectureError as error:
    assert "returned int" in str(error)
else:
    raise SystemExit("the plug-in's mistake went unnoticed")
"""
    ended = forked.begin(script, [], tmp_path, tmp_path, {"PYTHONPATH": str(tmp_path)}).end()
    assert ended.returncode == 0, ended.stderr


def test_a_network_of_nobodys_is_custom() -> None:
    assert architecture_of(nn.Linear(2, 2)).name == "custom"
    assert "torchvision/NAME" in names()
