"""Limits on the time of calls into code that is not ours: rewards and environments."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

__all__ = ["call_all", "call_each"]

T = TypeVar("T")
_STDERR = 2


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


def call_each(calls: Sequence[Callable[[], T]], *, seconds: float) -> list[T | Exception]:
    """What each call returns or raises, one after the other; a TimeoutError when one took over `seconds`.

    In the main thread the calls run there too, and a signal ends one that hangs, so nothing is left behind
    and functions may use signals of their own, but for SIGVTALRM and its timer. One that cannot be ended,
    because it catches whatever is raised or is native code that looks at no signal, ends the process after
    three times its seconds, and faulthandler prints where it was. Elsewhere this is `call_all`.

    >>> call_each([lambda: 1, lambda: time.sleep(60)], seconds=0.1)
    [1, TimeoutError('it took longer than 0.1 s')]
    """
    if threading.current_thread() is not threading.main_thread():
        return [
            r
            if not isinstance(r, BaseException) or isinstance(r, Exception)
            else RuntimeError(repr(r))
            for r in call_all(calls, seconds=seconds)
        ]
    with _Interrupter(seconds) as interrupter:
        return [interrupter.call(call) for call in calls]


class _Overdue(BaseException):
    """Not an Exception, which code that hangs may well catch."""


class _Interrupter:
    """Calls in the main thread, and signals that interrupt those over the limit.

    A thread sends them to a call that waits. It does not run while native code keeps the interpreter's
    lock (a regular expression, say), so there is a timer of the system too, which counts CPU time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = min(seconds / 4, 0.5)
        self._started: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Interrupter:
        self._previous = signal.signal(signal.SIGVTALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._pause, self._pause)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._previous)

    def call(self, function: Callable[[], T]) -> T | Exception:
        last = max(3 * self._seconds, self._seconds + 1)
        faulthandler.dump_traceback_later(last, exit=True, file=_STDERR)
        self._started = time.monotonic()
        try:
            return function()
        except _Overdue:
            return TimeoutError(f"it took longer than {self._seconds:g} s")
        except Exception as error:
            return error
        finally:
            self._started = None
            faulthandler.cancel_dump_traceback_later()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_late():
            raise _Overdue

    def _is_late(self) -> bool:
        return self._started is not None and time.monotonic() - self._started >= self._seconds

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._closed.wait(self._pause):
            if self._is_late():
                signal.pthread_kill(main, signal.SIGVTALRM)
