"""Schemas of functions are those of transformers, and what is missing is said in one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from tidemill.core.errors import ConfigError
from tidemill.tools.function_schema import function_schema


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number,
            which may be negative.

    Returns:
        Their sum.
    """
    return a + b


def search(query: str, limit: int | None = None, where: Literal["web", "books"] = "web") -> list[str]:
    """Search for a text.

    It looks in many places,
    one after the other.

    Args:
        query: What is looked for: words, or a phrase.
        limit: Most results.
        where: Where to look
    """
    return []


def everything(
    numbers: list[float],
    table: dict[str, int],
    pair: tuple[int, str],
    either: int | str,
    several: Union[list[int], str],  # noqa: UP007
    colour: Colour,
    perhaps: Optional[Colour] = None,  # noqa: UP045
    plain: list = [],  # noqa: B006
    anything: Any = None,
    flag: bool = False,
    mixed: Literal[1, "two", None] = 1,
    nested: dict[str, list[dict[str, int]]] | None = None,
):
    """All types.

    Args:
        numbers: a
        table: b
        pair: c
        either: d
        several: e
        colour: f
        perhaps: g
        plain: h
        anything: i
        flag: j
        mixed: k
        nested: l

    Raises:
        ValueError: never
    """


def drink(beverage: str) -> None:
    """Drink a beverage.

    Args:
        beverage: The beverage to drink (choices: ["tea", "coffee"])

    Returns:
        nothing at all,
        really
    """


def now() -> float:
    """The time."""
    return 0.0


class Game:
    """A game."""

    def move(self, direction: Literal["left", "right"], steps: int = 1) -> str:
        """
        Move the player.

        Args:
            direction: Where to.
            steps: How far.

        Returns:
            What is seen there.
        """
        return direction * steps

    def other(self, thing: Colour) -> Colour:
        """Return it.

        Args:
            thing: Any colour."""
        return thing


@pytest.mark.parametrize("function", [add, search, everything, drink, now, Game().move, Game().other])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    assert function_schema(function, function.__name__) == get_json_schema(function)


def test_types_in_brackets_are_read() -> None:
    """Google's style has them, and transformers' function takes such an argument as not described."""

    def weigh(thing: str, grams: float = 1.0) -> None:
        """Weigh it.

        Arguments:
            thing (str): A thing.
            grams (float, optional): Its weight.
        """

    with pytest.raises(Exception, match="no description"):
        get_json_schema(weigh)
    properties = function_schema(weigh, "weigh")["function"]["parameters"]["properties"]
    assert {name: each["description"] for name, each in properties.items()} == {"thing": "A thing.", "grams": "Its weight."}


def undocumented(a: int) -> int:
    return a


def unhinted(a, b: int) -> int:
    """Add.

    Args:
        a: x
        b: y
    """
    return a + b


def undescribed(a: int, b: int) -> int:
    """Add.

    Args:
        a: x
    """
    return a + b


def unknown_type(a: bytes) -> int:
    """Add.

    Args:
        a: x
    """
    return len(a)


def many(*a: int) -> int:
    """Add.

    Args:
        a: x
    """
    return len(a)


def nameless(a: Nothing) -> int:  # noqa: F821  # pyright: ignore
    """Add.

    Args:
        a: x
    """
    return 0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (undocumented, "tool 't' has no docstring: say"),
        (unhinted, "argument 'a' has no type hint: expected int, float"),
        (undescribed, "does not describe argument 'b': add `b: ...` under `Args:`"),
        (unknown_type, "hint <class 'bytes'> has no JSON schema: expected int"),
        (many, r"takes \*a: .*given by name"),
        (nameless, "a type hint cannot be read .*Nothing.*define it at the top of the file"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(function: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        function_schema(function, "t")
    assert "\n" not in str(caught.value)


def test_a_worker_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from tidemill import tool, ToolSet\n"
        "def f(a: int) -> int:\n    '''F.\n\n    Args:\n        a: x\n    '''\n"
        "print(ToolSet([tool(f)]).schemas[0]['function']['name'], {'torch', 'transformers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "f set()"
