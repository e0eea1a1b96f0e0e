"""`tidemill samples RUN`: replies of the policy, also of a live run."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tidemill.cli.commands.conversation import COLOURS, Segment, answer_row, facts_of, plain, rows_of, segments, text_of
from tidemill.cli.commands.run_state import state_of
from tidemill.cli.commands.screen import INDENT, Row, console, print_json, print_rows
from tidemill.core.errors import ConfigError, PayloadLost
from tidemill.core.types import Finish, Trajectory
from tidemill.ledger.ledger import SqliteLedger
from tidemill.ledger.queries import Order
from tidemill.ledger.records import SampleRow
from tidemill.models.tokenizer import Tokenizer
from tidemill.observability.safe_text import visible
from tidemill.run.storage.run_folder import RunFolder

LIMIT = 10  # trajectories, unless a number is given
LIKELY, UNLIKELY = (math.log(0.5), math.log(0.1))  # logprobs above which a token is likely, and below which it is a surprise


def samples(run: Path, step: int | None, worst: int | None, best: int | None, tokens: bool, as_json: bool) -> int:
    """Show samples. Returns 0. Raises ConfigError if there is nothing to show."""
    order, limit = _choice(worst, best)
    if step is not None and step < 1:
        raise ConfigError(f"--step {step}: steps are counted from 1, as the progress display counts them")
    folder = RunFolder.existing(run)
    with SqliteLedger(run, mode="read") as record:
        at = None if step is None else step - 1
        rows, note = record.samples(at, order, limit), ""
        if not rows and order != "recent" and (rows := record.samples(at, "recent", limit)):
            note = f"none has a score, so that --{order} cannot rank them: these are the latest, with what went wrong"
        if not rows:
            raise ConfigError(_nothing(record, folder, step))
        payloads = [_payload(record, row) for row in rows]
    tokenizer = tokenizer_of(folder) if tokens else None
    reader = cache(partial(_reader, folder))  # loaded only for payloads without messages
    if as_json:
        found = zip(rows, payloads, strict=True)
        print_json([_plain(row, payload, tokenizer) | plain(payload, reader) for row, payload in found])
        return 0
    screen = console()
    if note:
        screen.print(Text(note, "bold red"), soft_wrap=True)
    for row, payload in zip(rows, payloads, strict=True):
        for number, line in enumerate(_title(row, payload).wrap(screen, screen.width - INDENT)):
            line.rstrip()
            screen.print(Text(" " * INDENT if number else "") + line, soft_wrap=True)
        if payload is not None and tokenizer is not None:
            shown = [*_token_rows(payload, tokenizer, screen), *answer_row(row)]
        else:
            shown = [*rows_of(row, payload, reader), *_lost(row, payload)]
        print_rows(screen, [*shown, *facts_of(payload), *_later(row)])
        screen.print()
    if not tokens:
        screen.print(Text("  --tokens shows each token with the version and the logprob it was sampled with", "dim"))
    return 0


def _payload(record: SqliteLedger, row: SampleRow) -> Trajectory | None:
    """The trajectory of a sample; None if it cannot be read any more, though its row remains."""
    try:
        return record.load_trajectory(row.group_id, row.place)
    except PayloadLost:
        return None


def _choice(worst: int | None, best: int | None) -> tuple[Order, int]:
    if worst is not None and best is not None:
        raise ConfigError("--worst and --best were both given: choose one")
    limit = worst if worst is not None else best
    if limit is not None and limit < 1:
        raise ConfigError(f"--{'worst' if worst is not None else 'best'} {limit}: expected how many to show, at least 1")
    order: Order = "worst" if worst is not None else "best" if best is not None else "recent"
    return order, limit or LIMIT


def _nothing(record: SqliteLedger, folder: RunFolder, step: int | None) -> str:
    last, run, state = record.last_step(), folder.path, state_of(folder)
    now = "" if state.name == "complete" else f"; {state.what_to_do()}"
    if step is not None and (last is None or step > last + 1):
        known = "none was begun yet" if last is None else f"it has steps 1 to {last + 1}"
        return f"{run} has no step {step}: {known}{now}"
    where = f"step {step} of {run}" if step is not None else str(run)
    return f"{where} has no trajectories: none of its groups was finished{now}"


def tokenizer_of(folder: RunFolder) -> Tokenizer:
    """The tokenizer of a run. Raises ConfigError if the run has none."""
    if not folder.initial.is_dir():
        raise ConfigError(f"{folder.initial} does not exist: the tokens cannot be read without the run's tokenizer")

    from tidemill.models.tokenizer import load_tokenizer

    return load_tokenizer(folder.initial)


def _reader(folder: RunFolder) -> Tokenizer | None:
    return tokenizer_of(folder) if folder.initial.is_dir() else None


def _title(row: SampleRow, payload: Trajectory | None) -> Text:
    fate = f"step {row.step + 1}" if row.step is not None else f"dropped: {row.reason}" if row.fate else "pending"
    facts = [
        f"sample {row.group_id}.{row.place}",
        row.finish,
        f"{row.sampled} of {row.tokens} tokens sampled" if row.finish != Finish.GIVEN else f"{row.tokens} tokens",
        _weights(row),
    ]
    if payload is not None and payload.parent is not None:
        facts.append("branch of row {} at token {}".format(*payload.parent))
    if row.mean_logprob is not None:
        facts.append(f"mean logprob {row.mean_logprob:.2f}")
    if payload is not None and payload.temperature != 1:
        facts.append(f"temperature {payload.temperature:g}")
    return Text.assemble((fate, "bold"), "  ", _reward(row), ("  " + " · ".join(f for f in facts if f), "dim"))


def _reward(row: SampleRow) -> Text:
    if row.finish == Finish.GIVEN and row.reward is not None:
        return Text("to be learnt", "bold green") if row.reward > 0.5 else Text("to be avoided", "bold yellow")
    if not row.ends:
        return Text(f"a row of attempt {row.sample}")
    if row.outcome is None:
        return Text("not judged", "bold red")
    return judged_text(row.outcome, row.reward, row.outcome_reason)


def judged_text(outcome: str, reward: float | None, reason: str | None) -> Text:
    """An outcome in a few words: "reward 0.50", or "unscorable: no gold answer"."""
    if reward is None:
        return Text(f"{outcome}: {visible(reason or '')}", "bold red")
    return Text(f"reward {reward:.2f}", "bold green" if reward > 0.5 else "bold yellow")


def _later(row: SampleRow) -> list[Row]:
    return [
        ("judged again", judged_text(j.outcome, j.reward, j.reason).append(f" by {visible(j.judge)}")) for j in row.later
    ]


def _weights(row: SampleRow) -> str:
    if row.oldest is None:
        return ""
    return f"v{row.oldest}" if row.oldest == row.newest else f"v{row.oldest} to v{row.newest}"


def _lost(row: SampleRow, payload: Trajectory | None) -> list[Row]:
    if payload is not None:
        return []
    why = "removed by retention" if row.gone else "unreadable, the file in trajectories/ is damaged or gone"
    return [("tokens", Text(f"{why}; this row of the index remains", "yellow"))]


def _token_rows(t: Trajectory, tokenizer: Tokenizer, screen: Console) -> list[Row]:
    """A row for each segment: text, or for sampled tokens cells of token, logprob and version."""
    width = screen.width - 2 - len("environment") - 2
    rows: list[Row] = []
    for segment in segments(t):
        colour = COLOURS[segment.provenance]
        if segment.provenance == "sampled":
            content = _cells(t, segment, tokenizer, width, colour)
        else:
            content = Text(visible(text_of(t, segment, tokenizer)), colour)
        rows.append((Text(segment.provenance, colour), content))
    return rows


def _cells(t: Trajectory, segment: Segment, tokenizer: Tokenizer, width: int, colour: str) -> Text:
    """Three lines for each row of cells: the tokens, their logprobs (nats), their versions."""
    lines = [Text(no_wrap=True) for _ in range(3)]
    out = Text(no_wrap=True)
    for position in range(segment.start, segment.stop):
        logprob = float(t.logprobs[position])
        cell = (
            (_token(tokenizer, int(t.tokens[position])), f"bold {colour}"),
            (f"{logprob:.2f}", _surprise(logprob)),
            (f"v{t.versions[position]}", "dim"),
        )
        size = max(cell_len(text) for text, _ in cell)
        if lines[0].cell_len and lines[0].cell_len + size > width:
            out.append(Text("\n").join(lines)).append("\n")
            lines = [Text(no_wrap=True) for _ in range(3)]
        for line, (text, style) in zip(lines, cell, strict=True):
            line.append(text, style).append(" " * (size - cell_len(text) + 1))
    return out.append(Text("\n").join(lines))


def _surprise(logprob: float) -> str:
    return "dim" if logprob >= LIKELY else "yellow" if logprob > UNLIKELY else "bold red"


def _token(tokenizer: Tokenizer, token: int) -> str:
    """One token made visible: a space is ␣, and a part of a character is its id."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return f"#{token}" if not text or "�" in text else visible(text).replace(" ", "␣")


def _plain(row: SampleRow, payload: Trajectory | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A sample as JSON data. Retention may have removed its tokens."""
    found = asdict(row)
    found |= {"step": None if row.step is None else row.step + 1, "text": row.text if payload is None else payload.text}
    found["n_tokens"], found["n_sampled"] = found.pop("tokens"), found.pop("sampled")
    if tokenizer is not None:
        found["tokens"] = None if payload is None else _plain_tokens(payload, tokenizer)
    return found


def _plain_tokens(t: Trajectory, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            "id": int(t.tokens[i]),
            "text": tokenizer.decode([int(t.tokens[i])], skip_special_tokens=False),
            "from": segment.provenance,
            "version": int(t.versions[i]) if t.mask[i] else None,
            "logprob": float(t.logprobs[i]) if t.mask[i] else None,
        }
        for segment in segments(t)
        for i in range(segment.start, segment.stop)
    ]
