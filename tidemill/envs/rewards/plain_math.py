"""Converts LaTeX and Unicode mathematics to the plain text that `arithmetic` reads.

There is one way left to write a minus, a product, a fraction, a degree or a currency. Words within `\\text{...}` are put
between « and ». Every step takes time in proportion to the text.
"""

from __future__ import annotations

import re
import unicodedata

SPACE = "\u00a0"  # between digits of a number, where LaTeX and typographers put thin spaces
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣－", "-"),
        **dict.fromkeys("×·⋅∙∗✕", "*"),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("≈≃≅≡→⇒⟹∴", "="),
        **dict.fromkeys("\u2009\u202f\u2007\u2008\u200a", SPACE),
        **dict.fromkeys("\u200b\u200e\u200f\u2060\ufeff", ""),
        **{"—": " — ", "√": "\\sqrt ", "〈": "(", "〉": ")", "º": "°", "˚": "°", "’": "'", "ˆ": "^", "«": '"', "»": '"'},
    }
)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ", "0123456789+-=()n", strict=True))
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_OTHER = re.compile(r"[^\x00-\x7f]")
_TAG = re.compile(r"<\|[^<>|]{0,40}\|>|</?[A-Za-z][A-Za-z0-9_]*(?:\s[^<>]{0,200})?/?>")
_STYLED = re.compile(r"\\(?:text|math|emph|mbox|hbox|operatorname)(?:bf|it|rm|sf|tt|normal|md|up|sc)?\s*\*?\{([^{}]*)\}")
_FRACTION = re.compile(r"\\(?:[dtc]frac|nicefrac|sfrac|xfrac)(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*(?:\{\s*)?(?:\\circ|\\degree|°)(?:\s*\})?|\\degree(?![a-zA-Z])|°")
_SEPARATED = re.compile(r"(?<=\d)(?:\{,\}|,\\!\s?|\\!,)(?=\d)")
_THIN = re.compile(r"\\,|\\ |~|\{\\,\}")
_POWER = re.compile(r"(?<=[\d)}])\*\*(?=[-\d(])")
_BOLD = re.compile(r"\*\*|__")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt(?![A-Za-z])")
_CURRENCY = (
    r"(?:US|CA|AU|HK|[ACS])?\\?\$|[£€¥₹₩₽]|\\(?:pounds|euro|yen)(?![a-zA-Z])"
    r"|(?:USD|EUR|GBP|INR|JPY|CHF|CNY|Rs\.?)(?=\s?[-\d])"
)
_SIGNED_CURRENCY = re.compile(rf"([-+])\s?(?:{_CURRENCY})\s?(?=[\d.])")
_ANY_CURRENCY = re.compile(_CURRENCY)
_COMMANDS = {
    **dict.fromkeys(("cdot", "times", "ast"), "*"),
    **dict.fromkeys(("approx", "Rightarrow", "rightarrow", "Longrightarrow", "to", "implies", "therefore", "equiv"), "="),
    **dict.fromkeys(("left", "right", "big", "Big", "bigl", "bigr", "displaystyle", "limits", "boldsymbol"), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace", "hfill", "dots", "ldots"), " "),
    **{"div": "/", "pi": "π", "pm": "±", "mp": "±", "infty": "∞", "in": "∈", "cup": "∪", "le": "≤", "leq": "≤", "ge": "≥"},
    **{"geq": "≥", "ne": "≠", "neq": "≠", "lt": "<", "gt": ">", "lbrace": "⦃", "rbrace": "⦄", "mid": "|", "vert": "|"},
    **{"percent": "%", "lvert": "|", "rvert": "|", "lbrack": "[", "rbrack": "]", "ldotp": "."},
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_ESCAPED = {"%": "%", "{": "⦃", "}": "⦄", "!": "", "#": "#", "&": "&", "_": "_", "\\": "\n", "|": "|"}
_ESCAPE = re.compile(r"\\([^a-zA-Z])", re.DOTALL)


def plain(text: str) -> str:
    """Convert a text to the plain form (see the module)."""
    text = _characters(text.translate(_CHARACTERS))
    text = _BOLD.sub(" ", _POWER.sub("^", _TAG.sub(" ", text)))
    text = _PI.sub("π ", _ROOT.sub(r"\\sqrt ", text))
    text = _SEPARATED.sub(",", _FRACTION.sub(r"\\frac", _DEGREES.sub("°", text)))
    text = _THIN.sub(SPACE, text)
    for _ in range(3):  # depth to which styles are nested
        text = _STYLED.sub(_styled, text)
    text = _ANY_CURRENCY.sub(" ", _SIGNED_CURRENCY.sub(r" \1", text))
    text = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], " "), text)
    text = _COMMAND.sub(_command, text)
    return text.replace("^°", "°").replace("^{°}", "°")


def _styled(found: re.Match[str]) -> str:
    inner = found[1]
    if any(each.isdigit() for each in inner):
        return f" {inner} "
    return f"«{inner}»" if inner.strip() else " "


def _command(found: re.Match[str]) -> str:
    name = found[1]
    if name == "circ":
        return "°"
    said = _COMMANDS.get(name)
    return found[0] if said is None else said if said in ("", " ") or len(said) > 1 else f"{said} " if said == "π" else said


def _characters(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda found: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, found[0])) + "}", text)
    return _OTHER.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    """A character in ASCII if it is a digit of any script, full-width, or a one-character fraction."""
    given = found[0]
    if given.isdecimal():
        return str(unicodedata.decimal(given))
    usual = unicodedata.normalize("NFKC", given)
    if "⁄" in usual:
        return f" {usual.replace('⁄', '/')} "
    return usual if usual.isascii() and len(usual) == 1 and unicodedata.east_asian_width(given) == "F" else given
