"""The OpenAPI document: FastAPI's own routes, and the raw prediction paths that FastAPI does not know."""

from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dubito.models.manifest import Predictive
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE
from dubito.service.settings import Settings
from dubito.service.web.oip import JSON, LENGTH, OCTETS, PARAMETERS, TYPES
from dubito.service.web.options import MOST_SEED, RETURNS
from dubito.service.web.security import OPEN

Json = dict[str, Any]
PROBLEM = "application/problem+json"

NUMBER: Json = {"type": "number"}
WHOLE: Json = {"type": "integer"}
TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
ANY: Json = {}

STATUSES = {
    400: "The request is wrong; the text says what came and what was expected.",
    401: "No API key came, or none that is known.",
    403: "The request comes from a foreign page in a browser.",
    404: "There is no such model, or not in that version.",
    408: "The body did not come in time.",
    413: "The body, a picture or the number of inputs is too large.",
    415: "The body has a type or a coding that is not read here.",
    422: "The model answers this input with something that is not finite.",
    429: "The queue is full, or the rate of this key is used up; Retry-After says when to try again.",
    500: "The model failed on this request; the log says why.",
    503: "The server is starting or stopping, or the model is going away.",
    504: "The deadline passed, in the queue or while computing.",
}
OF_PREDICTIONS = tuple(STATUSES)
OF_ANY = (401, 429, 500, 503)


def some(item: Json, **more: Any) -> Json:
    return {"type": "array", "items": item, **more}


def thing(properties: Json, required: list[str] | None = None, **more: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        **more,
    }


def or_none(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def content(schema: Json, kind: str = JSON, **more: Any) -> Json:
    return {"content": {kind: {"schema": schema, **more}}}


def errors(statuses: tuple[int, ...], *, v2: bool) -> Json:
    """Error responses of an operation."""
    body = content(ref("Error")) if v2 else content(ref("Problem"), PROBLEM)
    return {str(status): {"description": STATUSES[status], **body} for status in statuses}


def answer(schema: Json, what: str, statuses: tuple[int, ...] = OF_ANY, *, v2: bool = False, **more: Any) -> Json:
    """The `responses` of an operation."""
    return {"200": {"description": what, **content(schema, **more)}, **errors(statuses, v2=v2)}


DIGITS: Json = {"type": "string", "pattern": "^[0-9]{1,19}$"}
METHOD: Json = {"enum": list(get_args(Predictive))}
DRAWN: Json = {"description": "With `auto`, how many draws this input took; with `return`, the draws themselves."}
CERTAIN = ["label", "class", "max_probability", "entropy", "expected_entropy", "mutual_information"]
SCHEMAS: Json = {
    "Problem": thing({"type": TEXT, "title": TEXT, "status": WHOLE, "detail": TEXT}),
    "Error": thing({"error": TEXT}),
    "Ood": thing({"flag": FLAG, "score": NUMBER, "threshold": NUMBER, "measure": TEXT, "samples": WHOLE}),
    "Classified": thing(
        {
            "label": TEXT,
            "class": WHOLE,
            "probabilities": some(NUMBER),
            **dict.fromkeys(CERTAIN[2:4], NUMBER),
            **{
                name: {**or_none(NUMBER), "description": "Null with `probit`, which cannot compute it."}
                for name in CERTAIN[4:]
            },
            "prediction_set": or_none(some(TEXT)),
            "ood": or_none(ref("Ood")),
            "samples": DRAWN,
        },
        [*CERTAIN, "prediction_set", "ood"],
    ),
    "Regressed": thing(
        {
            "targets": {**some(TEXT), "description": "Names of the numbers, where the artifact has them."},
            **{name: some(NUMBER) for name in ("mean", "epistemic_variance", "aleatoric_variance")},
            "interval": or_none(some(some(NUMBER))),
            "ood": or_none(ref("Ood")),
            "samples": DRAWN,
        },
        ["mean", "epistemic_variance", "aleatoric_variance", "interval", "ood"],
    ),
    "Predicted": thing(
        {
            "model": TEXT,
            "version": TEXT,
            "samples": WHOLE,
            "seed": WHOLE,
            "method": METHOD,
            "predictions": some({"anyOf": [ref("Classified"), ref("Regressed")]}),
            "timing_ms": {"type": "object", "additionalProperties": NUMBER},
        }
    ),
    "Model": thing(
        {
            "name": TEXT,
            "version": TEXT,
            "task": {"enum": ["classification", "regression"]},
            "architecture": TEXT,
            "methods": some(TEXT),
            "method": {**METHOD, "description": "Predictive used for requests that do not choose one."},
            "input": thing(
                {"shape": some(WHOLE), "image": or_none({"type": "object"}), "columns": or_none(some(TEXT))}
            ),
            "labels": or_none(some(TEXT)),
            "targets": or_none(some(TEXT)),
            "noise": or_none({"enum": ["constant", "input"]}),
            "outputs": or_none(WHOLE),
            "parameters": WHOLE,
            "deterministic_parameters": WHOLE,
            "bytes": thing({"artifact": WHOLE, "resident": WHOLE, "factors": WHOLE, "deterministic": WHOLE}),
            "calibration": or_none({"type": "object"}),
            "metrics": {"type": "object", "additionalProperties": NUMBER},
            "plain": or_none(
                {"type": "object", "description": "The plain network that it came from, on the same test data."}
            ),
            "sha256": TEXT,
            "samples": WHOLE,
            "max_samples": WHOLE,
            "device": TEXT,
        }
    ),
    "Tensor": thing({"name": TEXT, "datatype": TEXT, "shape": some(WHOLE)}),
    "InferenceReply": thing(
        {
            "model_name": TEXT,
            "model_version": TEXT,
            "id": TEXT,
            "parameters": thing(
                {"samples": WHOLE, "seed": {**TEXT, "description": "As text: it has up to 63 bits."}, "method": METHOD}
            ),
            "outputs": some(
                thing(
                    {
                        "name": TEXT,
                        "datatype": {"enum": list(TYPES)},
                        "shape": some(WHOLE),
                        "parameters": thing({"binary_data_size": WHOLE}, []),
                        "data": {**some(ANY), "description": "Flat, row by row; a number that is not finite is null."},
                    },
                    ["name", "datatype", "shape"],
                )
            ),
        },
        ["model_name", "model_version", "outputs"],
    ),
}


def document(app: FastAPI, settings: Settings) -> Json:
    """The whole document; examples fit the embedded digits, whose inputs are short."""
    schema = get_openapi(
        title="dubito",
        version=app.version,
        summary="Predictions that say how far they can be trusted.",
        routes=app.routes,
    )
    schema.setdefault("components", {}).setdefault("schemas", {}).update(SCHEMAS)
    schema["components"]["schemas"] |= {
        "PredictRequest": _predict_request(settings),
        "InferenceRequest": _inference_request(settings),
    }
    for item in schema["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)  # FastAPI adds it, but any text is a valid name
            for parameter in operation.get("parameters", []):
                parameter["example"] = EXAMPLES[parameter["name"]]
    schema["paths"] |= raw_paths(settings)
    if settings.api_keys:
        schema["components"]["securitySchemes"] = {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        }
        schema["security"] = [{"key": []}, {"bearer": []}]
        for path in OPEN & schema["paths"].keys():
            schema["paths"][path]["get"]["security"] = []
    return schema


def raw_paths(settings: Settings) -> Json:
    """The prediction paths, which bypass FastAPI's router."""
    options = _options(settings)
    return {
        "/v1/models/{name}/predict": {"post": _predict(options)},
        "/v2/models/{name}/infer": {"post": _infer("infer", ["name"])},
        "/v2/models/{name}/versions/{version}/infer": {"post": _infer("infer_version", ["name", "version"])},
    }


def _options(settings: Settings) -> Json:
    """Schemas of the options of a prediction, by name."""
    most = settings.max_samples
    return {
        "samples": {
            "anyOf": [{"type": "integer", "minimum": 0, "maximum": most}, {"const": "auto"}],
            "default": settings.samples,
            "description": "Posterior draws K; 0 is the posterior mean, `auto` draws until the answer has settled.",
        },
        "seed": {
            "anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_SEED}, DIGITS],
            "description": "Fixes the draws.",
        },
        "method": {
            **METHOD,
            "description": "Of a linearised network: `probit`, its closed form, which takes no draws, or `sampling`. "
            "Without it, as calibrated, and by sampling where `samples`, `max_samples` or `tolerance` are given.",
        },
        "group": {
            **TEXT,
            "description": "Of a model calibrated by group: the group of these inputs, whose own quantile then makes "
            "the prediction sets or intervals. Without it, that of all inputs together.",
        },
        "max_samples": {"type": "integer", "minimum": 1, "maximum": most, "default": min(AT_MOST, most)},
        "tolerance": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": TOLERANCE},
        "timeout_ms": {
            "type": "integer",
            "minimum": 1,
            "maximum": settings.max_deadline_ms,
            "default": settings.deadline_ms,
        },
        "return": some({"enum": list(RETURNS)}, description="`samples` adds the draws; without it none are listed."),
        "version": {**TEXT, "description": "Answer from this version or not at all."},
    }


def _predict_request(settings: Settings) -> Json:
    inputs: Json = {**some(ANY), "description": "Nested lists (B, ...) in the model's input space."}
    images = some({"type": "string", "contentEncoding": "base64"}, minItems=1)
    return {
        "oneOf": [
            thing({"inputs": inputs, **_options(settings)}, ["inputs"], additionalProperties=False),
            thing({"images": images, **_options(settings)}, ["images"], additionalProperties=False),
        ]
    }


EXAMPLES = {"name": "digits", "version": "1"}
ZEROS = [[[0.0] * 8 for _ in range(8)]]


def _predict(options: Json) -> Json:
    binary: Json = {"schema": {"type": "string", "format": "binary"}}
    example = {"value": {"inputs": [ZEROS], "samples": 20, "seed": 0}}
    form = thing({"file": some({"type": "string", "format": "binary"})})
    return {
        "tags": ["v1"],
        "summary": "Predict, and say how far each answer can be trusted",
        "operationId": "predict",
        "parameters": [_name("name"), *(_query(name, schema) for name, schema in options.items())],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": ref("PredictRequest"), "examples": {"one input": example}},
                "application/x-npy": binary,
                OCTETS: binary,
                "image/png": binary,
                "image/jpeg": binary,
                "multipart/form-data": {"schema": form},
            },
        },
        "responses": answer(ref("Predicted"), "One prediction for each input.", OF_PREDICTIONS),
    }


def _inference_request(settings: Settings) -> Json:
    size = {"binary_data_size": {"type": "integer", "minimum": 0}}
    data = {"anyOf": [some(ANY), {"type": "null"}], "description": "Nested or flat; not with binary_data_size."}
    tensor = thing(
        {
            "name": TEXT,
            "shape": some({"type": "integer", "minimum": 0}),
            "datatype": {"enum": [*TYPES, "BYTES"]},
            "parameters": {"type": "object", "properties": size},
            "data": data,
        },
        ["name", "shape", "datatype"],
    )
    wanted = thing(
        {"name": TEXT, "parameters": {"type": "object", "properties": {"binary_data": FLAG}}},
        ["name"],
    )
    ours = {name: s for name, s in _options(settings).items() if name in PARAMETERS}
    parameters = {"binary_data_output": FLAG, "timeout": {"anyOf": [{"type": "integer", "minimum": 0}, DIGITS]}, **ours}
    return thing(
        {
            "id": TEXT,
            "parameters": {"type": "object", "properties": parameters},
            "inputs": some(tensor, minItems=1),
            "outputs": some(wanted),
        },
        ["inputs"],
    )


def _infer(operation: str, names: list[str]) -> Json:
    tensor = {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": ZEROS}
    example = {"value": {"id": "1", "inputs": [tensor], "parameters": {"samples": 20, "seed": 0}}}
    octets: Json = {"schema": {"type": "string", "format": "binary"}}
    length: Json = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
        "description": "Bytes of JSON before the binary tensors; 0: the body is one raw FP32 input.",
    }
    responses = answer(ref("InferenceReply"), "The named outputs.", OF_PREDICTIONS, v2=True)
    responses["200"]["content"][OCTETS] = octets
    responses["200"]["headers"] = {LENGTH: {"schema": TEXT, "description": "Of a binary reply: its bytes of JSON."}}
    return {
        "tags": ["v2"],
        "summary": "Open Inference Protocol: infer",
        "operationId": operation,
        "parameters": [*map(_name, names), length],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": ref("InferenceRequest"), "examples": {"one input": example}},
                OCTETS: octets,
            },
        },
        "responses": responses,
    }


def _name(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": EXAMPLES[name]}


def _query(name: str, schema: Json) -> Json:
    """An option as a query parameter, for bodies that are not JSON; lists are separated by commas."""
    parameter: Json = {"name": name, "in": "query", "required": False, "schema": schema}
    return {**parameter, "style": "form", "explode": False} if schema.get("type") == "array" else parameter
