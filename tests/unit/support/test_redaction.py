"""What is replaced in a support bundle, and what stays readable."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.support.redaction import Redaction

CANARY = "Zq7Canary93xW"


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CANARY}",
        f"sk-appl-{CANARY}",
        f'{{"hf_token": "{CANARY}"}}',
        f'{{\\"aws_secret_access_key\\": \\"{CANARY}\\"}}',
        f"AWS_SECRET_ACCESS_KEY={CANARY} python -m x",
        f"password = '{CANARY}'",
        f'{{"id_token": "{"x" * 9000}{CANARY}{"x" * 9000}"}}',
        f'an odd line: {{"hf_token": "{CANARY}…',
        f"api_key='{CANARY}\nthe next line",
        f'{{\\"secret\\": \\"{"x" * 9000}{CANARY}',
        f"x-api-key: {CANARY}",
        f'token = "{"x" * 10_000}{CANARY}"',
        f'{{\\"hf_token\\": \\"{"x" * 10_000} {CANARY}\\"}}',
        f'token = "a value of a line that was cut {CANARY}',
        f"token = 'a value of a line that was cut {CANARY}\nthe next line",
        f"https://user:{CANARY}@hub.example/models",
        f"s3://bucket/x?X-Amz-Signature={CANARY}",
        f"join-{CANARY}",
        f"pulled with hf_{CANARY * 2}, pushed with ghp_{CANARY * 2} and glpat-{CANARY}",
        f"id_token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.{CANARY}-x_y",
        f"appliance --url https://box --api-key {CANARY} status",
        f'["appliance", "join", "--token", "{CANARY}"]',
        f'["appliance","join","--token","two words, {CANARY}"]',
        f"Cookie: a=b; __Host-appliance={CANARY}; c=d",
        f'{{"cookie": "__Host-appliance={CANARY}", "x-appliance-page": "{CANARY}"}}',
        f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
        f"-----BEGIN EC PRIVATE KEY-----\n{CANARY}",
        f"mail to {CANARY}@example.com",
        f"/home/{CANARY}/box/appliance.toml",
        f"secrets: tokens of {CANARY}-the-box",
        f"a key of {CANARY} was revoked",
    ],
)
def test_a_secret_or_a_person_is_gone(text):
    known, name = (f"{CANARY}-the-box", CANARY)
    assert CANARY not in Redaction([known], [name]).apply(text)


@pytest.mark.parametrize(
    "text",
    [
        "listening on 127.0.0.1:8000 and [::1]:8000, host 0.0.0.0",
        '{"prompt_tokens": 12, "max_tokens": null, "tokens_per_s": 31.5}',
        '{"tls_key_path": "/etc/box/key.pem", "token_count": 12}',
        '{"time":"2026-11-25T15:04:56.682Z","version":"0.1.0","torch":"2.13.0+cpu"}',
        "step-48 of ftjob-V5xcf9MJVf0tJ87ZnCriMq6b left the disk tier: no rule keeps it",
        "torch.Size([1, 2]) at std::vector<int>::push_back",
        '"hf_token": null, "password": ""',
        "appliance join HOST:6380 --token - --name two; hf_hub_download of 2 files by huggingface_hub, cookies: 3",
    ],
)
def test_what_says_what_is_wrong_stays(text):
    assert Redaction().apply(text) == text


def test_what_stands_beside_a_secret_stays():
    redaction = Redaction()
    assert redaction.apply('{"token": "abc", "step": 7}') == '{"token": "<secret>", "step": 7}'
    assert redaction.apply('{\\"token\\": \\"abc\\", \\"step\\": 7}') == '{\\"token\\": \\"<secret>\\", \\"step\\": 7}'
    assert redaction.apply("password: 'a \"b\"' at step 7\nstep 8") == "password: '<secret>' at step 7\nstep 8"
    assert redaction.apply('token: "abc\nstep 8') == 'token: "<secret>\nstep 8'


def test_an_address_has_one_name_in_all_files():
    redaction = Redaction()
    assert redaction.apply("10.0.0.5 lost 10.0.0.6") == "ip-1 lost ip-2"
    assert redaction.apply("from 10.0.0.6 and fe80::1ff:fe23:4567:890a") == "from ip-2 and ip-3"
    assert redaction.counts["ip"] == 4


def test_a_name_is_replaced_as_a_word():
    assert Redaction(names=["anna"]).apply("anna, hannah, anna-2: anna") == "name-1, hannah, anna-2: name-1"


@given(st.text(alphabet=st.sampled_from(list("ab1:.@/=-\"' \n")), max_size=60) | st.text(max_size=60))
def test_twice_is_once(text):
    redaction = Redaction(["a secret of the box"], ["ab"])
    once = redaction.apply(f"token={text} {text}")
    assert Redaction(["a secret of the box"], ["ab"]).apply(once) == once


RUNS = [
    "a",
    "_",
    "a.",
    "token_",
    ":",
    "1.",
    "a://",
    "token:'",
    "token:\"x'",
    'token: \\"a ',
    "-----BEGIN ",
    "a@a.",
    "Bearer ",
    "cookie:",
    "--token ",
    "hf_",
    "eyJaaaaaa.",
]


@pytest.mark.parametrize("text", RUNS)
def test_a_log_without_a_blank_is_read_in_time_that_grows_with_its_length(text: str):
    """Patterns that look to the end from every letter took 33 s for 20,000 of them, days for a log of 2 MB."""
    redaction, lengths = Redaction(["secret-of-the-box"], ["ann"]), (4_000, 16_000)
    took_s = []
    for length in lengths:
        began_s = time.process_time()
        redaction.apply(text * (length // len(text)))
        took_s.append(time.process_time() - began_s)
    assert took_s[1] < 8 * max(took_s[0], 0.05), "twice the linear growth, and little in any case"


def test_many_addresses_are_named_in_time_that_grows_with_their_number():
    """Each looked through all names that were given before: 200,000 would have taken ten minutes."""
    took_s = []
    for count in (2_000, 8_000):
        text = "\n".join(f"from 10.0.{i // 250}.{i % 250 + 1}" for i in range(count))
        redaction, began_s = Redaction(), time.process_time()
        assert redaction.apply(text).endswith(f"ip-{count}")
        took_s.append(time.process_time() - began_s)
    assert took_s[1] < 8 * max(took_s[0], 0.05)
