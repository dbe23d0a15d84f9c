"""How a machine becomes a node: with what it must show, and what a stranger on the way can do."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from appliance.boot.node import _enrolled
from appliance.nodes import enrolment
from appliance.nodes.certificate_authority import NODE_LIFE, Authority, Credentials, Unfit
from appliance.nodes.enrolment import EnrolmentServer, JoinToken, NotEnrolled, Tokens, enrol, renew
from appliance.paths import BoxPaths
from runtime.network import removed_nodes
from runtime.network.tunnel import NodeCertificate

RAY_TOKEN = b"0123456789abcdef" * 4


class Home:
    def __init__(self, folder):
        self.authority, self.tokens = Authority(folder), Tokens(folder / "tokens")
        self.credentials = self.authority.prepare("n0", "127.0.0.1")
        self.server = EnrolmentServer(self.authority, self.tokens, RAY_TOKEN)
        self.box = ("127.0.0.1", 0)

    async def start(self):
        self.box = ("127.0.0.1", await self.server.start("127.0.0.1", 0))
        return self

    def token(self, **more):
        return self.tokens.give(self.credentials.fingerprint(), **more)


@pytest.fixture
async def home(tmp_path):
    one = await Home(tmp_path / "box" / "ca").start()
    yield one
    await one.server.stop()


@pytest.fixture
def mine(tmp_path):
    return Credentials(tmp_path / "node" / "ca")


def all_files(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


async def test_a_token_makes_one_machine_a_node_and_no_second(home, mine, tmp_path):
    token = home.token().text()
    assert await enrol(mine, home.box, token, "n1", "127.0.0.2") == RAY_TOKEN
    assert mine.fit("n1", "127.0.0.2") == ""
    assert set(all_files(mine.folder).values()) == set(all_files(home.credentials.folder).values()) == {0o600}
    assert mine.folder.stat().st_mode & 0o777 == 0o700
    assert mine.files.key.read_bytes() not in [path.read_bytes() for path in home.credentials.folder.glob("*.*")]
    with pytest.raises(NotEnrolled, match="unknown, used or too old"):
        await enrol(Credentials(tmp_path / "second"), home.box, token, "n2", "127.0.0.3")
    assert not (tmp_path / "second").exists(), "nor is a key made for nothing"


async def silent_at(box, *addresses):
    """Connections of a stranger who shakes hands and then says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return [await asyncio.open_connection(*box, ssl=context, local_addr=(one, 0)) for one in addresses]


async def test_a_stranger_who_says_nothing_keeps_nobody_out(home, mine):
    silent = await silent_at(home.box, *["127.0.0.9"] * 16)
    told = [json.loads(await reader.readline()) for reader, _ in silent[enrolment.TALKS_OF_ONE :]]
    assert {line["error"] for line in told} == {"too many ask at once; try again"}
    assert await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2") == RAY_TOKEN
    for _, writer in silent:
        writer.close()


async def test_nor_does_one_who_has_many_addresses(home, mine):
    """Four, and sixteen connections, were enough."""
    many = [f"127.0.1.{n}" for n in range(1, 9)]
    silent = await silent_at(home.box, *many * enrolment.TALKS_OF_ONE)
    assert await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2") == RAY_TOKEN
    for _, writer in silent:
        writer.close()


async def test_a_line_of_nothing_but_brackets_is_unreadable_and_no_more(home, caplog):
    ((reader, writer),) = await silent_at(home.box, "127.0.0.9")
    writer.write(b"[" * 16000 + b"\n")
    assert json.loads(await reader.readline()) == {"error": "unreadable"}
    assert not [record for record in caplog.records if record.exc_info]
    writer.close()


async def test_of_two_who_show_the_same_token_at_once_one_becomes_a_node(home, tmp_path):
    token = home.token().text()
    told = await asyncio.gather(
        *(enrol(Credentials(tmp_path / f"c{number}"), home.box, token, "n1", "127.0.0.2") for number in range(4)),
        return_exceptions=True,
    )
    assert sorted(isinstance(one, NotEnrolled) for one in told) == [False, True, True, True], told


async def test_a_copy_of_rays_token_does_as_ever(home, mine):
    assert await enrol(mine, home.box, RAY_TOKEN.decode(), "n1", "127.0.0.2") == RAY_TOKEN
    assert mine.fit("n1", "127.0.0.2") == ""


@pytest.mark.parametrize("wrong", ["an old one", "a guess", "a guess with its id", "another ray token", "no token"])
async def test_nothing_else_does(home, mine, wrong):
    given = home.token()
    text = {
        "an old one": home.token(life_s=-1).text(),
        "a guess": JoinToken("00" * 8, bytes(24), given.box).text(),
        "a guess with its id": JoinToken(given.id, bytes(24), given.box).text(),
        "another ray token": "0" * 64,
        "no token": "join-abc",
    }[wrong]
    with pytest.raises(NotEnrolled):
        await enrol(mine, home.box, text, "n1", "127.0.0.2")
    assert not mine.folder.exists()
    assert home.tokens.key(given.id), "a wrong guess does not use up a token"


@pytest.mark.parametrize("shown", ["one-time", "ray token"])
async def test_who_sits_in_between_gets_nothing_and_is_named(home, mine, tmp_path, shown):
    """He has a certificate of his own, hands everything on, and reads it."""
    seen, between = b"", Authority(tmp_path / "between").prepare("n0", "127.0.0.1")
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE

    async def hand_on(reader, writer):
        nonlocal seen
        there = await asyncio.open_connection(*home.box, ssl=plain)
        for source, sink in ((reader, there[1]), (there[0], writer)) * 2:
            line = await source.readline()
            seen += line
            sink.write(line)
        there[1].close()
        writer.close()

    server = await asyncio.start_server(hand_on, "127.0.0.1", 0, ssl=between.server_context())
    token = home.token()
    with pytest.raises(NotEnrolled, match="certificate differs|does not know this token"):
        await enrol(
            mine,
            server.sockets[0].getsockname()[:2],
            token.text() if shown == "one-time" else RAY_TOKEN.decode(),
            "n1",
            "127.0.0.2",
        )
    server.close()
    assert RAY_TOKEN not in seen and token.secret.hex().encode() not in seen and b"CERTIFICATE" not in seen
    assert home.tokens.key(token.id) and not mine.folder.exists()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\n",
        b"[]\n",
        b"1\n",
        b"{}\n",
        b"\xff\xfe\n",
        b'{"id": "../../ray.token", "nonce": ""}\n',
        b'{"id": null, "nonce": null}\n',
        b'{"id": "%s", "nonce": "0"}\n' % (b"0" * 16),
        b"x" * 40_000 + b"\n",
        b'{"id": "ray.token", "nonce": "0"}\n[]\n',
        b'{"id": "ray.token", "nonce": "0"}\n{"proof": "\xc3\xa9"}\n',
        b'{"id": "ray.token", "nonce": "0"}\n{"name": "n1", "address": "a", "request": "", "proof": "\xc3\xa9"}\n',
    ],
    ids=range(13),
)
async def test_whatever_a_stranger_says_the_box_goes_on(home, mine, said):
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*home.box, ssl=plain)
    writer.write(said or b"\n")
    heard = await asyncio.wait_for(reader.read(), 60)
    assert b"error" in heard.splitlines()[-1] and b"CERTIFICATE" not in heard and RAY_TOKEN not in heard
    writer.close()
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")


@pytest.mark.parametrize("name", ["n0", "", "N1", "../n1", "n1\n", "x" * 32])
async def test_names_that_are_none_are_refused_by_the_box(home, mine, name):
    token = home.token()
    with pytest.raises((NotEnrolled, ValueError)):
        await enrol(mine, home.box, token.text(), name, "127.0.0.2")
    assert home.tokens.key(token.id)


def test_certificates_are_made_once_and_anew_before_they_end_or_for_another_address(tmp_path):
    authority = Authority(tmp_path)
    one = authority.prepare("n0", "10.0.0.5")
    before, issuer = one.files.certificate.read_bytes(), one.files.authority.read_bytes()
    assert Authority(tmp_path).prepare("n0", "10.0.0.5").files.certificate.read_bytes() == before
    assert "not for the address 10.0.0.6" in one.fit("n0", "10.0.0.6")
    moved = authority.prepare("n0", "10.0.0.6")
    assert moved.files.certificate.read_bytes() != before and moved.files.authority.read_bytes() == issuer
    assert "ended on" in moved.fit("n0", "10.0.0.6", datetime.now(UTC) + NODE_LIFE + timedelta(days=1))
    assert "is for n0, not for n1" in moved.fit("n1", "10.0.0.6")
    named = authority.prepare("n0", "localhost")
    assert named.fit("n0", "localhost") == named.fit("n0", "127.0.0.1") == "", "Ray connects by number"
    with pytest.raises(Unfit, match="cannot be resolved"):
        authority.prepare("n0", "no such.host")
    assert "no certificate yet" in Credentials(tmp_path / "new").fit("n1", "10.0.0.6")


def test_a_node_cannot_make_nodes(tmp_path):
    """Whatever a request asks for, the certificate is of a node, and of that one."""
    box = Authority(tmp_path / "box")
    home, node = box.prepare("n0", "10.0.0.5"), Credentials(tmp_path / "node")
    node.keep(home.files.authority.read_bytes(), box.sign(node.new_request("n0", "10.0.0.5"), "n1", "10.0.0.6"))
    made = x509.load_pem_x509_certificate(node.files.certificate.read_bytes())
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert node.fit("n1", "10.0.0.6") == "" and node.fit("n0", "10.0.0.5")
    with pytest.raises(Unfit, match="cannot be read"):
        box.sign(b"nothing", "n1", "10.0.0.6")
    other = Authority(tmp_path / "other")
    other.prepare("n0", "10.0.0.5")
    with pytest.raises(Unfit, match="has not signed"):
        node.keep(home.files.authority.read_bytes(), other.sign(node.new_request("n1", "10.0.0.6"), "n1", "10.0.0.6"))


def test_a_token_says_what_it_is_and_is_kept_as_a_key_alone(tmp_path):
    tokens = Tokens(tmp_path / "tokens")
    token = tokens.give("ab" * 32)
    assert JoinToken.read(token.text()) == token
    (kept,) = (tmp_path / "tokens").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600 and os.stat(tmp_path / "tokens").st_mode & 0o777 == 0o700
    note = json.loads(kept.read_text())
    assert token.secret.hex() not in kept.read_text() and abs(note["until_s"] - time.time() - 900) < 60
    assert tokens.key("../" + token.id) is None and tokens.key("") is None


async def test_the_command_prints_a_token_that_the_box_takes(home, mine, tmp_path):
    def run(data_dir, *more):
        command = [sys.executable, "-m", "appliance.cli.main", "node", "token", "--data-dir", str(data_dir), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    done = await asyncio.to_thread(run, tmp_path / "box")
    assert done.returncode == 0 and "good for 15 minutes, once" in done.stderr, done
    assert await enrol(mine, home.box, done.stdout.strip(), "n1", "127.0.0.2") == RAY_TOKEN
    (tmp_path / "alone").mkdir()
    refused = await asyncio.to_thread(run, tmp_path / "alone")
    assert refused.returncode == 1 and "set node_address in [box]" in refused.stderr


async def test_after_a_removal_rays_token_makes_no_node_and_a_new_token_gives_the_name_again(home, mine, tmp_path):
    """The removed node had Ray's token: under another name it would be a node again."""
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    removed = home.credentials.files.removed
    removed.remove("n1")
    for name in ("n1", "n9"):
        with pytest.raises(NotEnrolled, match="a node was removed from this box"):
            await enrol(Credentials(tmp_path / name), home.box, RAY_TOKEN.decode(), name, "127.0.0.2")
    assert removed.out() == {"n1"}
    await enrol(Credentials(tmp_path / "again"), home.box, home.token().text(), "n1", "127.0.0.2")
    assert removed.out() == set()


async def test_a_node_that_is_removed_between_the_lines_of_its_talk_gets_nothing(home, mine, tmp_path, monkeypatch):
    """One who began to talk with ray.token before his removal, and said the rest after it, was a node again."""
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    removed = home.credentials.files.removed
    asks = Credentials.new_request

    def removed_meanwhile(self, name, address):
        removed.remove("n1")
        return asks(self, name, address)

    monkeypatch.setattr(Credentials, "new_request", removed_meanwhile)
    with pytest.raises(NotEnrolled, match="a node was removed from this box"):
        await enrol(Credentials(tmp_path / "again"), home.box, RAY_TOKEN.decode(), "n9", "127.0.0.2")
    assert removed.out() == {"n1"} and removed.certified() == {"n0"}


async def test_who_is_removed_before_he_has_heard_of_his_certificate_stays_removed(home, mine, monkeypatch):
    """His name was noted as one that has joined again: his Ray was not ended any more."""
    removed, takes = home.credentials.files.removed, Tokens.take

    def removed_meanwhile(self, token_id):
        removed.remove("n1")
        return takes(self, token_id)

    monkeypatch.setattr(Tokens, "take", removed_meanwhile)
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    assert removed.out() == {"n1"}


async def test_no_removal_comes_between_the_look_at_a_certificate_and_another_one_for_it(home, mine, monkeypatch):
    """Who renewed his without end had one that was given out after his removal, and tunnels with it."""
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    removed, looked = home.credentials.files.removed, []

    def has(self, certificate):
        looked.append(real(self, certificate))
        if len(looked) == 1:
            remover.start()
            remover.join(0.5)  # it waits for the list while another certificate is given out
        return looked[-1]

    real, remover = removed_nodes.RemovedNodes.has, threading.Thread(target=removed.remove, args=["n1"])
    monkeypatch.setattr(removed_nodes.RemovedNodes, "has", has)
    await renew(mine, home.box, "n1", "127.0.0.2")
    await asyncio.to_thread(remover.join)
    made = x509.load_pem_x509_certificate(mine.files.certificate.read_bytes())
    before = made.not_valid_before_utc.strftime("%b %d %H:%M:%S %Y GMT")
    assert real(removed, {"subject": ((("commonName", "n1"),),), "notBefore": before}), "it is older than the removal"


async def test_who_removes_a_node_is_told_of_each_name_that_has_a_certificate(home, mine, tmp_path):
    """With ray.token the removed one could get some for other names, before."""
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    await enrol(Credentials(tmp_path / "n9"), home.box, RAY_TOKEN.decode(), "n9", "127.0.0.2")

    def remove(name):
        command = [sys.executable, "-m", "appliance.cli.main", "node", "remove", name, "--data-dir", tmp_path / "box"]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    done = await asyncio.to_thread(remove, "n1")
    assert done.returncode == 0 and "certificates were given to n9 too" in done.stderr, done
    done = await asyncio.to_thread(remove, "n9")
    assert done.returncode == 0 and "certificates were given" not in done.stderr, done


def test_the_command_removes_a_node_where_there_may_be_any_and_never_the_box(tmp_path, capsys):
    paths = BoxPaths.of(tmp_path)
    asked = ["--data-dir", str(tmp_path), "--remove"]
    assert enrolment.main([*asked, "n1"]) == 1 and "no other machine can join" in capsys.readouterr().err
    removed = Authority(paths.certificates).prepare("n0", "127.0.0.1").files.removed
    for wrong in ("n0", "N 1", ""):
        assert enrolment.main([*asked, wrong]) == 1 and "is not a node" in capsys.readouterr().err
    assert enrolment.main([*asked, "n1"]) == 0 and removed.out() == {"n1"}


async def test_a_node_gets_another_certificate_for_the_one_it_has(home, mine):
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    before = mine.files.certificate.read_bytes(), mine.files.key.read_bytes()
    await renew(mine, home.box, "n1", "127.0.0.2")
    after = mine.files.certificate.read_bytes(), mine.files.key.read_bytes()
    assert mine.fit("n1", "127.0.0.2") == "" and before[0] != after[0] and before[1] != after[1]
    assert set(all_files(mine.folder).values()) == {0o600}


async def test_a_renewed_certificate_is_for_the_same_node_whatever_is_asked_for(home, mine):
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    await renew(mine, home.box, "n9", "127.0.0.9")
    assert mine.fit("n1", "127.0.0.2") == "" and mine.fit("n9", "127.0.0.9")


@pytest.mark.parametrize(
    "who", ["a removed node", "nobody", "a node of another box", "one whose certificate has ended"]
)
async def test_nobody_else_gets_one_and_what_he_has_stays_as_it_was(home, mine, tmp_path, monkeypatch, who):
    await enrol(mine, home.box, home.token().text(), "n1", "127.0.0.2")
    if who == "a removed node":
        home.credentials.files.removed.remove("n1")
    elif who == "nobody":
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        monkeypatch.setattr(NodeCertificate, "context", lambda self, purpose: bare)
    elif who == "a node of another box":
        other, issuer = Authority(tmp_path / "other"), mine.files.authority.read_bytes()
        theirs = other.prepare("n0", "127.0.0.1").files.authority.read_bytes()
        mine.keep(theirs, other.sign(mine.new_request("n1", "127.0.0.2"), "n1", "127.0.0.2"))
        mine.files.authority.write_bytes(issuer)  # so that he believes the box
    else:
        monkeypatch.setattr("appliance.nodes.certificate_authority.NODE_LIFE", timedelta(seconds=-1))
        await renew(mine, home.box, "n1", "127.0.0.2")
    before = {path.name: path.read_bytes() for path in mine.folder.iterdir()}
    with pytest.raises(NotEnrolled):
        await renew(mine, home.box, "n1", "127.0.0.2")
    assert {path.name: path.read_bytes() for path in mine.folder.iterdir()} == before


async def test_a_node_that_starts_near_the_end_of_its_certificate_renews_it_by_itself(home, tmp_path, monkeypatch):
    paths = BoxPaths.of(tmp_path / "joined")
    credentials, head = Credentials(paths.certificates), f"127.0.0.1:{home.box[1] - 1}"
    monkeypatch.setattr("appliance.nodes.certificate_authority.NODE_LIFE", timedelta(days=59))
    await enrol(credentials, home.box, home.token().text(), "n1", "127.0.0.2")
    monkeypatch.undo()

    def start(renewing=False, head=head):
        return asyncio.to_thread(_enrolled, paths, head, None, "n1", "127.0.0.2", renewing)

    soon_s, nobody = credentials.ends_s(), "127.0.0.1:1"
    await start(head=nobody)
    assert credentials.ends_s() == soon_s, "it goes on with the one it has"
    await start()
    later_s, key = credentials.ends_s(), credentials.files.key.read_bytes()
    assert later_s - soon_s > 600 * 86400
    await start()
    assert credentials.files.key.read_bytes() == key, "once"
    await start(renewing=True)
    assert credentials.files.key.read_bytes() != key
    with pytest.raises(NotEnrolled, match="did not answer"):
        await start(renewing=True, head=nobody)


def test_a_certificate_beside_another_key_is_no_certificate(tmp_path):
    one = Authority(tmp_path / "a").prepare("n0", "127.0.0.1")
    one.files.key.write_bytes(Authority(tmp_path / "b").prepare("n0", "127.0.0.1").files.key.read_bytes())
    assert "another key" in one.fit("n0", "127.0.0.1")


def test_a_removal_holds_whatever_the_clock_did_since_the_certificate(tmp_path, monkeypatch):
    """A certificate given out while the clock was an hour ahead was later than its node's removal, which let it in."""
    now_s = time.time()
    authority = Authority(tmp_path / "ca")
    authority.prepare("n0", "127.0.0.1")
    removed = authority.home.files.removed

    def given(name: str, at_s: float) -> dict:
        monkeypatch.setattr(removed_nodes.time, "time", lambda: at_s)
        mine = Credentials(tmp_path / f"{name}-{at_s}")
        mine.keep(
            authority.home.files.authority.read_bytes(), authority.sign(mine.new_request(name, "::1"), name, "::1")
        )
        made = x509.load_pem_x509_certificate(mine.files.certificate.read_bytes())
        subject = ((("commonName", name),),)
        return {"subject": subject, "notBefore": made.not_valid_before_utc.strftime("%b %d %H:%M:%S %Y GMT")}

    ahead, before = given("two", now_s + 3600), given("three", now_s)
    for name in ("two", "three"):
        removed.remove(name, now_s + 5)
    assert removed.has(ahead) and removed.has(before)
    # And a new one is later than the removal, though the clock is set back once more.
    assert not removed.has(given("two", now_s - 3600)) and not removed.has(given("three", now_s - 3600))
    assert removed.has(ahead) and removed.has(before)
