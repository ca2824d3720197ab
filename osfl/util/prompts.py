"""Prompts: the names of classes and domains as words."""

import re
from collections.abc import Mapping

# The embedded digits' classes.
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# By sound: "an hourglass", "a unicorn"; of what folders are called, as far as the first letters
# tell.
_VOWEL = re.compile("[aeiou]|hour|honest|honou?r|heir")
_CONSONANT = re.compile(r"eu|ew|one\b|once\b|uni(?![nm])|us[aeu]|usb|ut[ei]|ufo\b|uk[eu]")


def in_words(name: str) -> str:
    """The name of a class or domain, often a folder's, as words.

    `alarm_clock` is "alarm clock", `Real_World` "real world".
    """
    return " ".join(name.replace("_", " ").split()).lower()


def fill(template: str, names: Mapping[str, str], caption: str = "") -> str:
    """A prompt.

    The template with names in the place of {class} and {domain}, as words, and a text in that of
    {caption}.

    "a {class}" becomes "an alarm clock" where the word begins with a vowel's sound. Not with the
    embedded digits: their kit has learned "a eight".
    """
    texts = {name: in_words(text) for name, text in names.items()} | {"caption": caption}
    digits = names.get("class") in DIGITS

    def put(found: re.Match[str]) -> str:
        article = found["article"] or ""
        text = texts.get(found["name"], found["braces"])
        if article and not digits and _VOWEL.match(text) and not _CONSONANT.match(text):
            article = f"{article[0]}n "
        return article + text

    return re.sub(r"(?P<article>\b[Aa] )?(?P<braces>\{(?P<name>\w+)\})", put, template)
