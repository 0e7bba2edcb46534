"""Instruction families of the pretraining corpus; none is a target task of `moebook.data.tasks`.

Every family is a pure function of a random generator that returns a question and its answer. They
teach the form (question, then a short exact answer) and simple skills, so that a base of about one
million parameters can be tuned to the target tasks in minutes, on tasks it has never seen.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from random import Random

NAMES = (
    "Ada Ben Clara David Ella Felix Grace Henry Iris Jonas Karen Leo Mia Noah Olga Paul Quinn Rosa "
    "Sam Tara Umar Vera Will Xena Yara Zoe"
).split()
THINGS = (
    "apples books coins cards shells stamps pencils marbles stickers eggs flowers bottles cookies "
    "tickets stones buttons ribbons candles"
).split()
WORDS = (
    "river stone cloud table garden window yellow winter planet market silver copper forest bridge "
    "candle letter mirror orange pocket rabbit saddle tunnel valley wagon anchor basket castle "
    "desert engine feather guitar hammer island jacket kettle ladder magnet needle oyster pepper"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
ROMAN = (
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
)
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
UNITS = (
    ("metres", "centimetres", 100),
    ("hours", "minutes", 60),
    ("weeks", "days", 7),
    ("kilograms", "grams", 1000),
    ("feet", "inches", 12),
    ("minutes", "seconds", 60),
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

Pair = tuple[str, str]


def _numbers(rng: Random, low: int = 0, high: int = 99) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(3, 6))]


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def english_number(number: int) -> str:
    """Spell a number from 0 to 99 in English."""
    if number < 20:
        return ONES[number]
    tail = f"-{ONES[number % 10]}" if number % 10 else ""
    return TENS[number // 10 - 2] + tail


def roman_number(number: int) -> str:
    """Write a number from 1 to 399 in Roman numerals."""
    digits = ""
    for value, letters in (*ROMAN, (1, "I")):
        digits += letters * (number // value)
        number %= value
    return digits


def difference(rng: Random) -> Pair:
    """Ask for the difference of two numbers below 100."""
    a = rng.randint(0, 99)
    b = rng.randint(0, 99)
    question = rng.choice(["What is {} minus {}?", "Subtract: {} - {}", "{} - {} ="])
    return question.format(max(a, b), min(a, b)), str(abs(a - b))


def quotient(rng: Random) -> Pair:
    """Ask for a division without remainder."""
    b = rng.randint(2, 9)
    q = rng.randint(1, 12)
    question = rng.choice(
        ["Divide {} by {}.", "What is {} divided by {}?", "{} / {} ="]
    )
    return question.format(b * q, b), str(q)


def remainder(rng: Random) -> Pair:
    """Ask what remains of a division."""
    a = rng.randint(5, 60)
    b = rng.randint(2, 9)
    return f"What remains when {a} is divided by {b}?", str(a % b)


def compare(rng: Random) -> Pair:
    """Ask which of two numbers is larger, or smaller."""
    a, b = rng.sample(range(200), 2)
    larger = rng.random() < 0.5
    answer = max(a, b) if larger else min(a, b)
    return f"Which is {'larger' if larger else 'smaller'}, {a} or {b}?", str(answer)


def parity(rng: Random) -> Pair:
    """Ask whether a number is even."""
    a = rng.randint(0, 999)
    return f"Is {a} even or odd?", "odd" if a % 2 else "even"


def ordering(rng: Random) -> Pair:
    """Ask to sort numbers."""
    numbers = _numbers(rng)
    down = rng.random() < 0.3
    order = "from the smallest to the largest"
    if down:
        order = "from the largest to the smallest"
    return f"Sort {order}: {_listed(numbers)}", _listed(sorted(numbers, reverse=down))


def extremes(rng: Random) -> Pair:
    """Ask for the largest or smallest of several numbers."""
    numbers = _numbers(rng)
    name, value = rng.choice([("maximum", max(numbers)), ("minimum", min(numbers))])
    return f"Give the {name} of {_listed(numbers)}.", str(value)


def successor(rng: Random) -> Pair:
    """Ask how an arithmetic series goes on."""
    start = rng.randint(0, 40)
    step = rng.randint(1, 9)
    series = [start + step * i for i in range(5)]
    return f"Continue: {_listed(series[:4])}, ...", str(series[4])


def word_problem(rng: Random) -> Pair:
    """Tell of things given away and found; the answer shows its two steps."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    a = rng.randint(5, 40)
    b = rng.randint(1, 5)
    c = rng.randint(1, 20)
    story = f"{name} has {a} {thing}. {name} gives {b} to {other} and finds {c} more."
    answer = (
        f"{a} - {b} = {a - b}. {a - b} + {c} = {a - b + c}. The answer is {a - b + c}."
    )
    return f"{story} How many {thing} does {name} have now?", answer


def price(rng: Random) -> Pair:
    """Tell of a purchase; the answer shows its two steps."""
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    count = rng.randint(2, 9)
    each = rng.randint(2, 9)
    paid = count * each + rng.randint(1, 20)
    question = (
        f"{name} buys {count} {thing} for {each} dollars each and pays with {paid} dollars. "
        "How much change is there?"
    )
    cost = count * each
    left = paid - count * each
    return (
        question,
        f"{count} * {each} = {cost}. {paid} - {cost} = {left}. The answer is {left}.",
    )


def spelled_english(rng: Random) -> Pair:
    """Ask for a number in English words, or back."""
    number = rng.randint(0, 99)
    if rng.random() < 0.5:
        return f"Write {number} in English words.", english_number(number)
    return f"Write {english_number(number)} as a number.", str(number)


def roman(rng: Random) -> Pair:
    """Ask for a number in Roman numerals."""
    number = rng.randint(1, 199)
    return f"Write {number} in Roman numerals.", roman_number(number)


def weekday(rng: Random) -> Pair:
    """Ask which weekday comes some days later."""
    today = rng.randrange(7)
    days = rng.randint(1, 10)
    question = f"Today is {WEEKDAYS[today]}. Which day is it in {days} days?"
    return question, WEEKDAYS[(today + days) % 7]


def date(rng: Random) -> Pair:
    """Ask for a date in ISO form."""
    day = datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(9000))
    written = f"{day.day} {MONTHS[day.month - 1]} {day.year}"
    return f"Write the date {written} in the form year-month-day.", day.isoformat()


def clock(rng: Random) -> Pair:
    """Ask for the time some minutes later."""
    hour = rng.randrange(24)
    minute = rng.randrange(60)
    later = rng.randint(1, 90)
    total = (hour * 60 + minute + later) % 1440
    question = f"It is {hour:02d}:{minute:02d}. What time is it {later} minutes later?"
    return question, f"{total // 60:02d}:{total % 60:02d}"


def units(rng: Random) -> Pair:
    """Ask to convert a whole number of units."""
    large, small, factor = rng.choice(UNITS)
    count = rng.randint(2, 9)
    return f"How many {small} are {count} {large}?", str(count * factor)


def spelling(rng: Random) -> Pair:
    """Ask to spell a word letter by letter."""
    word = rng.choice(WORDS)
    return f"Spell the word {word}.", "-".join(word)


def letters(rng: Random) -> Pair:
    """Ask for a letter of a word."""
    word = rng.choice(WORDS)
    place = rng.choice(["first", "second", "last"])
    index = {"first": 0, "second": 1, "last": -1}[place]
    return f"What is the {place} letter of {word}?", word[index]


def alphabetical(rng: Random) -> Pair:
    """Ask to put words in alphabetical order."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    return f"Put in alphabetical order: {_listed(words)}", _listed(sorted(words))


def casing(rng: Random) -> Pair:
    """Ask for words in upper or title case."""
    words = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    name, change = rng.choice([("upper case", str.upper), ("title case", str.title)])
    return f"Write in {name}: {words}", change(words)


def membership(rng: Random) -> Pair:
    """Ask whether a word is in a list."""
    words = rng.sample(WORDS, 5)
    asked = words[0] if rng.random() < 0.5 else words[4]
    shown = words[:4]
    rng.shuffle(shown)
    return (
        f"Is {asked} in this list? {_listed(shown)}",
        "yes" if asked in shown else "no",
    )


def position(rng: Random) -> Pair:
    """Ask for the word at a place in a list."""
    words = rng.sample(WORDS, 4)
    place = rng.randrange(4)
    name = ("first", "second", "third", "fourth")[place]
    return f"Which is the {name} in this list? {_listed(words)}", words[place]


def python_type(rng: Random) -> Pair:
    """Ask for the type of a Python literal."""
    values: list[object] = [
        rng.randint(0, 99),
        rng.choice(WORDS),
        _numbers(rng),
        None,
        rng.random() < 0.5,
        {rng.choice(WORDS): rng.randint(0, 9)},
        round(rng.random() * 10, 2),
        tuple(_numbers(rng)),
    ]
    value = rng.choice(values)
    return f"What is the type of this Python value? {value!r}", type(value).__name__


def python_list(rng: Random) -> Pair:
    """Ask to write words as a Python list."""
    words = rng.sample(WORDS, rng.randint(2, 5))
    return f"Write as a Python list of strings: {_listed(words)}", repr(words)


def table_row(rng: Random) -> Pair:
    """Ask for one value of a row of keys and values."""
    keys = rng.sample(["name", "age", "colour", "size", "weight", "year"], 3)
    cells = [
        rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(1, 99))
        for _ in keys
    ]
    asked = rng.randrange(3)
    row = "; ".join(f"{key}: {cell}" for key, cell in zip(keys, cells, strict=True))
    return f"Read the value of {keys[asked]} from: {row}", cells[asked]


FAMILIES: tuple[Callable[[Random], Pair], ...] = (
    difference,
    quotient,
    remainder,
    compare,
    parity,
    ordering,
    extremes,
    successor,
    word_problem,
    price,
    spelled_english,
    roman,
    weekday,
    date,
    clock,
    units,
    spelling,
    letters,
    alphabetical,
    casing,
    membership,
    position,
    python_type,
    python_list,
    table_row,
)
