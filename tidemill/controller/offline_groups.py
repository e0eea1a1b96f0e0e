"""Groups built from the replies that a task holds, for learning without sampling.

    answers  `completion`, or `messages` (a conversation), or `answer`    one attempt, of score 1
    pairs    `chosen` and `rejected`                                     two, of score 1 and 0
    labels   `completion` and `label` (true or false)                    one, of score 1 or 0

They pass through the same controller, buffer, ledger and trainer as sampled groups. A completion, chosen or rejected one is
a text, or the messages that follow the prompt; the assistant's messages are learnt.

Provenance stays true (I7): no token is marked as sampled, so none has a logprob or a version. `Trajectory.given` marks the
learnt tokens: a reply's, and the end of its turn. I1 and I2 do not apply to such a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tidemill.algorithms.token_rows import POLICY
from tidemill.core.errors import ConfigError
from tidemill.core.interfaces import Algorithm, Trainer
from tidemill.core.task_places import named
from tidemill.core.types import Array, Finish, Group, Metrics, Sample, Score, Task, Trajectory
from tidemill.models.chat_template import Message, Messages, Turn, as_messages, is_message, text_of
from tidemill.models.conversations import conversation, too_long, unknown_token
from tidemill.models.tokenizer import Tokenizer

# metrics of `prepare` that are reported for held-out rows
FIGURES = ("preference_loss", "preference_accuracy", "margin", "kto_baseline")
ROWS = 256  # rows in one forward pass over held-out rows, to bound its length

Reply = tuple[list[Turn], float]  # a conversation, and its score


class OfflineRoller:
    """`interfaces.Roller` that turns a task's own replies into its group."""

    def __init__(self, kind: str, tokenizer: Tokenizer) -> None:
        """Make groups of one kind. kind: `AlgorithmSettings.given`, so answers, pairs or labels."""
        self._kind, self._tokenizer = kind, tokenizer

    async def rollout(self, group_id: int, task: Task) -> Group:
        found = enumerate(replies(self._kind, task))
        return Group(group_id, task, [_trajectory(self._tokenizer, turns, score, i) for i, (turns, score) in found])


class HeldOut:
    """Metrics of held-out tasks from the trainer's forward passes alone, without any gradient."""

    def __init__(self, trainer: Trainer, algorithm: Algorithm, roller: OfflineRoller) -> None:
        self._trainer, self._algorithm, self._roller = trainer, algorithm, roller

    async def __call__(self, tasks: Sequence[Task]) -> Metrics:
        """Metrics of the trainer's present weights.

        For answers the `loss` a token; for pairs and labels those of FIGURES that the algorithm reports.
        """
        groups = [await self._roller.rollout(number, task) for number, task in enumerate(tasks)]
        rows = self._algorithm.rows(groups, 0)
        logprobs = {who: await self._forward(rows, who) for who in self._algorithm.asks or (POLICY,)}
        found = self._algorithm.prepare(groups, 0, rows, logprobs).metrics
        told = {name: found[name] for name in FIGURES if name in found}
        if not told:
            learnt = [values[row.predicted] for row, values in zip(rows, logprobs[POLICY], strict=True)]
            told["loss"] = -float(np.concatenate(learnt).mean(dtype=np.float64))
        return {"n": float(len(tasks)), **told}

    async def _forward(self, rows: Sequence[Sample], policy: str) -> list[Array]:
        parts = [await self._trainer.forward(list(rows[i : i + ROWS]), policy) for i in range(0, len(rows), ROWS)]
        return [values for part in parts for values in part]


def check_offline(kind: str, tasks: Sequence[Task], tokenizer: Tokenizer, context: int, vocab: int | None = None) -> int:
    """Check every task's replies, and return the length of the longest row in tokens.

    Raises ConfigError, which names the task, when one lacks a column, is refused by the chat template, has a row longer than
    `context` tokens, or ids that the model has no embedding for. vocab: the number of tokens that the model knows.
    """
    longest = 0
    for task in tasks:
        for turns, _ in replies(kind, task):
            try:
                tokens, _ = conversation(tokenizer, turns)
            except ValueError as error:
                raise ConfigError(f"the row of {_named(task)}: {error}") from None
            if len(tokens) > context:
                raise ConfigError(too_long(len(tokens), context, f"the row of {_named(task)}"))
            if vocab is not None and (unknown := unknown_token(tokens, tokenizer, vocab)):
                raise ConfigError(f"the row of {_named(task)} {unknown}")
            longest = max(longest, len(tokens))
    return longest


def replies(kind: str, task: Task) -> list[Reply]:
    """The task's own replies with their scores, in the order of the samples of its group.

    Raises ConfigError for a missing column.
    """
    match kind:
        case "answers":
            return [(_answer(task), 1.0)]
        case "pairs":
            return [(_reply(task, column), score) for column, score in (("chosen", 1.0), ("rejected", 0.0))]
        case "labels":
            if not isinstance(label := task.data.get("label"), bool):
                raise ConfigError(f"{_named(task)} has label = {label!r:.40}: expected a column `label`, true or false")
            return [(_reply(task, "completion"), float(label))]
    raise AssertionError(kind)


def _answer(task: Task) -> list[Turn]:
    if "completion" in task.data:
        return _reply(task, "completion")
    if "messages" in task.data:
        return list(_turns(task, task.data["messages"], "messages"))
    if "answer" not in task.data and isinstance(task.prompt, list):  # the column of the prompt is the whole conversation
        return list(_turns(task, task.prompt, "messages"))
    return _reply(task, "answer")


def _reply(task: Task, column: str) -> list[Turn]:
    """The turns that follow the prompt: a text, or messages of which the assistant's are learnt."""
    found = task.data.get(column)
    if isinstance(found, str):
        return [(as_messages(task.prompt), found)]
    if isinstance(found, list) and column != "answer":
        return list(_turns(task, found, column, as_messages(task.prompt)))
    has = f"{column} = {found!r:.40}" if column in task.data else f"the columns {', '.join(task.data) or 'none'}"
    raise ConfigError(f"{_named(task)} has {has}: expected a column `{column}` with a text")


def _turns(task: Task, messages: Sequence[Mapping[str, Any]], column: str, before: Sequence[Message] = ()) -> Iterator[Turn]:
    """Each message of the assistant, with the messages since its previous one.

    before: messages that come first and are not learnt. Raises ConfigError for messages that cannot be learnt.
    """
    heard: Messages = list(before)
    try:
        said = as_messages(messages) if isinstance(messages, str) else [dict(message) for message in messages]
    except (ValueError, TypeError):
        said = []
    if not said or not all("role" in m and ("content" in m or "tool_calls" in m) for m in said):
        raise ConfigError(f"{_named(task)} has {column} = {messages!r:.60}: expected messages with role and content")
    for number, message in enumerate(said):
        if not is_message(message):
            has = f"the role {message['role']!r:.40} and the content {message.get('content')!r:.40}"
            raise ConfigError(f"{_named(task)}: message {number} has {has}: expected texts, or a list of parts as content")
        if message["role"] != "assistant":
            heard.append(message)
        elif not heard:
            raise ConfigError(
                f"{_named(task)}: message {number} is the assistant's and answers none: expected one before it"
            )
        else:
            only_text = message.keys() == {"role", "content"} and isinstance(message["content"], str)
            yield heard, message["content"] if only_text else message
            heard = []
    if heard:
        raise ConfigError(
            f"{_named(task)}: the last message is the {heard[-1]['role']}'s: expected the assistant's, to learn"
        )


def _trajectory(tokenizer: Tokenizer, turns: Sequence[Turn], score: float, sample: int) -> Trajectory:
    tokens, learnt = conversation(tokenizer, turns)
    last = turns[-1][1]
    return Trajectory(
        tokens=tokens,
        mask=np.zeros(len(tokens), np.bool_),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        finish=Finish.GIVEN,
        outcome=Score(score),
        sample=sample,
        turns=len(turns),
        text=last if isinstance(last, str) else text_of(last),
        given=learnt,
    )


def _named(task: Task) -> str:
    return f"{named(task.id)} ({str(task.prompt)!r:.40})"
