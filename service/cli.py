"""Commands of the service: serve, score, key, doctor, bench http."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dubito.models.cli import ADDRESSES, Artifact, Method, Network, Samples

app = typer.Typer(rich_markup_mode=None)


@app.command()
def serve(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Artifacts, or model repositories (PATH/NAME/VERSION/model.safetensors), or addresses of them "
            f"({ADDRESSES}), or zoo:NAME of the list `dubito zoo`. Without any: zoo:clothes and zoo:digits.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.", show_default="8000")] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            help="Serve gRPC too, on this port; 0 takes a free one. Needs the extra grpc.", show_default="off"
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Where models run.", show_default="auto")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Several devices, each with a copy of every model: cuda:0,cuda:1, or all for every GPU.",
            show_default="the one of --device",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that serve the port, each with its own copy of every model; for CPUs.", show_default="1"
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="For artifacts whose network cannot be written as data: the class or function that makes it, as in "
            "package.module:factory. Its code runs. May be repeated.",
        ),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A TOML file of settings; DUBITO_SETTINGS names one too.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any setting: --set samples=64; may be repeated."),
    ] = None,
    print_settings: Annotated[
        bool, typer.Option("--print-settings", help="Print every setting with its value and meaning as TOML, and exit.")
    ] = False,
) -> None:
    """Serve models over HTTP: predictions with uncertainty, metrics, and a console at /.

    Settings come from flags, then the environment (DUBITO_PORT=80 ...), then the TOML file.

    Try: dubito serve model.safetensors --port 8000
    """
    from dubito.models.cli import permit_network
    from dubito.service.settings import as_toml, settings_of_command

    flags: dict[str, object] = {"models": paths, "host": host, "port": port, "device": device, "networks": network}
    flags |= {"grpc_port": grpc_port, "workers": workers, "devices": None if devices is None else devices.split(",")}
    effective = settings_of_command(settings, flags, change or [])
    if print_settings:
        print(as_toml(effective))
        return
    for name in effective.networks:
        permit_network(name)
    if effective.workers > 1:
        from dubito.service.workers import supervise as run
    else:
        from dubito.service.run import serve as run
    raise typer.Exit(run(effective, lambda text: print(text, flush=True)))


@app.command()
def score(
    file: Artifact,
    rows: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="What to score: a Parquet, CSV, .npy or .npz file or the address of one, a folder of pictures, or a "
            "pattern in quotes.",
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(metavar="OUTPUT", help="The Parquet file to write; or its address (s3://, gs://, az://)."),
    ],
    samples: Samples = None,
    seed: Annotated[int, typer.Option(help="Fixes the draws, which are the same for all rows.", min=0)] = 0,
    method: Method = None,
    group: Annotated[
        str | None, typer.Option(help="Of a model calibrated by group: the group that all rows belong to.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, all (every GPU), or a list such as cuda:0,cuda:1.")
    ] = "auto",
    batch: Annotated[
        int | None, typer.Option(help="Rows of a batch.", min=1, show_default="64 on a CPU, 256 on a GPU")
    ] = None,
    on_bad: Annotated[
        Literal["stop", "null"],
        typer.Option(help="At a row that cannot be scored: stop, or write nulls and the reason in a column `error`."),
    ] = "stop",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew: drop what an earlier run has written.")] = False,
    network: Network = None,
) -> None:
    """Predict every row of a file or folder, and write Parquet with the fields of a reply.

    Finished parts are kept in OUTPUT.parts: after an interruption the same command goes on where it ended, and writes
    the same values as a run without one. Needs the extra score.

    Try: dubito score model.safetensors rows.parquet scores.parquet --samples 20
    """
    from dubito.models.cli import chosen_method, chosen_samples
    from dubito.models.extras import need
    from dubito.models.remote.address import place_of
    from dubito.models.remote.cache import local_copy
    from dubito.models.terminal import bar

    need("score", "pyarrow")
    from dubito.service.engine.device import devices_of
    from dubito.service.scoring.delivery import delivered
    from dubito.service.scoring.rows import input_place
    from dubito.service.scoring.score import Scoring
    from dubito.service.scoring.score import score as run

    devices, options = devices_of(device.split(","), "--device"), (chosen_method(method), group, network, on_bad, batch)
    with local_copy(input_place(rows)) as source, delivered(output, fresh=fresh) as target:
        asked = Scoring(file, str(source), target, chosen_samples(samples), seed, *options)
        scored = run(asked, devices, fresh, lambda left: bar("scoring", left))
    earlier = f", {scored.before:,} of them by earlier runs" if scored.before else ""
    print(f"wrote {place_of(output)}: {scored.rows:,} rows{earlier}")


@app.command()
def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is: its name in the settings.")],
) -> None:
    """Make an API key: the key goes to its owner, its hash into the settings.

    Try: dubito key alice
    """
    from secrets import token_urlsafe

    from dubito.service.web.security import hash_key

    secret = token_urlsafe(32)
    print(f"key (give it to {name}; it is shown only now): {secret}")
    print(f'setting: api_keys = {{ "{name}" = "{hash_key(secret)}" }}')


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Check this installation: versions, devices, what is missing and how to get it.

    The exit code is 0 where serving works, else 1.

    Try: dubito doctor --json
    """
    import json

    from dubito.service.doctor import examine, lines

    report = examine()
    print(json.dumps(report) if as_json else "\n".join(lines(report)))
    if not report["serving"]["works"]:
        raise typer.Exit(1)


bench = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure a running server.")
app.add_typer(bench, name="bench")


@bench.command("http")
def bench_http(
    words: Annotated[list[str], typer.Argument(metavar="URL", help="A server: http://localhost:8000.")],
    model: Annotated[str | None, typer.Option(help="Name of the model to ask.", show_default="the first")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second.", show_default="50")] = None,
    rates: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Several rates, one after the other: 50,100,200 or 50 100 200."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each rate, in seconds.")] = 10.0,
    samples: Annotated[
        str | None, typer.Option(help="Number of posterior draws K, or auto.", show_default="the server's")
    ] = None,
    rows: Annotated[int, typer.Option(help="Inputs in each request.")] = 1,
    key: Annotated[str | None, typer.Option(help="API key.", envvar="DUBITO_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also write a plot: FILE.png, .svg or .pdf.")] = None,
) -> None:
    """Send requests to a server at a given rate, and report latencies and statuses.

    Requests leave at random times (Poisson), whether or not earlier ones are answered, and latency counts from the time
    at which a request was due. Ctrl-C ends the run early and reports what was measured.

    Try: dubito bench http http://localhost:8000 --rates 50,100,200 --seconds 5
    """
    import json

    from rich.console import Console

    from dubito.service import load

    url, rates = load.address_in(words, rates)
    wanted = load.rates_of(rate, rates)
    arrivals = [load.poisson(one, seconds) for one in wanted]
    if plot is not None:
        load.check_plot(plot)
    name, target = load.predictions(url, model, rows, samples, key)
    loads = load.put_each(target, dict(zip(wanted, arrivals, strict=True)))
    title = f"{name}, rows {rows}, samples {samples or 'as the server says'}"
    if as_json:
        print(json.dumps({"model": name, "rows": rows, "samples": samples, "runs": [one.summary() for one in loads]}))
    else:
        Console().print(load.table(loads, title))
    for doubt in load.doubts(loads):
        typer.echo(doubt, err=True)
    if plot is not None and loads:
        load.plot(loads, plot, title)
        typer.echo(f"wrote {plot}", err=True)
    if any(one.stopped for one in loads):
        raise typer.Exit(130)
