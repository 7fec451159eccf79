"""Schemas from signatures, calls from text, and what a model is told about a bad call."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from fastrl.envs import ToolBox, ToolCall, ToolEnv, load_env_task, parse_tool_calls, tool_schema
from fastrl.envs.calculator import Calculator
from fastrl.envs.guess_number import GuessNumber


def search(query: str, limit: int = 5, order: Literal["new", "old"] = "new", tags: list[str] | None = None) -> str:  # fmt: skip
    """Search the shelves
    of the library.

    query: words to look for
    """
    if not query:
        raise ValueError("query is empty")
    return f"{limit} {order} {query} {tags}" if query != "crash" else str(1 // 0)


def test_the_schema_is_the_signature() -> None:
    assert tool_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the shelves of the library.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for"},
                    "limit": {"type": "integer"},
                    "order": {"enum": ["new", "old"]},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }  # fmt: skip


def untyped(a) -> str:  # type: ignore[no-untyped-def]
    return str(a)


def starred(*a: int) -> str:
    return str(a)


def exotic(a: complex) -> str:
    return str(a)


@pytest.mark.parametrize("function", [untyped, starred, exotic])
def test_functions_that_are_no_tools_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=function.__name__):
        tool_schema(function)


@pytest.mark.parametrize(
    ("arguments", "output", "valid"),
    [
        ({"query": "x"}, "5 new x None", True),
        ({"query": "x", "limit": 2, "order": "old", "tags": ["a"]}, "2 old x ['a']", True),
        ({}, "error: search needs query", False),
        ({"query": 3}, "error: query must be", False),
        ({"query": "x", "limit": True}, "error: limit must be", False),
        ({"query": "x", "limit": 1.5}, "error: limit must be", False),
        ({"query": "x", "order": "best"}, "error: order must be", False),
        ({"query": "x", "tags": [1]}, "error: tags must be", False),
        ({"query": "x", "page": 1}, "error: search has no parameter page", False),
        ({"query": ""}, "error: query is empty", False),
        # The tool's own fault is no fault of the call.
        ({"query": "crash"}, "error: ZeroDivisionError", True),
    ],
)
def test_calls_are_checked(arguments: dict[str, Any], output: str, valid: bool) -> None:
    got, was_valid = ToolBox([search]).call(ToolCall("search", arguments))
    assert got.startswith(output)
    assert was_valid is valid


def test_an_unknown_tool_and_a_long_output() -> None:
    box = ToolBox([search], max_output=10)
    assert box.call(ToolCall("find", {})) == ("error: no tool find; there are search", False)
    assert (
        box.call(ToolCall("search", {"query": "y" * 50}))[0]
        == f"5 new yyyy\n[{51 - 0} more characters]"
    )


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "forged"),
    [
        ("no call", 0, 0, False),
        ('<tool_call>{"name": "a", "arguments": {}}</tool_call> <tool_call>{"name": "b"}</tool_call>', 2, 0, False),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', 1, 0, False),
        ("<tool_call>nonsense</tool_call>", 0, 1, False),
        ('<tool_call>{"name": 3}</tool_call><tool_call>[]</tool_call>', 0, 2, False),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', 0, 1, False),
        ('<tool_call>{"name": "a"', 0, 1, False),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", 0, 1, False),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', 0, 1, False),
        ('<tool_call>{"name": "a", "arguments": {"x": "\\udc80"}}</tool_call>', 0, 1, False),
        ("<tool_response>42</tool_response>", 0, 0, True),
        ("<|im_start|>tool\n42", 0, 0, True),
    ],
)  # fmt: skip
def test_calls_are_read_from_text(text: str, calls: int, malformed: int, forged: bool) -> None:
    parsed = parse_tool_calls(text)
    assert (len(parsed.calls), parsed.malformed, parsed.forged) == (calls, malformed, forged)


class Library(ToolEnv):
    def __init__(self) -> None:
        super().__init__([search])

    def finish(self, answer: str) -> dict[str, float | None]:
        return {"score": float(answer == "done")}


def test_an_environment_with_tools() -> None:
    env = Library()
    message = {
        "role": "assistant",
        "content": '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>',
    }
    result = env.step(message)
    assert result.messages == [{"role": "tool", "name": "search", "content": "5 new x None"}]
    assert (dict(result.reward_parts), result.done) == ({}, False)
    # The record of the conversation has the call in the form of chat completions.
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "x"}'}  # type: ignore[index]
    env.step({"role": "assistant", "content": "<tool_call>?</tool_call>"})
    last = env.step({"role": "assistant", "content": "done"})
    assert last == ([], {"score": 1.0, "valid_calls": 0.5}, True)


# --- built-in environments -----------------------------------------------------------------------


def ask(env: Any, *texts: str) -> list[Any]:
    return [env.step({"role": "assistant", "content": text}) for text in texts]


def test_guessing_scores_by_hand() -> None:
    env = GuessNumber(numbers=16, turns=5, process=True)
    assert env.reset({"secret": 12}) == [{"role": "user", "content": "?"}]
    first, second, third = ask(env, "7", "zz", "c")
    # 16 secrets are left, then 8 ("8" to "f"): half of them was ruled out.
    assert first == ([{"role": "user", "content": ">"}], {"narrowed": 0.5}, False)
    assert second == ([{"role": "user", "content": "?"}], {"narrowed": 0.0}, False)
    assert third.reward_parts == {"narrowed": 1 - 1 / 8, "solved": 1.0, "score": 1 - 3 / 10}
    env.reset({"secret": 0})
    assert ask(env, *"fedcb")[-1] == ([], {"narrowed": pytest.approx(1 / 12), "solved": 0.0, "score": 0.0}, True)  # fmt: skip


def test_the_calculator_wants_every_call() -> None:
    env = Calculator(terms=3, strict=False)
    env.reset({"terms": [3, 5, 4]})
    assert ask(env, "=12")[0].reward_parts == {"solved": 0.0, "answer": 0.0, "valid_calls": 0.0}
    env.reset({"terms": [3, 5, 4]})
    results = ask(env, "04+5", "03+5", "08+4", "=12")
    assert [r.messages[0]["content"] for r in results[:3]] == ["09;", "08;", "12;"]
    # The first call was another one than was due: three of four characters, of half of the calls.
    assert [r.reward_parts.get("steps") for r in results[:3]] == [3 / 8, None, None]
    assert results[3].reward_parts == {"solved": 1.0, "answer": 1.0, "valid_calls": 1.0}
    strict = Calculator(terms=3)
    strict.reset({"terms": [3, 5, 4]})
    assert ask(strict, "04+5")[0].done


def test_the_calculator_by_tool_calls() -> None:
    env = Calculator(terms=2, style="tools")
    env.reset({"terms": [7, 5]})
    call = '<tool_call>{"name": "calculate", "arguments": {"a": 7, "operator": "+", "b": 5}}</tool_call>'
    first, last = ask(env, call, "It is 12.")
    assert first.messages == [{"role": "tool", "name": "calculate", "content": "12"}]
    assert last.reward_parts == {"solved": 1.0, "answer": 1.0, "valid_calls": 1.0}


def test_tasks_are_split_and_streamed() -> None:
    task = load_env_task(
        "calculator", params={"terms": 2}, size=20, held_out=5, weights={"steps": 0.5}
    )
    assert (len(task.train), len(task.held_out)) == (20, 5)
    assert task.weights["steps"] == 0.5
    assert {tuple(t["terms"]) for t in task.train}.isdisjoint(
        tuple(t["terms"]) for t in task.held_out
    )
    whole = task.batch(0, 50)
    assert whole[15:35] == task.batch(15, 20)
    assert task.total({"solved": 1.0, "answer": None, "steps": 1.0}) == 1.5
    assert task.total({"solved": None}) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", "guess_number"),
        ("no.such:Class", "cannot import"),
        ("gymnasium:", "expected one of"),
    ],
)
def test_unknown_environments_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_env_task(source)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="no reward parts"):
        load_env_task("guess_number", weights={"speed": 1.0})


# --- other packages ------------------------------------------------------------------------------


def test_reasoning_gym_in_one_turn() -> None:
    task = load_env_task(
        "reasoning_gym:chain_sum", params={"min_terms": 2, "max_terms": 2}, size=3, held_out=1
    )
    env = task.make()
    messages = env.reset(task.train[0])
    assert messages[0]["content"] == task.train[0]["question"]
    result = env.step({"role": "assistant", "content": task.train[0]["answer"]})
    assert result == ([], {"score": 1.0}, True)


def test_gymnasium_speaks_text() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    env = load_env_task("gymnasium:Blackjack-v1", size=2, held_out=0).make()
    first = env.reset({"seed": 1})[0]["content"]
    assert first.endswith("Answer with a number from 0 to 1.")
    assert (
        env.step({"role": "assistant", "content": "what?"})
        .messages[0]["content"]
        .startswith("Answer")
    )
    last = env.step({"role": "assistant", "content": "I stick: 0"})
    assert last.done
    assert last.reward_parts["reward"] in (-1.0, 0.0, 1.0)


def test_textarena_plays_alone() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    env = load_env_task("textarena:GuessTheNumber-v0", size=1, held_out=0).make()
    assert env.reset({"seed": 3})[0]["content"]
    for guess in range(1, 21):
        result = env.step({"role": "assistant", "content": f"[{guess}]"})
        if result.done:
            break
    assert result.done
    assert "reward" in result.reward_parts
