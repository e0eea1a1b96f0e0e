from __future__ import annotations

import inspect
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import ConfigError
from tidemill.core.import_object import load_object
from tidemill.envs.rewards import functions as f
from tidemill.envs.rewards.boxes import boxed, last_boxes
from tidemill.envs.rewards.named import NAMED, named_reward
from tidemill.envs.rewards.read_number import reading_of


def last_number(text: str) -> Fraction | None:
    value = reading_of(text).value
    return None if value is None else Fraction(value)


def test_exact():
    assert f.exact(" Paris\n", "Paris") == 1.0
    assert f.exact("paris.", "Paris") == 0.0
    assert f.exact("the  answer:\tPARIS.", "The answer: Paris", normalise=True) == 1.0
    assert f.exact("Lyon", "Paris", normalise=True) == 0.0
    assert f.exact("4", 4) == f.regex("=4", 4, pattern=r"=(\d)") == f.last_boxed(r"\boxed{4}", 4) == 1.0


def test_regex():
    assert f.regex("Answer: 3\nAnswer: 4", "4", pattern=r"Answer: (\d)") == 1.0
    assert f.regex("Answer: 3\nAnswer: 4", "3", pattern=r"Answer: (\d)") == 0.0
    assert f.regex("nothing", "", pattern=r"Answer: (\d)") == 0.0
    assert f.regex("x=YES", "yes", pattern="YES|NO", normalise=True) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 42.", 42),
        ("$1,234.50", Fraction("1234.5")),
        ("1,234,567 people", 1234567),
        ("1, 2, 3", None),
        ("12,3", None),
        ("-3/4", Fraction(-3, 4)),
        ("= −7", -7),
        ("5-3", None),
        ("5-3 = 2", 2),
        ("x-3", None),
        ("(-3)", -3),
        (".5", Fraction(1, 2)),
        ("6.02e23", Fraction("6.02e23")),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{ 4}", Fraction(-3, 4)),
        ("3/0", None),
        ("none", None),
        ("1e999999999", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_numeric():
    assert f.numeric("The total is 1,000.", "1000.0") == 1.0
    assert f.numeric("1000001", "1000000") == 0.0
    assert f.numeric("0.333", "1/3") == 0.0
    assert f.numeric("0.333", "1/3", tolerance=1e-3) == 1.0
    assert f.numeric("3", 3) == 1.0
    assert f.numeric("I do not know", "3") == 0.0
    assert f.numeric("3", "three") is None
    assert f.numeric("18", "16 - 3 - 4 = 9; 9 * 2 = 18\n#### 18") == 1.0


@given(st.integers(-(10**12), 10**12), st.integers(1, 999))
def test_numbers_are_read_as_they_are_written(top, bottom):
    assert last_number(f"it is {top:,}") == top
    assert last_number(f"it is {top}/{bottom} or so") == Fraction(top, bottom)
    assert last_number(rf"= \frac{{{top}}}{{{bottom}}}$") == Fraction(top, bottom)


@given(st.text(alphabet="0123456789,./-e \\frac{}", max_size=60))
def test_numbers_never_raise(text):
    last_number(text)


def test_a_long_completion_is_read_quickly():
    begun = time.process_time()
    for text in ("1," * 50_000, "9" * 100_000, "\\boxed{" * 20_000, "-" * 100_000, "1/" * 50_000):
        last_number(text)
        boxed(text)
    assert time.process_time() - begun < 2.0


def test_last_boxed():
    assert f.last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}") == 1.0
    assert f.last_boxed(r"\boxed{x + 1}", r"so \boxed{x+1}") == 1.0
    assert f.last_boxed(r"\boxed{2}", "1") == 0.0
    assert f.last_boxed("1", "1") == 0.0
    assert boxed(r"\boxed{1} \boxed{2") == "1"


def test_a_number_of_a_column_is_what_it_is():
    assert f.numeric("0.1", 0.1) == f.numeric("\\frac{1}{10}", 0.1) == f.numeric("-3", -3) == f.numeric("1.2", 1.200) == 1.0
    assert f.numeric("0.1000000000000001", 0.1) == 0.0
    assert f.numeric("5", float("inf")) is f.numeric("1", True) is None


def test_the_last_boxes():
    assert last_boxes(r"\boxed{1} then \boxed{\{2\}}")[0] == [r"\{2\}"]
    assert last_boxes(r"\boxed{\frac{1}{\{2}}, $\boxed{3}$ \text{ and } \fbox{4}.")[0] == [r"\frac{1}{\{2}", "3", "4"]
    assert last_boxes(r"\boxed{\boxed{5}}")[0] == ["5"] and last_boxes(r"\boxed 7")[0] == ["7"]
    assert last_boxes("no box") is last_boxes(r"\boxed{1") is None
    assert f.last_boxed(r"\boxed{2}, \boxed{1}", "1, 2") == 1.0  # the answers of one question
    assert f.last_boxed(r"\boxed{4}, \boxed{5}", "5") != 1.0  # a guess at two
    assert f.last_boxed(r"\boxed{4}. Wait. \boxed{5}", "5") == 1.0


def test_boxes_are_compared_by_value():
    for reply, answer, earned in [
        ("1+x", "x+1", 1.0),
        ("x-1", "x+1", 0.0),
        ("x", "|x|", 0.0),
        ("x", r"\sqrt{x^2}", 0.0),
        ("1200", "(1,200)", None),
        ("(2,1)", "(1,2)", 0.0),
        ("(0.5, 1)", r"\left(\frac12, 1\right)", 1.0),
        ("2, 1", "1,2", 1.0),
        ("B", "A", 0.0),
        ("random words", "17", 0.0),
        ("seventeen", "17", None),
        (r"\text{(A)}", "A", 1.0),
        ("0.1", "10\\%", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
    ]:
        assert f.last_boxed(f"\\boxed{{{reply}}}", answer) == earned, (reply, answer)


def test_what_a_word_means_is_not_guessed():
    for reply, answer, earned in [
        ("five", "5", None),
        ("the cost is 3 million", "3000000", 1.0),
        ("it takes 2 hours 30 minutes", "30", None),
        ("5 kg of CO2", "5", 1.0),
        ("the area is 12 m^2", "12", 1.0),
        ("4 out of 5", "5", None),
        ("$18 for 3 days", "18", None),
        ("5 cm", "5 m", None),
        ("25%", "25", 1.0),
        ("25", "25%", None),
        ("\\boxed{5} in 3 steps", "5", None),
        ("1.200", "1200", None),
        ("about 3 or 4", "7", 0.0),
        ("1200", "(1,200)", None),
        ("($500)", "500", None),
        ("(-3)", "-3", 1.0),
        ("|-5|", "5", None),
        ("x = 2 or x = 3", "3", None),
        ("five", "6", None),
    ]:
        assert f.numeric(reply, answer) == earned, (reply, answer)


def test_math():
    from tidemill.envs.rewards.math import score

    assert score(r"so the answer is $\boxed{\frac{2}{4}}$", "1/2") == 1.0
    assert score(r"$x = 0.5$", r"\frac{1}{2}") == 1.0
    assert score(r"\boxed{(x+1)^2}", "$x^2+2x+1$") == 1.0
    assert score(r"\boxed{7}", "8") == 0.0
    assert score("I give up", "8") == 0.0
    assert score(r"\boxed{7}", 7) == 1.0
    assert score(r"I get \boxed{4}. No: $2+3=5$, so \boxed{5}.", "5") == 1.0 and score(r"\boxed{4}, \boxed{5}", "4,5") == 1.0
    assert score(r"\boxed{1011}", "1011_2") is score(r"\boxed{25}", r"25\%") is None  # math-verify calls them equal
    assert score(r"\boxed{7}", "") is None


@pytest.mark.parametrize("name", NAMED)
def test_what_a_recipe_may_name_is_there_with_the_options_it_claims(name):
    reference, signature = named_reward(name)
    parameters = inspect.signature(load_object(reference)).parameters
    assert tuple(p for p in parameters if parameters[p].default is inspect.Parameter.empty) == signature.required
    assert tuple(p for p in parameters if parameters[p].default is not inspect.Parameter.empty) == signature.optional


def test_an_unknown_name_is_one_sentence():
    with pytest.raises(ConfigError, match="unknown reward 'numerc'; did you mean 'numeric'"):
        named_reward("numerc")
