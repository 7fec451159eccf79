"""Messages as tokens, so that what the model sampled is never tokenised again.

An episode is one growing list of tokens. The first prompt goes through the chat template; after each
assistant turn only what the template puts behind it (the end of the turn, tool outputs, the opening of
the next turn) is tokenised and appended. Rendering the whole conversation anew at each turn, as chat
servers do, would tokenise sampled text differently here and there, drop the thoughts of earlier turns
under some templates, and train on tokens that were never sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastrl.envs import Message
from fastrl.train.models import Policy

__all__ = ["Chat"]

# Stands for an assistant message while the template is rendered; any unusual word does.
_MARKER = "fastrl-assistant-turn"


class Chat:
    """Renders first prompts and what comes between assistant turns.

    Without `use_template` messages are joined as they are. With it the tokenizer's chat template is
    used, and checked once for what the appending needs: that text of earlier turns does not change
    when messages are added. Raises ValueError when that does not hold.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        use_template: bool,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._policy = policy
        self._use_template = use_template
        self._system = system
        self._tools = list(tools)
        specials = [t for t in policy.tokenizer.all_special_tokens if len(t) > 1]
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None
        if use_template:
            self._check_template()

    def first(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Text and tokens of the first prompt, ready for the assistant to answer."""
        if not self._use_template:
            text = "".join(self._neutral(m["content"]) for m in messages)
        else:
            text = self._render([*self._start(), *map(self._safe, messages)], answer=True)
        return text, self._policy.encode(text)

    def between(self, messages: Sequence[Message], last_token: int) -> tuple[str, list[int]]:
        """Text and tokens that follow an assistant turn whose last token was `last_token`."""
        if not self._use_template:
            text = "".join(self._neutral(m["content"]) for m in messages)
            return text, self._policy.encode(text)
        text = self._behind_turn(messages)
        ids = self._policy.encode(text)
        # The model has already written its end of turn.
        if ids[0] == last_token and last_token in self._policy.eos_ids:
            ids = ids[1:]
        return text, ids

    def _start(self) -> list[Message]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _behind_turn(self, messages: Sequence[Message]) -> str:
        """What the template writes after the text of an assistant turn that `messages` follow."""
        asked = [*self._start(), {"role": "user", "content": "?"}]
        turn = {"role": "assistant", "content": _MARKER}
        text = self._render([*asked, turn, *map(self._safe, messages)], answer=True)
        return text[text.index(_MARKER) + len(_MARKER) :]

    def _render(self, messages: Sequence[Message], *, answer: bool) -> str:
        extra: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        return cast(
            str,
            self._policy.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer, **extra
            ),
        )

    def _check_template(self) -> None:
        """Raise ValueError unless turns can be appended."""
        asked = [*self._start(), {"role": "user", "content": "?"}]
        turn = {"role": "assistant", "content": _MARKER}
        for role in ("user", "tool") if self._tools else ("user",):
            later = [{"role": role, "name": "tool", "content": "answer"}]
            problem = ""
            try:
                short = self._render([*asked, turn], answer=False)
                long = self._render([*asked, turn, *later], answer=True)
            except Exception as error:
                problem = (
                    f"it cannot render a message of role {role!r} after an assistant's: {error}"
                )
            else:
                before = short[: short.find(_MARKER) + len(_MARKER)]
                if short.count(_MARKER) != 1 or not long.startswith(before):
                    problem = f"the text of earlier turns changes when a {role!r} message is added"
                elif "answer" not in long[len(before) :]:
                    problem = f"it does not show messages of role {role!r}"
            if problem:
                raise ValueError(
                    "chat: the chat template cannot be continued turn by turn: "
                    f"{problem}; set tokenizer.chat_template to one that only appends, let the "
                    "environment answer with messages of role 'user', or set task.chat = false"
                )

    def _safe(self, message: Message) -> Message:
        return {**message, "content": self._neutral(message["content"])}

    def _neutral(self, text: str) -> str:
        """`text` with its special tokens broken up: a tool's output must not end a turn or open one."""
        if self._specials is None:
            return text
        return self._specials.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
