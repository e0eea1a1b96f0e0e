"""The scheduler of the fake SGLang server: requests that wait and run, pauses, aborts, and labels of weights.

It follows `managers/scheduler.py` and `utils/weight_versions.py` of SGLang 0.5.23: a change of the label notes how many
tokens each running request has, `in_place` leaves everything where it is, `retract` puts running requests back into the
queue without their KV, and an abort ends every request whose id begins with the given one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import torch
from engine.sglang.fake_model import FakeModel
from transformers import DynamicCache


@dataclass(eq=False)
class Row:
    """One request."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    key: str | None
    start: int  # of the prompt's logprobs; -1: none
    tops: int
    stream: bool
    outputs: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    given: list[list[Any]] = field(default_factory=list)  # logprobs of the prompt
    given_tops: list[Any] = field(default_factory=list)
    cache: DynamicCache | None = None
    cached: int = 0
    changes: list[tuple[str, int]] = field(default_factory=list)  # (label before, tokens then)
    sent: int = 0
    finish: dict[str, Any] | None = None
    queued: bool = True  # it waits, again after it was retracted
    told: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)

    def spans(self, label: str, visible: int) -> list[dict[str, Any]]:
        """`compute_weight_version_spans`, as far as `visible` tokens go."""
        found = list[dict[str, Any]]()
        for version, end in [*self.changes, (label, len(self.outputs))]:
            end = min(end, len(self.outputs))
            if found and end <= found[-1]["end"]:
                continue
            if found and version == found[-1]["version"]:
                found[-1]["end"] = end
                continue
            found.append({"version": version, "start": found[-1]["end"] if found else 0, "end": end})
        return [span | {"end": min(span["end"], visible)} for span in found if span["start"] in range(max(1, visible))]


class FakeScheduler:
    """Requests of one model."""

    def __init__(self, model: FakeModel, context: int, running: int, incremental: bool = True) -> None:
        self.model, self.context, self.most, self.incremental = model, context, running, incremental
        self.label, self.paused = "default", False
        self.hold_at: int | None = None  # tokens at which each request waits for the next pause or release
        self.rows = list[Row]()
        self.prefilled = 0
        self._noise = torch.Generator().manual_seed(0)  # one for all: a request's own seed changes nothing
        self._changed = asyncio.Event()

    def running(self) -> list[Row]:
        return [row for row in self.rows if not row.queued]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._changed.set()

    async def run(self) -> None:
        while True:
            if self.paused or all(map(self._held, self.rows[: self.most])):
                self._changed.clear()
                await self._changed.wait()
                continue
            for row in self.rows[: self.most]:
                if row in self.rows and not self.paused and not self._held(row):
                    self._step(row)
                await asyncio.sleep(0)

    def _held(self, row: Row) -> bool:
        return self.hold_at is not None and len(row.outputs) >= self.hold_at

    def release(self) -> None:
        self.hold_at = None
        self._changed.set()

    async def emptied(self) -> None:
        while self.rows:
            await asyncio.sleep(0)

    def pause(self, mode: str) -> None:
        self.paused, self.hold_at = True, None
        if mode == "abort":
            self.abort("", everything=True)
        for row in self.running() if mode == "retract" else ():
            row.queued, row.cache = True, None

    def resume(self) -> None:
        self.paused = False
        self._changed.set()

    def flush(self) -> bool:
        """Forget all KV; False if a request holds some."""
        if self.running():
            return False
        self.model.flush()
        return True

    def relabel(self, label: str | None) -> None:
        if label is None or label == self.label:
            return
        for row in self.rows:
            if row.outputs:
                row.changes.append((self.label, len(row.outputs)))
        self.label = label

    def abort(self, rid: str, everything: bool = False) -> None:
        for row in [row for row in self.rows if everything or row.rid.startswith(rid)]:
            row.finish = {"type": "abort", "message": "Abort in waiting queue" if row.queued else "Aborted"}
            if not row.queued:
                row.finish |= {"status_code": None, "err_type": None}
            self._tell(row)

    def _step(self, row: Row) -> None:
        tokens = [*row.prompt, *row.outputs]
        if row.cache is None:
            whole = row.start >= 0
            logits, row.cache, cached = self.model.begin(tokens, row.key, whole)
            row.cached, row.queued = row.cached or cached, False
            self.prefilled += len(tokens) - cached
            if whole and not row.given:
                self._score(row, logits)
        else:
            logits = self.model.forward(tokens[-1:], row.cache)
        self._sample(row, logits[-1])
        if row.finish or len(row.outputs) - row.sent >= row.params.get("stream_interval", 1) or not row.sent:
            self._tell(row)

    def _score(self, row: Row, logits: torch.Tensor) -> None:
        known = torch.log_softmax(logits, -1)
        named = [token if token < self.model.vocab - 1 else 0 for token in row.prompt]  # as SGLang 0.5.23 does
        row.given, row.given_tops = [[None, named[0], None]], [None]
        for t, token in enumerate(row.prompt[1:]):
            row.given.append([float(known[t, token]), named[t + 1], None])
            best = known[t].topk(row.tops)
            row.given_tops.append([[float(p), int(i), None] for p, i in zip(best.values, best.indices, strict=True)])

    def _sample(self, row: Row, logits: torch.Tensor) -> None:
        warm = row.params.get("temperature", 1.0)
        known = torch.log_softmax(logits / (warm if warm >= 1e-6 else 1.0), -1)
        token = int(known.argmax() if warm < 1e-6 else torch.multinomial(known.exp(), 1, generator=self._noise))
        row.outputs.append(token)
        row.logprobs.append([float(known[token]), token, None])
        # `_check_token_based_finish`: ignore_eos ignores stop_token_ids, too
        ends = set[int]() if row.params.get("ignore_eos") else {*row.params.get("stop_token_ids", ())} | self.model.eos
        most = min(row.params.get("max_new_tokens", 128), self.context - len(row.prompt) - 2)
        if token in ends:
            row.finish = {"type": "stop", "matched": token}
        elif len(row.outputs) >= most:
            row.finish = {"type": "length", "length": len(row.outputs)}

    def _tell(self, row: Row) -> None:
        """Put an event into the row's queue, as `TokenizerManager._handle_batch_output` and `_handle_abort_req` make it."""
        if row.finish:
            self.rows.remove(row)
            if row.cache is not None:
                self.model.remember([*row.prompt, *row.outputs[:-1]], row.key, row.cache)
        elif not row.stream:
            return
        in_queue, incremental = bool(row.finish and row.queued), self.incremental and row.stream
        # The scheduler says only that a request left the queue, so the reply ends with what was sent before, in whole,
        # and its last token is there again.
        told = row.outputs[: row.sent if in_queue else None]
        at = row.sent if incremental else 0
        ids = told[-1:] if in_queue and incremental else told[at:]
        row.sent = len(told)
        meta: dict[str, Any] = {
            "id": row.rid,
            "finish_reason": row.finish,
            "prompt_tokens": len(row.prompt),
            "weight_version": self.label,
            "completion_tokens": len(told),
            "input_token_logprobs": row.given,
            "output_token_logprobs": row.logprobs[0 if in_queue else at : len(told)],
        }
        meta |= {} if in_queue else {"cached_tokens": row.cached}
        meta |= {"input_top_logprobs": row.given_tops} if row.tops else {}
        meta |= {"weight_versions": row.spans(self.label, len(told))} if row.finish else {}
        row.told.put_nowait({"output_ids": list(ids), "meta_info": meta})
