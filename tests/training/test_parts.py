"""Which part of a data set a command uses, and how a set is read for a model that is already there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dubito.models import save
from dubito.models.manifest import Card, Input, Manifest, Provenance, Regression
from dubito.training.data.data import DataError, DataSet, Examples, divide, part_of
from dubito.training.data.sources import read_data, read_for
from tests.small_models import bayesian_mlp


def numbered(n: int, start: int = 0) -> Examples:
    """Examples that say which they are."""
    return Examples(torch.arange(start, start + n).float()[:, None], torch.arange(n) % 3)


UNDIVIDED = DataSet(numbered(100), None, ("a", "b", "c"))
DIVIDED = DataSet(numbered(100), numbered(20, 100), ("a", "b", "c"))


def trained_on(data: DataSet, **changes: Any) -> Card:
    shares = {"name": "npz:x", "validation": 0.1, "calibration": 0.2, "test": 0.3, **changes}
    return Card(provenance=Provenance(recipe={"seed": 4, "data": shares}, data_hash=data.hash()))


@pytest.mark.parametrize("data", [UNDIVIDED, DIVIDED])
def test_the_models_own_set_is_divided_as_in_training(data: DataSet) -> None:
    parts = divide(data, 0.1, 0.2, 0.3, 4)
    card = trained_on(data)
    for name in ("train", "validation", "calibration", "test"):
        found, examples = part_of(data, card, name)
        assert found == name
        assert torch.equal(examples.x, getattr(parts, name).x)
        assert torch.equal(examples.y, getattr(parts, name).y)
    assert torch.equal(part_of(data, card)[1].x, parts.test.x)
    name, examples = part_of(data, card, default="calibration")
    assert name == "calibration"
    assert torch.equal(examples.x, parts.calibration.x)
    assert len(part_of(data, card, "all")[1]) == len(data.train) + (20 if data is DIVIDED else 0)


def test_another_set_is_used_as_it_comes() -> None:
    card = trained_on(UNDIVIDED)
    other = DataSet(numbered(10, 500), None, ("a", "b", "c"))
    assert part_of(other, card)[0] == "all"
    assert part_of(other, card, default="calibration")[0] == "all"
    name, examples = part_of(DIVIDED, card)
    assert name == "test"
    assert torch.equal(examples.x, numbered(20, 100).x)
    name, examples = part_of(DIVIDED, card, default="calibration")
    assert name == "all"
    assert torch.equal(examples.x, numbered(120).x)
    assert torch.equal(part_of(DIVIDED, card, "train")[1].x, DIVIDED.train.x)


@pytest.mark.parametrize(
    ("data", "part", "message"),
    [
        (UNDIVIDED, "test", "comes undivided: ask for all"),
        (UNDIVIDED, "calibration", "no part 'calibration'"),
        (DIVIDED, "calibration", "has the parts train, test and all"),
        (DIVIDED, "tets", "no part 'tets'; there are: train, validation, calibration, test, all"),
    ],
)
def test_a_part_that_is_not_there(data: DataSet, part: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        part_of(data, Card(), part)


def test_an_origin_that_cannot_be_read_is_no_origin() -> None:
    assert part_of(UNDIVIDED, trained_on(UNDIVIDED, validation="much"))[0] == "all"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    card = Card(input=Input(shape=(2,)), labels=("cat", "dog", "owl"))
    card = card.model_copy(update={"provenance": Provenance(recipe={"data": {"name": "csv:x", "target": "what"}})})
    network = bayesian_mlp((2, 4, 3), "ffg-u", inducing=2)
    return save(network, tmp_path / "m.safetensors", card=card)


def test_classes_go_by_name(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("what,a,b\nowl,1,2\ncat,3,4\n")
    data = read_for(manifest, f"csv:{tmp_path / 'some.csv'}")
    assert data.labels == ("cat", "dog", "owl")
    assert data.train.y.tolist() == [2, 0]
    assert data.train.x.tolist() == [[1, 2], [3, 4]]


def test_columns_go_by_name(manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = manifest.card.model_copy(update={"input": Input(shape=(2,), columns=("a", "b"))})
    named = manifest.model_copy(update={"card": card})
    (tmp_path / "turned.csv").write_text("what,b,a\nowl,2,1\ncat,4,3\n")
    for labelled in (True, False):
        data = read_for(named, f"csv:{tmp_path / 'turned.csv'}", labelled=labelled)
        assert data.train.x.tolist() == [[1, 2], [3, 4]]
    (tmp_path / "other.csv").write_text("what,c,a\nowl,2,1\ncat,4,3\n")
    with pytest.raises(DataError, match=r"other\.csv has no column b, which this model takes; its columns are: c, a"):
        read_for(named, f"csv:{tmp_path / 'other.csv'}")
    outside = read_for(named, f"csv:{tmp_path / 'other.csv'}", labelled=False)
    assert outside.train.x.tolist() == [[2, 1], [4, 3]]  # of other things
    assert "the columns c, a, the model a, b: they are taken in order" in capsys.readouterr().err
    (tmp_path / "more.csv").write_text("id,b,a,what\n7,2,1,owl\n8,4,3,cat\n")
    target = named.model_copy(update={"card": card.model_copy(update={"targets": ("what",)})})
    assert read_for(target, f"csv:{tmp_path / 'more.csv'}").train.x.tolist() == [[1, 2], [3, 4]]
    assert "column id is left out" in capsys.readouterr().err


def test_the_target_goes_by_its_name(manifest: Manifest, tmp_path: Path) -> None:
    """Wherever it stands; it may be missing where targets do not matter."""
    card = manifest.card.model_copy(update={"input": Input(shape=(2,), columns=("a", "b")), "targets": ("kind",)})
    unnamed = card.model_copy(update={"provenance": Provenance()})  # no recipe says which column it is
    named = manifest.model_copy(update={"card": unnamed})
    (tmp_path / "first.csv").write_text("kind,b,a\nowl,2,1\ncat,4,3\n")
    data = read_for(named, f"csv:{tmp_path / 'first.csv'}")
    assert data.train.x.tolist() == [[1, 2], [3, 4]]
    assert data.train.y.tolist() == [2, 0]
    (tmp_path / "without.csv").write_text("b,a\n2,1\n")
    assert read_for(named, f"csv:{tmp_path / 'without.csv'}", labelled=False).train.x.tolist() == [[1, 2]]
    with pytest.raises(DataError, match="has no column 'kind'"):
        read_for(named, f"csv:{tmp_path / 'without.csv'}")


def test_outside_tables_have_targets_of_their_own(manifest: Manifest, tmp_path: Path) -> None:
    """Whose names and words do not matter."""
    card = manifest.card.model_copy(update={"input": Input(shape=(2,), columns=("a", "b")), "targets": ("y",)})
    named = manifest.model_copy(update={"card": card.model_copy(update={"provenance": Provenance()})})
    (tmp_path / "other.csv").write_text("u,v,kind\n1,2,x0\n3,4,x1\n")
    assert read_for(named, f"csv:{tmp_path / 'other.csv'}", labelled=False).train.x.tolist() == [[1, 2], [3, 4]]
    (tmp_path / "bare.csv").write_text("0.1,0.2\n0.3,0.4\n")
    with pytest.raises(DataError, match="expected a header"):
        read_for(named, f"csv:{tmp_path / 'bare.csv'}", labelled=False)


def test_classes_of_a_table_go_by_name_where_any_is_known(manifest: Manifest, tmp_path: Path) -> None:
    named = manifest.model_copy(update={"card": manifest.card.model_copy(update={"labels": ("1", "2", "3")})})
    (tmp_path / "shifted.csv").write_text("what,a,b\n1,1,2\n0,3,4\n2,5,6\n")
    with pytest.raises(DataError, match=r"has the classes 0, 1, 2, this model 1, 2, 3: only 1, 2 are the same"):
        read_for(named, f"csv:{tmp_path / 'shifted.csv'}")
    (tmp_path / "some.csv").write_text("what,a,b\n3,1,2\n2,3,4\n")
    assert read_for(named, f"csv:{tmp_path / 'some.csv'}").train.y.tolist() == [2, 1]


def test_numbers_that_float32_does_not_tell_apart_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    seconds = 1.7e9 + np.arange(0, 600, 3.0)
    rows = "\n".join(f"{t},{i % 7},{np.sin(t)}" for i, t in enumerate(seconds))
    (tmp_path / "t.csv").write_text(f"t,i,y\n{rows}\n")
    with pytest.raises(DataError, match=r"column .t. has numbers near 1\.7e\+09 that .* Subtract 1\.7e\+09"):
        read_data(f"csv:{tmp_path / 't.csv'}")
    declared = Card(input=Input(shape=(2,), columns=("t", "i")), targets=("y",))
    model = manifest.model_copy(update={"card": declared, "task": Regression()})
    assert len(read_for(model, f"csv:{tmp_path / 't.csv'}").train) == 200  # a part of what a model tells apart
    y = 1e9 + np.random.default_rng(0).standard_normal(50)
    np.savez(tmp_path / "y.npz", x=np.full((50, 2), 0.1), y=y)  # a constant column is no such
    with pytest.raises(DataError, match=r"column 'y\[:, 0\]' has numbers near 1e\+09"):
        read_data(f"npz:{tmp_path / 'y.npz'}")


def test_unknown_names_go_by_number_where_there_are_as_many(manifest: Manifest, tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", x=np.zeros((2, 2)), y=np.array([0, 1]))
    assert read_for(manifest, f"npz:{tmp_path / 'two.npz'}").train.y.tolist() == [0, 1]
    (tmp_path / "three.csv").write_text("what,a,b\nKatze,1,2\nHund,3,4\nEule,3,4\n")
    assert read_for(manifest, f"csv:{tmp_path / 'three.csv'}").train.y.tolist() == [2, 1, 0]
    (tmp_path / "two.csv").write_text("what,a,b\nKatze,1,2\nHund,3,4\n")
    with pytest.raises(DataError, match=r"has 2 classes \(Hund, Katze\); this model tells 3 apart \(cat, dog, owl\)"):
        read_for(manifest, f"csv:{tmp_path / 'two.csv'}")
    assert len(read_for(manifest, f"csv:{tmp_path / 'two.csv'}", labelled=False).train) == 2
    with pytest.raises(DataError, match="10 classes"):
        read_for(manifest, "digits")


def test_targets_must_be_of_the_models_kind(manifest: Manifest, tmp_path: Path) -> None:
    value = manifest.model_copy(update={"task": Regression(), "card": Card()})
    with pytest.raises(DataError, match="digits has classes for targets; this model predicts numbers"):
        read_for(value, "digits")
    root = tmp_path / "UCI" / "standard" / "tiny" / "data"
    root.mkdir(parents=True)
    np.savetxt(root / "data.txt", np.arange(15).reshape(5, 3))
    for name, rows in {"features": [0, 1], "target": [2], "train_0": [0, 1, 2], "test_0": [3, 4]}.items():
        np.savetxt(root / f"index_{name}.txt", rows)
    assert read_for(value, "uci/tiny", tmp_path).train.y.tolist() == [[2], [5], [8]]
    with pytest.raises(DataError, match="uci/tiny has numbers for targets; this model predicts classes"):
        read_for(manifest, "uci/tiny", tmp_path)


def test_digits_are_read_the_same_for_a_model_as_for_training(tmp_path: Path) -> None:
    data = read_data("digits")
    net = bayesian_mlp((64, 4, 10), "ffg-u", inducing=2)
    card = trained_on(data).model_copy(update={"labels": data.labels})
    assert read_for(save(net, tmp_path / "m.safetensors", card=card), "digits").hash() == data.hash()


def test_pictures_of_all_kinds_are_read_and_others_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `dubito score` reads them."""
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for suffix in ("png", "gif", "tif", "ppm"):
            Image.new("RGB", (6, 6), (200, 0, 0) if kind == "cat" else (0, 200, 0)).save(
                tmp_path / kind / f"1.{suffix}"
            )
    (tmp_path / "dog" / "2.heic").write_bytes(b"?")
    (tmp_path / "dog" / "notes.txt").write_text("?")
    data = read_data(f"folder:{tmp_path}")
    assert data.train.y.tolist() == [0] * 4 + [1] * 4
    said = " ".join(capsys.readouterr().err.split())
    assert "pictures are left out (1 of .heic)" in said
