"""The files of the zoo: what the list says of an artifact, and whether a file is the one that the list means."""

from pathlib import Path

from dubito.models.artifact.artifact import load
from dubito.models.artifact.described import bare_by
from dubito.models.manifest import Manifest
from dubito.models.numerics.parameters import count
from dubito.models.remote.address import Place, place_of_zoo
from dubito.models.remote.cache import fetched, hash_of
from dubito.models.zoo import Listed, ZooError, named


def entry_of(path: Path, *, shipped: bool) -> Listed:
    """The entry of an artifact, which is loaded and so checked; its name is that of the file."""
    model = load(path)
    manifest = model.manifest
    card = manifest.card
    if card.zoo is None:
        raise ZooError(f"{path} has no card of the zoo; expected a file that `dubito zoo pack` wrote.")
    plain, pruned = card.plain, any(buffer.endswith(".keep") for buffer, _ in model.network.named_buffers())
    beside = None if plain is None else plain.tempered or plain.metrics
    if plain is not None and beside is not None and "auroc" not in plain.differences:  # not by measures chosen alike
        beside = {name: value for name, value in beside.items() if name != "auroc"}
    return Listed(
        name=path.stem,
        title=card.zoo.title,
        task=manifest.task.kind,
        architecture=manifest.architecture.name,
        method=", ".join([*methods_of(manifest), *(["pruned"] if pruned else [])]),
        data=data_of(manifest),
        precision=manifest.precision,
        bytes=path.stat().st_size,
        sha256=hash_of(path),
        parameters=count(model.network),
        deterministic=count(bare_by(manifest)),
        metrics=card.metrics,
        plain=beside,
        shipped=shipped,
    )


def methods_of(manifest: Manifest) -> list[str]:
    """Names of its methods, and of its objective where that is function-space VI."""
    fit = (manifest.card.provenance.recipe or {}).get("fit")
    by_functions = isinstance(fit, dict) and fit.get("objective") == "function-space"
    return [*manifest.methods, *(["function-space"] if by_functions else [])]


def data_of(manifest: Manifest) -> str:
    """The data set by its name in a recipe."""
    data = (manifest.card.provenance.recipe or {}).get("data")
    return str(data.get("name")) if isinstance(data, dict) else "unknown"


def verify(name: str, release: str | None = None) -> Path:
    """The file of a model of the zoo, loaded and compared with the list."""
    expected = named(name)
    where: Place = place_of_zoo(name, release)
    path = fetched(where)
    if (came := hash_of(path)) != expected.sha256:
        raise ZooError(
            f"{where} has the SHA-256 {came}; the list of the zoo says {expected.sha256}. It was changed or damaged: "
            "install dubito again."
        )
    load(path)
    return path
