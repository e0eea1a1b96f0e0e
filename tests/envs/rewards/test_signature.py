from __future__ import annotations

import math

import numpy as np
import pytest

from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object, reference_of
from tidemill.core.outcomes import outcome_of, outcomes_of
from tidemill.core.types import InfraError, Score, Task, Unscorable
from tidemill.envs.rewards.signature import group_values, signature_of, single_values

TASK = Task("t", "2+2=", {"answer": "4", "level": 3})
CHAT = Task("t", [{"role": "user", "content": "2+2="}], {"answer": "4"})


def test_an_attempt_is_filled_by_name():
    def score(completion, answer, *, level=0, unknown=7): ...

    signature = signature_of(score, "score")
    signature.check({"answer"})
    assert not signature.group
    assert signature.pick(single_values(TASK, "5")) == {"completion": "5", "answer": "4", "level": 3}


def test_an_attempt_may_ask_for_everything():
    def score(completion, task, **columns): ...

    values = signature_of(score, "score").pick(single_values(TASK, "5"))
    assert values["task"] == {"id": "t", "prompt": "2+2=", "data": TASK.data}
    assert {"answer", "level", "prompt"} <= set(values)


def test_a_group_is_filled_as_trl_does():
    def score(completions, answer, **kwargs): ...

    signature = signature_of(score, "score")
    values = signature.pick(group_values(TASK, ["5", "4"], [[1], [2, 3]]))
    assert signature.group
    assert values == {
        "completions": ["5", "4"],
        "prompts": ["2+2=", "2+2="],
        "completion_ids": [[1], [2, 3]],
        "answer": ["4", "4"],
        "level": [3, 3],
    }


def test_a_conversational_group_is_filled_as_trl_does():
    def score(prompts, completions): ...

    values = signature_of(score, "score").pick(group_values(CHAT, ["5"], [[1]]))
    assert values == {"completions": [[{"role": "assistant", "content": "5"}]], "prompts": [CHAT.prompt]}


def test_a_column_cannot_hide_the_completion():
    assert single_values(Task("t", "p", {"completion": "gold"}), "said")["completion"] == "said"
    assert group_values(Task("t", "p", {"completions": "gold"}), ["said"], [[1]])["completions"] == ["said"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text, answer: 1, "expected a parameter `completion`"),
        (lambda completion, /, answer: 1, "positional-only"),
        (3, "expected a function"),
    ],
)
def test_a_form_that_is_neither_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        signature_of(function, "mine")


def test_a_parameter_that_nothing_fills_is_refused():
    def score(completion, solution): ...

    with pytest.raises(ConfigError, match=r"needs 'solution', which no task has \(columns: answer, level\)"):
        signature_of(score, "score").check(TASK.data)


def test_async_is_seen_in_functions_and_in_callables():
    async def score(completion): ...

    class Client:
        async def __call__(self, completions, **kwargs): ...

    assert signature_of(score, "score").awaits
    assert signature_of(Client(), "client").awaits
    assert not signature_of(lambda completion: 1.0, "plain").awaits


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.array(0.5), np.array([0.5]).sum()])
def test_numbers_are_scores(value):
    assert outcome_of(value, "r") == Score(float(value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", b"1", [1.0], {}, 1j, np.ones(2), 10**400, object])
def test_anything_else_is_an_infra_error(value):
    assert isinstance(outcome_of(value, "r"), InfraError)


def test_none_and_outcomes():
    assert isinstance(outcome_of(None, "r"), Unscorable)
    assert outcome_of(InfraError("x"), "r") == InfraError("x")
    assert outcomes_of(np.array([1.0, np.nan]), "r", 2)[0] == Score(1.0)
    assert [type(o) for o in outcomes_of([1.0, None, "x"], "r", 3)] == [Score, Unscorable, InfraError]
    assert [type(o) for o in outcomes_of("12", "r", 2)] == [InfraError, InfraError]
    assert [type(o) for o in outcomes_of([1.0], "r", 2)] == [InfraError, InfraError]


def top_level(completion):
    return 1.0


def test_loading(tmp_path):
    file = tmp_path / "mine.py"
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 3\n")
    file.write_text("from helper_of_mine import VALUE\ndef score(completion): return VALUE\n")
    score = load_object(f"{file}:score")
    assert score("x") == 3
    assert load_object(f"{file}:score") is score
    assert load_object(reference_of(score)) is score
    assert load_object(reference_of(top_level)) is top_level
    with pytest.raises(ValueError, match="lambda or is defined inside a function"):
        reference_of(lambda completion: 1.0)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent.py:score", "does not exist"),
        ("math", "expected FILE.py:NAME"),
        ("math:sqr", "did you mean 'sqrt'"),
        ("no_such_module:x", "does not import"),
    ],
)
def test_loading_says_what_is_wrong(reference, message):
    with pytest.raises(ConfigError, match=message):
        load_object(reference)


def test_a_file_that_does_not_import(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_thing\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not import: ModuleNotFoundError"):
            load_object(f"{file}:score")
