"""Masking of personal data: mail addresses of all alphabets, public IP addresses, phone numbers, and secret keys.

A phone number begins with ``+``, follows a word such as "Tel", or has the form of North America with separators. A key
has the form of a provider's tokens or of a private key, or is a quoted value under a name such as ``api_key``.
"""

from __future__ import annotations

import ipaddress
from typing import Final

import regex
from datatrove.pipeline.formatters import PIIFormatter

from bytescale_ext.data.clean.words import IDEOGRAPHIC, SYLLABIC

EMAIL: Final = "email@example.com"
ADDRESS: Final = "192.0.2.1"  # from ranges that are reserved for documentation
ADDRESS_6: Final = "2001:db8::1"
PHONE: Final = "+1-202-555-0123"  # from the numbers that are reserved for fiction
KEY: Final = "[key]"
_GLOBAL_6: Final = ipaddress.ip_network("2000::/3")

# A letter of a script with spaces. In other scripts no blanks separate an address from the text.
_UNSPACED: Final = rf"[{IDEOGRAPHIC}{SYLLABIC}]"
_LETTER: Final = rf"[[\p{{L}}\p{{M}}\p{{N}}]--{_UNSPACED}]"
_ATOM: Final = r"[!#$%&'*+/=?^_`{|}~\-]"
_LOCAL: Final = rf"(?:{_LETTER}|_)(?:{_LETTER}|{_ATOM})*+(?:\.(?:{_LETTER}|{_ATOM})++)*+"
_LABEL: Final = rf"(?:{_LETTER}++(?:-++{_LETTER}++)*+|{_UNSPACED}++)"
_MAIL: Final = regex.compile(
    rf"(?:(?<!{_LETTER}|_|{_ATOM})(?<!(?:{_LETTER}|{_ATOM})\.){_LOCAL}|(?<!{_UNSPACED}){_UNSPACED}++)"
    rf"@(?:{_LABEL}(?:\.{_LABEL})++|\[[0-9A-Fa-f.:]++\])",
    regex.V1,
)
_IP_6: Final = regex.compile(
    r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{1,4}:){1,7}(?::?[0-9A-Fa-f]{1,4}){0,7}(?::\d{1,3}(?:\.\d{1,3}){3})?(?![0-9A-Za-z:])"
)
_LABELS: Final = (
    r"tel(?:ephone|efon|éfono|éphone|efono|\.)?|phone|mobile?|handy|fax|call|тел(?:ефон|\.)?"
    r"|电话|電話|手机|전화|هاتف|फ़ोन|โทร"
)
_DIGITS: Final = r"(?:[ .\-/\u00a0]?\(?\d{1,5}\)?){2,8}"
_PHONE: Final = regex.compile(
    rf"(?:(?P<label>(?<!\p{{L}})(?:{_LABELS})[ .:\uff1a\u00a0]{{0,3}})|(?<![\w+.\-/]))"
    rf"(?P<number>(?P<plus>\+|00(?=[1-9]))?\(?\d{_DIGITS})(?![\w.\-/]?\d)(?![A-Za-z_])",
    regex.V1 | regex.IGNORECASE,
)
_NORTH_AMERICA: Final = regex.compile(r"(?:1[ .\-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .\-])[2-9]\d\d[.\- ]\d{4}")
_KEY_BLOCK: Final = regex.compile(
    r"-----BEGIN (?P<kind>[A-Z ]{0,20}PRIVATE KEY(?: BLOCK)?)-----[^-]++-----END (?P=kind)-----"
)
_KEY: Final = regex.compile(
    r"(?<![A-Za-z0-9_\-])(?:"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,}|glpat-[A-Za-z0-9_\-]{20,}"
    r"|AIza[A-Za-z0-9_\-]{35}|xox[abprs]-[A-Za-z0-9\-]{20,}|hf_[A-Za-z0-9]{30,}"
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{20,}|sk-(?:[a-z]+-)?[A-Za-z0-9_\-]{32,}"
    r"|eyJ[A-Za-z0-9_\-]{10,}\.eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}"
    r")(?![A-Za-z0-9_\-])"
)
_NAMED_KEY: Final = regex.compile(
    r"(?P<name>(?:api|secret|access|auth|client|private)[_\- ]?(?:key|token|secret)[\"']?\s{0,3}[:=]\s{0,3})"
    r"(?P<quote>[\"'])(?=[^\"'\s]{0,200}\d)(?=[^\"'\s]{0,200}[A-Za-z])[A-Za-z0-9+/=_\-.]{20,200}(?P=quote)",
    regex.IGNORECASE,
)


class PersonalData:
    """Masks mail addresses, public IP addresses, phone numbers and secret keys in texts."""

    def __init__(self) -> None:
        self._version_4 = PIIFormatter(remove_emails=False, ip_replacement=ADDRESS)

    def masked(self, text: str) -> str:
        """Return a text with replaced addresses, numbers and keys."""
        if "PRIVATE KEY" in text:
            text = _KEY_BLOCK.sub(KEY, text)
        text = _KEY.sub(KEY, text)
        text = _NAMED_KEY.sub(rf"\g<name>\g<quote>{KEY}\g<quote>", text)
        text = _PHONE.sub(_masked_phone, text)
        if "@" in text:
            text = _MAIL.sub(EMAIL, text)
        if "::" in text or text.count(":") >= 7:
            text = _IP_6.sub(_masked_6, text)
        masked: str = self._version_4.format(text)
        return masked


def _masked_6(match: regex.Match[str]) -> str:
    """Return the mask of a public address of version 6, or the text itself."""
    text: str = match.group()
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    return ADDRESS_6 if address.is_global and address in _GLOBAL_6 else text


def _masked_phone(match: regex.Match[str]) -> str:
    """Return the mask of a phone number, after its label, or the text itself."""
    text: str = match.group()
    label, number = match.group("label") or "", match.group("number")
    num_digits = sum(letter.isdecimal() for letter in number)
    is_phone = (
        (bool(label) and 6 <= num_digits <= 15)
        or (bool(match.group("plus")) and 9 <= num_digits <= 15)
        or _NORTH_AMERICA.fullmatch(number) is not None
    )
    return label + PHONE if is_phone else text
