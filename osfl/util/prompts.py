"""Prompts: templates filled with the names of classes and domains."""

import re
from collections.abc import Mapping

# The embedded digits' classes
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# First letters with a vowel's sound ("an hourglass") or a consonant's ("a unicorn"), as far as
# spelling tells, for words that are common as names of folders
_VOWEL = re.compile("[aeiou]|hour|honest|honou?r|heir")
_CONSONANT = re.compile(r"eu|ew|one\b|once\b|uni(?![nm])|us[aeu]|usb|ut[ei]|ufo\b|uk[eu]")


def to_words(name: str) -> str:
    """Turn the name of a class or domain, often a folder's, into words.

    `alarm_clock` becomes "alarm clock", and `Real_World` becomes "real world".
    """
    return " ".join(name.replace("_", " ").split()).lower()


def fill_prompt(template: str, names: Mapping[str, str], caption: str = "") -> str:
    """Fill a prompt template.

    {class} and {domain} become the names as words, and {caption} becomes the caption. "a {class}"
    becomes "an alarm clock" if the word begins with a vowel's sound, except for the embedded
    digits, whose kit has learned "a eight".
    """
    texts = {name: to_words(text) for name, text in names.items()} | {"caption": caption}
    digits = names.get("class") in DIGITS

    def substitute(match: re.Match[str]) -> str:
        article = match["article"] or ""
        text = texts.get(match["name"], match["braces"])
        if article and not digits and _VOWEL.match(text) and not _CONSONANT.match(text):
            article = f"{article[0]}n "
        return article + text

    return re.sub(r"(?P<article>\b[Aa] )?(?P<braces>\{(?P<name>\w+)\})", substitute, template)
