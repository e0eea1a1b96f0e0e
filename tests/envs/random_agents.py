"""Agents that hold conversations at random over one chat, with rewrites, compaction, retries and several at a time."""

from __future__ import annotations

import asyncio
import random
from contextvars import ContextVar
from typing import Any

import numpy as np
from envs.scripted_engine import CHATML, FORGETS, TRIMS, chat_tokenizer

from tidemill.core.attempt_checks import check_attempts
from tidemill.core.interfaces import Sampler
from tidemill.core.serialization import decode, encode
from tidemill.core.types import Completion, Finish, GenerateRequest, Group, SamplingParams, Score, Task, Trajectory, Version
from tidemill.envs.chat import EpisodeChat, rollout_seeds
from tidemill.models.chat_template import Messages
from tidemill.models.tokenizer import Tokenizer, character_tokenizer

LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 <>/\n")
TOKENIZERS: dict[str, Tokenizer] = {
    "appends": chat_tokenizer(CHATML),
    "strips thinking": chat_tokenizer(FORGETS),
    "trims": chat_tokenizer(TRIMS),
    "no template": LETTERS,
}


ASKED: ContextVar[Any] = ContextVar("ASKED")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class RandomEngine:
    """Says random texts in random ids, mostly others than the text is encoded as; answers after a while."""

    openings = ("", "<think>hm</think>", "<think>well ")  # of its texts

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.calls: list[tuple[GenerateRequest, Completion]] = []
        self.asked: list[Any] = []  # the conversation behind each call
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        ids = self._ids()
        if self.rng.random() < 0.85:
            ids.append(self.tokenizer.eos_token_id)
        ids = ids[: request.params.max_tokens]
        self.version += self.rng.random() < 0.3
        n, finish = len(ids), Finish.STOP if ids[-1:] == [self.tokenizer.eos_token_id] else Finish.LENGTH
        sources = (Version(self.version),)
        made = Completion(
            np.array(ids, np.int32),
            -self.rng.random() * np.arange(1, n + 1, dtype=np.float32),
            np.full(n, self.version, np.int32),
            sources,
            finish,
        )
        self.calls.append((request, made))
        self.asked.append(ASKED.get())
        return made

    def _ids(self) -> list[int]:
        text = self._text()
        if self.rng.random() < 0.5:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return [i for each in text for i in self.tokenizer.encode(each, add_special_tokens=False)]

    def _text(self) -> str:
        return self.rng.choice(self.openings) + "".join(self.rng.choice("abc 12") for _ in range(self.rng.randint(1, 6)))

    async def abort(self, key: str) -> None:
        raise AssertionError("nothing is aborted here")

    async def score(self, tokens: Any, policy: str, temperature: float, top_k: int) -> Any:
        raise AssertionError("nothing is scored here")


class Agent:
    """Holds conversations and goes on with them at random, as agents do: see the module."""

    context, most = 4000, 40  # tokens: of all, of a reply

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, engine: Sampler, context: int = 0) -> None:
        self.rng, self.tokenizer = rng, tokenizer
        params = SamplingParams(stop_ids=(self.tokenizer.eos_token_id,), max_tokens=self.most)
        how: dict[str, Any] = {"context": context or self.context, "key": "k", "seeds": rollout_seeds(0, 0, 0)}
        self.chat = EpisodeChat(engine, tokenizer, params, **how)
        self.known: list[Messages] = []  # conversations that end with a reply
        self.asked: list[Messages] = []

    def word(self) -> str:
        return "".join(self.rng.choice("abc ") for _ in range(self.rng.randint(1, 5))) + self.rng.choice("abc")

    def next(self) -> Messages:
        """A conversation to be answered."""
        if not self.known or self.rng.random() < 0.1:
            return [*([{"role": "system", "content": self.word()}] if self.rng.random() < 0.5 else []), user(self.word())]
        before = list(self.known[-1] if self.rng.random() < 0.5 else self.rng.choice(self.known))
        match self.rng.choices(["append", "again", "rewrite", "compact", "two"], [6, 2, 2, 2, 1])[0]:
            case "again" if len(self.asked) > 0:  # a retry that is sampled anew, or a second answer
                return list(self.rng.choice(self.asked))
            case "rewrite":
                place = self.rng.randrange(len(before))
                before[place] = {**before[place], "content": (before[place].get("content") or "")[:-1] + self.word()}
                return [*before, user(self.word())]
            case "compact":
                return [*before[:1], user("all before " + self.word()), *before[-1:], user(self.word())]
            case "two":
                return [*before, user(self.word()), {"role": "user", "content": self.word()}]
        return [*before, user(self.word())]

    async def ask(self, messages: Messages) -> None:
        self.asked.append(messages)
        ASKED.set(messages)
        self.known.append([*messages, said((await self.chat.complete(messages)).text)])

    async def play(self) -> list[Trajectory]:
        await self.talk()
        return self.chat.rows(Score(1.0))

    async def talk(self) -> None:
        for _ in range(self.rng.randint(1, 9)):
            if self.rng.random() < 0.3:
                await asyncio.gather(*(self.ask(self.next()) for _ in range(self.rng.randint(2, 4))))
            else:
                await self.ask(self.next())


def check_record(rows: list[Trajectory], calls: list[tuple[GenerateRequest, Completion]]) -> None:
    """Each sampled token stands in one row, after exactly the tokens that it was sampled from."""
    check_attempts(Group(1, Task("t", ""), rows))
    assert sum(row.sampled for row in rows) == sum(len(made.tokens) for _, made in calls)
    free = {(number, int(place)) for number, row in enumerate(rows) for place in np.flatnonzero(row.mask)}
    for asked, made in calls:
        start, stop = len(asked.tokens), len(asked.tokens) + len(made.tokens)
        whole = np.concatenate([asked.tokens, made.tokens])
        own = next(
            number
            for number, row in enumerate(rows)
            if len(row.tokens) >= stop
            and {(number, place) for place in range(start, stop)} <= free
            and np.array_equal(row.tokens[:stop], whole)
            and np.array_equal(row.logprobs[start:stop], made.logprobs)
        )
        assert np.array_equal(rows[own].versions[start:stop], made.versions)
        free -= {(own, place) for place in range(start, stop)}
    assert not free, "tokens are trained that no engine sampled"
    assert [row.outcome for row in rows] == [*[None] * (len(rows) - 1), Score(1.0)]
    last = calls[-1][1]
    assert np.array_equal(rows[-1].tokens[-len(last.tokens) :], last.tokens), "the attempt ends with another reply"
    for row in rows:
        assert decode(encode(row), Trajectory).parent == row.parent


def check_text(tokenizer: Tokenizer, engine: RandomEngine) -> None:
    """Each prompt is what the template renders of the whole conversation."""
    for messages, (asked, _) in zip(engine.asked, engine.calls, strict=True):
        if tokenizer.chat_template:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        else:
            text = "".join(each["content"] for each in messages)
        shown = tokenizer.decode(asked.tokens, skip_special_tokens=not tokenizer.chat_template)
        assert "".join(shown.split()) == "".join(text.split())
