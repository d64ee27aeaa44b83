"""Who goes first: clients take turns in a queue, models at the device, and short requests with long ones."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dubito.models import load
from dubito.models.predictions.model import Model
from dubito.service.engine.batcher import Batcher
from dubito.service.engine.engine import Engine, PredictRequest
from dubito.service.engine.turn import Turn
from dubito.service.fair import FairQueue
from dubito.service.problems import Hopeless, Overloaded
from tests.service.test_batcher import network_of, same, until_it_waits

BUCKETS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_artifact: Callable[..., Path]) -> Model:
    return load(make_artifact(tmp_path_factory.mktemp("m") / "m.safetensors", seed=3))


def ask(n: int, samples: Any = 20, seed: int | None = None) -> PredictRequest:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
    return PredictRequest(x.numpy(), samples, seed, 128, 0.05)


def in_loop(body: Callable[[Batcher], Awaitable[None]], model: Model, **limits: Any) -> list[int]:
    """Runs it with a batcher whose short batches have 80 rows × draws; rows of the batches."""
    batches: list[int] = []

    async def go() -> None:
        engine = Engine(model, BUCKETS)
        engine.slices = limits.pop("slices", (80, 400))
        batcher = Batcher(
            [(engine, Turn())],
            max_work=1000,
            max_queue=limits.get("max_queue", 100_000),
            on_batch=lambda rows, cpu: batches.append(rows),
        )
        try:
            await body(batcher)
        finally:
            await batcher.close()

    asyncio.run(go())
    return batches


async def busy(batcher: Batcher) -> list[Any]:
    """A request for which the thread waits for the device."""
    batcher.workers[0].device.acquire()
    first = batcher.put(ask(1), 30, client="first")
    await until_it_waits(batcher)
    return first


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.append(item[0], item)
    assert (len(queue), queue.clients, queue.first()) == (6, 3, "a1")
    assert [queue.pop() for _ in range(4)] == ["a1", "b1", "c1", "a2"]
    queue.put_back("a", "a2")
    queue.append("d", "d1")
    assert sorted(queue) == ["a2", "a3", "b2", "d1"]
    left = [queue.pop() for _ in range(5)]
    assert left.index("a2") < left.index("a3")
    assert left[4] is None
    assert (len(queue), queue.clients) == (0, 0)


def test_a_flood_of_one_client_does_not_keep_another_waiting(model: Model) -> None:
    """Its request is in the next batch, whatever came before it."""

    async def body(batcher: Batcher) -> None:
        first = await busy(batcher)
        flood = [batcher.put(ask(1), 30, client="flood") for _ in range(100)]
        mine = batcher.put(ask(2), 30, client="mine")
        batcher.workers[0].device.release()
        await batcher.result(mine)
        for tickets in (first, *flood):
            await batcher.result(tickets)
        assert sum(ticket[0].ended < mine[0].ended for ticket in flood) < 50

    in_loop(body, model)


def test_a_client_with_less_than_its_share_finds_room_in_a_full_queue(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        first = await busy(batcher)
        put = [batcher.put(ask(1), 30, client="flood") for _ in range(49)]  # 1000 with the first
        put += [batcher.put(ask(2), 30, client=name) for name in ("mine", "yours")]
        with pytest.raises(Overloaded):
            batcher.put(ask(1), 30, client="flood")
        put += [batcher.put(ask(1), 30, client="mine") for _ in range(10)]  # four clients: 250 each
        with pytest.raises(Overloaded):
            batcher.put(ask(1), 30, client="mine")
        batcher.workers[0].device.release()
        for tickets in (first, *put):
            await batcher.result(tickets)
        while batcher.work:
            await asyncio.sleep(0.001)
        assert (batcher.by_client, batcher.cost, batcher.long_work) == ({}, 0, 0)

    in_loop(body, model, max_queue=1000)


def test_short_requests_are_answered_between_the_passes_of_a_long_one(model: Model) -> None:
    """And all answers are what they are alone: those of the long one too, whose draws are not split."""

    async def body(batcher: Batcher) -> None:
        x = torch.from_numpy(ask(40).x)
        first = await busy(batcher)
        long = batcher.put(ask(40, 100, seed=5), 300)
        assert len(long) > 1
        batcher.workers[0].device.release()
        await batcher.result(first)
        order: list[str] = []

        async def wait(name: str, tickets: Any) -> Any:
            answer = await batcher.result(tickets)
            order.append(name)
            return answer

        waiting = [asyncio.create_task(wait("long", long))]
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.append(asyncio.create_task(wait("short", batcher.put(ask(2), 30))))
        answers = await asyncio.gather(*waiting)
        assert order == ["short"] * 3 + ["long"]
        assert same(answers[0], x, 100, model)
        assert all(same(answer, torch.from_numpy(ask(2).x), 20, model) for answer in answers[1:])
        while batcher.work:
            await asyncio.sleep(0.001)
        assert batcher.running == []

    in_loop(body, model)


def test_one_row_with_many_draws_is_long_too(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        passes: list[float] = []
        network_of(batcher.engine).register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
        found = await batcher.result(batcher.put(ask(1, 1000, seed=3), 300))
        assert same(found, torch.from_numpy(ask(1).x), 1000, model)
        alone = len([n for n in passes if n > 1])
        assert alone > 10  # in passes of at most 80
        again = await batcher.result(batcher.put(ask(1, 1000, seed=3), 300, client="other"))
        assert (found.columns["probabilities"] == again.columns["probabilities"]).all()  # to the bit

    in_loop(body, model)


def paced(model: Model) -> Engine:
    """Passes take 2 + draws × (rows + 9) milliseconds by torch; a batch of one input was compiled and takes 40."""
    engine = Engine(model, BUCKETS)
    engine.slices, engine.long_passes, engine.finest = (80, 400), (100, 1000), 60
    engine.draw_rows, engine.usual, engine.fine, engine.whole = 9.0, 20, 0.005, {1: {20: 0.04}}
    engine.uncompiled.a, engine.uncompiled.b = 0.002, 0.001
    return engine


def test_draws_count_with_what_they_take_beside_their_rows(model: Model) -> None:
    engine = paced(model)
    assert engine.cost(ask(1, samples=20)) == 20  # the usual ones are in the fixed cost of a batch
    assert engine.cost(ask(1, samples=30)) == 30 + 9 * 10
    assert engine.cost(ask(4, samples="auto")) == 4 * 16

    async def body(batcher: Batcher) -> None:
        batcher.engine = engine
        (ticket,) = batcher.put(ask(1, samples=30), 30)
        assert ticket.long  # 30 rows × draws would be short
        assert (await batcher.result([ticket])).samples == 30
        assert batcher.cost == 0

    in_loop(body, model)


def test_passes_between_pauses(model: Model) -> None:
    """100 of work: 102 ms by torch. A compiled pass that is shorter is taken unless it is much slower for each draw."""
    engine = paced(model)
    assert engine._pass_draws(100, 1) == 20  # the compiled one, 2 ms a draw; by torch 10 draws, 10.2 ms each
    assert engine._pass_draws(100, 4) == 7  # 7 × (4 + 9) = 91
    assert engine._pass_draws(5, 4) == 1
    engine.whole = {1: {20: 0.4}}  # longer than what others should wait for
    assert engine._pass_draws(100, 1) == 10
    engine.whole = {1: {20: 0.04}}
    engine.uncompiled.b = 0.0001
    assert engine._pass_draws(400, 1) == 40  # 42 ms: a compiled pass would take 80 for as many
    made: list[int] = []
    engine.pause, engine.pass_work = lambda: made.append(1), 100.0
    (result,) = engine.answer([ask(4, samples=30)])
    assert not isinstance(result, Exception)
    assert len(made) == 4  # between five passes of 7, 7, 7, 7 and 2 draws


@pytest.mark.parametrize("samples", [0, 1, 20])
def test_a_model_is_timed_whatever_its_usual_draws(model: Model, samples: int) -> None:
    engine = Engine(model, BUCKETS)
    engine.warm(samples, nullcontext(), (0.005, 0.02, 0.1))
    assert engine.usual == samples
    assert engine.draw_rows >= 0
    assert 1 <= engine.first_draw <= max(1, samples)
    assert all(work >= 1 for work in (*engine.slices, *engine.long_passes))


def test_rows_of_few_draws_count_with_what_draws_do_not_share(model: Model) -> None:
    engine = paced(model)
    engine.usual, engine.draw_rows, engine.first_draw = 20, 0.0, 5.75
    assert [engine.cost(ask(4, samples)) for samples in (0, 1, 20, 40)] == [23, 23, 80, 160]
    assert engine.cost(ask(4, 5)) == 4 * 5 + 4 * 3.75  # 4.75 less with each of the nineteen further draws
    engine.slices = 46.0, 1000.0

    async def parts() -> list[int]:
        batcher = Batcher([(engine, Turn())], max_work=1000, max_queue=10_000)
        try:
            assert batcher.unpaused == 8
            tickets = batcher.put(ask(20, 1), 60.0)
            await batcher.result(tickets)
            return [ticket.request.rows for ticket in tickets]
        finally:
            await batcher.close()

    assert asyncio.run(parts()) == [8, 8, 4]


def test_a_seed_has_the_same_passes_whoever_else_asks(model: Model) -> None:
    engine = paced(model)
    for samples in (20, 100):  # short and long, for 4 rows
        engine.pause, engine.pass_work = None, float(sys.maxsize)
        alone = engine.answer([ask(4, samples, seed=5)])
        made: list[int] = []
        engine.pause, engine.pass_work = partial(made.append, 1), 30.0
        beside = engine.answer([ask(4, samples, seed=5)])
        assert len(made) == (0 if samples == 20 else 24), samples
        for a, b in zip(alone, beside, strict=True):
            assert not isinstance(a, Exception)
            assert not isinstance(b, Exception)
            assert all((a.columns[name] == b.columns[name]).all() for name in a.columns)


def test_who_gives_up_a_long_request_ends_it(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        tickets = batcher.put(ask(1, 60_000), 300)  # one row: it cannot go in parts
        while not tickets[0].taken:
            await asyncio.sleep(0.001)
        batcher.drop(tickets)
        found = await batcher.result(batcher.put(ask(2), 30))
        assert same(found, torch.from_numpy(ask(2).x), 20, model)
        assert not batcher.dead

    in_loop(body, model)


def test_long_requests_fill_half_of_the_queue(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        first = await busy(batcher)
        put = [batcher.put(ask(20), 30) for _ in range(2)]  # 400 each
        with pytest.raises(Overloaded):
            batcher.put(ask(20), 30)
        put += [batcher.put(ask(1), 30) for _ in range(10)]
        batcher.workers[0].device.release()
        for tickets in (first, *put):
            await batcher.result(tickets)

    in_loop(body, model, max_queue=2000)


def test_what_cannot_be_in_time_alone_is_refused(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        for work in (10, 20, 40):
            batcher.pace.add(work, work / 100)
        with pytest.raises(Hopeless, match=r"no answer within 2\.000 s is possible: this request takes about 8\.0 s"):
            batcher.put(ask(40), 2.0)
        await batcher.result(batcher.put(ask(40), 300))

    in_loop(body, model)


class Clock:
    """Stands in for the module `time`; moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Claimant:
    """A thread that takes the device when asked to, and keeps it until then."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.pool = ThreadPoolExecutor(1)

    def claim(self) -> "Future[bool]":
        """Wait for the device, from now on."""
        before, got = self.turn.waiting, self.pool.submit(self.turn.acquire)
        while not got.done() and self.turn.waiting == before:
            time.sleep(0.001)
        return got

    def keep(self) -> bool:
        return self.pool.submit(self.turn.keep).result()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr("dubito.service.engine.turn.time", one)
    return one


def test_models_share_the_device_in_time(clock: Clock) -> None:
    """One that takes a third as long has three turns for each of the other."""
    turn = Turn()
    light, heavy = Claimant(turn), Claimant(turn)
    assert heavy.claim().result()
    waits = light.claim()
    clock.now += 30
    assert not heavy.keep()
    assert waits.result()
    turns = []
    for _ in range(3):
        waits = heavy.claim()
        count = 1
        clock.now += 10
        while light.keep():
            count += 1
            clock.now += 10
        turns.append(count)
        assert waits.result()
        waits = light.claim()
        clock.now += 30
        assert not heavy.keep()
        assert waits.result()
    assert turns == [3, 3, 3]


def test_who_did_not_ask_for_the_device_saves_up_nothing(clock: Clock) -> None:
    turn = Turn()
    old, new = Claimant(turn), Claimant(turn)
    assert old.claim().result()
    for _ in range(100):
        clock.now += 10
        assert old.keep()  # nobody else wants it
    waits = new.claim()
    clock.now += 10
    assert not old.keep()
    assert waits.result()
    waits = old.claim()
    clock.now += 10
    assert not new.keep()
    assert waits.result()


def test_requests_that_come_while_another_model_has_the_device_go_together(model: Model) -> None:
    """The batch is formed when the device is free, so that none waits for one more turn of the other model."""

    async def body(batcher: Batcher) -> None:
        tickets = [await busy(batcher)]
        for _ in range(3):
            tickets.append(batcher.put(ask(1), 30, client="first"))
            await asyncio.sleep(0.01)
        batcher.workers[0].device.release()
        for one in tickets:
            await batcher.result(one)

    assert in_loop(body, model) == [4]


def test_models_that_take_little_wait_for_one_turn_of_another() -> None:
    """A thread that takes it again and again does not keep another one waiting for more than its turn."""
    turn, ended = Turn(), threading.Event()
    turns: list[str] = []

    def greedy() -> None:
        while not ended.is_set():
            with turn:
                turns.append("greedy")
                time.sleep(0.002)

    thread = threading.Thread(target=greedy)
    thread.start()
    try:
        while not turns:
            time.sleep(0.001)
        for _ in range(20):
            before = len(turns)
            with turn:
                turns.append("mine")
            assert turns[before:].index("mine") <= 2
        assert turn.contended
    finally:
        ended.set()
        thread.join()
    assert not turn.locked()
    assert turn.acquire(blocking=False)
    assert not turn.acquire(blocking=False)
    assert not turn.acquire(timeout=0.01)
    turn.release()
    assert not turn.locked()


def test_a_device_that_two_use_in_turn_counts_as_contended_before_anybody_waits() -> None:
    """Else the first batch of the second would be as long as if it were alone."""
    turn = Turn()
    for _ in range(3):
        with turn:
            pass
    assert not turn.contended
    seen: list[bool] = []

    def other() -> None:
        with turn:
            seen.append(turn.contended)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [True]
