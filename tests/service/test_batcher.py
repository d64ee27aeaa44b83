"""The batcher and the engine themselves, on a real model: what goes together, what is split, dropped and refused."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dubito.models import load
from dubito.models.errors import InputError
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import known_in
from dubito.service.engine.batcher import Batcher
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.engine.turn import Turn
from dubito.service.problems import Crowded, Gone, Late, Overloaded
from tests.service.beside import Beside

BUCKETS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_artifact: Callable[..., Path]) -> Model:
    return load(make_artifact(tmp_path_factory.mktemp("m") / "m.safetensors", seed=3))


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def ask(x: Tensor, samples: Any = 20, seed: int | None = None, keep: bool = False) -> PredictRequest:
    return PredictRequest(x.numpy(), samples, seed, 128, 0.05, keep)


def network_of(engine: Engine) -> torch.nn.Module:
    """The network whose passes answer requests."""
    form = engine.model.factors.form
    return engine.model.network.net if form is None else form


@contextmanager
def passes(engine: Engine) -> Iterator[list[int]]:
    """Rows of each pass through the network."""
    seen: list[int] = []
    hook = network_of(engine).register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        yield seen
    finally:
        hook.remove()


def same(found: Any, x: Tensor, samples: Any, model: Model) -> bool:
    assert isinstance(found, PredictResult), found
    alone = model.predict(x, samples, found.seed)
    pairs = ((torch.from_numpy(found.columns[name]), mine) for name, mine in known_in(alone.summary).items())
    return found.samples == alone.samples and all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_requests_with_different_samples_share_their_passes(model: Model) -> None:
    """Of 1, 4 and 8 draws: eight draws in all, not thirteen, and one seed for all."""
    engine = Engine(model, BUCKETS)
    asks = [ask(rows(2, i), samples) for i, samples in enumerate((1, 4, 8, "auto"))]
    engine.answer(asks)  # the first of a shape checks itself
    with passes(engine) as seen:
        found = engine.answer(asks)
    assert all(same(f, torch.from_numpy(a.x), a.samples, model) for f, a in zip(found, asks, strict=True))
    assert len({f.seed for f in found if isinstance(f, PredictResult)}) == 1
    settled = found[3].samples if isinstance(found[3], PredictResult) else 0
    drawn_rows = 8 * 1 + 6 * 3 + 4 * 4 + (settled - 8) * 2  # real rows × draws, before padding
    assert drawn_rows <= sum(seen) <= 1.5 * drawn_rows + 2 * settled


def test_a_seed_is_honoured_to_the_bit_whoever_else_asks(model: Model) -> None:
    engine = Engine(model, BUCKETS)
    mine = ask(rows(3), 20, seed=7)
    (alone,) = engine.answer([mine])
    others = [ask(rows(5, i), K, seed) for i, (K, seed) in enumerate([(20, None), (3, 7), (20, 7), (0, None), (64, 9)])]
    found = engine.answer([*others[:3], mine, *others[3:]])
    assert isinstance(alone, PredictResult)
    assert isinstance(found[3], PredictResult)
    for name, column in alone.columns.items():
        assert (column == found[3].columns[name]).all()
    for f, a in zip(found, [*others[:3], mine, *others[3:]], strict=True):
        assert same(f, torch.from_numpy(a.x), a.samples, model)


def test_batches_are_padded_to_buckets(model: Model) -> None:
    engine = Engine(model, BUCKETS)
    engine.answer([ask(rows(5), 4)])
    with passes(engine) as seen:
        (found,) = engine.answer([ask(rows(5), 4)])
    assert seen == [8 * 4]  # five rows as eight, four draws
    assert same(found, rows(5), 4, model)


def test_every_bucket_is_warmed(model: Model) -> None:
    engine = Engine(model, BUCKETS)
    with passes(engine) as seen:
        engine.warm(20, nullcontext())
    assert {size * 20 for size in BUCKETS} <= set(seen)


def in_loop(
    body: Callable[[Batcher], Awaitable[None]], model: Model, beside: Beside | None = None, **limits: int
) -> list[int]:
    """Runs it with a batcher of this model; rows of the batches that went to the device."""
    batches: list[int] = []

    async def go() -> None:
        given = {"max_work": 1000, "max_queue": 10_000, **limits}
        engine, device = Engine(model, BUCKETS), Turn()
        engine.graphs = beside
        batcher = Batcher(
            [(engine, device)],
            max_work=given["max_work"],
            max_queue=given["max_queue"],
            on_batch=lambda rows, cpu: batches.append(rows),
        )
        try:
            await body(batcher)
        finally:
            if device.locked():  # a check that failed has left it so
                device.release()
            await batcher.close()

    asyncio.run(go())
    return batches


async def until_it_waits(batcher: Batcher) -> None:
    """Until the batcher's thread waits for the device."""
    while not batcher.workers[0].device.waiting:
        await asyncio.sleep(0.001)


def test_what_is_queued_goes_together_up_to_a_batch_of_work(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1), 20), 30)
        await until_it_waits(batcher)
        tickets = [batcher.put(ask(rows(2, i), 20), 30) for i in range(10)]  # 40 each
        batcher.workers[0].device.release()
        found = [await batcher.result(t) for t in (first, *tickets)]
        assert all(same(f, rows(2, i), 20, model) for i, f in enumerate(found[1:]))

    assert in_loop(body, model, max_work=160) == [7, 8, 6]


def test_no_more_rows_go_together_than_a_captured_pass_takes(model: Model) -> None:
    """However little work they are, and a request of more rows goes in parts; others are not held to it."""

    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1), 20), 30)
        await until_it_waits(batcher)
        tickets = [batcher.put(ask(rows(6, i), 4), 30) for i in range(4)]
        long = batcher.put(ask(rows(40), 4), 30)
        free = [batcher.put(ask(rows(40), K), 30) for K in (3, 0)]
        assert (batcher.work, batcher.rows, len(long)) == (20 + 96 + 160 + 120 + 40, 145, 3)
        batcher.workers[0].device.release()
        found = [await batcher.result(t) for t in (first, *tickets, long, *free)]
        assert all(same(f, rows(6, i), 4, model) for i, f in enumerate(found[1:5]))
        assert all(same(f, rows(40), K, model) for f, K in zip(found[5:], (4, 3, 0), strict=True))
        assert (batcher.work, batcher.rows) == (0, 0)

    assert in_loop(body, model, Beside(model, BUCKETS, (4, 20))) == [13, 12, 16, 16, 8, 80]


@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_a_device_beside_the_host_answers_as_the_model_does(model: Model, seconds: float) -> None:
    """Batches are launched before the last is answered, and read their inputs from where the next will be put."""

    async def body(batcher: Batcher) -> None:
        asked = [(rows(1 + i % 5, i), (8, 8, 8, 3, "auto", 0)[i % 6], i if i % 7 == 0 else None) for i in range(90)]

        async def one(x: Tensor, K: Any, seed: int | None, i: int) -> PredictResult:
            await asyncio.sleep(0.001 * (i % 10))
            return await batcher.result(batcher.put(ask(x, K, seed), 30))

        found = await asyncio.gather(*(one(*given, i) for i, given in enumerate(asked)))
        assert all(same(f, x, K, model) for f, (x, K, _) in zip(found, asked, strict=True))
        assert (batcher.work, batcher.rows, batcher.running) == (0, 0, [])

    in_loop(body, model, Beside(model, BUCKETS, (8,), seconds), max_work=200)


def test_an_idle_device_does_not_wait_for_more_than_half_of_what_it_takes(model: Model) -> None:
    """While all who were answered ask again, it would have nothing to do."""

    async def body(batcher: Batcher) -> None:
        while not batcher.asleep:
            await asyncio.sleep(0.001)
        few = [batcher.put(ask(rows(1, i), 8), 30) for i in range(7)]
        time.sleep(0.05)  # the loop is busy: more may have come meanwhile
        assert batcher.depth == 7
        half = batcher.put(ask(rows(1, 7), 8), 30)
        for _ in range(1000):
            time.sleep(0.001)
            if not batcher.depth:
                break
        rest = [batcher.put(ask(rows(1, i), 8), 30) for i in range(8, 16)]
        found = [await batcher.result(t) for t in (*few, half, *rest)]
        assert all(same(f, rows(1, i), 8, model) for i, f in enumerate(found))

    assert in_loop(body, model, Beside(model, BUCKETS, (8,), 0.05)) == [8, 8]


def test_who_gave_up_leaves_no_inputs_behind_while_the_device_is_busy(model: Model) -> None:
    """Late, or cancelled by the client: either may come again and again before the device is free."""

    async def body(batcher: Batcher) -> None:
        device = batcher.workers[0].device
        device.acquire()
        late, gone = (batcher.put(ask(rows(4, i), 8), seconds) for i, seconds in enumerate((0.05, 30)))
        assert batcher.waiting == 2
        batcher.drop(gone)
        assert (batcher.waiting, batcher.depth) == (1, 2)  # its ticket stays in the line, and nobody waits for it
        with pytest.raises(Late):
            await batcher.result(late)
        held = [ticket.request.x for ticket in (*late, *gone)]
        assert [(x.nbytes, x.base) for x in held] == [(0, None)] * 2
        assert (batcher.work, batcher.rows, batcher.waiting) == (0, 0, 0)
        device.release()
        found = await batcher.result(batcher.put(ask(rows(2), 8), 30))
        assert same(found, rows(2), 8, model)

    in_loop(body, model)


def test_requests_that_are_refused_teach_no_pace(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        await batcher.result(batcher.put(ask(rows(2), 8), 30))
        known = vars(batcher.pace).copy()
        assert known["n"] == 1
        for _ in range(3):
            with pytest.raises(InputError):
                await batcher.result(batcher.put(ask(torch.full((8, 4), torch.nan), 8), 30))
        assert vars(batcher.pace) == known

    in_loop(body, model)


def test_a_batch_waits_some_turns_of_the_loop_for_requests_that_may_follow(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        while not batcher.asleep:
            await asyncio.sleep(0.001)
        tickets = []
        for i in range(3):
            tickets.append(batcher.put(ask(rows(1, i), 8), 30, more=True))
            await asyncio.sleep(0)  # the next one is queued some turns later
            await asyncio.sleep(0)
        found = [await batcher.result(t) for t in tickets]  # none comes any more: it is not waited for
        assert all(same(f, rows(1, i), 8, model) for i, f in enumerate(found))

    assert in_loop(body, model) == [3]


def test_some_are_left_to_the_next_batch_where_others_fill_a_smaller_pass(model: Model) -> None:
    """Nine would take as long as sixteen, eight little more than half of that; fifteen are near enough.

    Who is left may yet go.
    """
    beside = Beside(model, BUCKETS, (8,))
    for (B, _), one in beside.known.items():
        one.seconds = 0.3 if B == 1 else 0.02 + 0.01 * B

    async def body(batcher: Batcher) -> None:
        for n, goes in ((9, False), (15, False), (9, True)):
            first = batcher.put(ask(rows(1), 8), 30)  # the others come while the device is busy with it
            while batcher.depth:
                await asyncio.sleep(0.001)
            tickets = [batcher.put(ask(rows(1, i), 8), 30) for i in range(n)]
            await batcher.result(first)
            if goes:
                assert len(batcher.queue) == 1
                batcher.drop(tickets.pop())
                assert batcher.work == 8 * 8
            found = [await batcher.result(ticket) for ticket in tickets]
            assert all(same(f, rows(1, i), 8, model) for i, f in enumerate(found))
        assert (batcher.work, batcher.rows, batcher.running) == (0, 0, [])

    assert in_loop(body, model, beside) == [1, 8, 1, 1, 15, 1, 8]


def test_none_are_left_where_no_captured_pass_answers_all(model: Model) -> None:
    beside = Beside(model, BUCKETS, (8,))
    for (B, _), one in beside.known.items():
        one.seconds = 0.02 + 0.01 * B

    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1), 8), 30)
        await until_it_waits(batcher)
        tickets = [batcher.put(ask(rows(1, i), 5 if i else 8), 30) for i in range(9)]
        batcher.workers[0].device.release()
        found = [await batcher.result(ticket) for ticket in (first, *tickets)]
        assert all(same(f, rows(1, i), 5 if i else 8, model) for i, f in enumerate(found[1:]))

    assert in_loop(body, model, beside) == [10]


def test_rows_that_are_done_do_not_wake_the_thread(model: Model) -> None:
    """What was answered while the loop was busy is told of later; who comes meanwhile goes together."""

    async def body(batcher: Batcher) -> None:
        first = batcher.put(ask(rows(8), 8), 30)
        for _ in range(1000):  # the loop is busy, and hears of nothing
            time.sleep(0.002)
            if batcher.asleep and not batcher.depth:
                break
        tickets = []
        for i in range(4):
            tickets.append(batcher.put(ask(rows(1, i), 8), 30))
            time.sleep(0.02)
        found = [await batcher.result(ticket) for ticket in (first, *tickets)]
        assert all(same(f, rows(1, i), 8, model) for i, f in enumerate(found[1:]))

    assert in_loop(body, model, Beside(model, BUCKETS, (8,))) == [8, 4]


def test_inputs_that_are_unfit_are_told_apart_after_the_launch(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        asks = [ask(rows(2, i), 8) for i in range(3)]
        asks[1].x = asks[1].x.copy()
        asks[1].x[1, 2] = float("nan")
        while not batcher.asleep:
            await asyncio.sleep(0.001)
        tickets = [batcher.put(one, 30) for one in asks]
        assert same(await batcher.result(tickets[0]), rows(2), 8, model)
        with pytest.raises(InputError, match="input 1 holds NaN"):
            await batcher.result(tickets[1])
        assert same(await batcher.result(tickets[2]), rows(2, 2), 8, model)

    assert in_loop(body, model, Beside(model, BUCKETS, (8,))) == [6]


class Turns:
    """A lock that somebody else has, from a moment on."""

    def __init__(self) -> None:
        self.mine, self.theirs = threading.Lock(), threading.Event()
        self.theirs.set()  # not yet
        self.taken = 0
        self.contended = False

    def acquire(self, blocking: bool = True) -> bool:
        if not blocking and not self.theirs.is_set():
            return False
        self.theirs.wait()
        self.mine.acquire()
        self.taken += 1
        return True

    def release(self) -> None:
        self.mine.release()

    def keep(self) -> bool:
        if not self.theirs.is_set():
            self.release()
        return self.theirs.is_set()


def test_answers_do_not_wait_for_the_next_batch_to_get_the_device(model: Model) -> None:
    """Nor does it look as if the device were stuck."""

    async def body(batcher: Batcher) -> None:
        turns = Turns()
        batcher.workers[0].device = turns  # type: ignore[assignment]
        first = batcher.put(ask(rows(1), 8), 30)
        while not turns.taken:
            await asyncio.sleep(0.001)
        turns.theirs.clear()  # before the second comes, whose batch might have the device by then
        second = batcher.put(ask(rows(2), 8), 30)
        try:
            async with asyncio.timeout(10):
                assert same(await batcher.result(first), rows(1), 8, model)
            await asyncio.sleep(0.2)
            assert not second[0].future.done()
            assert batcher.alive(0.1)
        finally:
            turns.theirs.set()
        assert same(await batcher.result(second), rows(2), 8, model)

    assert in_loop(body, model, Beside(model, BUCKETS, (8,), 0.2)) == [1, 2]


def test_a_launch_that_fails_is_tried_without(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    beside = Beside(model, BUCKETS, (8,))
    beside.known[2, 8].put = None

    async def body(batcher: Batcher) -> None:
        found = await batcher.result(batcher.put(ask(rows(1), 8), 30))
        assert same(found, rows(1), 8, model)
        with pytest.raises(TypeError):
            await batcher.result(batcher.put(ask(rows(2), 8), 30))
        assert same(await batcher.result(batcher.put(ask(rows(2), 3), 30)), rows(2), 3, model)

    in_loop(body, model, beside)
    assert "a batch is not launched" in caplog.text


def test_oversize_requests_go_in_parts_with_one_seed(model: Model) -> None:
    x = rows(50)

    async def body(batcher: Batcher) -> None:
        found = await batcher.result(batcher.put(ask(x, 20), 30))
        assert same(found, x, 20, model)
        assert len(found.columns["probabilities"]) == len(found.rules) == 50
        kept = await batcher.result(batcher.put(ask(x, 20, seed=4, keep=True), 30))
        assert kept.outputs is not None
        alone = model.predict(x, 20, 4, keep_outputs=True).outputs
        assert alone is not None
        assert torch.allclose(kept.outputs, alone, atol=1e-5)
        auto = await batcher.result(batcher.put(ask(x, "auto", seed=4), 30))
        assert same(auto, x, "auto", model)

    assert max(in_loop(body, model, max_work=200)) == 12  # `auto` counts with its usual 16 draws, the others have 20


def test_who_has_gone_never_reaches_the_device(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1)), 30)
        await until_it_waits(batcher)
        gone = [batcher.put(ask(rows(3, i)), 30) for i in range(5)]
        stays = batcher.put(ask(rows(2, 9)), 30)
        for tickets in gone:
            batcher.drop(tickets)
        batcher.workers[0].device.release()
        assert same(await batcher.result(stays), rows(2, 9), 20, model)
        await batcher.result(first)

    assert in_loop(body, model) == [3]


def test_who_goes_while_the_batch_waits_for_the_device_does_not_reach_it(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        tickets = batcher.put(ask(rows(7)), 30)
        await until_it_waits(batcher)
        batcher.drop(tickets)
        batcher.workers[0].device.release()
        await batcher.result(batcher.put(ask(rows(2)), 30))

    assert in_loop(body, model) == [2]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        await batcher.result(batcher.put(ask(rows(1)), 30))  # so that its speed is known
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1)), 30)
        await until_it_waits(batcher)
        waits = [batcher.put(ask(rows(1), 20), 30) for _ in range(4)]  # 100 in all, with the first
        with pytest.raises(Overloaded) as caught:
            batcher.put(ask(rows(1), 20), 30)
        assert caught.value.status == 429
        assert int(caught.value.headers["Retry-After"]) >= 1
        batcher.workers[0].device.release()
        for tickets in (first, *waits):
            await batcher.result(tickets)

    in_loop(body, model, max_queue=100)


def test_what_cannot_be_in_time_is_refused_rather_than_kept_waiting(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1)), 30)
        await until_it_waits(batcher)
        second = batcher.put(ask(rows(1)), 30)
        for work, seconds in ((10, 1.0), (20, 2.0)):
            batcher.pace.add(work, seconds)  # forty are under way: four seconds
        with pytest.raises(Crowded, match=r"about 4\.000 s would pass .* which has 1\.000 s"):
            batcher.put(ask(rows(1)), 1.0)
        third = batcher.put(ask(rows(1)), 50.0)
        batcher.workers[0].device.release()
        for tickets in (first, second, third):
            await batcher.result(tickets)

    in_loop(body, model)


def test_a_small_batch_that_was_slow_says_little_about_many(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.pace.add(3, 0.1)  # thirty a second, were it a rate
        batcher.workers[0].device.acquire()
        put = [batcher.put(ask(rows(4), 64), 30) for _ in range(40)]
        batcher.workers[0].device.release()
        for tickets in put:
            await batcher.result(tickets)

    in_loop(body, model, max_queue=1 << 20)


def test_who_has_gone_counts_no_longer(model: Model) -> None:
    """A large request that was given up does not keep others out while the device is busy."""

    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        first = batcher.put(ask(rows(1)), 30)
        await until_it_waits(batcher)
        late = batcher.put(ask(rows(4), 20), 0.01)
        with pytest.raises(Late):
            await batcher.result(late)
        batcher.drop(batcher.put(ask(rows(4), 20), 30))
        assert batcher.work == 20  # the first, which the device has
        waiting = asyncio.ensure_future(batcher.result(batcher.put(ask(rows(4), 20), 30)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert batcher.work == 20
        last = batcher.put(ask(rows(4), 20), 30)
        assert batcher.work == 100
        batcher.workers[0].device.release()
        await batcher.result(first)
        await batcher.result(last)
        while batcher.work:
            await asyncio.sleep(0.001)

    in_loop(body, model, max_queue=100)


def test_deadlines_hold_in_the_queue_and_on_the_device(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        began = time.monotonic()
        tickets = batcher.put(ask(rows(1)), 0.05)
        with pytest.raises(Late):
            await batcher.result(tickets)
        assert time.monotonic() - began < 5
        batcher.workers[0].device.release()

    in_loop(body, model)


def test_a_deadline_holds_for_an_answer_that_was_slow_first(model: Model) -> None:
    """Whoever asked is told once that it takes a while, each for itself, and then that it is late."""

    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        told: list[int] = []
        tickets = [batcher.put(ask(rows(1)), 0.4, lambda i=i: told.append(i)) for i in range(3)]  # type: ignore[misc]
        stays = batcher.put(ask(rows(1)), 30)
        for one in tickets:
            with pytest.raises(Late):
                await batcher.result(one)
        assert told == [0, 1, 2]
        batcher.workers[0].device.release()
        await batcher.result(stays)
        while batcher.look is not None:  # nobody is under way: nobody looks
            await asyncio.sleep(0.01)

    in_loop(body, model)


def test_inputs_are_let_go_once_they_are_answered(model: Model) -> None:
    """Not when garbage is next collected: bodies are large."""

    async def body(batcher: Batcher) -> None:
        mine = ask(rows(1))
        seen, known = weakref.ref(mine.x), list[Any]()
        known.append(batcher.put(mine, 30, known.clear))  # who hears that it is slow knows it
        await batcher.result(known[0])
        await batcher.result(batcher.put(ask(rows(1)), 30))  # the thread has another one now
        del mine, known
        assert seen() is None

    gc.disable()
    try:
        in_loop(body, model)
    finally:
        gc.enable()


def test_closing_answers_what_was_accepted_and_takes_no_more(model: Model) -> None:
    async def body(batcher: Batcher) -> None:
        batcher.workers[0].device.acquire()
        tickets = [batcher.put(ask(rows(2, i)), 30) for i in range(4)]
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        with pytest.raises(Gone):
            batcher.put(ask(rows(1)), 30)
        batcher.workers[0].device.release()
        for i, one in enumerate(tickets):
            assert same(await batcher.result(one), rows(2, i), 20, model)
        await closing

    in_loop(body, model)
