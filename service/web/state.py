"""The server's state: its settings, metrics and models, and whether it is starting, ready or draining."""

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from prometheus_client import generate_latest

from dubito.models.errors import DubitoError
from dubito.models.extras import need
from dubito.models.numerics.proof import name_of
from dubito.service.engine.budget import KINDS, Budget
from dubito.service.engine.device import Device, device_of, devices_of, dtype_of, trusted
from dubito.service.logs import writer
from dubito.service.metrics import Counts, Metrics, Sizes, device_bytes
from dubito.service.problems import Problem
from dubito.service.rates import OwnRates, Rates, SharedRates
from dubito.service.repository import Repository
from dubito.service.settings import Settings
from dubito.service.siblings import Siblings
from dubito.service.web.decoders import OUTCOMES, Decoders
from dubito.service.web.limits import ConnectionLimits
from dubito.service.web.predict import Predictor

if TYPE_CHECKING:
    from dubito.service.traces import Tracer

log = logging.getLogger("dubito")


class State:
    """Shared by the application, its routes and `dubito serve`, which starts and stops it."""

    def __init__(self, settings: Settings, siblings: Siblings | None = None) -> None:
        """`siblings`: the other workers of the server, where it has several."""
        self.settings, self.siblings = settings, siblings
        self.rates: Rates = OwnRates() if siblings is None else SharedRates(siblings.folder / "rates")
        self.metrics = Metrics()
        self.metrics.registry.register(Sizes(self._sizes))
        self.metrics.registry.register(Counts(self._counts))
        self.limits = ConnectionLimits(settings)
        self.repository: Repository | None = None
        self.predictor: Predictor | None = None
        self.decoders: Decoders | None = None
        self.asked = torch.float32  # dtype of activations that the settings ask for
        self.started = self.draining = False
        self.changes = set[asyncio.Task[None]]()  # of models, under way
        self.tracer = _tracer() if settings.traces else None

    async def start(self) -> None:
        """Load and warm every model; raises the error of the first that cannot be loaded."""
        devices: list[Device] = []
        for name in self._names():
            gpu = next((one for one in devices if one.name == name and one.device.type == "cuda"), None)
            devices.append(await self._device(name) if gpu is None else replace(gpu))  # the same lock and memory
        trace = None if self.tracer is None else self.tracer.batch
        self.repository = await asyncio.to_thread(  # which looks for models: a store may take its time
            Repository, self.settings, devices, self.metrics, trace
        )
        for one in devices:
            log.log(logging.INFO if one.proven else logging.WARNING, "models run", extra=one.said)
        self.decoders = Decoders(self.settings)
        self.decoders.start()
        self.predictor = Predictor(self.settings, self.repository, self.decoders)
        if self.siblings is not None:
            await self.siblings.start(self._answer)
        await self.repository.load_all(() if self.siblings is None else self.siblings.unloaded())
        self.started = True

    async def _answer(self, asked: dict[str, Any]) -> str | None:
        """To another worker."""
        if asked["do"] == "metrics":
            text = await asyncio.to_thread(generate_latest, self.metrics.registry)
            return text.decode()
        await self._change(asked["do"], asked["name"])
        return None

    async def change(self, do: Literal["load", "unload"], name: str) -> None:
        """Load the newest version of a model or unload it, in every worker.

        It goes on to its end where who asked for it goes away: half of it would leave memory held and workers unlike.
        """
        task = asyncio.create_task(self._change_all(do, name))
        self.changes.add(task)
        task.add_done_callback(self._changed)
        await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[None]) -> None:
        self.changes.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: asyncio would log it where nobody waits any more

    async def _change_all(self, do: Literal["load", "unload"], name: str) -> None:
        await self._change(do, name)
        if self.siblings is not None:
            await self.siblings.change(do, name)

    async def _change(self, do: str, name: str) -> None:
        assert self.repository is not None
        if do == "unload":
            await self.repository.unload(name)
            return
        try:
            await self.repository.load(name)
        except Problem:
            raise
        except DubitoError:
            raise Problem(400, f"the artifact cannot be loaded: {self.repository.reason(name)}") from None

    def _names(self) -> list[str]:
        """Of the devices."""
        if self.settings.devices:
            return devices_of(self.settings.devices, "devices")
        return [str(device_of(self.settings.device))]

    async def _device(self, name: str) -> Device:
        """A device that has proved itself, and its dtype."""
        device = torch.device(name)
        self.asked, why = dtype_of(self.settings.dtype, device)
        dtype, fault = await asyncio.to_thread(trusted, self.asked, device)
        said = {"device": name, "asked": name_of(self.asked), "dtype": name_of(dtype), "why": fault or why}
        return Device(
            name, device, dtype, Budget.of(self.settings.memory_bytes, device), proven=fault is None, said=said
        )

    async def stop(self, seconds: float) -> None:
        """Answer the accepted requests within that time, then stop."""
        self.draining = True
        try:
            if self.repository is not None:
                await asyncio.wait_for(self.repository.close(), seconds)
        finally:
            if self.decoders is not None:
                self.decoders.close()
            if self.siblings is not None:
                self.siblings.close()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    @property
    def ready(self) -> bool:
        repository = self.repository
        return repository is not None and self.started and repository.ready and repository.alive and not self.draining

    @property
    def missing(self) -> list[str]:
        """Expected models that do not answer yet."""
        return [] if self.repository is None else sorted(self.repository.expected - set(self.repository.served))

    @property
    def live(self) -> bool:
        return self.repository is None or self.repository.alive

    def _sizes(self) -> dict[tuple[str, str, tuple[str, ...]], dict[tuple[str, ...], float]]:
        repository = self.repository
        served = {} if repository is None else dict(repository.served)
        kinds = ("artifact", "resident", "deterministic")
        bytes_: dict[tuple[str, ...], float] = {
            (name, kind): one.bytes[kind] for name, one in served.items() for kind in kinds
        }
        bytes_ |= {(name, "bank"): one.bank_bytes for name, one in served.items() if one.bank_bytes}
        devices = () if repository is None else repository.devices
        memory: Counter[str] = Counter()  # of all devices; two on one chip share its memory
        for device in {one.device for one in devices} or {torch.device("cpu")}:
            memory.update(device_bytes(device))
        for budget in {id(one.budget): one.budget for one in devices}.values():
            memory.update({kind: budget.held(kind) for kind in KINDS})
            memory.update({} if budget.limit is None else {"limit": budget.limit})
        return {
            ("dubito_workers", "Processes of the server whose metrics these are.", ()): {(): 1},
            ("dubito_connections", "Open connections.", ()): {(): len(self.limits.open)},
            ("dubito_unsent_bytes", "Bytes of large replies that clients have not taken yet.", ()): {
                (): self.limits.unsent
            },
            ("dubito_held_bytes", "Bytes of bodies and decoded inputs of requests under way.", ()): {
                (): 0 if self.predictor is None else self.predictor.held
            },
            ("dubito_decode_depth", "Bodies that wait for a process that decodes them.", ()): {
                (): 0 if self.decoders is None else self.decoders.depth
            },
            ("dubito_queue_depth", "Requests in the queue.", ("model",)): {
                (name,): one.batcher.waiting for name, one in served.items()
            },
            (
                "dubito_model_bytes",
                "Bytes of a model: its file, in memory, as the plain network, and of draws made ahead.",
                ("model", "kind"),
            ): bytes_,
            (
                "dubito_device_proven",
                "1 where the device computes right in the dtype asked for; 0 where another one is used.",
                ("model", "device", "asked", "dtype"),
            ): {
                (name, str(model.device), name_of(self.asked), name_of(model.factors.dtype)): float(
                    model.factors.dtype == self.asked
                )
                for name, one in served.items()
                for model in (engine.model for engine in one.engines)
            },
            ("dubito_ways_excluded", "Executions of a layer that gave wrong results, and are not used.", ("model",)): {
                (name,): sum(len(engine.plans.wrong) for engine in one.engines) for name, one in served.items()
            },
            ("dubito_factor_cache_bytes", "Bytes of a model's factors.", ("model",)): {
                (name,): one.bytes["factors"] for name, one in served.items()
            },
            (
                "dubito_device_memory_bytes",
                "Memory of the device that models run on: in all, of this process, and of its models by kind.",
                ("kind",),
            ): {(kind,): value for kind, value in memory.items()},
        }

    def _counts(self) -> dict[tuple[str, str, tuple[str, ...]], dict[tuple[str, ...], float]]:
        return {
            ("dubito_connections_closed", "Connections closed for a limit, by its name.", ("reason",)): {
                (reason,): number for reason, number in self.limits.closed.items()
            },
            ("dubito_decoded_total", "Bodies decoded by other processes, by outcome.", ("outcome",)): {
                (outcome,): 0 if self.decoders is None else self.decoders.counts[outcome] for outcome in OUTCOMES
            },
            ("dubito_log_lines_dropped", "Log lines dropped because nothing took them.", ()): {(): writer.dropped},
        }


def _tracer() -> "Tracer":
    need("otel", "opentelemetry")
    need("otel", "opentelemetry.sdk")
    from dubito.service.traces import from_environment

    return from_environment()
