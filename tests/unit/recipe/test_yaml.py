"""`recipe.yaml`: YAML 1.2 as plain data, with the line of every key."""

import random
import time

import pytest

from paceline.recipe.yaml import (
    MAX_FILE_BYTES,
    MAX_VALUES,
    YamlDocument,
    read_yaml_file,
    read_yaml_text,
    read_yaml_value,
    to_yaml_text,
)

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
PLAIN = "not allowed in a recipe (write a plain value)"
NO_DATE = "datetime.date(2026, 11, 21) is a date, which recipes do not support (write a number or text)"
NO_MAPPING = "a recipe is a mapping of sections, not a list or a value (write `train: {epochs: 10}`)"
NO_MINOR = "is not YAML: version minor part can only be 2 or 1, got (1, 3) (fix the file)"


def twice(key: str) -> str:
    return f'found duplicate key "{key}" with value "3" (original value: "1") (fix the YAML)'


REFUSED = {
    "a tag": ("a: 1\nb: !!str 3\n", f"r.yaml:2: tag tag:yaml.org,2002:str is {PLAIN}"),
    "a tag that calls": ("a: !python/name:os.system x", f"r.yaml:1: tag !python/name:os.system is {PLAIN}"),
    "a tag on a mapping": ("!!map {a: 1}", f"r.yaml:1: tag tag:yaml.org,2002:map is {PLAIN}"),
    "a tag on a list": ("a: !x [1]", f"r.yaml:1: tag !x is {PLAIN}"),
    "an empty tag": ("a: ! 3", f"r.yaml:1: tag ! is {PLAIN}"),
    "an alias": ("a: 1\nb: *x\n", f"r.yaml:2: anchors and aliases are {PLAIN}"),
    "an anchor": ("a: &x true\n", f"r.yaml:1: anchors and aliases are {PLAIN}"),
    "a merge key": ("a: 1\nb:\n  <<: {c: 1}\n", f"r.yaml:3: merge keys are {PLAIN}"),
    "a directive": ("%YAML 1.1\n---\na: yes\n", f"r.yaml:2: directives are {PLAIN}"),
    "a directive of the future": ("%YAML 1.3\n---\na: 1\n", f"r.yaml: {NO_MINOR}"),
    "a tag directive": ("%TAG ! tag:x,2000:\n---\na: 1\n", f"r.yaml:2: directives are {PLAIN}"),
    "nesting without end": ("a: " + "[" * 2000, f"r.yaml:1: more than 20 levels are {PLAIN}"),
    "a duplicate key": ("a: 1\nb: 2\na: 3\n", f"r.yaml:3:1: {twice('a')}"),
    "a duplicate key below": ("a:\n  b: 1\n  b: 3\n", f"r.yaml:3:3: {twice('b')}"),
    "a list": ("- 1\n", f"r.yaml:1: {NO_MAPPING}"),
    "a value": ("3\n", f"r.yaml:1: {NO_MAPPING}"),
    "a date": ("a: 1\nb:\n  c: 2026-11-21\n", f"r.yaml:3: {NO_DATE}"),
    "a date in a list": ("a:\n  - 1\n  - 2026-11-21\n", f"r.yaml:3: {NO_DATE}"),
    "a number for a key": ("a: 1\n2: x\n", 'r.yaml:2: key 2 is not a word (write it in quotes: "2")'),
    "a number with a zero in front": ("a: {007: x}\n", 'r.yaml:1: key 007 is not a word (write it in quotes: "007")'),
    "a truth for a key": ("true: x\n", 'r.yaml:1: key true is not a word (write it in quotes: "true")'),
    "a date for a key": (
        "2026-11-21: x\n",
        'r.yaml:1: key 2026-11-21 is not a word (write it in quotes: "2026-11-21")',
    ),
    "nothing for a key": ("~: x\n", "r.yaml:1: key None is not a word (fix it)"),
    "a list for a key": ("? [a]\n: b\n", "r.yaml:1: key ('a',) is not a word (fix it)"),
    "a key of two lines": ('b: 1\n"a\\nb": 1\n', "r.yaml:2: key 'a\\nb' is not a word (fix it)"),
    "a NUL": ("a: 1\nb: \0\n", "r.yaml:2: '\\x00' is not allowed in YAML (remove it)"),
    "a control character": ("a: 1\nb: 2\nc: \x07\n", "r.yaml:3: '\\x07' is not allowed in YAML (remove it)"),
    "a tab": ("a:\n\tb: 1\n", "r.yaml:2:1: found character '\\t' that cannot start any token (fix the YAML)"),
    "an open bracket": ("a: [1\n", "r.yaml:2:1: expected ',' or ']', but got '<stream end>' (fix the YAML)"),
    "two documents": ("a: 1\n---\nb: 2\n", "r.yaml:2:1: but found another document (fix the YAML)"),
}


# matrix: 44
def test_what_is_refused_is_refused_in_one_line_with_file_and_line(refusal):
    assert {why: refusal(read_yaml_text, text, "r.yaml") for why, (text, _) in REFUSED.items()} == {
        why: message for why, (_, message) in REFUSED.items()
    }


def test_a_number_of_thousands_of_digits_is_refused_in_one_line(refusal):
    """Python itself refuses to convert it, which is what protects us."""
    assert refusal(read_yaml_text, f"a: {'9' * 5000}\n", "r.yaml").startswith(
        "r.yaml: is not YAML: Exceeds the limit (4300"
    )


# matrix: 44
@pytest.mark.parametrize("text", [BOMB, "[" * 3000, "{a: " * 3000], ids=["aliases", "lists", "mappings"])
def test_a_small_file_that_would_grow_without_end_is_refused_at_once(refusal, text):
    """The aliases stand for 9**9 values and reading 3,000 brackets took 10 s, so 5 s tells the two apart."""
    before = time.monotonic()
    refusal(read_yaml_text, text, "r.yaml")
    assert time.monotonic() - before < 5


def test_a_file_that_is_too_big_is_refused_unread(tmp_path, refusal):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert refusal(read_yaml_file, path) == f"{path}: is over 500,000 bytes, the limit for recipes (name another file)"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert read_yaml_file(path) == YamlDocument({})


@pytest.mark.parametrize("content", [b"a: \xff", "a: 1".encode("utf-16"), "a: é".encode("latin-1")])
def test_a_file_that_is_not_utf_8_is_refused(tmp_path, refusal, content):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert refusal(read_yaml_file, path) == f"{path}: is not UTF-8 text (name a recipe file)"


def test_a_file_that_is_not_there_is_refused(tmp_path, refusal):
    path = tmp_path / "r.yaml"
    assert refusal(read_yaml_file, path) == f"{path}: cannot be read: No such file or directory (name a recipe file)"


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "---\n"])
def test_an_empty_file_sets_nothing(text):
    assert read_yaml_text(text, "r.yaml") == YamlDocument({})


@pytest.mark.parametrize("text", ["\ufeffa: 1\nb: 2\n", "a: 1\r\nb: 2\r\n", "a: 1\nb: 2", "---\na: 1\nb: 2\n...\n"])
def test_marks_and_line_ends_of_other_editors_change_nothing(text):
    assert read_yaml_text(text, "r.yaml").values == {"a": 1, "b": 2}


def test_numbers_and_text_are_those_of_yaml_1_2():
    text = "a: 1e-3\nb: 012\nc: yes\nd: on\ne: off\nf: 12:30\ng: 5.0e-4\nh: true\ni: 0o17\nj: ~\nk: 1e3\n"
    assert read_yaml_text(text, "r.yaml").values == {
        "a": 1e-3, "b": 12, "c": "yes", "d": "on", "e": "off", "f": "12:30", "g": 5e-4, "h": True, "i": 15, "j": None,
        "k": 1000.0,
    }  # fmt: skip


def test_values_are_plain_python():
    """Not ruamel's subclasses, which would carry comments and quotes into pickles and hashes."""

    def kinds(value):
        yield type(value)
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in children:
            yield type(key)
            yield from kinds(child)

    text = "a: 0x1F  # hex\nb: 'quoted'\nc: [1.50, {d: |\n  text\n  }]\n".replace("|\n  text\n  ", '"text"')
    assert set(kinds(read_yaml_text(text, "r.yaml").values)) == {dict, list, str, int, float}


def test_every_key_and_item_knows_its_line():
    text = "# a comment\na: 1\n\nb:\n  c:\n    d: 2\n  e: {f: 3,\n      g: 4}\nh:\n  - i: 5\n"
    assert read_yaml_text(text, "r.yaml").lines == {
        "a": 2, "b": 4, "b.c": 5, "b.c.d": 6, "b.e": 7, "b.e.f": 7, "b.e.g": 8, "h": 9,
        "h[0]": 10, "h[0].i": 10,
    }  # fmt: skip


def test_a_value_may_be_of_any_kind():
    assert [read_yaml_value(text, "key") for text in ("3", "[a, 1e-3]", "{a: 1}", "")] == [
        3,
        ["a", 1e-3],
        {"a": 1},
        None,
    ]


TEXTS = [
    "", " ", "~", "null", "true", "on", "1e-3", "012", "0x1F", "12:30", "2026-11-21", "=", "<<", "#x", "a: b", "a #b",
    "- a", "? a", "[a]", "{", "'", '"', "!x", "&x", "*x", "%x", "@x", "`x", "|", ">", ".inf", ".nan", "---", "x ",
    " x", "a\nb", "\na", "a\n", "a\n\n\nb", "\t", "\x07", "é", "\U0001f600", "\u2028", "\ufeff", "x" * 300,
    "a b " * 60,
]  # fmt: skip
NUMBERS = [0, -1, 2**63, 0.0, -0.0, 1.0, 0.1, 1 / 3, 1e-5, 4e-6, 1e22, 1e300, 5e-324, 2.5e-3]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_reads_back_equal(text):
    assert read_yaml_text(to_yaml_text({"a": text, "b": [text]}), "r.yaml").values == {"a": text, "b": [text]}


@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_reads_back_equal_and_of_its_kind(number):
    read = read_yaml_text(to_yaml_text({"a": number}), "r.yaml").values["a"]
    assert (read, type(read), str(read)) == (number, type(number), str(number))


def test_any_mapping_reads_back_equal():
    """200 mappings grown from a fixed seed."""
    draw = random.Random(0)

    def grow(depth: int):
        kind = draw.randrange(5 if depth else 3)
        if kind == 3:
            return [grow(depth - 1) for _ in range(draw.randrange(3))]
        if kind == 4:
            return {f"k{number}": grow(depth - 1) for number in range(draw.randrange(4))}
        return draw.choice([TEXTS, NUMBERS, [True, False, None]][kind])

    for _ in range(200):
        values = {"a": grow(3), "b": grow(3)}
        assert read_yaml_text(to_yaml_text(values), "r.yaml").values == values


def test_a_list_that_is_used_twice_is_written_twice():
    """An alias would be shorter, and refused on reading."""
    shared = [0.5]
    assert read_yaml_text(to_yaml_text({"mean": shared, "std": shared}), "r.yaml").values == {
        "mean": [0.5],
        "std": [0.5],
    }


def test_keys_stay_in_the_order_given():
    assert to_yaml_text({"b": 1, "a": {"d": 2, "c": 3}}) == "b: 1\na:\n  d: 2\n  c: 3\n"


@pytest.mark.parametrize("limit", [600, pytest.param(MAX_VALUES, marks=pytest.mark.long)])
def test_more_keys_and_values_than_any_recipe_has_are_refused(refusal, monkeypatch, limit):
    monkeypatch.setattr("paceline.recipe.yaml.MAX_VALUES", limit)
    text = "".join(f"k{number}: 1\n" for number in range(limit // 2 + 10))
    assert refusal(read_yaml_text, text, "r.yaml").startswith(
        f"r.yaml:{limit // 2 + 1}: more than {limit:,} keys and values are not allowed"
    )
