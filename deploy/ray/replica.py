"""A replica: the application that `dubito serve` runs, with its own batcher and queues, behind Ray's proxy."""

import asyncio
import logging
from typing import Any

import ray
import torch
from prometheus_client import generate_latest
from ray import serve

from dubito.deploy.ray.gather import Gatherer, joined_metrics
from dubito.models.cli import permit_network
from dubito.service.engine.budget import SHARE
from dubito.service.logs import start_logging
from dubito.service.settings import Settings
from dubito.service.web.app import Server, application
from dubito.service.web.http import Message, Receive, Scope, Send
from dubito.service.web.state import State

NAMESPACE, GATHERER = "dubito", "dubito-metrics"
EVERY = 2.0  # seconds between two reports of a replica's metrics
log = logging.getLogger("dubito")


class ServedReplica:
    """One replica of the application. Ray makes it, asks whether it is well, and ends it once it is idle."""

    async def __init__(self, settings: dict[str, Any], gpus: float) -> None:  # type: ignore[misc]
        self.settings = Settings(**settings)
        if 0 < gpus < 1 and not self.settings.memory_bytes and torch.cuda.is_available():
            share = int(SHARE * gpus * torch.cuda.get_device_properties(0).total_memory)
            self.settings = self.settings.model_copy(update={"memory_bytes": share})
        start_logging(self.settings.log_level, self.settings.log_bytes)
        for name in self.settings.networks:
            permit_network(name)
        self.state = State(self.settings)
        await self.state.start()
        self.name = serve.get_replica_context().replica_id.unique_id
        self.gatherer = gatherer()
        self.reporting = asyncio.create_task(self._report())

    def __serve_build_asgi_app__(self) -> Any:
        return ReplicaApplication(application(Server(self.state)), self)

    def check_health(self) -> None:
        """Ray ends a replica that raises here, and starts another one."""
        if not self.state.live:
            raise RuntimeError("a batch is stuck, or the inference thread has died")

    def metrics(self) -> str:
        return generate_latest(self.state.metrics.registry).decode()

    async def _report(self) -> None:
        while True:
            try:
                await self.gatherer.put.remote(self.name, self.metrics())
            except ray.exceptions.RayError as error:  # the actor is being restarted elsewhere
                log.warning("metrics are not gathered", extra={"error": str(error)[:200]})
            await asyncio.sleep(EVERY)

    async def gathered(self) -> str:
        """The metrics of all replicas, its own as they are now."""
        try:
            known: dict[str, str] = await asyncio.wait_for(self.gatherer.all.remote(), EVERY)
        except (ray.exceptions.RayError, TimeoutError):
            known = {}
        return joined_metrics(known | {self.name: self.metrics()})

    async def __del__(self) -> None:
        """Ray has let the requests under way end."""
        self.reporting.cancel()
        self.gatherer.drop.remote(self.name)
        await self.state.stop(self.settings.drain_seconds)


class ReplicaApplication:
    """The ASGI application of a replica; Ray wants a callable object that knows ASGI's lifespan."""

    def __init__(self, app: Any, replica: ServedReplica) -> None:
        self.app, self.replica = app, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
        elif scope["path"] == "/metrics":
            await self.app(scope, receive, GatheredReply(send, self.replica).send)
        else:
            await self.app(scope, receive, send)


class GatheredReply:
    """The server's reply to /metrics, with all replicas' metrics where it lets the client see its own."""

    def __init__(self, send: Send, replica: ServedReplica) -> None:
        self._send, self.replica = send, replica
        self.start: Message = {}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        if self.start["status"] == 200 and not message.get("more_body", False):
            body = (await self.replica.gathered()).encode()
            own = [(key, value) for key, value in self.start["headers"] if key.lower() != b"content-length"]
            self.start = {**self.start, "headers": [*own, (b"content-length", b"%d" % len(body))]}
            message = {**message, "body": body}
        await self._send(self.start)
        await self._send(message)


def gatherer() -> Any:
    """The actor that holds the metrics of all replicas; it outlives the node that it runs on."""
    options = {"name": GATHERER, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    return ray.remote(Gatherer).options(num_cpus=0, max_restarts=-1, **options).remote()
