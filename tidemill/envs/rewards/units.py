"""Words after a number: names of units, and words that scale it, such as million and percent."""

from __future__ import annotations

import re
from fractions import Fraction

SCALES = {
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **{"lakh": 10**5, "lakhs": 10**5, "crore": 10**7, "crores": 10**7, "millions": 10**6, "billions": 10**9},
    **{"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "bn": 10**9, "mn": 10**6, "mln": 10**6, "bln": 10**9, "tn": 10**12},
}
PARTS = {
    **dict.fromkeys(("percent", "pct", "percentage"), Fraction(1, 100)),
    **dict.fromkeys(("bps", "bp"), Fraction(1, 10_000)),
}
MINOR = {"cents": Fraction(1, 100), "cent": Fraction(1, 100), "¢": Fraction(1, 100), "m": Fraction(10**6)}  # possibly
# By kind. Each unit has the name of its first spelling.
_UNITS = """
m meter meters metre metres; cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres; km kilometer kilometers kilometre kilometres
in inch inches; ft foot feet; yd yard yards; mi mile miles
g gram grams; kg kilogram kilograms; mg milligram milligrams; lb lbs pound pounds; oz ounce ounces
l L liter liters litre litres; ml mL milliliter milliliters
s sec secs second seconds; min mins minute minutes; h hr hrs hour hours; day d days; week weeks; month months
year yr yrs years
dollar dollars usd USD; cent cents ¢; euro euros eur EUR
degree degrees; radian rad radians; N newton newtons; J joule joules; W watt watts; V volt volts; A; Hz; mph; kmh kph
"""
_NAMES = {name: names.split()[0] for names in re.split("[;\n]", _UNITS.strip()) for name in names.split()}


def unit_of(word: str) -> str:
    """The unit that a word names, under one name for all its spellings; empty for other words."""
    return _NAMES.get(word) or (_NAMES.get(word.lower(), "") if len(word) > 2 else "")
