"""Who arrives while others are answered waits and is answered together with the rest."""

import asyncio
import threading

import pytest

from labeling_app.web.batching import RequestBatcher
from tests.labeling_app.conftest import run_async


class Doubling:
    """Doubles numbers, in batches that it remembers; it can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()

    def answer_all(self, numbers) -> list[int]:
        self.batches.append(list(numbers))
        assert self.go.wait(10)
        if 13 in numbers:
            raise ArithmeticError("thirteen")
        return [2 * number for number in numbers]


def answers_of(doubling: Doubling, numbers: list[int], give_up: tuple[int, ...] = ()) -> list:
    """Ask for the first, and for the others while it is being answered."""

    async def ask() -> list:
        batcher = RequestBatcher(doubling.answer_all)
        asked = [asyncio.create_task(batcher.answer(numbers[0]))]
        while not doubling.batches:
            await asyncio.sleep(0)
        asked += [asyncio.create_task(batcher.answer(number)) for number in numbers[1:]]
        await asyncio.sleep(0)
        for number in give_up:
            asked[numbers.index(number)].cancel()
        doubling.go.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    return run_async(ask())


@pytest.fixture
def doubling() -> Doubling:
    return Doubling()


def test_the_first_goes_alone_and_the_rest_together(doubling):
    assert answers_of(doubling, [1, 2, 3, 4]) == [2, 4, 6, 8]
    assert doubling.batches == [[1], [2, 3, 4]]


def test_a_batch_that_fails_leaves_the_others_alone(doubling):
    first, *rest = answers_of(doubling, [1, 13, 3])
    assert first == 2
    assert [str(problem) for problem in rest] == ["thirteen", "thirteen"]


def test_one_who_goes_away_does_not_take_the_others_along(doubling):
    answers = answers_of(doubling, [1, 2, 3], give_up=(2,))
    assert (answers[0], answers[2]) == (2, 6)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert doubling.batches == [[1], [2, 3]]  # it was asked before it went
