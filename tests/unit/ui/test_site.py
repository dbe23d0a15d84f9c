"""Files of the web page: vendored packages match npm, each language is complete, and the first visit is small."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from appliance.ui.site import CONTENT_TYPES, DOCUMENT, STATIC, read_site, site

SCRIPTS = sorted(path for path in STATIC.rglob("*.js") if path.parent.name != "vendor")
LANGUAGES = ("en", "zh-CN")
# Upper limit for the compressed files that a first visit loads.
FIRST_LOAD_BYTES = 110_000


def words(language: str) -> dict[str, str]:
    return json.loads((STATIC / "i18n" / f"{language}.json").read_text())


def url(name: str) -> bytes:
    (found,) = [path for path in site() if path.endswith(b"/" + name.encode())]
    return found


# --- served files


def test_document_links_only_existing_files():
    document = site()[b"/ui"].body.decode()
    named = re.findall(r'(?:href|src)="([^"]+)"', document)
    assert len(named) > 4 and {name.encode() for name in named} <= site().keys()
    assert "{{" not in document


def test_files_have_content_type_and_immutable_cache_except_document():
    for path, file in site().items():
        assert file.content_type in CONTENT_TYPES.values()
        kept = dict(file.headers)[b"cache-control"]
        assert (kept == b"no-cache") == (path == b"/ui") and (b"immutable" in kept) == (path != b"/ui")
    assert site()[url("app.js")].content_type.startswith(b"text/javascript")


def test_changed_file_gets_new_url(tmp_path: Path):
    (tmp_path / DOCUMENT).write_text('<script src="/ui/{{hash}}/a.js"></script>')
    (tmp_path / "a.js").write_text("1")
    before = read_site(tmp_path)
    (tmp_path / "a.js").write_text("2")
    after = read_site(tmp_path)
    assert before.keys() & after.keys() == {b"/ui"} and before[b"/ui"].body != after[b"/ui"].body


def test_first_visit_is_small():
    fetched = [file.body for path, file in site().items() if not path.endswith((b".txt", b"zh-CN.json"))]
    assert sum(len(gzip.compress(body)) for body in fetched) < FIRST_LOAD_BYTES


# --- restrictions on scripts


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_insert_no_markup_and_store_no_key(path: Path):
    source = path.read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|sessionStorage"
        r"|indexedDB|document\.cookie|https?://",
        source,
    )
    # The page stores its language and half of a login token; this half is useless without the cookie.
    assert ("localStorage" in source) == (path.name in ("i18n.js", "api.js"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_call_only_the_two_apis(path: Path):
    asked = re.findall(r"\b(?:get|post|call|send)\(\s*(?:\"[A-Z]+\",\s*)?[\"`](/[^\"`$]*)", path.read_text())
    assert all(one.startswith(("/v1/", "/admin/v1/")) for one in asked)
    assert "fetch(" not in path.read_text() or path.name in ("api.js", "i18n.js")


# --- translations


def test_languages_have_same_keys_and_placeholders():
    english = words("en")
    assert {path.stem for path in (STATIC / "i18n").iterdir()} == set(LANGUAGES)
    for language in LANGUAGES[1:]:
        other = words(language)
        assert other.keys() == english.keys()
        for name, text in english.items():
            assert other[name].strip() and sorted(re.findall(r"{\w+}", other[name])) == sorted(
                re.findall(r"{\w+}", text)
            ), name


def test_translations_match_keys_used_in_scripts():
    source = "\n".join(path.read_text() for path in SCRIPTS)
    said = set(re.findall(r'\bt\(\s*"([a-z_.0-9]+)"[,)]', source))
    missing = said - words("en").keys()
    assert not missing
    quoted = set(re.findall(r'"([a-z_.0-9]+)"', source))
    families = tuple(re.findall(r"[(`]([a-z_.]+\.)\$\{", source))
    unsaid = {name for name in words("en") if name not in quoted and not name.startswith(families)}
    assert not unsaid


# --- vendored packages


def test_vendored_files_have_hash_and_licence():
    folder = STATIC / "vendor"
    listed = {}
    for line in (folder / "VENDORED.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, package, version, _, digest, *_ = re.split(r"  +", line)
            listed[name] = digest
            assert re.fullmatch(r"\d+\.\d+\.\d+", version)
            assert (folder / f"LICENSE-{package}.txt").exists()
    assert listed.keys() | {"VENDORED.txt"} == {path.name for path in folder.iterdir()}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
