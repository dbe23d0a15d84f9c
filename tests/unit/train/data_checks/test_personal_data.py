"""Personal data is found by form and checksum, and no text makes the patterns go back over it."""

import time

import pytest

from train.data_checks.personal_data import find, hinted, is_card, is_iban, is_id_number, masked


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to ann.lee+x@mail.example.org.", "email"),
        ("card 4111 1111 1111 1111 12/27", "card"),
        ("card 378282246310005", "card"),
        ("IBAN DE89 3704 0044 0532 0130 00 AND more", "iban"),
        ("GB82WEST12345698765432", "iban"),
        ("身份证11010519491231002X。", "id_number"),
        ("host 8.8.8.8 answers", "ip"),
        ("host 2001:4860:4860::8888 answers", "ip"),
        ("call +49 30 1234567 now", "phone"),
        ("call (212) 555-0123", "phone"),
        ("call 212-555-0123", "phone"),
        ("Tel. 030/1234567", "phone"),
        ("手机 13912345678", "phone"),
        ("key sk-abcdefghijklmnopqrstuvwxyz012345", "secret"),
        ("AKIAIOSFODNN7EXAMPLE", "secret"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "secret"),
    ],
)
def test_is_found_and_masked(text, kind):
    found = find(text)
    assert [one.kind for one in found] == [kind]
    changed, kinds = masked(text)
    assert kinds == [kind] and f"[{kind.upper()}]" in changed and find(changed) == []
    assert text[found[0].start : found[0].end] not in hinted(text, found[0])


@pytest.mark.parametrize(
    "text",
    [
        "card 4111 1111 1111 1112",  # Luhn
        "number 4222222222222",  # as cards were long ago, and one in ten of all numbers of 13 digits still is
        "DE89 3704 0044 0532 0130 01",  # modulo 97
        "110105194912310021",  # the last place, and no card begins with 1
        "version 1.2.3.4.5 or 192.168.0.1 or 999.1.1.1",
        "at 10:30:45 on 2024-01-15, 1,234,567 of 12 345 678",
        "36/4=<<36/4=9>>9 apples cost $1200.50, 200 300 4000",
        "a@b, @someone, x@y@z",
        "skip sk-short",
    ],
)
def test_what_only_looks_like_it_is_left(text):
    assert find(text) == []


def test_the_earlier_kind_wins_where_two_overlap():
    assert [one.kind for one in find("https://u:sk-abcdefghijklmnopqrstuvwx@host.example.org")] == ["secret"]


def test_checksums():
    assert is_card("5555555555554444") and not is_card("0000000000000000") and not is_card("5555555555554445")
    assert is_iban("FR14 2004 1010 0505 0001 3M02 606") and not is_iban("FR14 2004 1010 0505 0001 3M02 607")
    assert is_id_number("11010519491231002x") and not is_id_number("110105194912310027")


@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "1 ",
        "+1",
        "(0",
        "a.",
        "a@",
        "@a.",
        "1.",
        ":1",
        "::",
        "DE89 ",
        "DE891",
        "eyJa.",
        "-----BEGIN ",
        "0 1-",
        "a@b.cc ",
        "8.8.8.8 ",
        "+49 30 1234567 ",
    ],
)
def test_no_text_costs_more_than_its_length(unit):
    """Twenty times as much takes about twenty times as long; a pattern that goes back would take four hundred."""

    def seconds(n):
        text = unit * (n // len(unit))
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            find(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(200_000) < 100 * max(seconds(10_000), 1e-3)
