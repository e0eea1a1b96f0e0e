"""Faults of evaluations whose attempts have no score: who is told, and when the run ends. See `faults`."""

from __future__ import annotations

from faults import Fault

UNSCORED = "controller/test_unscored.py"

EVALUATION_FAULTS = [
    Fault(
        "a first evaluation without a score does not end the run",
        "        if self._first and (why := found.cause(self._first)) is not None:\n            raise RunFailed(why)\n",
        "",
        UNSCORED,
    ),
    Fault(
        "a verifier that has judged ends the run at its first disturbance",
        '            self._first = ""\n        self._tell(found)\n',
        "            pass\n        self._tell(found)\n",
        UNSCORED,
    ),
    Fault(
        "a model that does not end its replies is taken for a mistake",
        "isinstance(outcome, InfraError) and rows[-1].finish not in TRUNCATED",
        "isinstance(outcome, InfraError)",
        UNSCORED,
    ),
    Fault(
        "an attempt that its reply kept from a score is taken for a mistake",
        "        return not any(row.sampled for row in rows) and",
        "        return True and",
        UNSCORED,
    ),
    Fault(
        "an attempt that waits for its reply is taken for a mistake",
        " and not rows[-1].info.get(UNANSWERED)",
        "",
        UNSCORED,
    ),
    Fault(
        "an attempt without a score and without a reply is taken for the policy's doing",
        "        return not any(row.sampled for row in rows) and",
        "        return False and",
        UNSCORED,
    ),
    Fault(
        "a first evaluation plays every attempt, though none of the first can be judged",
        "            if index in scouts and ended.keys() >= scouts:\n",
        "            if False:\n",
        UNSCORED,
    ),
    Fault(
        "one attempt with a score does not save the run",
        "if self.attempts < PATIENCE or self.failed < self.attempts:",
        "if self.attempts < PATIENCE or not self.failed:",
        UNSCORED,
    ),
    Fault(
        "a warm-up repeats a reason at each measurement",
        "                told.add(reason)\n",
        "",
        UNSCORED,
    ),
    Fault(
        "the line of an evaluation keeps silent on attempts without a score",
        "paragraphs(said + missing, self._width",
        "paragraphs(said, self._width",
        "observability/test_display.py",
    ),
]
