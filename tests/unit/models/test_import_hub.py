"""Downloads from a hub on loopback: resume, checksums, refusals; offline by default."""

from pathlib import Path

import pytest

from appliance.models import hub
from appliance.models.errors import DownloadCorrupt, HubDisallowed, HubNotFound, HubUnreachable, SourceNotFound
from appliance.models.library import ModelLibrary
from tests.unit.models import checkpoints
from tests.unit.models.hub_server import COMMIT, Hub, Server
from tests.unit.models.test_import_adapter import write as write_adapter
from weights.checkpoint.folder import NotACheckpoint, PickleRefused
from weights.format.names import encode_name
from weights.tiers.copies import verify

REPOSITORY = "org/tiny"


@pytest.fixture
def content(tmp_path: Path) -> dict[str, bytes]:
    source = checkpoints.write(tmp_path / "source", shards=2)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    unwanted = {
        "pytorch_model.bin": b"\x80\x04",
        "modeling.py": b"import os",
        "onnx/model.safetensors": b"x",
        ".gitattributes": b"*.safetensors filter=lfs",
    }
    return files | unwanted | {"README.md": b"# tiny"}


@pytest.fixture
def served(content):
    served = Hub(REPOSITORY, content)
    with Server(served) as endpoint:
        yield served, endpoint


def library_at(tmp_path: Path, endpoint: str) -> ModelLibrary:
    return ModelLibrary(tmp_path / "models", hub_settings=hub.HubSettings(allowed=True, endpoint=endpoint))


def fetched(served: Hub) -> set[str]:
    """Names of the files that were downloaded."""
    return {path.partition(f"/resolve/{COMMIT}/")[2] for method, path in served.requests if method == "GET"}


def test_import_hub_downloads_only_needed_files(tmp_path, served, content):
    state, endpoint = served
    library = library_at(tmp_path, endpoint)
    heard = []
    taken = library.import_model(REPOSITORY, report=lambda *progress: heard.append(progress))
    assert (taken.name, taken.version, taken.source) == (REPOSITORY, "v1", f"{REPOSITORY}@{COMMIT}")
    told = list(dict.fromkeys(message.partition(" ")[0] for *_, message in heard))
    assert told == ["listing", "downloading", "copying", "testing", "comparing", "computing"]
    assert verify(taken.path).tensors == len(checkpoints.tensors())
    for name in ("config.json", "model-00001-of-00002.safetensors", "README.md"):
        assert (taken.path / name).read_bytes() == content[name]
    assert not fetched(state) & {"pytorch_model.bin", "modeling.py", "onnx/model.safetensors", ".gitattributes"}
    done, total, *_ = [h for h in heard if h[3].startswith("downloading")][-1]
    assert done == total == sum(len(content[p.name]) for p in taken.path.iterdir() if p.name in content)
    assert not any((tmp_path / "models" / ".downloads").iterdir())


def test_import_hub_removes_partial_files_of_a_killed_download(tmp_path, served, monkeypatch):
    _, endpoint = served
    library, needed = library_at(tmp_path, endpoint), []
    folder = tmp_path / "models" / ".downloads" / f"{encode_name(REPOSITORY)}@{encode_name(COMMIT)}"
    partial = folder / ".cache" / "huggingface" / "download" / "x.1a2b3c4d.incomplete"
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as file:
        file.truncate(2**40)
    monkeypatch.setattr(library, "_require_space", lambda nbytes: needed.append((nbytes > 0, partial.exists())))
    assert library.import_model(REPOSITORY).version == "v1"
    assert needed[0] == (True, False)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_import_hub_rejects_and_deletes_corrupt_download(tmp_path, served, content, name):
    state, endpoint = served
    library = library_at(tmp_path, endpoint)
    state.lies[name] = content[name][:-1] + bytes([content[name][-1] ^ 1])
    with pytest.raises(DownloadCorrupt, match=name):
        library.import_model(REPOSITORY)
    assert not checkpoints.stored(tmp_path) and not list((tmp_path / "models" / ".downloads").glob(f"*/{name}"))
    state.lies.clear()
    assert library.import_model(REPOSITORY).version == "v1"


def test_import_hub_offline_error_names_the_setting(tmp_path):
    with pytest.raises(HubDisallowed, match=r"offline by default.*hub_offline = false.*\[box\].*hub_endpoint"):
        ModelLibrary(tmp_path / "models").import_model(REPOSITORY)


def test_import_hub_distinguishes_gated_missing_and_unreachable(tmp_path, served):
    state, endpoint = served
    library = library_at(tmp_path, endpoint)
    with pytest.raises(HubNotFound, match="does not exist"):
        library.import_model("org/other")
    with pytest.raises(HubNotFound, match="revision"):
        library.import_model(REPOSITORY, revision="v9")
    state.gated = True
    with pytest.raises(HubNotFound, match="gated.*import the directory"):
        library.import_model(REPOSITORY)
    with pytest.raises(HubUnreachable):
        library_at(tmp_path, "http://127.0.0.1:1").import_model(REPOSITORY)


def test_import_hub_rejects_pickles_before_download(tmp_path, served):
    state, endpoint = served
    for name in [n for n in state.files if n.endswith(".safetensors")]:
        del state.files[name]
    with pytest.raises(PickleRefused, match="pytorch_model.bin"):
        library_at(tmp_path, endpoint).import_model(REPOSITORY)
    del state.files["pytorch_model.bin"]
    with pytest.raises(NotACheckpoint):
        library_at(tmp_path, endpoint).import_model(REPOSITORY)
    assert fetched(state) == {""}, "the listing alone"


def adapter_on_hub(tmp_path: Path, **more: bytes) -> Hub:
    directory = write_adapter(tmp_path / "adapter")
    return Hub(REPOSITORY, {path.name: path.read_bytes() for path in directory.iterdir()} | more)


def test_find_adapter_on_hub_reads_only_its_config(tmp_path):
    served = adapter_on_hub(tmp_path, **{"README.md": b"#", "tokenizer.json": b"{}", "adapter_model.bin": b"\x80"})
    base = ModelLibrary(tmp_path / "models").import_model(checkpoints.write(tmp_path / "source"))
    with Server(served) as endpoint:
        library = library_at(tmp_path, endpoint)
        assert library.find_adapter(REPOSITORY) == (REPOSITORY, "org/source", COMMIT)
        assert fetched(served) == {"", "adapter_config.json"}
        assert library.find_adapter(REPOSITORY, name="mine", revision=COMMIT) == ("mine", "org/source", COMMIT)
        based_on = {"base": "source", "base_version": "v1", "base_path": base.path, "rank_limit": 32}
        taken = library.import_adapter(REPOSITORY, name="mine", revision=COMMIT, **based_on)
        with pytest.raises(NotACheckpoint):  # import_model rejects an adapter
            library.import_model(REPOSITORY)
    taken_files = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in taken.path.iterdir()} == taken_files | {"manifest.json"}
    assert taken.source == f"{REPOSITORY}@{COMMIT}" and verify(taken.path).tensors == 2
    assert fetched(served) == taken_files | {""}


def test_find_adapter_on_hub_ignores_whole_model(tmp_path, served):
    state, endpoint = served
    state.files["adapter_config.json"] = b"{}"  # a file that training left in the repository
    assert library_at(tmp_path, endpoint).find_adapter(REPOSITORY) is None
    assert library_at(tmp_path, endpoint).import_model(REPOSITORY).version == "v1"


@pytest.mark.parametrize("source", ["org/../../etc", "http://x/y", "-rf"])
def test_import_rejects_source_that_is_neither_path_nor_repository(tmp_path, source):
    with pytest.raises(SourceNotFound, match="neither"):
        library_at(tmp_path, "http://127.0.0.1:1").import_model(source)
