"""Weights from elsewhere: what wraps them, what they are refused for, and that no code of theirs runs."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dubito.models import build
from dubito.training.config import Data, Network
from dubito.training.inputs import classes_in
from dubito.training.weights import Weights, WeightsError, fill, fitting_names, read_labels, read_weights
from tests.small_models import mlp

LABELS = ("cat", "dog", "owl")


def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return mlp(4, 5, 3).state_dict()


def with_prefix(prefix: str) -> dict[str, Tensor]:
    return {prefix + key: t for key, t in state().items()}


class Dangerous:
    """What a pickle is that runs code when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def complaint(path: Path, content: Any, net: nn.Module | None = None, name: str = "mlp") -> str:
    torch.save(content, path)
    net = mlp(4, 5, 3) if net is None else net
    with pytest.raises(WeightsError) as caught:
        fill(net, fitting_names(read_weights(path), list(net.state_dict())), name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRAPPINGS: dict[str, tuple[Any, str]] = {
    "alone": (state(), ""),
    "state_dict": ({"state_dict": state(), "epoch": 3, "loss": torch.tensor(0.1)}, "under state_dict"),
    "model_state_dict": ({"model_state_dict": state(), "optimizer": {"state": {}}}, "under model_state_dict"),
    "torchvision's script": ({"model": with_prefix("module."), "args": argparse.Namespace(lr=0.1)}, "'module.'"),
    "Lightning": (
        {
            "state_dict": with_prefix("net.") | {"criterion.weight": torch.ones(3)},
            "hyper_parameters": {"class_names": list(LABELS)},
            "pytorch-lightning_version": "2.5",
        },
        "begin with 'net.', which is left out; 1 tensors",
    ),
    "EMA": ({"state_dict": mlp(4, 5, 3).state_dict(), "state_dict_ema": state()}, "average over training (EMA)"),
    "torchvision's EMA": (
        {"model_ema": with_prefix("module.module.") | {"n_averaged": torch.tensor(5)}},
        "begin with 'module.module.'",
    ),
    "torch.compile": (with_prefix("_orig_mod."), "'_orig_mod.'"),
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_common_wrappings_are_recognised_and_said(name: str, tmp_path: Path) -> None:
    content, words = WRAPPINGS[name]
    torch.save(content, tmp_path / "w.pth")
    net = mlp(4, 5, 3)
    weights = fitting_names(read_weights(tmp_path / "w.pth"), list(net.state_dict()))
    fill(net, weights, "mlp")
    for key, tensor in state().items():
        assert torch.equal(net.state_dict()[key], tensor)
    assert words in " ".join(weights.remarks)
    assert bool(weights.remarks) == bool(words)
    assert weights.labels == (LABELS if name == "Lightning" else None)


def test_safetensors_and_every_form_of_torchs_own_files(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "w.safetensors")
    torch.save(state(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("w.safetensors", "old.pth"):
        tensors = read_weights(tmp_path / name).tensors
        assert {key: t.tolist() for key, t in tensors.items()} == {key: t.tolist() for key, t in state().items()}


def test_a_file_that_would_run_code_is_refused_and_does_not_run_it(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    for content in (Dangerous(mark), {"state_dict": state(), "callback": Dangerous(mark)}):
        said = complaint(tmp_path / "w.pth", content)
        assert "would run code" in said
        assert "posix.mkdir" in said
        assert "torch.save(model.state_dict(), path)" in said
    assert not mark.exists()


def test_a_whole_pickled_network_is_refused(tmp_path: Path) -> None:
    assert "holds an object of torch.nn.modules" in complaint(tmp_path / "w.pth", mlp(4, 5, 3))


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04cut", b"\x80\x02}q\x00.", b"{}" * 40, b"\0" * 100])
def test_foreign_and_damaged_files_get_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_weights(tmp_path / "w.pth")
    assert "w.pth" in str(caught.value)
    assert "\n" not in str(caught.value)


def damaged(kind: str, path: Path) -> None:
    torch.save(state(), path)
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "script":
            torch.jit.save(torch.jit.script(mlp(4, 5, 3)), path)
        case "Keras":
            path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
        case "text":
            path.write_text("see the other file")
        case "nothing in it":
            torch.save({}, path)
        case "diverged":
            torch.save({key: t * torch.nan for key, t in state().items()}, path)
        case "two names":
            torch.save({"state_dict": state(), "classes": ["a", "b", "c"], "labels": ["c", "b", "a"]}, path)


@pytest.mark.filterwarnings("ignore")  # torch calls scripts old
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "is empty; expected weights"),
        ("cut", "was cut off or damaged after torch.save wrote it: copy or download it again"),
        ("script", "is a TorchScript archive, which holds code. Save the weights alone"),
        ("Keras", "is an HDF5 file, as Keras writes"),
        ("text", "is neither a .safetensors file nor one of torch.save, or it is damaged"),
        ("nothing in it", "holds a dict without entries, and no tensors by name; expected a state dict"),
        ("diverged", "has NaN or infinity in "),
        ("two names", "names its classes in ways that disagree (classes: a, b, c, …; labels: c, b, a, …)"),
    ],
)
def test_what_a_file_is_instead_and_what_to_do(kind: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    damaged(kind, path)
    net = mlp(4, 5, 3)
    with pytest.raises(WeightsError) as caught:
        fill(net, fitting_names(read_weights(path), list(net.state_dict())), "mlp")
    assert said in str(caught.value)


def test_what_does_not_fit_is_named_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    assert "none of its names is the network's; it has a, the network 1.weight" in complaint(path, {"a": torch.ones(2)})
    assert "3.weight of shape (3, 5), but mlp (7, 5)" in complaint(path, state(), mlp(4, 5, 7))
    assert "holds a dict with epoch" in complaint(path, {"epoch": 3})
    fewer = {key: t for key, t in state().items() if key != "1.bias"}
    assert "it has nothing, where the network has 1.bias (5,)" in complaint(path, fewer)
    whole = {key: t.to(torch.int8) for key, t in state().items()}
    assert "expected floats, not a quantised network" in complaint(path, whole)


def test_a_replaced_head_gets_advice_that_works(tmp_path: Path) -> None:
    net = build("torchvision/resnet18", classes=10)
    head = nn.Linear(512, 10)
    own = {key: t for key, t in net.state_dict().items() if not key.startswith("fc.")}
    own |= {"fc.1.weight": head.weight.detach(), "fc.1.bias": head.bias.detach()}
    said = complaint(tmp_path / "w.pth", own, net, "torchvision/resnet18")
    for words in (
        "it has fc.1.weight (10, 512), fc.1.bias (10,), where the network has fc.weight (10, 512), fc.bias (10,)",
        "nn.Sequential(nn.Dropout(), nn.Linear(512, 10))",
        "--rename fc.1=fc",
        "--network package.module:function",
    ):
        assert words in said
    weights = read_weights(tmp_path / "w.pth").renamed(["fc.1=fc"])
    fill(net, weights, "torchvision/resnet18")
    assert torch.equal(net.state_dict()["fc.weight"], head.weight)
    with pytest.raises(WeightsError, match="expected OLD=NEW with a name in"):
        weights.renamed(["fc.1=fc"])


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_32", "densenet121", "squeezenet1_0"])
def test_the_head_says_how_many_classes_there_are(name: str) -> None:
    with torch.device("meta"):
        tensors = build(f"torchvision/{name}", classes=37).state_dict()
    weights = Weights(Path("w.pth"), {f"module.{key}": t for key, t in tensors.items()})
    assert classes_in(weights, Network(architecture=f"torchvision/{name}"), Data(name="folder:x")) == 37


def test_classes_are_named_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "labels"
    for text in (
        "cat\ndog\n\nowl\n",
        json.dumps(LABELS),
        json.dumps({"0": "cat", "1": "dog", "2": "owl"}),
        json.dumps({"owl": 2, "cat": 0, "dog": 1}),
    ):
        file.write_text(text)
        assert read_labels(file) == LABELS
    for text in ("", "cat", "cat\ncat\n", '{"cat": "dog"}', "[1, 2]", '{"0": "cat", "2": "dog"}'):
        file.write_text(text)
        with pytest.raises(WeightsError, match="no names of classes"):
            read_labels(file)
