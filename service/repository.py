"""Models by name and version: finds, loads, warms and checks them, then switches to them while the old ones drain."""

import asyncio
import gc
import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dubito.models.artifact.artifact import load
from dubito.models.errors import ArtifactError, DubitoError, InputError, NumericsError, first_line
from dubito.models.manifest import Input
from dubito.models.network.layers import takes_ids
from dubito.models.numerics.proof import name_of
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import bytes_of, reside
from dubito.models.remote.address import Place
from dubito.models.remote.cache import fetched
from dubito.models.report import report
from dubito.service.engine.bank import Bank, bytes_of_sample
from dubito.service.engine.batcher import Batcher
from dubito.service.engine.budget import Budget
from dubito.service.engine.device import Device
from dubito.service.engine.engine import Engine
from dubito.service.engine.pass_cache import PassCache, pass_folder
from dubito.service.engine.plans import PlanCache, plan_file
from dubito.service.engine.worker import Batch
from dubito.service.metrics import Metrics, Series, model_bytes
from dubito.service.problems import Problem
from dubito.service.settings import Settings
from dubito.service.sources import FILE, Key, Scan, Source, find

PATHS = re.compile(r"(?<![\w.-])/\w")  # of the server's own files: a reply must not show them
LOOKED = 2.0  # seconds for which a look at the repositories is good
PATIENCE = 10.0  # seconds that the index waits for a store
FINE, LONG = 0.25, 5.0  # slices of a pass after which others may come, and of a batch while nobody else waits
log = logging.getLogger("dubito")


@dataclass
class ServedModel:
    """A version of a model that answers requests."""

    source: Source
    engines: Sequence[Engine]  # one on each of its devices
    declared: Input
    known: dict[str, Any]  # report of `dubito inspect`
    bytes: dict[str, int]
    batcher: Batcher
    series: Series
    retired: bool = False  # replaced by another version, or unloaded
    limits: Any = None  # of its requests, once known
    outputs: Any = None  # that it declares, once known

    def __post_init__(self) -> None:
        self.name, self.version = self.source.name, self.source.version
        self.model = self.engines[0].model
        self.predictive = self.model.method  # predictive of requests that do not choose one

    @property
    def bank_bytes(self) -> int:
        return sum(engine.bank.bytes for engine in self.engines if engine.bank is not None)


class Repository:
    """The versions on disk, and those that are served. Changes happen on the event loop, loading in a thread."""

    def __init__(
        self,
        settings: Settings,
        devices: Sequence[Device],
        metrics: Metrics,
        trace: Callable[[Batch, float], None] | None = None,
    ) -> None:
        """`trace` is called for each batch of every model, with the time of its end."""
        self.settings, self.devices, self.metrics, self.trace = settings, devices, metrics, trace
        self.sources: dict[Key, Source] = {}
        self.refused: dict[Key, str] = {}  # folders that cannot be served, and why
        self.unread: set[Place] = set()  # addresses that could not be looked up last time
        self.faults: set[str] = set()  # of the paths given
        self.looked = 0.0  # when that was
        self.looking: asyncio.Task[None] | None = None
        self._scanned(find(settings.models).checked())
        self.expected = set(settings.expected) or {name for name, _ in self.sources}
        if unknown := self.expected - {name for name, _ in self.sources}:
            why = " ".join(reason for (name, _), reason in self.refused.items() if name in unknown)
            raise ArtifactError(f"expected models {', '.join(sorted(unknown))} are not among the paths given. {why}")
        self.served: dict[str, ServedModel] = {}
        self.failed: dict[Key, str] = {}  # versions that could not be loaded, and why; the log has it whole
        self.loading = {name for name, _ in self.sources}  # models that are not served yet, and will be if they can be
        self.broken: set[str] = set()  # models of which no version could be loaded at the start
        self.changing = asyncio.Lock()
        self.leaving: list[ServedModel] = []  # they answer what they have accepted
        self._check_placement()

    def _check_placement(self) -> None:
        known = [one.name for one in self.devices]
        for model, names in self.settings.placement.items():
            if not names or not set(names) <= set(known):
                came, there = ", ".join(names) or "nothing", ", ".join(known)
                raise InputError(f"placement of {model} is {came}; expected some of the devices {there}.")

    def devices_of(self, name: str) -> list[Device]:
        """Those that a model runs on."""
        names = self.settings.placement.get(name)
        return [one for one in self.devices if names is None or one.name in names]

    @property
    def ready(self) -> bool:
        return bool(self.expected) and all(name in self.served for name in self.expected)

    @property
    def alive(self) -> bool:
        """Whether no model's threads are dead or stuck, those of one that is being retired included."""
        seconds = self.settings.stuck_seconds
        leaving = any(retired.batcher.stuck(seconds) for retired in self.leaving)
        return not leaving and all(served.batcher.alive(seconds) for served in self.served.values())

    def get(self, name: str, version: str | None = None) -> ServedModel:
        served = self.served.get(name)
        if served is None:
            if name in self.broken:
                raise Problem(503, "this model could not be loaded; POST /v2/repository/index says why.")
            if name in self.expected or name in self.loading:
                raise Problem(503, "this model is being loaded; /readyz says when it answers.", {"Retry-After": "1"})
            raise Problem(404, "no such model is served; GET /v1/models lists those that are.")
        if version is not None and version != served.version:
            raise Problem(404, f"this model is not served in that version; it is in version {served.version}.")
        return served

    def _scanned(self, scan: Scan) -> None:
        """Take over what lies on disk now, and log each folder that cannot be served, once."""
        for (name, version), reason in scan.refused.items():
            if (name, version) not in self.refused:
                log.error("cannot serve a folder", extra={"model": name, "version": version, "error": reason})
        for fault in scan.faults:
            if fault not in self.faults:
                log.error("cannot serve a path", extra={"error": fault})
        # what a store held when it last answered
        kept = {key: source for key, source in self.sources.items() if source.root in scan.unread}
        self.sources, self.refused, self.unread = kept | scan.sources, scan.refused, scan.unread
        self.faults, self.looked = set(scan.faults), time.monotonic()

    def _versions(self, name: str) -> list[str]:
        """On disk, the newest first."""
        return sorted((version for one, version in self.sources if one == name), key=int, reverse=True)

    def reason(self, name: str) -> str:
        """Why the newest version that could not be loaded could not be."""
        return next((self.failed[name, v] for v in self._versions(name) if (name, v) in self.failed), "")

    async def load_all(self, but: Collection[str] = ()) -> None:
        """Load the newest version of each model that can be loaded, `but` some that requests have unloaded.

        An artifact given by its own path must be one; a model of a repository may fail, as long as one is served.
        """
        first: DubitoError | None = None
        self.loading -= set(but)
        self.expected -= set(but)
        for name in sorted({name for name, _ in self.sources} - set(but)):
            for version in self._versions(name):
                self.loading.add(name)
                try:
                    await self.load(name, version)
                    break
                except DubitoError as error:
                    if (name, version) in self.sources and self.sources[name, version].path in self.settings.models:
                        raise
                    first = first or error
            self.loading.discard(name)
        if first is not None and not self.served:
            raise first
        self.broken = {name for name, _ in self.sources} - set(self.served) - set(but)
        if not self.settings.expected:
            self.expected = set(self.served)

    async def load(self, name: str, version: str | None = None) -> None:
        """Load, warm and check a version, by default the newest on disk, and switch to it; the old version drains.

        If it cannot be loaded, the old version stays.
        """
        async with self.changing:
            self._scanned(await asyncio.to_thread(find, self.settings.models))
            versions = self._versions(name) if version is None else [version]
            roots = {source.root for (one, _), source in self.sources.items() if one == name}
            if self.unread and (not roots or roots & self.unread):
                raise Problem(503, "a store of models does not answer; the server's log has the reason.")
            if not versions or (name, versions[0]) not in self.sources:
                if reasons := [reason for (one, _), reason in self.refused.items() if one == name]:
                    raise Problem(400, reasons[0])
                if name in self.served:
                    raise Problem(404, "the model's file is gone; the version that is served stays.")
                raise Problem(404, "no such model in the repository; POST /v2/repository/index lists them.")
            source = self.sources[name, versions[0]]
            if name in self.served and self.served[name].source == source:
                return
            self.loading.add(name)
            try:
                engines, declared, known = await asyncio.to_thread(self._prepare, source)
            except Exception as error:
                ours = isinstance(error, DubitoError)
                fields = {"model": name, "version": source.version, "path": str(source.path), "error": str(error)}
                log.error("cannot load model", extra=fields, exc_info=not ours)
                self.failed[name, source.version] = _shown(source, error)
                if ours:
                    raise
                raise ArtifactError(f"{source.path} cannot be loaded: {type(error).__name__}.") from error
            finally:
                self.loading.discard(name)
            self.failed.pop((name, source.version), None)
            series = self.metrics.of(name)
            batcher = Batcher(
                [(engine, one.turn) for engine, one in zip(engines, self.devices_of(name), strict=True)],
                max_work=self.settings.batch_work,
                max_queue=self.settings.queue_work,
                on_batch=series.batch,
            )
            batcher.trace = self.trace
            sizes = model_bytes([engine.model for engine in engines], known["bytes"], known["deterministic"])
            old = self.served.get(name)
            self.served[name] = ServedModel(source, engines, declared, known, sizes, batcher, series)
            self.expected.add(name)  # again, if it had been unloaded
            self.broken.discard(name)
            on = ",".join(one.name for one in self.devices_of(name))
            log.info("model serves", extra={"model": name, "version": source.version, "device": on})
            if old is not None:
                retired = self._retire(old)
                del old  # so that it can be freed
                await retired

    def _prepare(self, source: Source) -> tuple[list[Engine], Input, dict[str, Any]]:
        """Load and warm a model on its devices, in a thread, so that its first request need not wait."""
        model = load(source.path)
        declared = model.card.input
        if declared is None:
            raise InputError(
                f"{source.path} does not say what its inputs look like, so it cannot be asked over HTTP: "
                "save it with a card that has an input."
            )
        known = report(model.manifest, model.network, fetched(source.path).stat().st_size)
        engines: list[Engine] = []
        try:
            for device in self.devices_of(source.name):
                engines.append(self._on(device, model, source))
        except Exception:
            self._release(source.name, engines)
            raise
        return engines, declared, known

    def _on(self, device: Device, model: Model, source: Source) -> Engine:
        """A copy of the model on a device, in float32 where that does not compute right otherwise."""
        with torch.cuda.device(device.device) if device.device.type == "cuda" else nullcontext():
            try:
                return self._warmed(model, source, device, device.dtype)
            except NumericsError as error:
                if device.dtype.itemsize >= torch.float32.itemsize:
                    raise
                fields = {"model": source.name, "asked": name_of(device.dtype), "why": str(error)}
                log.warning("model runs in float32", extra=fields)
            return self._warmed(model, source, device, torch.float32)

    def _release(self, name: str, engines: Sequence[Engine]) -> None:
        """Give the memory back that a model's copies have reserved, and end the threads that refer to them."""
        for engine, device in zip(engines, self.devices_of(name), strict=False):
            if engine.bank is not None:
                engine.bank.close()
            device.budget.release(engine.share)

    def _warmed(self, model: Model, source: Source, on: Device, dtype: torch.dtype) -> Engine:
        model = reside(model, on.device, dtype)
        plan_cache = PlanCache(plan_file() if self.settings.plan_seconds else None, on.device)
        share = on.budget.share()
        seconds = self.settings.plan_seconds
        passes = PassCache(pass_folder()) if seconds else None
        try:
            engine = Engine(model, self.settings.buckets, plan_cache, seconds, share=share, pass_cache=passes)
            self._enter(engine, on.budget)
            banked = self._reserve_bank(engine, on.budget)
            slices = self.settings.slice_ms / 1000
            engine.warm(self.settings.samples, on.turn, (FINE * slices, slices, LONG * slices))
            if banked:
                engine.bank = Bank(engine.model, *banked, self.settings.bank_seconds)
                share.kinds["bank"] = lambda: 0 if engine.bank is None else engine.bank.bytes
        except DubitoError:
            on.budget.release(share)
            raise
        except Exception as error:
            on.budget.release(share)
            log.exception("the model fails before any request")
            reason = first_line(error)
            ids = takes_ids(model.network)
            tokens = " It has a table of token ids; those are not served, only real numbers." if ids else ""
            raise ArtifactError(
                f"{source.path} fails on inputs of zeros or of random numbers: {reason}.{tokens}"
            ) from error
        return engine

    def _enter(self, engine: Engine, budget: Budget) -> None:
        """Register the model's device memory by kind; raises where it exceeds the limit."""
        share, model = engine.share, engine.model
        resident, share.sample = bytes_of([model.network, model.factors]), bytes_of_sample(model)
        share.kinds["resident"] = lambda: resident
        share.kinds["draws"] = lambda: engine.draws * share.sample
        share.kinds["plans"] = lambda: engine.plans.bytes
        if share.limited and budget.left < 0:
            raise DubitoError(
                f"the model takes {resident:,} bytes, {-budget.left:,} more than are left of the "
                f"{budget.limit:,} that the setting memory_bytes allows: raise it, or serve fewer models."
            )

    def _reserve_bank(self, engine: Engine, budget: Budget) -> tuple[int, int] | None:
        """Number of seeds and draws of the bank; None without a bank: by settings, for this model, or for lack of
        memory."""
        settings, factors, share = self.settings, engine.model.factors, engine.share
        automatic = settings.sample_mode == "auto" and factors.ahead
        if factors.normals == 0 or not (automatic or settings.sample_mode == "bank"):
            return None
        sets, samples = settings.bank_sets, settings.samples if automatic else settings.bank_samples
        size = sets * samples * (share.sample - 4 * factors.normals)  # the normals are not kept
        if size == 0:  # draws are not weights of layers
            return None
        if share.limited and size > budget.left // 2:  # passes need memory too
            log.warning("the bank does not fit the memory: draws are made anew", extra={"bytes": size})
            return None
        share.kinds["bank"] = lambda: size
        return sets, samples

    async def unload(self, name: str) -> None:
        async with self.changing:
            if name not in self.served:
                raise Problem(404, "no such model is served.")
            self.expected.discard(name)
            await self._retire(self.served.pop(name))
            self.metrics.forget(name)

    async def _retire(self, old: ServedModel) -> None:
        self.leaving.append(old)
        try:
            await self._drain(old)
        finally:
            self.leaving = [one for one in self.leaving if one is not old]
        self._release(old.name, old.engines)
        log.info("model retired", extra={"model": old.name, "version": old.version})
        held = [old]
        del old  # so that only the list refers to it
        await asyncio.to_thread(self._free, held)

    async def _drain(self, served: ServedModel) -> None:
        """Answer the accepted requests, and stop the model's threads."""
        served.retired = True
        await served.batcher.close()
        for bank in (engine.bank for engine in served.engines):
            if bank is not None:
                bank.close()
                while bank.alive:
                    await asyncio.sleep(0.005)

    def _free(self, held: list[ServedModel]) -> None:
        """Free a model's memory, in a thread, while holding its devices: freeing pinned memory would break a capture of
        another model's graphs."""
        devices = self.devices_of(held[0].name)
        with ExitStack() as turns:
            for turn in {id(device.turn): device.turn for device in devices}.values():
                if not turn.acquire(timeout=self.settings.stuck_seconds):
                    log.error("the device is stuck: what a model held of it is not given back")
                    return
                turns.callback(turn.release)
            for engine in held.pop().engines:
                engine.graphs = None
            del engine
            gc.collect()  # a failed request and its traceback form a cycle that refers to the model
            if any(device.device.type == "cuda" for device in devices):
                torch.cuda.empty_cache()

    async def close(self) -> None:
        """Answer the accepted requests; memory is freed with the process."""
        for served in list(self.served.values()):
            await self._drain(served)

    async def look(self) -> None:
        """Look up which versions there are now, unless that was done a moment ago.

        A store is not waited for long: until it answers, its versions are those of the last time.
        """
        if self.looking is None and time.monotonic() - self.looked > LOOKED:
            self.looking = asyncio.create_task(self._look())
        if self.looking is not None:
            await asyncio.wait([self.looking], timeout=PATIENCE)

    async def _look(self) -> None:
        try:
            self._scanned(await asyncio.to_thread(find, self.settings.models))
        except Exception:
            log.exception("cannot look up the repositories")
        finally:
            self.looking = None

    def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """Every version on disk and every served one with its state, as the model repository extension lists them."""
        served = {(name, one.version) for name, one in self.served.items()}
        rows = []
        for key in sorted({*self.sources, *self.refused, *served}, key=lambda key: (key[0], len(key[1]), key[1])):
            ready, reason = key in served, self.refused.get(key, "") or self.failed.get(key, "")
            if ready and key not in self.sources:
                reason = "its file is gone: it answers until it is unloaded or the server ends"
            if ready or not ready_only:
                state = "READY" if ready else "UNAVAILABLE"
                rows.append({"name": key[0], "version": key[1], "state": state, "reason": reason})
        return rows


def _shown(source: Source, error: Exception) -> str:
    """Why a version could not be loaded, for clients: without paths of the server."""
    if not isinstance(error, DubitoError):
        return f"it cannot be loaded: {type(error).__name__}; the server's log has the reason"
    text = str(error).replace(str(source.path), f"{source.name}/{source.version}/{FILE}")
    return "it cannot be loaded; the server's log has the reason" if PATHS.search(text) else text
