"""Reward audit: tests a reward on replies of known worth before a run uses it.

Gold replies, of which the environment says that they earn the full score, fail when more than `WRONG` of them do not.
Garbage passes, wrongly, when it earns the full score every time, or by two standard errors more often than the commonest
gold reply would. Partial scores are not examined. Without a known gold reply nothing is checked. A reply that could not be
judged neither passes nor fails. If a reward asks for token ids, it gets one for each byte: no model is needed.
"""

from __future__ import annotations

import string
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from random import Random
from typing import Literal, cast

import numpy as np

from tidemill.controller.rollout import EpisodeSetup
from tidemill.core.amounts import amount
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Checkable, Environment, Gold, Sampler
from tidemill.core.outcomes import SOLVED, clip
from tidemill.core.seeding import derive_seed
from tidemill.core.task_places import named
from tidemill.core.types import (
    Completion,
    Finish,
    GenerateRequest,
    InfraError,
    Outcome,
    SamplingParams,
    Score,
    Task,
    Unscorable,
    Version,
)
from tidemill.models.tokenizer import EOS, Tokenizer, byte_tokenizer

WRONG = 0.05  # share of gold replies that may fall short: every set of tasks has a few wrong labels
HOPELESS = 3  # unjudged replies in a row, from the first on, after which no more are tried
MOST_TURNS = 64
OWN = "own"
LONG = 20_000  # characters of the longest garbage
SCRAMBLED = (string.ascii_lowercase.encode() + 6 * b" ") * 8  # makes letters and spaces of random bytes
REFUSAL = "I'm sorry, but I can't help with that."
Verdict = Literal["ok", "fails", "passes", "not judged", "not checked"]


@dataclass(frozen=True, slots=True)
class Own:
    """A reply of the user's own, and the verdict that it must get."""

    text: str
    expect: Literal["pass", "fail"]
    task: str = ""  # an id; empty: any
    formatted: bool = False  # `text` is an answer, to be put into the form of a gold reply


@dataclass(frozen=True, slots=True)
class Tried:
    """A reply that was tried, with its outcome."""

    task: Task
    kind: str
    reply: str
    outcome: Outcome
    seconds: float
    expect: Literal["pass", "fail"] = "fail"


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one kind of reply."""

    kind: str
    n: int
    mean: float | None  # of the scores; None where there is none
    passed: int  # earned the full score
    unscorable: int
    infra_errors: int
    slowest_s: float | None
    verdict: Verdict
    why: str = ""

    @property
    def bad(self) -> bool:
        """True when the verdict speaks against the reward, or there is none."""
        return self.verdict in ("fails", "passes", "not judged")


@dataclass(frozen=True, slots=True)
class Check:
    """The results of an audit, a line for each kind of reply."""

    environment: str
    tasks: int
    lines: list[Line]

    def refused(self, accepted: Sequence[str] = ()) -> dict[str, str]:
        """Reasons not to train, by "gold" or "garbage", without those that the user accepts."""
        gold = [line.why for line in self.lines if line.kind == "gold" and line.bad]
        passing = [line.why for line in self.lines if line.verdict == "passes" and not line.kind.startswith(OWN)]
        named = {"gold": gold, "garbage": passing}  # garbage that could not be judged got no score
        return {name: whys[0] for name, whys in named.items() if whys and name not in accepted}


async def check(
    environment: Environment,
    tasks: Sequence[Task],
    *,
    limit_s: float,
    budget_s: float,
    own: Sequence[Own] = (),
    without_gold: bool = False,
    frozen: Iterable[str] = (),
) -> Check:
    """Try every kind of reply on `tasks`, for about `budget_s` seconds. limit_s: of one episode.

    without_gold: try garbage even where no gold reply is known; by default nothing is tried there. frozen: policies that an
    episode may ask. One that does cannot be checked, because no engine serves them here.
    """
    golds = {task.id: _gold(environment, task) for task in tasks}
    tokenizer = cast(Tokenizer, byte_tokenizer(EOS, literal=True))
    asked = {name: Version(0, policy=name) for name in frozen}
    episodes = EpisodeSetup(environment, tokenizer, SamplingParams(), 1 << 40, limit_s, frozen=asked)
    begin, tried = time.monotonic(), list[Tried]()
    grouped = not isinstance(environment, Checkable) or environment.grouped
    for task in tasks:
        gold = golds[task.id]
        if isinstance(gold, Unscorable) and not without_gold and not own:
            continue
        replies = _replies(environment, task, gold, own)
        for batch in [replies] if grouped else [[reply] for reply in replies]:
            hopeless = len(tried) >= HOPELESS and all(isinstance(t.outcome, InfraError) for t in tried)
            if tried and (hopeless or time.monotonic() - begin > budget_s):
                break
            try:
                tried += await _try(episodes, task, batch)
            except _NotServed as error:
                return Check(environment.name, 0, [Line("gold", 0, None, 0, 0, 0, None, "not checked", str(error))])
    return Check(environment.name, len({t.task.id for t in tried}), _lines(tried, golds))


def _gold(environment: Environment, task: Task) -> Gold:
    if isinstance(environment, Checkable):
        return environment.gold(task)
    return Unscorable("the environment does not say what would be right: it has no method `gold`")


@dataclass(frozen=True, slots=True)
class _Reply:
    kind: str
    texts: list[str]  # one a turn; the last is repeated
    expect: Literal["pass", "fail"] = "fail"


def _replies(environment: Environment, task: Task, gold: Gold, own: Sequence[Own]) -> list[_Reply]:
    known = [] if isinstance(gold, Unscorable) else [gold] if isinstance(gold, str) else gold
    found = [_Reply("gold", known, "pass")] if known else []
    texts = {"empty": "", **_garbage(task)}
    wrapped = _formatted(environment, task, texts["letters"])
    if wrapped is not None and wrapped != texts["letters"]:
        texts["formatted"] = wrapped
    found += [_Reply(kind, [text]) for kind, text in texts.items() if [text.strip()] != [k.strip() for k in known]]
    for number, each in enumerate(own, 1):
        if each.task not in ("", task.id):
            continue
        text = _formatted(environment, task, each.text) if each.formatted else each.text
        if text is None:
            raise ConfigError(f"answer {each.text!r:.60}: {environment.name} has no form for it; give the whole `reply`")
        found.append(_Reply(f"{OWN} {number}", [text], each.expect))
    return found


def _garbage(task: Task) -> dict[str, str]:
    """Replies that answer nothing, always the same for a task."""
    draw = Random(derive_seed("garbage", task.id))
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(4)]
    prompt = task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1]["content"])
    return {
        "letters": " ".join(words),
        "digits": "".join(draw.choices(string.digits, k=17)),
        "echo": prompt,
        "refusal": REFUSAL,
        "long": draw.randbytes(LONG).translate(SCRAMBLED).decode(),
    }


def _formatted(environment: Environment, task: Task, answer: str) -> str | None:
    """An answer in the form of a gold reply, if the environment derives that from `answer`, else None."""
    first, second, wanted = (
        _gold(environment, replace(task, data={**task.data, "answer": each})) for each in ("one", "two", answer)
    )
    return wanted if isinstance(wanted, str) and "answer" in task.data and first != second else None


async def _try(episodes: EpisodeSetup, task: Task, replies: Sequence[_Reply]) -> list[Tried]:
    """Play and judge these replies as one group, or each by itself if the group fails as a whole."""
    begin = time.monotonic()
    scripts = [cast(Sampler, _Script(reply.texts, episodes.tokenizer)) for reply in replies]  # never asked for scores
    attempts = [
        await episodes.play(task, script, f"check/{reply.kind}", lambda turn: turn)
        for reply, script in zip(replies, scripts, strict=True)
    ]
    await episodes.judge(task, attempts)
    seconds = time.monotonic() - begin
    ends = [rows[-1] for rows in attempts]
    if len(replies) > 1 and all(isinstance(end.outcome, InfraError) for end in ends):
        return [tried for reply in replies for tried in await _try(episodes, task, [reply])]
    shown = [clip(" | ".join(reply.texts), 60) for reply in replies]
    return [
        Tried(task, reply.kind, text, end.outcome or Unscorable("no outcome"), seconds, reply.expect)
        for reply, text, end in zip(replies, shown, ends, strict=True)
    ]


class _NotServed(Exception):
    """An episode asked a frozen policy."""


class _Script:
    """An engine that says written replies, one a turn, and repeats the last."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer, self._turn = texts, tokenizer, 0

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.policy != "policy":
            raise _NotServed(f"its episodes ask the policy {request.policy!r}, which nothing serves before a run")
        text = self._texts[min(self._turn, len(self._texts) - 1)]
        self._turn += 1
        text = text.encode(errors="replace").decode()  # no policy can say half a surrogate pair
        said = np.array([*self._tokenizer.encode(text), self._tokenizer.eos_token_id], np.int32)
        nothing, finish = np.zeros(len(said), np.float32), Finish.STOP if self._turn < MOST_TURNS else Finish.CONTEXT
        versions = np.zeros(len(said), np.int32)
        return Completion(said, nothing, versions, (Version(0),), finish, prompt_tokens=len(request.tokens))

    async def abort(self, key: str) -> None:
        return None


def _lines(tried: Sequence[Tried], golds: dict[str, Gold]) -> list[Line]:
    reasons = [gold.reason for gold in golds.values() if isinstance(gold, Unscorable)]
    unknown = f"no gold reply is known: {reasons[0]}" if len(reasons) == len(golds) and reasons else ""
    lines = [] if any(t.kind == "gold" for t in tried) else [Line("gold", 0, None, 0, 0, 0, None, "not checked", unknown)]
    repeated = Counter(str(golds[id_]) for id_ in {t.task.id for t in tried} if not isinstance(golds[id_], Unscorable))
    chance = max(repeated.values()) / repeated.total() if repeated else 0.0
    for kind in dict.fromkeys(t.kind for t in tried):
        those = [t for t in tried if t.kind == kind]
        known = [t for t in those if kind.startswith(OWN) or not isinstance(golds[t.task.id], Unscorable)]
        verdict, why = _verdict(kind, known, chance) if known else ("not checked", unknown)
        scores = [t.outcome.value for t in those if isinstance(t.outcome, Score)]
        mean, passed = sum(scores) / len(scores) if scores else None, sum(score >= SOLVED for score in scores)
        kinds, slowest = Counter(type(t.outcome) for t in those), max(t.seconds for t in those)
        failed = kinds[Unscorable], kinds[InfraError]
        lines.append(Line(kind, len(those), mean, passed, *failed, slowest, verdict, why))
    return lines


def _verdict(kind: str, tried: Sequence[Tried], chance: float) -> tuple[Verdict, str]:
    scored = [(t, t.outcome.value) for t in tried if isinstance(t.outcome, Score)]
    if not scored:
        reason = next(t.outcome.reason for t in tried if not isinstance(t.outcome, Score))
        verdict: Verdict = "fails" if kind == "gold" else "not judged"
        return verdict, f"{_named(kind, len(tried))} could not be judged: {reason}"
    passed = [(t, value) for t, value in scored if value >= SOLVED]
    short = [(t, value) for t, value in scored if value < SOLVED]
    share = len(passed) / len(scored)
    if tried[0].expect == "pass":
        bad, allowed = short, WRONG if kind == "gold" else 0.0
        if 1 - share <= allowed:
            return "ok", ""
        said, verdict = "score less than 1", "fails"
    else:
        own = kind.startswith(OWN)
        beyond = chance + 2 * sqrt(chance * (1 - chance) / len(scored))
        if not passed or (not own and share < 1 and share <= beyond):
            return "ok", ""
        bad, said, verdict = passed, "earn the full score", "passes"
    example, value = bad[0]
    return verdict, (
        f"{len(bad)} of {_named(kind, len(scored))} {said}, such as {example.reply!r} to {named(example.task.id)}: {value:g}"
    )


def _named(kind: str, n: int) -> str:
    return amount(n, f"{kind} reply")
