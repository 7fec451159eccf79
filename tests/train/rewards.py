"""Rewards that tests name by import path. Two of them end the process that calls them, at a chosen call."""

from __future__ import annotations

import itertools
import os
import signal

from fastrl.envs import Question
from fastrl.envs.tasks import position_match

SIGNAL_AT = "FASTRL_TEST_SIGNAL_AT"
_calls = itertools.count(1)


def restart_counting() -> None:
    """Begin to count the calls of `position_or_signal` anew."""
    global _calls
    _calls = itertools.count(1)


def position_or_signal(question: Question, completion: str) -> float:
    """`position_match`; at call n the process gets signal s when the environment says "n:s"."""
    call, _, number = os.environ.get(SIGNAL_AT, "0:0").partition(":")
    if next(_calls) == int(call):
        os.kill(os.getpid(), signal.Signals(int(number)))
    return position_match(question, completion)


def signal_to_second(question: Question, completion: str) -> float:
    """`position_or_signal` in the process of rank 1, `position_match` in the others."""
    if os.environ.get("RANK") == "1":
        return position_or_signal(question, completion)
    return position_match(question, completion)


def none_for_short(question: Question, completion: str) -> float | None:
    """Not scored when the completion has fewer than three characters."""
    return None if len(completion) < 3 else 1.0


def nan_always(question: Question, completion: str) -> float:
    """Never scored."""
    return float("nan")


def length(question: Question, completion: str) -> float:
    """Characters of the completion."""
    return float(len(completion))
