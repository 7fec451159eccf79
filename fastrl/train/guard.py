"""Limits on the time of calls into code that is not ours: rewards and environments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["call_all"]

T = TypeVar("T")


def call_all(
    calls: Sequence[Callable[[], T]], *, seconds: float, workers: int = 1
) -> list[T | BaseException]:
    """What each call returns or raises, in order; a TimeoutError when it took longer than `seconds`.

    `workers` calls run at a time, in threads. Python cannot end a thread, so a call that hangs is left
    behind with what it holds; it does not keep the program from ending. Code that may hang often
    belongs in a process of its own.

    >>> call_all([lambda: 1, lambda: 1 // 0], seconds=5.0)
    [1, ZeroDivisionError('integer division or modulo by zero')]
    """
    return _Calls(calls, seconds, workers).results()


class _Calls(Generic[T]):
    def __init__(self, calls: Sequence[Callable[[], T]], seconds: float, workers: int) -> None:
        self._calls = calls
        self._seconds = seconds
        self._change = threading.Condition()
        self._results: list[Any] = [None] * len(calls)
        self._left = len(calls)
        self._next = 0
        self._running: dict[int, float] = {}
        for _ in range(min(workers, len(calls))):
            self._start_worker()

    def results(self) -> list[T | BaseException]:
        with self._change:
            while self._left:
                self._change.wait(self._end_overdue())
        return self._results

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._change:
                if self._next == len(self._calls):
                    return
                number = self._next
                self._next += 1
                self._running[number] = time.monotonic()
            try:
                result: Any = self._calls[number]()
            except BaseException as error:
                result = error
            with self._change:
                if self._running.pop(number, None) is None:
                    return  # given up meanwhile, and replaced by another worker
                self._set(number, result)

    def _set(self, number: int, result: Any) -> None:
        self._results[number] = result
        self._left -= 1
        if not self._left:
            self._change.notify_all()

    def _end_overdue(self) -> float:
        """Give up calls over the limit; seconds until the next one may be."""
        now = time.monotonic()
        for number, started in list(self._running.items()):
            if now - started >= self._seconds:
                del self._running[number]
                self._set(number, TimeoutError(f"it took longer than {self._seconds:g} s"))
                self._start_worker()
        if not self._left:
            return 0.0
        oldest = min(self._running.values(), default=now)
        return max(oldest + self._seconds - now, 0.01)
