"""Masking of personal data: e-mail addresses, also of other alphabets, and public IP addresses of both versions."""

from __future__ import annotations

import ipaddress
from typing import Final

import regex
from datatrove.pipeline.formatters import PIIFormatter

from bytescale_ext.data.clean.words import IDEOGRAPHIC, SYLLABIC

EMAIL: Final = "email@example.com"
ADDRESS: Final = "192.0.2.1"  # from ranges that are reserved for documentation
ADDRESS_6: Final = "2001:db8::1"
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


class PersonalData:
    """Masks e-mail addresses and public IP addresses in texts."""

    def __init__(self) -> None:
        self._version_4 = PIIFormatter(remove_emails=False, ip_replacement=ADDRESS)

    def masked(self, text: str) -> str:
        """Return a text with replaced addresses."""
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
