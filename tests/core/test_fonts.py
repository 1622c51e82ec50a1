"""Fonts for names in any script."""

from fedheal.core import fonts


def test_usual_letters_need_no_other_font():
    assert fonts.find_families("abc\nd") == [fonts.USUAL]


def test_the_installed_font_with_most_of_the_missing_letters_is_added():
    letters = "".join(sorted(fonts.read_letters("STIXGeneral") - fonts.read_letters(fonts.USUAL))[:50])
    usual, fallback = fonts.find_families("a" + letters)
    assert usual == fonts.USUAL
    assert set(letters) <= fonts.read_letters(fallback)


def test_letters_that_no_family_has_are_escaped():
    assert fonts.escape_letters("a\n\u5199", [fonts.USUAL]) == "a\n\\u5199"


def test_the_font_of_boxes_is_no_font():
    assert not any("Last Resort" in family for family in fonts._find_fallback(frozenset("\u5199\u771f")))
