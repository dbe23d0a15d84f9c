"""Personal data is found by form and checksum, and no text makes the patterns go back over it."""

import pytest

from train.data_checks.check import personal_data


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to ann.lee+x@mail.example.org.", "email"),
        ("card 4111 1111 1111 1111 12/27", "card"),
        ("host 8.8.8.8 answers", "ip"),
        ("host 2001:4860:4860::8888 answers", "ip"),
        ("call +49 30 1234567 now", "phone"),
        ("call (212) 555-0123", "phone"),
        ("Tel. 030/1234567", "phone"),
        ("手机 13912345678", "phone"),
        ("key sk-abcdefghijklmnopqrstuvwxyz012345", "secret"),
        ("AKIAIOSFODNN7EXAMPLE", "secret"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "secret"),
    ],
)
def test_personal_data_matches_each_form(text, kind):
    (match,) = personal_data(text)
    assert match.kind == kind and match.value in text and match.value not in match.hint()


@pytest.mark.parametrize(
    "text",
    [
        "card 4111 1111 1111 1112, 0000000000000000",  # Luhn
        "number 4222222222222",  # as cards were long ago, and one in ten of all numbers of 13 digits still is
        "version 1.2.3.4.5 or 192.168.0.1 or 999.1.1.1",
        "at 10:30:45 on 2024-01-15, 1,234,567 of 12 345 678",
        "36/4=<<36/4=9>>9 apples cost $1200.50, 200 300 4000",
        "a@b, @someone, x@y@z",
        "skip sk-short",
    ],
)
def test_personal_data_similar_text_is_none(text):
    assert personal_data(text) == []


def test_earlier_kind_wins_where_two_overlap():
    (match,) = personal_data("https://u:sk-abcdefghijklmnopqrstuvwx@host.example.org")
    assert match.kind == "secret"
