"""Faults of replies held to a grammar, and of the supports that record what they were sampled from. See `faults`."""

from __future__ import annotations

from faults import Fault

GRAMMAR_FAULTS = [
    Fault(
        "a set that lacks ids is taken for the ids that it lists",
        "        out = (~lacks)[:, None].repeat(1, vocab)",
        "        out = torch.ones_like(lacks)[:, None].repeat(1, vocab)",
        "models/test_logprobs.py trainer/test_constrained_rows.py",
    ),
    Fault(
        "positions share the set of whatever came first",
        "        if (number := self._known.get(key)) is None:",
        "        if (number := next(iter(self._known.values()), None)) is None:",
        "core/test_sampling_support.py",
    ),
    Fault(
        "turns that are joined keep the numbers of their sets",
        "    numbers = [each.set_of_each + first for each, first in zip(known, sets, strict=False)]",
        "    numbers = [each.set_of_each for each in known]",
        "core/test_sampling_support.py",
    ),
    Fault(
        "a stop id may end a reply anywhere",
        "        self.kept[self._stops] = ends",
        "        self.kept[self._stops] = True",
        "engine/native/test_grammars.py",
    ),
    Fault(
        "drafts are made for replies that are held",
        " or rows.held[slot]:\n",
        ":\n",
        "engine/native/test_grammars.py",
    ),
    Fault(
        "the support of a reply under a grammar and top-p is the grammar's",
        "    if request.record is not None and i in sampled.supports:",
        "    if request.record is not None and i in sampled.supports and request.held is None:",
        "engine/native/test_grammars.py",
    ),
    Fault(
        "a reply that gets stuck samples on without its grammar",
        "            self._requests.refuse(request, error)",
        "            pass",
        "engine/native/test_grammars.py",
    ),
    Fault(
        "a schema may choose the options of its compiler",
        '    options = {"x-guidance": _OPTIONS}',
        '    options = {} if isinstance(schema, dict) and "x-guidance" in schema else {"x-guidance": _OPTIONS}',
        "engine/server/test_structured_replies.py",
    ),
    Fault(
        "open bounds of numbers are left to the library",
        "    _close_bounds(schema)\n",
        "",
        "engine/native/test_grammars.py",
    ),
]
