"""Frozen policies of a run, as an episode asks them: a request in a conversation of its own, and the text of the reply.

message -> tokens -> GenerateRequest(policy) -> Completion -> its version is the frozen one's, or PolicyMismatch -> text
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tidemill.core.errors import Exceeds, PolicyMismatch
from tidemill.core.types import Array, Completion, Finish, GenerateRequest, SamplingParams, Version
from tidemill.models.chat_template import Messages
from tidemill.models.conversations import renderer, too_long, unknown_token
from tidemill.models.tokenizer import Tokenizer


class FrozenPolicies:
    """The frozen policies that one episode may ask, by name, with the versions that engines serve of them."""

    def __init__(
        self,
        versions: Mapping[str, Version],
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        own: str,
        context: int,
        vocab: int | None,
    ) -> None:
        """params: of the episode. own: the policy that plays it. context, vocab: as for `EpisodeChat`."""
        self._versions, self._tokenizer, self._params = versions, tokenizer, params
        self._own, self._context, self._vocab = own, context, vocab

    def request(self, policy: str, messages: Messages, key: str, seed: int, max_tokens: int | None) -> GenerateRequest:
        """The request for a reply of a frozen policy.

        Raises ValueError for one that is not served or not frozen, and for messages that no reply fits after.
        """
        if not isinstance(policy, str) or policy not in self._versions:
            known = f"it serves {', '.join(map(repr, self._versions))}" if self._versions else "it serves none"
            own = " is the one that plays, and chat.reply asks it" if policy == self._own else " is no frozen policy"
            raise ValueError(f"chat.ask({policy!r}): {policy!r}{own} of this run; {known}: see `policies` in the recipe")
        limit = min(max_tokens or self._params.max_tokens, self._context)
        params = replace(self._params, seed=seed, max_tokens=limit, last=True)
        return GenerateRequest(self._tokens(policy, messages), params, policy, key)

    def _tokens(self, policy: str, messages: Messages) -> Array:
        what = f"the message to {policy!r}"
        try:
            tokens = renderer(self._tokenizer, self._context).begin(messages)
        except Exceeds as error:  # too long to be encoded at all
            raise ValueError(too_long(error.least, self._context, what, at_least=True)) from None
        if self._vocab is not None and (unknown := unknown_token(tokens, self._tokenizer, self._vocab)):
            raise ValueError(f"{what} {unknown}")
        if len(tokens) >= self._context:
            raise ValueError(too_long(len(tokens), self._context, what))
        return tokens

    def check(self, policy: str, reply: Completion) -> None:
        """Raise PolicyMismatch unless the frozen version itself sampled all of a reply."""
        if any(source != self._versions[policy] for source in reply.sources) or (len(reply.tokens) and not reply.sources):
            found = ", ".join(source.exact for source in reply.sources) or "no version"
            raise PolicyMismatch(f"{self._versions[policy].exact} was asked, and {found} answered")


def reply_text(tokenizer: Tokenizer, reply: Completion) -> str:
    """A reply as text, without the token that ends it."""
    spoken = reply.tokens[:-1] if reply.finish is Finish.STOP else reply.tokens
    return tokenizer.decode(spoken.tolist(), skip_special_tokens=True)
