"""Rewards that tests name by import path. Two of them end the process that calls them, at a chosen call."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from typing import Any

import torch

from fastrl.envs import Question
from fastrl.envs.tasks import position_match

SIGNAL_AT = "FASTRL_TEST_SIGNAL_AT"
FAULT = "FASTRL_TEST_FAULT"
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


def random_number(question: Question, completion: str) -> float:
    """From the generator that everybody shares, so who is asked when shows."""
    return random.random()


def noisy_position(question: Question, completion: str) -> float:
    """`position_match` and a little noise from Python's generator, which a resumed run must draw again."""
    return position_match(question, completion) + 0.1 * random.random()


# --- rewards that fail, each at every third completion that it is called with --------------------

_ANSWERS: dict[str, object] = {
    "a string": "1.0",
    "a list": [1.0],
    "two numbers": torch.zeros(2),
    "infinity": float("inf"),
    "minus infinity": -float("inf"),
    "a complex number": 1j,
    "a dict": {"score": 1.0},
}


def faulty(question: Question, completion: str) -> Any:
    """`position_match`, but what FASTRL_TEST_FAULT says for some completions."""
    if sum(map(ord, completion)) % 3:
        return position_match(question, completion)
    fault = os.environ[FAULT]
    if fault == "raises":
        raise KeyError("score")
    if fault == "exits":
        sys.exit("done")
    while fault == "hangs":
        try:
            time.sleep(60)
        except Exception:
            continue
    return _ANSWERS[fault]
