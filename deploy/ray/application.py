"""The Ray Serve application: what a replica needs, how many there are, and how they are replaced."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dubito.models.errors import DubitoError
from dubito.service.settings import Settings
from dubito.service.sources import find

NAME = "dubito"
ENVIRONMENT = {  # read by Ray when it is imported, on every node
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # its default proxy adds milliseconds to each request
    # a prediction may be computed twice: one whose replica is lost before it answers goes to another
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # a busy machine starts it in more than the usual 5 s
}
SPARE = 64  # requests beyond `max_requests` that a replica takes, to refuse them with 429 itself


class RayError(DubitoError):
    """An application that Ray cannot run as asked."""


@dataclass(frozen=True)
class ReplicaOptions:
    """What each replica gets, and how many there are."""

    least: int = 1
    most: int = 1
    target: float = 16.0  # predictions under way per replica, queued ones included: more of them start a replica
    cpus: float = 1.0
    gpus: float = 0.0
    up_seconds: float = 10.0  # for which there must be more than the target
    down_seconds: float = 120.0  # for which there must be fewer


def prepare_environment() -> None:
    """Before Ray is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def connect(address: str | None, *, logs: bool) -> None:
    """Join a cluster; without an address, start Ray on this machine, for this machine alone."""
    prepare_environment()
    import ray

    where: dict[str, Any] = {"_node_ip_address": "127.0.0.1"} if address is None else {"address": address}
    ray.init(namespace=NAME, log_to_driver=logs, include_dashboard=False, **where)


def application_of(settings: Settings, options: ReplicaOptions) -> Any:
    """The application to hand to `serve.run`, which replaces the replicas that run."""
    if settings.grpc_port is not None:
        raise RayError("grpc_port is set, but replicas of Ray answer HTTP only; leave it out, or use `dubito serve`.")
    if settings.workers > 1:
        raise RayError(
            f"workers is {settings.workers}, but a replica is one process; ask for more of them: --replicas."
        )
    if settings.repository_api:
        raise RayError(
            "repository_api is on, but a load over HTTP would reach one replica; leave it out, and run `dubito ray` "
            "again with another version."
        )
    from ray import serve

    from dubito.deploy.ray.replica import ServedReplica

    settings = settings.model_copy(
        update={
            "repository_api": False,
            "models": tuple(p.resolve() if isinstance(p, Path) else p for p in settings.models),
        }
    )
    find(settings.models).checked()
    scaling: dict[str, Any] = {"num_replicas": options.least}
    if options.most > options.least:
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.least,
                "max_replicas": options.most,
                "target_ongoing_requests": options.target,
                "upscale_delay_s": options.up_seconds,
                "downscale_delay_s": options.down_seconds,
            }
        }
    deployment = serve.deployment(
        serve.ingress()(ServedReplica),
        name=NAME,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        max_ongoing_requests=settings.max_requests + SPARE,
        graceful_shutdown_timeout_s=settings.drain_seconds + 1,
        health_check_period_s=5.0,
        **scaling,
    )
    return deployment.bind(settings.model_dump(mode="json"), options.gpus)


def run(settings: Settings, options: ReplicaOptions, address: str | None, say: Callable[[str], None]) -> None:
    """Without an address, start Ray on this machine and serve until a signal; else deploy there and return."""
    connect(address, logs=address is None)
    import ray
    from ray import serve

    serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": settings.port})
    serve.run(application_of(settings, options), name=NAME, route_prefix="/")
    say(f"dubito serves {options.least} to {options.most} replicas on http://{settings.host}:{settings.port}")
    if address is not None:
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()
