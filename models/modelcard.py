"""A model card for the Hugging Face hub, made from the manifest: what the model is, its figures, limits and use."""

import json
from collections.abc import Iterator
from typing import Any

from dubito.models.manifest import Card, Manifest
from dubito.models.verdict import NAMES, beside_plain

HUB_DATA = {  # data sets by name -> how the hub calls them
    "mnist": ("MNIST", "ylecun/mnist"),
    "fashion-mnist": ("Fashion-MNIST", "zalando-datasets/fashion_mnist"),
    "cifar10": ("CIFAR-10", "uoft-cs/cifar10"),
    "cifar100": ("CIFAR-100", "uoft-cs/cifar100"),
    "svhn": ("SVHN", "ufldl-stanford/svhn"),
    "digits": ("Optical Recognition of Handwritten Digits", "digits"),
}
OWN = ("data of its authors", "own")  # whose path is nobody's business


def model_card(manifest: Manifest, repository: str, *, license: str = "unknown") -> str:
    """README.md of a repository of the hub."""
    return "\n".join(["---", *_metadata(manifest, repository, license), "---", "", *_text(manifest, repository), ""])


def _metadata(manifest: Manifest, repository: str, license: str) -> Iterator[str]:
    """YAML, each value in JSON, which YAML is a superset of: names from a file cannot break it."""
    name, data = _data(manifest.card)
    task = _task(manifest)
    tags = ["dubito", "bayesian", "uncertainty", "safetensors", *manifest.methods]
    tags += ["conformal-prediction", "out-of-distribution-detection"] if manifest.card.calibration else []
    yield f"license: {json.dumps(license)}"
    yield 'library_name: "dubito"'
    yield f"pipeline_tag: {json.dumps(task)}"
    yield f"tags: {json.dumps(tags)}"
    if "/" in data:
        yield f"datasets: {json.dumps([data])}"
    metrics = manifest.card.metrics
    if metrics:
        yield f"metrics: {json.dumps(list(metrics))}"
        results = [{"type": key, "name": NAMES.get(key, key), "value": value} for key, value in metrics.items()]
        result = {"task": {"type": task}, "dataset": {"name": name, "type": data, "split": "test"}, "metrics": results}
        index = [{"name": repository.rpartition("/")[2], "results": [result]}]
        yield f"model-index: {json.dumps(index, ensure_ascii=False)}"


def _task(manifest: Manifest) -> str:
    declared = manifest.card.input
    kind = manifest.task.kind
    if declared is not None and declared.image is not None:
        return f"image-{kind}" if kind == "classification" else "other"
    return f"tabular-{kind}"


def _data(card: Card) -> tuple[str, str]:
    """The data set's name for people and on the hub."""
    recipe: Any = card.provenance.recipe or {}
    data = recipe.get("data")
    return HUB_DATA.get(str(data.get("name")), OWN) if isinstance(data, dict) else OWN


def _text(manifest: Manifest, repository: str) -> Iterator[str]:
    card, data = manifest.card, _data(manifest.card)[0]
    yield f"# {repository.rpartition('/')[2]}"
    yield ""
    what = "classes" if manifest.task.kind == "classification" else "numbers"
    yield (
        f"A Bayesian network ({_code(manifest.architecture.name)}, {', '.join(map(_code, manifest.methods))}) that "
        f"predicts {what} and says how far each answer can be trusted: it draws from the posterior over its weights. "
        f"Made with [dubito](https://pypi.org/project/dubito/), trained on {data}."
    )
    if card.input is not None:
        kind = "a picture, or a tensor" if card.input.image is not None else "a tensor"
        yield f"Its input is {kind} of shape {tuple(card.input.shape)}."
    if card.labels is not None:
        yield f"It knows {len(card.labels)} classes: {', '.join(map(_code, card.labels[:20]))}" + (
            f" and {len(card.labels) - 20} more." if len(card.labels) > 20 else "."
        )
    if card.targets is not None:
        yield f"It predicts {', '.join(map(_code, card.targets))}."
    yield from figures(card, data)
    yield from limits(card)
    yield from _use(repository)


def figures(card: Card, data: str) -> Iterator[str]:
    """A table of the model's figures beside those of the plain network, and the verdict."""
    yield from ("", "## Figures", "")
    if not card.metrics:
        yield "None were measured before it was pushed."
        return
    plain = card.plain
    heads = ["figure", "Bayesian"]
    if plain is not None:
        heads += ["plain network"] + (["plain, with its temperature"] if plain.temperature is not None else [])
    yield f"On the test part of {data}:"
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for key, value in card.metrics.items():
        cells = [_code(NAMES.get(key, key.replace("_", " "))), f"{value:.4g}"]
        if plain is not None:
            columns = [plain.metrics] + ([plain.tempered] if plain.temperature is not None else [])
            cells += [f"{column[key]:.4g}" if key in column else "" for column in columns]
        yield f"| {' | '.join(cells)} |"
    if plain is not None and "auroc" in card.metrics and "auroc" in plain.tempered and card.calibration is not None:
        own, its = (_code(m) for m in (card.calibration.measure, plain.measure))
        yield from ("", f"The AUROC of this model is by {own}, that of the plain network by {its}.")
    if plain is not None and (verdict := beside_plain(plain)):
        yield ""
        yield verdict


def limits(card: Card) -> Iterator[str]:
    """What is promised and what is not."""
    yield from ("", "## Limits", "")
    calibration = card.calibration
    if calibration is None:
        yield "- It is not calibrated: no prediction sets, and no flags for inputs unlike the training data."
    else:
        yield (
            f"- Prediction sets and intervals hold the true answer {calibration.coverage:.0%} of the time, for inputs "
            "like those it was calibrated on. For other inputs nothing is promised."
        )
        yield (
            f"- The OOD flag goes by {_code(calibration.measure)} and is raised for "
            f"{calibration.false_positive_rate:.0%} of inputs like the calibration data; it does not see every input "
            "that is unlike them."
        )
    yield "- Its figures come from one test part. Measure it on your own data: `dubito evaluate`."
    if card.zoo is not None:
        yield from (f"- {limit}" for limit in card.zoo.limits)
        yield from ("", "## When not to use it", "")
        yield from (f"- {case}" for case in card.zoo.not_for)


def _use(repository: str) -> Iterator[str]:
    yield from ("", "## Use", "", "```console")
    yield "$ pip install 'dubito[remote]'"
    yield f"$ dubito inspect hf://{repository}"
    yield f"$ dubito serve hf://{repository}"
    yield from ("```", "", "```python", "from dubito.models import load", "")
    yield f'model = load("hf://{repository}")'
    yield "prediction = model.predict(x, samples=20, seed=0)"
    yield "```"


def _code(text: str) -> str:
    """A word of the file as inline code: no markup of it counts."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"`{shown.replace('`', chr(39)).replace('|', '∣')}`"
