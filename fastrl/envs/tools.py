"""Tools: typed Python functions that a model may call, and the environment that lets it.

A schema in the form of chat completions is made from a function's signature and docstring. Calls are
read from `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form that most open chat
models are trained on. A bad call is no crash: the model is told what was wrong.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fastrl.envs.env import Message, StepResult

__all__ = ["Parsed", "ToolBox", "ToolCall", "ToolEnv", "parse_tool_calls", "tool_schema"]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# What only an environment writes. A model that writes it itself tries to answer its own call.
_FORGED = re.compile(r"</?tool_response>|<\|im_start\|>|<\|start_header_id\|>|\[TOOL_RESULTS\]")

_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


class ToolCall(NamedTuple):
    """A call that the model asked for."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """What an assistant message holds."""

    content: str
    """Its text without the calls."""
    calls: list[ToolCall]
    """The calls that could be read, in order."""
    malformed: int
    """Calls that could not be read."""
    forged: bool
    """Whether it has markers that only an environment writes."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of `function` in the form that chat completions use for tools.

    Every parameter needs a type: str, int, float, bool, a Literal, list[...], dict, or one of these
    or None. The first paragraph of the docstring is the description; a line "name: text" in it
    describes a parameter. Raises TypeError for a parameter without a type or of another one.

    >>> def add(a: int, b: int = 0) -> int:
    ...     'Add two numbers.'
    ...     return a + b
    >>> tool_schema(add)["function"]["parameters"]["required"]
    ['a']
    """
    hints = typing.get_type_hints(function)
    document = inspect.getdoc(function) or ""
    about = dict(re.findall(r"^\s*(\w+): (.+)$", document, re.MULTILINE))
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"tool_schema: {function.__name__} takes {parameter}, but a tool needs named parameters"
            )
        if name not in hints:
            raise TypeError(
                f"tool_schema: parameter {name} of {function.__name__} needs a type annotation"
            )
        properties[name] = _json_type(hints[name], f"{function.__name__}.{name}")
        if name in about:
            properties[name]["description"] = about[name]
        if parameter.default is parameter.empty:
            required.append(name)
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": " ".join(document.partition("\n\n")[0].split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if hint is list or origin is list:
        item = {"items": _json_type(arguments[0], where)} if arguments else {}
        return {"type": "array", **item}
    if hint is dict or origin is dict:
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_json_type(a, where) for a in arguments]}
    raise TypeError(
        f"tool_schema: {where} has type {hint}; expected str, int, float, bool, Literal, list, dict, "
        "or one of these or None"
    )


def parse_tool_calls(text: str) -> Parsed:
    """The calls in an assistant message.

    >>> parse_tool_calls('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
    [ToolCall(name='add', arguments={'a': 1})]
    """
    calls, malformed = [], 0
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            # Half of a surrogate pair is no text: neither tokenizers nor files take it.
            json.dumps(call, ensure_ascii=False).encode()
            arguments = call.get("arguments", {})
            # Some models write the arguments as a string that holds JSON, as the protocol itself does.
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not (isinstance(call["name"], str) and isinstance(arguments, dict)):
                raise TypeError
            calls.append(ToolCall(call["name"], arguments))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            malformed += 1
    content = _CALL.sub("", text)
    # An opening without an end is a call too, only a broken one.
    malformed += content.count("<tool_call>")
    return Parsed(content.strip(), calls, malformed, bool(_FORGED.search(text)))


class ToolBox:
    """Functions by name, called with arguments that are checked against their schemas.

    >>> def add(a: int, b: int) -> int:
    ...     'Add two numbers.'
    ...     return a + b
    >>> box = ToolBox([add])
    >>> box.call(ToolCall("add", {"a": 1, "b": 2})), box.call(ToolCall("add", {"a": 1}))
    (('3', True), ('error: add needs b', False))
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], *, max_output: int = 4000) -> None:
        self._functions = {f.__name__: f for f in functions}
        self.schemas = [tool_schema(f) for f in functions]
        self._max_output = max_output

    def call(self, call: ToolCall) -> tuple[str, bool]:
        """The output as text, cut to `max_output` characters, and whether the call was valid.

        A call that the tool itself refuses with ValueError was not valid; other errors of a tool are
        reported to the model as well, but are no fault of the call.
        """
        function = self._functions.get(call.name)
        if function is None:
            return f"error: no tool {call.name}; there are {', '.join(self._functions)}", False
        if problem := self._problem(call):
            return f"error: {problem}", False
        try:
            output = function(**call.arguments)
        except ValueError as error:
            return self._cut(f"error: {error}"), False
        except Exception as error:
            return self._cut(f"error: {type(error).__name__}: {error}"), True
        return self._cut(output if isinstance(output, str) else json.dumps(output)), True

    def _problem(self, call: ToolCall) -> str:
        schema = next(s for s in self.schemas if s["function"]["name"] == call.name)
        parameters = schema["function"]["parameters"]
        missing = [n for n in parameters["required"] if n not in call.arguments]
        if missing:
            return f"{call.name} needs {', '.join(missing)}"
        for name, value in call.arguments.items():
            if name not in parameters["properties"]:
                return f"{call.name} has no parameter {name}"
            if not _fits(value, parameters["properties"][name]):
                return f"{name} must be {parameters['properties'][name]}, got {value!r:.80}"
        return ""

    def _cut(self, text: str) -> str:
        rest = len(text) - self._max_output
        return text if rest <= 0 else f"{text[: self._max_output]}\n[{rest} more characters]"


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, s) for s in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "array":
        items = schema.get("items")
        return isinstance(value, list) and (items is None or all(_fits(v, items) for v in value))
    if kind == "object":
        return isinstance(value, dict)
    if isinstance(value, bool):
        return kind == "boolean"
    accepted: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "null": (type(None),),
    }
    return isinstance(value, accepted.get(kind, ()))


class ToolEnv:
    """A base for environments with tools: parses calls, runs them, and asks `finish` for the rewards.

    A subclass sets `weights`, calls `super().__init__(functions)`, defines `tasks` and `reset`, and
    defines `finish(answer)`, which scores the episode when a message comes without a call. Of one
    message every call is run in order. The part "valid_calls" is the share of calls that were valid,
    over the whole episode, counted once when it ends. Nothing is ever scored from text that claims to
    be the output of a tool: a message with such markers gets no output, and counts as an invalid call.
    """

    weights: Mapping[str, float] = {"score": 1.0, "valid_calls": 0.0}

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._box = ToolBox(functions)
        self.tools = self._box.schemas
        self.begin()

    def begin(self) -> None:
        """Forget the calls of an earlier episode; `reset` of a subclass calls it."""
        self.num_calls = self.num_valid = 0

    def step(self, message: Message) -> StepResult:
        """Run the calls of `message`, or finish when there is none."""
        parsed = parse_tool_calls(message["content"])
        self.num_calls += len(parsed.calls) + parsed.malformed + parsed.forged
        if parsed.forged:
            error = "error: only the environment writes tool outputs; nothing was run"
            return StepResult([{"role": "tool", "content": error}], {}, False)
        if not parsed.calls and not parsed.malformed:
            parts = dict(self.finish(parsed.content))
            if "valid_calls" in self.weights:
                parts["valid_calls"] = self.num_valid / self.num_calls if self.num_calls else 0.0
            return StepResult([], parts, True)
        message["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in parsed.calls
        ]
        answers = []
        for call in parsed.calls:
            output, valid = self._box.call(call)
            self.num_valid += valid
            answers.append({"role": "tool", "name": call.name, "content": output})
        if parsed.malformed:
            text = (
                'error: a call must read <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
            )
            answers.append({"role": "tool", "content": text})
        return StepResult(answers, {}, False)

    def finish(self, answer: str) -> Mapping[str, float | None]:
        """The reward parts of the whole episode, given the final message."""
        raise NotImplementedError
