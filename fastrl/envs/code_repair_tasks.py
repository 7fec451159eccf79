"""Small repositories with one fault each: problem, files, the module at fault, hidden cases."""

from __future__ import annotations

from typing import Any

__all__ = ["TASKS"]


def _case(call: str, *args: Any, expect: Any = None, raises: str | None = None) -> dict[str, Any]:
    outcome = {"expect": expect} if raises is None else {"raises": raises}
    return {"call": call, "args": list(args), **outcome}


TASKS: tuple[dict[str, Any], ...] = (
    {
        "name": "median",
        "problem": "median() is wrong for some lists.",
        "module": "stats.py",
        "files": {
            "stats.py": (
                "def median(values):\n"
                '    """The middle of the sorted values; the mean of the two middle ones if even."""\n'
                "    if not values:\n"
                '        raise ValueError("no values")\n'
                "    ordered = sorted(values)\n"
                "    return ordered[len(ordered) // 2]\n"
            ),
            "test_stats.py": (
                "from stats import median\n\n\n"
                "def test_odd():\n    assert median([3, 1, 2]) == 2\n\n\n"
                "def test_even():\n    assert median([1, 2, 3, 4]) == 2.5\n"
            ),
        },
        "cases": [
            _case("median", [5], expect=5),
            _case("median", [9, 1, 5], expect=5),
            _case("median", [1, 2], expect=1.5),
            _case("median", [4, 1, 3, 2], expect=2.5),
            _case("median", [10, 0, 20, 30, 40, 50], expect=25),
            _case("median", [], raises="ValueError"),
        ],
    },
    {
        "name": "leap_year",
        "problem": "is_leap() is wrong for some centuries, and days_in_month() follows it.",
        "module": "dates.py",
        "files": {
            "dates.py": (
                "def is_leap(year):\n"
                "    return year % 4 == 0\n\n\n"
                "def days_in_month(year, month):\n"
                "    if not 1 <= month <= 12:\n"
                '        raise ValueError("month must be 1 to 12")\n'
                "    if month == 2:\n"
                "        return 29 if is_leap(year) else 28\n"
                "    return 30 if month in (4, 6, 9, 11) else 31\n"
            ),
            "test_dates.py": (
                "from dates import days_in_month, is_leap\n\n\n"
                "def test_common():\n    assert is_leap(2024) and not is_leap(2023)\n\n\n"
                "def test_century():\n    assert not is_leap(1900)\n"
            ),
        },
        "cases": [
            _case("is_leap", 1900, expect=False),
            _case("is_leap", 2000, expect=True),
            _case("is_leap", 2100, expect=False),
            _case("is_leap", 2024, expect=True),
            _case("days_in_month", 1800, 2, expect=28),
            _case("days_in_month", 1600, 2, expect=29),
            _case("days_in_month", 2023, 13, raises="ValueError"),
        ],
    },
    {
        "name": "flatten",
        "problem": "flatten() stops after one level.",
        "module": "lists.py",
        "files": {
            "lists.py": (
                "def flatten(items):\n"
                "    result = []\n"
                "    for item in items:\n"
                "        if isinstance(item, list):\n"
                "            result.extend(item)\n"
                "        else:\n"
                "            result.append(item)\n"
                "    return result\n"
            ),
            "test_lists.py": (
                "from lists import flatten\n\n\n"
                "def test_flat():\n    assert flatten([1, [2, 3]]) == [1, 2, 3]\n\n\n"
                "def test_deep():\n    assert flatten([1, [2, [3]]]) == [1, 2, 3]\n"
            ),
        },
        "cases": [
            _case("flatten", [], expect=[]),
            _case("flatten", [1, [2]], expect=[1, 2]),
            _case("flatten", [[[1]], 2], expect=[1, 2]),
            _case("flatten", [[[[["x"]]]]], expect=["x"]),
            _case("flatten", [1, [2, [3, [4, [5]]]]], expect=[1, 2, 3, 4, 5]),
        ],
    },
    {
        "name": "word_count",
        "problem": "count_words() takes words in capitals, or with punctuation, for other words.",
        "module": "words.py",
        "files": {
            "words.py": (
                "def count_words(text):\n"
                '    """Occurrences of each word, in lower case and without .,;:!? around it."""\n'
                "    counts = {}\n"
                "    for word in text.split():\n"
                "        counts[word] = counts.get(word, 0) + 1\n"
                "    return counts\n"
            ),
            "test_words.py": (
                "from words import count_words\n\n\n"
                "def test_plain():\n    assert count_words('a b a') == {'a': 2, 'b': 1}\n\n\n"
                "def test_capitals():\n    assert count_words('The the') == {'the': 2}\n"
            ),
        },
        "cases": [
            _case("count_words", "", expect={}),
            _case("count_words", "x y x", expect={"x": 2, "y": 1}),
            _case("count_words", "Go, go!", expect={"go": 2}),
            _case("count_words", "Yes. No; yes?", expect={"yes": 2, "no": 1}),
            _case("count_words", "a - a", expect={"a": 2, "-": 1}),
        ],
    },
    {
        "name": "binary_search",
        "problem": "find() misses some elements of a sorted list.",
        "module": "search.py",
        "files": {
            "search.py": (
                "def find(items, wanted):\n"
                '    """Index of `wanted` in the sorted list, or -1."""\n'
                "    low, high = 0, len(items) - 1\n"
                "    while low < high:\n"
                "        middle = (low + high) // 2\n"
                "        if items[middle] == wanted:\n"
                "            return middle\n"
                "        if items[middle] < wanted:\n"
                "            low = middle + 1\n"
                "        else:\n"
                "            high = middle - 1\n"
                "    return -1\n"
            ),
            "test_search.py": (
                "from search import find\n\n\n"
                "def test_middle():\n    assert find([1, 2, 3], 2) == 1\n\n\n"
                "def test_end():\n    assert find([1, 2, 3], 3) == 2\n"
            ),
        },
        "cases": [
            _case("find", [1, 2, 3], 2, expect=1),
            _case("find", [1, 2, 3], 1, expect=0),
            _case("find", [1, 2, 3], 3, expect=2),
            _case("find", [7], 7, expect=0),
            _case("find", [], 7, expect=-1),
            _case("find", [2, 4, 6, 8], 5, expect=-1),
            _case("find", [2, 4, 6, 8], 8, expect=3),
        ],
    },
    {
        "name": "bank",
        "problem": "transfer() can make money disappear when it fails.",
        "module": "bank.py",
        "files": {
            "bank.py": (
                "def transfer(accounts, source, target, amount):\n"
                '    """Balances after the transfer; ValueError, and nothing moved, when it is not possible."""\n'
                "    accounts[source] -= amount\n"
                "    if accounts[source] < 0 or target not in accounts:\n"
                '        raise ValueError("not possible")\n'
                "    accounts[target] += amount\n"
                "    return accounts\n\n\n"
                "def attempt(accounts, source, target, amount):\n"
                '    """Balances after trying."""\n'
                "    try:\n"
                "        return transfer(accounts, source, target, amount)\n"
                "    except ValueError:\n"
                "        return accounts\n"
            ),
            "test_bank.py": (
                "from bank import attempt\n\n\n"
                "def test_good():\n"
                "    assert attempt({'a': 5, 'b': 0}, 'a', 'b', 3) == {'a': 2, 'b': 3}\n\n\n"
                "def test_bad():\n"
                "    assert attempt({'a': 5, 'b': 0}, 'a', 'b', 9) == {'a': 5, 'b': 0}\n"
            ),
        },
        "cases": [
            _case("attempt", {"a": 5, "b": 0}, "a", "b", 5, expect={"a": 0, "b": 5}),
            _case("attempt", {"a": 5, "b": 0}, "a", "b", 6, expect={"a": 5, "b": 0}),
            _case("attempt", {"a": 5}, "a", "c", 1, expect={"a": 5}),
            _case("transfer", {"a": 1, "b": 1}, "a", "b", 2, raises="ValueError"),
        ],
    },
)
