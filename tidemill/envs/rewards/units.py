"""Words after a number: names of units, and words that scale it, such as million and percent."""

from __future__ import annotations

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
_UNITS = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "l": "l L liter liters litre litres",
    "ml": "ml mL milliliter milliliters",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "d day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "dollar": "dollar dollars usd USD",
    "cent": "cent cents ¢",
    "euro": "euro euros eur EUR",
    "degree": "degree degrees",
    "radian": "rad radian radians",
    "N": "N newton newtons",
    "J": "J joule joules",
    "W": "W watt watts",
    "V": "V volt volts",
    "A": "A",
    "Hz": "Hz",
    "mph": "mph",
    "kmh": "kmh kph",
}
_NAMES = {name: unit for unit, names in _UNITS.items() for name in names.split()}


def unit_of(word: str) -> str:
    """The unit that a word names, under one name for all its spellings; empty for other words."""
    return _NAMES.get(word) or (_NAMES.get(word.lower(), "") if len(word) > 2 else "")
