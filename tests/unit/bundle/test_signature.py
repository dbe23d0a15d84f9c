"""Signatures: our verification against cryptography's, our format against minisign's."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bundle import signing
from appliance.bundle.carried import ed25519
from appliance.bundle.carried.errors import BadSignature, Refused, Unusable
from appliance.bundle.carried.signature import PublicKey, Signature

# RFC 8032, 7.1: secret key, public key, message, signature.
OF_THE_STANDARD = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("public", "message", "signature"), OF_THE_STANDARD)
def test_the_vectors_of_the_standard(public, message, signature):
    public, message, signature = map(bytes.fromhex, (public, message, signature))
    assert ed25519.verify(public, message, signature)
    assert not ed25519.verify(public, message + b"x", signature)


@settings(max_examples=40, deadline=None)
@given(
    st.binary(min_size=32, max_size=32), st.binary(max_size=64), st.integers(0, 95), st.integers(0, 7), st.booleans()
)
def test_the_same_verdict_as_cryptography(seed, message, place, bit, changed):
    key = Ed25519PrivateKey.from_private_bytes(seed)
    both = bytearray(key.sign(message) + key.public_key().public_bytes_raw())
    if changed:
        both[place] ^= 1 << bit
    signature, public = bytes(both[:64]), bytes(both[64:])
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
        wanted = True
    except (InvalidSignature, ValueError):
        wanted = False
    assert ed25519.verify(public, message, signature) == wanted
    assert wanted != changed


@pytest.mark.parametrize(
    ("public", "signature"),
    [
        (b"", bytes(64)),
        (bytes(32), b""),
        (b"\xff" * 32, bytes(64)),  # no point
        (bytes(32), bytes(32) + b"\xff" * 32),  # a scalar beyond the order
        ((2**255 - 18).to_bytes(32, "little"), bytes(64)),  # an encoding that is not the shortest
    ],
)
def test_what_is_no_key_or_signature_is_refused(public, signature):
    assert not ed25519.verify(public, b"", signature)


def test_a_key_goes_to_its_files_and_comes_back(tmp_path):
    key, path = signing.new_key(), tmp_path / "release.key"
    key.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert signing.SecretKey.read(path) == key
    assert PublicKey.given(str(tmp_path / "release.key.pub")) == PublicKey.given(key.public.line) == key.public
    with pytest.raises(Refused, match="never written over"):
        key.write(path)


@pytest.mark.parametrize("text", ["", "one line\n", "a comment\nbm90IGEga2V5\n", "untrusted comment: x\n%%%\n"])
def test_what_is_no_key_is_said_to_be_none(tmp_path, text):
    (tmp_path / "k").write_text(text)
    with pytest.raises(Unusable, match="not a secret key"):
        signing.SecretKey.read(tmp_path / "k")
    with pytest.raises(Unusable, match="not a public key"):
        PublicKey.given(str(tmp_path / "k"))


def test_a_damaged_secret_key_is_refused(tmp_path):
    path = tmp_path / "k"
    signing.new_key().write(path)
    comment, line, *_ = path.read_text().splitlines()
    path.write_text(f"{comment}\n{line[:100]}{'A' if line[100] != 'A' else 'B'}{line[101:]}\n")
    with pytest.raises(Unusable, match="damaged"):
        signing.SecretKey.read(path)


def test_a_signature_is_over_the_message_and_its_comment():
    key, other = signing.new_key(), signing.new_key()
    signed = Signature.read(key.sign(b"message", "appliance 1").text)
    signed.check(b"message", key.public)
    with pytest.raises(BadSignature, match="not that of"):
        signed.check(b"massage", key.public)
    with pytest.raises(BadSignature, match="not that of"):
        signed.check(b"message", other.public)
    with pytest.raises(BadSignature, match="comment"):
        Signature.read(signed.text.replace("appliance 1", "appliance 2")).check(b"message", key.public)
    with pytest.raises(BadSignature, match="format"):
        Signature.read("nothing")


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_reads_ours_and_we_read_minisigns(tmp_path):
    ours, message = tmp_path / "ours", tmp_path / "manifest.json"
    message.write_bytes(b"{}")
    key = signing.new_key()
    key.write(ours)
    (tmp_path / "manifest.json.minisig").write_text(key.sign(b"{}", "appliance 1").text)
    subprocess.run(["minisign", "-Vm", message, "-P", key.public.line], check=True)
    theirs = tmp_path / "theirs"
    subprocess.run(["minisign", "-GW", "-s", theirs, "-p", f"{theirs}.pub"], check=True)
    made = signing.SecretKey.read(theirs)
    assert made.public == PublicKey.given(f"{theirs}.pub")
    subprocess.run(["minisign", "-Sm", message, "-s", theirs, "-t", "by minisign"], check=True)
    Signature.read((tmp_path / "manifest.json.minisig").read_text()).check(b"{}", made.public)
