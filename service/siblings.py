"""Worker processes of one server speak to each other: metrics of all of them, and changes of models for all of them."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dubito.models.disk import write_by
from dubito.service.problems import Problem

LINE = 1 << 24  # bytes of the longest message
SOON, LONG = 5.0, 600.0  # seconds that an answer about metrics, and about a model to load, may take
UNLOADED = "unloaded.json"  # names of models that requests have unloaded, which a worker that starts again leaves out
log = logging.getLogger("dubito")

Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class Siblings:
    """This worker's socket, in a folder that only its user may enter, and those of the others beside it."""

    def __init__(self, folder: Path, index: int, count: int) -> None:
        self.folder, self.index, self.count = folder, index, count
        self.answer: Answer | None = None  # to what others ask
        self.server: asyncio.Server | None = None

    async def start(self, answer: Answer) -> None:
        self.answer = answer
        path = self._socket(self.index)
        path.unlink(missing_ok=True)  # of a worker before it
        self.server = await asyncio.start_unix_server(self._serve, path, limit=LINE)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def metrics(self) -> list[str]:
        """Of the others that answer soon."""
        found = await self._ask_all({"do": "metrics"}, SOON)
        return [one["done"] for one in found if one is not None and "done" in one]

    async def change(self, do: str, name: str) -> None:
        """Have every other worker load or unload a model too; raises the first refusal.

        A worker that does not answer is being started, and reads the models anew.
        """
        self._remember(do, name)
        for one in await self._ask_all({"do": do, "name": name}, LONG):
            if one is not None and "failed" in one:
                raise Problem(one["status"], one["failed"])

    def unloaded(self) -> set[str]:
        try:
            return set(json.loads((self.folder / UNLOADED).read_text()))
        except FileNotFoundError:
            return set()

    def _remember(self, do: str, name: str) -> None:
        before = self.unloaded()
        now = before | {name} if do == "unload" else before - {name}
        if now != before:
            part = self.folder / f"{UNLOADED}.{self.index}"
            write_by(part, self.folder / UNLOADED, json.dumps(sorted(now)).encode(), mode="wb")

    def _socket(self, index: int) -> Path:
        return self.folder / f"{index}.sock"

    async def _ask_all(self, asked: dict[str, Any], seconds: float) -> list[dict[str, Any] | None]:
        others = [index for index in range(self.count) if index != self.index]
        return await asyncio.gather(*(self._ask(index, asked, seconds) for index in others))

    async def _ask(self, index: int, asked: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_unix_connection(self._socket(index), limit=LINE)
                try:
                    writer.write(json.dumps(asked).encode() + b"\n")
                    answer: dict[str, Any] = json.loads(await reader.readline())
                    return answer
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError) as error:
            fields = {"worker": index, "asked": asked["do"], "error": f"{type(error).__name__}: {error}"}
            log.warning("another worker does not answer", extra=fields)
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.answer is not None
        with suppress(OSError):
            try:
                said = {"done": await self.answer(json.loads(await reader.readline()))}
            except Problem as problem:
                said = {"failed": problem.detail, "status": problem.status}
            except Exception:
                log.exception("a worker could not do what another asked")
                said = {"failed": "another worker failed; the server's log has the reason.", "status": 500}
            writer.write(json.dumps(said).encode() + b"\n")
            writer.close()
