"""JSON over HTTP: one exchange, and errors that say whether asking again can help."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

__all__ = ["EngineError", "Unavailable", "exchange", "field"]


class EngineError(OSError):
    """A server cannot be reached, refuses, or answers what cannot be used."""


class Unavailable(EngineError):
    """The same request may succeed later, or at another server."""


def exchange(url: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> Any:
    """What `url` answers to a POST of `body`, or to a GET without one; None for an empty answer.

    A request must have the same effect when it is sent twice, because nobody knows whether a server that
    did not answer has worked.

    Raises Unavailable when there is no connection or no whole answer within `timeout` seconds, and for
    the status codes 408, 429 and 500 and above; EngineError for other codes and for what is not JSON.
    """
    parts = urllib.parse.urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    connection = kinds[parts.scheme](parts.netloc, timeout=timeout)
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content, status = response.read(), response.status
    except (OSError, http.client.HTTPException) as error:
        reason = f"nothing within {timeout:g} s" if isinstance(error, TimeoutError) else repr(error)
        raise Unavailable(f"engine: {url} did not answer: {reason}") from error
    finally:
        connection.close()
    text = content.decode(errors="replace")
    if status >= 400:
        kind = Unavailable if status >= 500 or status in (408, 429) else EngineError
        raise kind(f"engine: {url} answered status {status}: {text[:300]}")
    try:
        return json.loads(text) if text.strip() else None
    except ValueError as error:
        raise EngineError(
            f"engine: {url} must answer JSON, got {text[:80]!r}; check that engine.urls name the servers "
            "themselves and engine.kind what they are"
        ) from error


def field(value: Any, where: str, key: str | int, kind: type, remedy: str) -> Any:
    """`value[key]`, which must be a `kind`.

    >>> field({"choices": [1]}, "http://a/v1/completions", "choices", list, "start vLLM")
    [1]
    >>> field({"choices": None}, "http://a/v1/completions", "choices", list, "start vLLM")
    Traceback (most recent call last):
        ...
    fastrl.train.http_json.EngineError: engine: http://a/v1/completions: field 'choices' must be a list, got None; start vLLM
    """
    try:
        found = value[key]
    except (KeyError, IndexError, TypeError):
        found = None
    # JSON writes 1 for 1.0; true is no number.
    fits = isinstance(found, (int, float) if kind is float else kind)
    if not fits or (isinstance(found, bool) and kind is not bool):
        raise EngineError(
            f"engine: {where}: field {key!r} must be a {kind.__name__}, got {str(found)[:80]}; {remedy}"
        )
    return found
