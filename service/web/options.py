"""Options of a prediction, from JSON fields, query parameters or the parameters of the Open Inference Protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dubito.models.manifest import Predictive
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE
from dubito.models.predictions.answers import CERTAINTIES
from dubito.service.problems import Problem
from dubito.service.settings import Settings
from dubito.service.web.oip import PARAMETERS

RETURNS = (  # `probabilities` and `samples` are large, and returned only on request; the rest is always returned
    *("probabilities", "samples", "label", "class", *CERTAINTIES, "targets", "prediction_set", "ood"),
    *("mean", "epistemic_variance", "aleatoric_variance", "interval"),
)
DRAWN = ("samples", "max_samples", "tolerance")  # any of these options implies sampling
KNOWN = (*PARAMETERS, "return", "version")
MOST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class PredictOptions:
    samples: int | Literal["auto"]
    seed: int | None
    max_samples: int
    tolerance: float
    timeout_ms: int
    returns: tuple[str, ...]
    version: str | None
    predictive: Predictive | None  # None: the one that the model was calibrated for
    group: str | None  # of a model calibrated by group; None: all inputs together


def read_options(given: Mapping[str, Any], settings: Settings) -> PredictOptions:
    """Check the options of a request; values from a query are text."""
    for key in given:
        if key not in KNOWN:
            raise Problem(400, f"there is no option {str(key)[:40]!r}; there are: {', '.join(KNOWN)}.")
    samples: int | Literal["auto"] = "auto"
    if given.get("samples") != "auto":
        samples = _whole(given, "samples", min(settings.samples, settings.max_samples), 0, settings.max_samples)
    returns = given.get("return", ["probabilities"])
    wanted = returns.split(",") if isinstance(returns, str) else returns
    if not isinstance(wanted, list) or any(word not in RETURNS for word in wanted):
        raise Problem(400, f"return is {shown(returns)}; expected a list of some of: {', '.join(RETURNS)}.")
    if "samples" in wanted and samples == "auto":
        raise Problem(400, 'return asks for samples, but samples is "auto": give a number.')
    version = given.get("version")
    if version is not None and not isinstance(version, str):
        raise Problem(400, f'version is {shown(version)}; expected a string such as "1".')
    return PredictOptions(
        samples,
        None if given.get("seed") is None else _whole(given, "seed", 0, 0, MOST_SEED),
        _whole(given, "max_samples", min(AT_MOST, settings.max_samples), 1, settings.max_samples),
        _tolerance(given.get("tolerance", TOLERANCE)),
        _whole(given, "timeout_ms", min(settings.deadline_ms, settings.max_deadline_ms), 1, settings.max_deadline_ms),
        tuple(wanted),
        version,
        _predictive(given, "samples" in wanted),
        _group(given.get("group")),
    )


def _predictive(given: Mapping[str, Any], draws: bool) -> Predictive | None:
    """The predictive: sampling if any option needs draws, since the closed form (probit) has none."""
    predictive = given.get("method")
    needs_draws = [f"`{option}`" for option in DRAWN if option in given] + (["the draws"] if draws else [])
    match predictive:
        case "sampling":
            return "sampling"
        case "probit":
            if needs_draws:
                raise Problem(400, f"method is 'probit', which takes no draws; it came with {needs_draws[0]}.")
            return "probit"
        case None:
            return "sampling" if needs_draws else None
    raise Problem(400, f"method is {shown(predictive)}; expected 'probit' or 'sampling'.")


def _group(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Problem(400, f"group is {shown(value)}; expected the name of one, as text.")
    return value


def _tolerance(value: Any) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = -1.0
        if 0 < number < 1:
            return number
    raise Problem(400, f"tolerance is {shown(value)}; expected a number between 0 and 1.")


def _whole(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        also = ' or "auto"' if name == "samples" else ""
        raise Problem(400, f"{name} is {shown(value)}; expected a whole number from {low} to {high}{also}.")
    return value


def shown(value: object) -> str:
    """repr of a value, shortened for an error message; of a long or deep list or object, only its length."""
    if isinstance(value, list | dict) and (len(value) > 4 or any(isinstance(part, list | dict) for part in value)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    if isinstance(value, dict):
        return "an object" if value else "{}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
