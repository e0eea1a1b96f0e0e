"""Demo task without reasoning-gym: spell a word backward, with words made of random syllables."""

from __future__ import annotations

from random import Random

COUNT = 11_400  # words; a tenth is held out
# By length, the weight. Most words are long: with mostly short ones, half are soon solved and the long ones then never are.
LENGTHS = {3: 2, 4: 10, 5: 18, 6: 30, 7: 40}
_ONSETS = ["", *"bcdfghjklmnprstvwz"]
_ONSETS += ["bl", "br", "ch", "cl", "dr", "fl", "gr", "pl", "pr", "qu", "sh", "sl", "st", "th", "tr"]
_VOWELS = (*"aeiou", "ai", "ea", "ee", "oa", "oo", "ou")
_CODAS = ("", "", *"bdgklmnprstxy", "ck", "ft", "ll", "nd", "ng", "nt", "rd", "rm", "sh", "ss", "st")


def score(completion: str, answer: str) -> float:
    """1.0 for exactly the word backward, else 0.0."""
    return float(completion.strip() == answer)


def words(count: int) -> list[str]:
    """Make `count` distinct words of syllables, the same ones in every call with this count."""
    draw, found = Random(0), dict[str, None]()
    wanted = draw.choices(list(LENGTHS), list(LENGTHS.values()), k=count)
    for length in wanted:
        while len(word := _word(draw)) != length or word in found:
            pass
        found[word] = None
    return list(found)


def _word(draw: Random) -> str:
    syllables = draw.choice((1, 2, 2))
    return "".join(draw.choice(part) for _ in range(syllables) for part in (_ONSETS, _VOWELS, _CODAS))


def tasks(split: str) -> list[dict[str, str]]:
    """The tasks of a split; every tenth word is held out for "eval"."""
    made = [word for i, word in enumerate(words(COUNT)) if (i % 10 == 0) == (split == "eval")]
    return [{"prompt": f"Spell this word backward (example: sun -> nus): {word}", "answer": word[::-1]} for word in made]
