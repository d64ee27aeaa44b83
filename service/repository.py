"""Models by name and version: found, loaded, warmed and verified, then switched to at once while the old ones drain."""

import asyncio
import gc
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dubito.models.artifact.artifact import load
from dubito.models.errors import ArtifactError, DubitoError, InputError, NumericsError
from dubito.models.manifest import Input
from dubito.models.numerics.proof import name_of
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import bytes_of, reside
from dubito.models.report import report
from dubito.service.engine.bank import Bank, bytes_of_sample
from dubito.service.engine.batcher import Batcher
from dubito.service.engine.budget import Budget
from dubito.service.engine.engine import Engine
from dubito.service.engine.plans import Memory, plan_file
from dubito.service.metrics import Metrics, Series, model_bytes
from dubito.service.problems import Problem
from dubito.service.settings import Settings

FILE = "model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
VERSION = re.compile(r"[0-9]{1,18}")
log = logging.getLogger("dubito")


@dataclass(frozen=True)
class Source:
    """Where a version lies; nothing of it has been read. A file that was written anew is another source."""

    name: str
    version: str
    path: Path
    stamp: tuple[int, int, int]


@dataclass
class Served:
    """A version that answers."""

    source: Source
    engine: Engine
    declared: Input
    known: dict[str, Any]  # what `dubito inspect` would say
    bytes: dict[str, int]
    batcher: Batcher
    series: Series
    retired: bool = False  # another one answers now

    def __post_init__(self) -> None:
        self.name, self.version = self.source.name, self.source.version
        self.model = self.engine.model
        self.method = self.model.method  # of requests that name none


def find(paths: Sequence[Path]) -> dict[tuple[str, str], Source]:
    """An artifact is a model of version 1, called after its file; a repository has folders name/version/FILE."""
    found: dict[tuple[str, str], Source] = {}
    for path in paths:
        if path.is_file():
            sources = [_source(path.stem, "1", path)]
        elif path.is_dir():
            sources = _inside(path)
            if not sources:
                raise ArtifactError(f"{path} holds no NAME/VERSION/{FILE} with a whole number for a version.")
        else:
            raise ArtifactError(f"there is no {path}; expected an artifact or a model repository.")
        for source in sources:
            key = (source.name, source.version)
            if key in found:
                raise ArtifactError(f"two artifacts are called {key[0]!r} in version {key[1]}; give them other names.")
            found[key] = source
    return found


def _inside(root: Path) -> list[Source]:
    whole = root.resolve()
    found = []
    for file in sorted(root.glob(f"*/*/{FILE}")):
        name, version = file.parent.parent.name, file.parent.name
        if not VERSION.fullmatch(version):
            continue
        if not file.resolve().is_relative_to(whole):
            raise ArtifactError(f"{file} leads out of the repository {root}; put a copy there.")
        found.append(_source(name, version, file))
    return found


def _source(name: str, version: str, path: Path) -> Source:
    if not NAME.fullmatch(name):
        raise ArtifactError(f"{path}: {name!r} is no name for a model; expected letters, digits, '.', '_' and '-'.")
    stat = path.stat()
    return Source(name, version, path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


class Repository:
    """Which versions there are and which answer. Changes happen on the event loop; loading in a thread."""

    def __init__(self, settings: Settings, device: torch.device, dtype: torch.dtype, metrics: Metrics) -> None:
        self.settings, self.device, self.dtype, self.metrics = settings, device, dtype, metrics
        self.sources = find(settings.models)
        self.expected = set(settings.expected) or {name for name, _ in self.sources}
        if unknown := self.expected - {name for name, _ in self.sources}:
            raise ArtifactError(f"expected models {', '.join(sorted(unknown))} are not among the paths given.")
        self.served: dict[str, Served] = {}
        self.failed: set[tuple[str, str]] = set()  # versions that could not be loaded; the log says why
        self.changing = asyncio.Lock()
        self.turn = threading.Lock()  # whose turn it is on the device
        self.budget = Budget.of(settings.memory_bytes, device)

    @property
    def ready(self) -> bool:
        return bool(self.expected) and all(name in self.served for name in self.expected)

    @property
    def alive(self) -> bool:
        return all(served.batcher.alive(self.settings.stuck_seconds) for served in self.served.values())

    def get(self, name: str, version: str | None = None) -> Served:
        served = self.served.get(name)
        if served is None:
            raise Problem(404, "no such model is served; GET /v1/models lists those that are.")
        if version is not None and version != served.version:
            raise Problem(404, f"this model is not served in that version; it is in version {served.version}.")
        return served

    async def load_all(self) -> None:
        """The newest version of each name."""
        for name in sorted({name for name, _ in self.sources}):
            await self.load(name)

    async def load(self, name: str) -> None:
        """The newest version on disk, loaded, warmed and verified; then it answers, and the one before it drains.

        Where it cannot be loaded, the one before it goes on.
        """
        async with self.changing:
            self.sources = await asyncio.to_thread(find, self.settings.models)
            versions = [version for n, version in self.sources if n == name]
            if not versions:
                raise Problem(404, "no such model in the repository; POST /v2/repository/index lists them.")
            source = self.sources[name, max(versions, key=int)]
            if name in self.served and self.served[name].source == source:
                return
            try:
                engine, declared, known = await asyncio.to_thread(self._prepare, source)
            except DubitoError as error:
                self.failed.add((name, source.version))
                log.error("cannot load model", extra={"model": name, "version": source.version, "error": str(error)})
                raise
            self.failed.discard((name, source.version))
            series = self.metrics.of(name)
            batcher = Batcher(
                engine,
                max_work=self.settings.batch_work,
                max_queue=self.settings.queue_work,
                device=self.turn,
                on_batch=series.batch,
            )
            sizes = model_bytes(engine.model, known["bytes"], known["deterministic"])
            old = self.served.get(name)
            self.served[name] = Served(source, engine, declared, known, sizes, batcher, series)
            self.expected.add(name)  # once more, where it had been unloaded
            log.info("model serves", extra={"model": name, "version": source.version, "device": str(self.device)})
            if old is not None:
                retired = self._retire(old)
                del old  # so that it can go
                await retired

    def _prepare(self, source: Source) -> tuple[Engine, Input, dict[str, Any]]:
        """In a thread: everything a first request would wait for is done here."""
        model = load(source.path)
        declared = model.card.input
        if declared is None:
            raise InputError(
                f"{source.path} does not say what its inputs look like, so it cannot be asked over HTTP: "
                "save it with a card that has an input."
            )
        known = report(model.manifest, model.network, source.path.stat().st_size)
        try:
            return self._warmed(model, source, self.dtype), declared, known
        except NumericsError as error:
            if self.dtype.itemsize >= torch.float32.itemsize:
                raise
            told = {"model": source.name, "asked": name_of(self.dtype), "why": str(error)}
            log.warning("model runs in float32", extra=told)
        return self._warmed(model, source, torch.float32), declared, known

    def _warmed(self, model: Model, source: Source, dtype: torch.dtype) -> Engine:
        model = reside(model, self.device, dtype)
        memory = Memory(plan_file() if self.settings.plan_seconds else None, self.device)
        share = self.budget.share()
        engine = Engine(model, self.settings.buckets, memory, self.settings.plan_seconds, share=share)
        try:
            self._enter(engine)
            banked = self._reserve_bank(engine)
            engine.warm(self.settings.samples, self.turn)
            if banked:
                engine.bank = Bank(engine.model, *banked, self.settings.bank_seconds)
                share.kinds["bank"] = lambda: 0 if engine.bank is None else engine.bank.bytes
        except DubitoError:
            self.budget.release(share)
            raise
        except Exception as error:
            self.budget.release(share)
            log.exception("the model fails before any request")
            raise ArtifactError(
                f"{source.path} fails on inputs of zeros or of random numbers: {type(error).__name__}."
            ) from error
        return engine

    def _enter(self, engine: Engine) -> None:
        """What the model takes of the device's memory, by kind."""
        share, model = engine.share, engine.model
        resident, share.sample = bytes_of([model.network, model.factors]), bytes_of_sample(model)
        share.kinds["resident"] = lambda: resident
        share.kinds["draws"] = lambda: engine.draws * share.sample
        share.kinds["plans"] = lambda: engine.plans.bytes
        if share.limited and self.budget.left < 0:
            raise DubitoError(
                f"the model takes {resident:,} bytes, {-self.budget.left:,} more than are left of the "
                f"{self.budget.limit:,} that the setting memory_bytes allows: raise it, or serve fewer models."
            )

    def _reserve_bank(self, engine: Engine) -> tuple[int, int] | None:
        """Sets and samples; None where draws are made anew, or there are none to be made ahead, or no room for them."""
        settings, factors, share = self.settings, engine.model.factors, engine.share
        if settings.sample_mode == "fresh" or factors.normals == 0:
            return None
        sets, samples = settings.bank_sets, settings.bank_samples
        size = sets * samples * (share.sample - 4 * factors.normals)  # the normals are not kept
        if size == 0:  # draws are not weights of layers
            return None
        if share.limited and size > self.budget.left // 2:  # passes need some, too
            log.warning("the bank does not fit the memory: draws are made anew", extra={"bytes": size})
            return None
        share.kinds["bank"] = lambda: size
        return sets, samples

    async def unload(self, name: str) -> None:
        async with self.changing:
            if name not in self.served:
                raise Problem(404, "no such model is served.")
            self.expected.discard(name)  # somebody wanted it gone
            await self._retire(self.served.pop(name))
            self.metrics.forget(name)

    async def _retire(self, old: Served) -> None:
        await self._drain(old)
        self.budget.release(old.engine.share)
        log.info("model retired", extra={"model": old.name, "version": old.version})
        held = [old]
        del old  # so that none but the list knows it
        await asyncio.to_thread(self._free, held)

    async def _drain(self, served: Served) -> None:
        """What was accepted is answered."""
        served.retired = True
        await served.batcher.close()
        if (bank := served.engine.bank) is not None:
            bank.close()
            while bank.alive:
                await asyncio.sleep(0.005)

    def _free(self, held: list[Served]) -> None:
        """In a thread. Not while another model's passes are captured: what the host shares with the device would be
        freed beside that."""
        if not self.turn.acquire(timeout=self.settings.stuck_seconds):
            log.error("the device is stuck: what a model held of it is not given back")
            return
        try:
            held.pop().engine.programs = None
            gc.collect()  # a request that failed is in a circle with its traceback, which knows the model
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        finally:
            self.turn.release()

    async def close(self) -> None:
        """Answer what was accepted, then stop: what a model holds goes with the process."""
        for served in list(self.served.values()):
            await self._drain(served)

    def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        rows = []
        for name, version in sorted(self.sources, key=lambda key: (key[0], int(key[1]))):
            ready = name in self.served and self.served[name].version == version
            reason = "it could not be loaded; the server's log says why" if (name, version) in self.failed else ""
            state = "READY" if ready else "UNAVAILABLE"
            if ready or not ready_only:
                rows.append({"name": name, "version": version, "state": state, "reason": reason})
        return rows
