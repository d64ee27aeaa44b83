"""Compares a model with the plain network or another model, in one sentence."""

from collections.abc import Mapping

from dubito.models.manifest import Difference, Plain

HIGHER_IS_BETTER = {"accuracy": True, "nll": False, "ece": False, "brier": False, "auroc": True, "rmse": False}
NAMES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier score", "auroc": "AUROC", "rmse": "RMSE"}
IN_POINTS = ("accuracy", "ece")  # percentage points
CLEAR = 2.0  # standard errors


def beside_plain(plain: Plain) -> str:
    """The verdict against the plain network, with its temperature if it has one."""
    rival = "the plain network" if plain.temperature is None else "the plain network with its temperature"
    return verdict(plain.differences, rival)


def columns(metrics: Mapping[str, float], plain: Plain | None) -> list[str]:
    """Lines of text: each figure, with those of the plain network without and with its temperature; the verdict."""
    lines = []
    for name, value in metrics.items():
        beside = ""
        if plain is not None and name in plain.metrics:
            beside = f" (plain {plain.metrics[name]:.4g}"
            beside += f", with a temperature {plain.tempered[name]:.4g}" if name in plain.tempered else ""
            beside += f", by {plain.measure})" if name == "auroc" and plain.tempered else ")"
        lines.append(f"{name.replace('_', ' ')}: {value:.4g}{beside}")
    return lines if plain is None else [*lines, beside_plain(plain)]


def verdict(differences: Mapping[str, Difference], rival: str) -> str:
    """One sentence: at which figures the model is better, worse and no different, with differences and their errors."""
    better: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for name, d in differences.items():
        if abs(d.value) <= CLEAR * d.se or d.value == 0:
            same.append(NAMES[name])
        else:
            ours = (d.value > 0) == HIGHER_IS_BETTER[name]
            (better if ours else worse).append(f"{NAMES[name]} ({_signed(name, d)})")
    if not differences:
        return ""
    if not better and not worse:
        return f"Against {rival}, this model is no different: at {_listed(same)} within two standard errors."
    if worse and not better and not same:
        return f"{rival[0].upper()}{rival[1:]} is better at everything: {_listed(worse)}. Serve that one instead."
    said = [f"better at {_listed(better)}"] if better else []
    said += [f"worse at {_listed(worse)}"] if worse else []
    said += [f"no different at {_listed(same)}"] if same else []
    sentence = f"Against {rival}, this model is {'; '.join(said)}."
    return sentence if better else f"{sentence} It is better at nothing: consider serving the other one."


def _signed(name: str, d: Difference) -> str:
    if name in IN_POINTS:
        return f"{100 * d.value:+.2f} ± {100 * d.se:.2f} points"
    return f"{d.value:+.3g} ± {d.se:.1g}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
