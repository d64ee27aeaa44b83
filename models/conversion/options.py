"""How each layer of a network is made Bayesian: one set of options, changed for some layers by name, glob or type."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dubito.models.errors import ConversionError
from dubito.models.names import METHODS
from dubito.models.posteriors.dictionary import COMPOSED, POSTERIORS, entry_class, entry_classes
from dubito.models.posteriors.entry import Entry, Option, is_count

Override = str | Mapping[str, Any]  # a method, or options
Overrides = Mapping[str | type[nn.Module], Override]


def known_options() -> dict[str, Option]:
    """The options of all methods, by name."""
    return {name: option for entry in entry_classes().values() for name, option in entry.options.items()}


def options_of(*methods: str) -> list[str]:
    """Options of `bayesianize` that change something in a network with layers of these methods."""
    names: list[str] = []
    for method in dict.fromkeys(part for whole in methods for part in COMPOSED.get(whole, (whole,))):
        if method in POSTERIORS:
            entry = entry_class(method)
            names += [name for name, option in entry.options.items() if not option.of or method in option.of]
            names += ["spread"] * (method in entry.spreads) + ["hierarchy"] * (entry.below is not None)
    return list(dict.fromkeys("inducing" if name in ("M_out", "M_in") else name for name in names))


@dataclass(frozen=True)
class Options:
    """How one layer is made Bayesian; `layers=` of `bayesianize` changes these for some layers."""

    method: str
    given: Mapping[str, Any] = field(default_factory=dict)  # those of other methods too, for layers that change theirs

    @property
    def entry(self) -> type[Entry] | None:
        """None: the layer stays as it is."""
        return None if self.method == "deterministic" else entry_class(self.method)

    def values(self, entry: type[Entry]) -> dict[str, Any]:
        """Every option of such layers, defaults included."""
        return {name: self.given.get(name, option.default) for name, option in entry.options.items()}

    def changed(self, override: Override) -> "Options":
        changes: dict[str, Any] = {"method": override} if isinstance(override, str) else dict(override)
        if "inducing" in changes:
            changes["M_out"], changes["M_in"] = pair(changes.pop("inducing"))
        method, known = changes.pop("method", self.method), known_options()
        if unknown := changes.keys() - known.keys():
            raise ConversionError(
                f"unknown option {sorted(unknown)[0]!r}; there are: inducing, method, {', '.join(known)}."
            )
        if method not in POSTERIORS and method != "deterministic":
            whole = " of a layer: it is one of a network" if method in COMPOSED else ""
            raise ConversionError(f"no method {method!r}{whole}; there are: {', '.join(METHODS)}.")
        for name, value in changes.items():
            known[name].check(name, value)
        return replace(self, method=method, given={**self.given, **changes})


def pair(M: int | tuple[int, int]) -> tuple[int, int]:
    """(M_out, M_in) of one number or two."""
    both = (M, M) if isinstance(M, int) else M
    whole = isinstance(both, tuple | list) and len(both) == 2 and all(map(is_count, both))
    if not whole or isinstance(M, bool):
        raise ConversionError(
            f"inducing weights of size {M!r}; expected a whole number from 1, or a pair (M_out, M_in)."
        )
    return both[0], both[1]


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConversionError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Puts the layer's name in front of an error about it."""
    try:
        yield
    except ConversionError as error:
        raise ConversionError(f"layer {layer!r}: {error}") from None


def options_for(name: str, module: nn.Module, base: Options, overrides: Overrides) -> Options:
    """Types first, then globs, then names, so that the most particular has the last word."""
    matching: list[list[Override]] = [[], [], []]
    for key, override in overrides.items():
        if isinstance(key, type):
            if isinstance(module, key):
                matching[0].append(override)
        elif key == name:
            matching[2].append(override)
        elif fnmatchcase(name, key):
            matching[1].append(override)
    for override in [o for rank in matching for o in rank]:
        with naming(name):
            base = base.changed(override)
    return base


def names_it(name: str, module: nn.Module, overrides: Overrides) -> bool:
    """Whether an override gives the layer by its own name, or gives a method to a glob or a type that it fits."""
    for key, override in overrides.items():
        if key == name or (_fits(key, name, module) and (isinstance(override, str) or "method" in override)):
            return True
    return False


def check_used(overrides: Overrides, modules: Mapping[str, nn.Module]) -> None:
    """Raise an error for an override that matches no layer: most likely a name is misspelt."""
    for key in overrides:
        if not any(_fits(key, n, m) for n, m in modules.items()):
            raise ConversionError(f"layers={{{key!r}: …}} matches no layer; there are: {', '.join(modules)}.")


def _fits(key: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    return isinstance(module, key) if isinstance(key, type) else fnmatchcase(name, key)
