"""Versions that came onto the box before there was a rule: looked at, and tried once, before they are opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import appliance.models.opening as module
from appliance.models.errors import TemplateRefused, TrialEnded
from appliance.models.opening import Opening
from appliance.store.database import Database
from tests.unit.models import checkpoints
from weights.checkpoint.errors import OpeningRefused
from weights.format.errors import VersionNotFound

BAD_TEMPLATE = "{{ ''.__class__.__mro__ }}"


@pytest.fixture
def db(tmp_path: Path):
    with Database(tmp_path / "appliance.db") as database:
        yield database


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "v1")


@pytest.fixture
def trials(monkeypatch) -> list[Path]:
    """The folders that were tried; each trial passes, or ends as `ends` of the module says."""
    done: list[Path] = []
    monkeypatch.setattr(module, "try_folder", lambda folder: done.append(folder))
    return done


def ends(monkeypatch, error: Exception, done: list[Path]) -> None:
    def tried(folder: Path) -> None:
        done.append(folder)
        raise error

    monkeypatch.setattr(module, "try_folder", tried)


async def test_a_version_whose_settings_name_files_is_refused_by_name(db, version, trials):
    (version / "tokenizer_config.json").write_text(json.dumps({"vocab": "/box/first-key"}))
    with pytest.raises(OpeningRefused, match=r"tokenizer_config.json: has 'vocab'.*appliance model verify mine"):
        await Opening(db).check(version, "mine")
    assert not trials, "nothing of it was read by a library"


async def test_a_template_of_before_the_trial_is_refused_and_nothing_is_deleted(db, tmp_path):
    version = checkpoints.write(tmp_path / "old", template=BAD_TEMPLATE)
    for _ in range(2):
        with pytest.raises(OpeningRefused, match=r"chat template: reaches outside.*model verify mine"):
            await Opening(db).check(version, "mine")
    assert (version / "model.safetensors").is_file()


async def test_it_is_tried_once_and_a_jobs_model_with_its_bases_files_not_at_all(db, version, trials, tmp_path):
    await Opening(db).check(version, "mine")
    await Opening(db).check(version, "mine")
    made = tmp_path / "v2"
    shutil.copytree(version, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    await Opening(db).check(made, "ft:mine")
    assert trials == [version]
    (made / "chat_template.jinja").write_text("{{ messages }}")
    await Opening(db).check(made, "ft:mine")
    assert trials == [version, made]


async def test_what_an_import_has_just_tried_is_not_tried_again(db, version, trials):
    opening = Opening(db)
    await opening.passed(version)
    await opening.check(version, "mine")
    assert not trials


async def test_newer_trials_reach_every_version_and_verify_tries_again(db, version, trials, monkeypatch):
    opening = Opening(db)
    await opening.check(version, "mine")
    monkeypatch.setattr(module, "RULES", module.RULES + 1)
    ends(monkeypatch, TemplateRefused("chat template", "loops"), trials)
    for again in (False, False, True):
        with pytest.raises(OpeningRefused, match="loops"):
            await opening.check(version, "mine", again=again)
    assert len(trials) == 3, "once at first, once by the new trials, and once because it was asked for"


async def test_a_trial_that_the_kernel_ended_says_nothing_of_the_model(db, version, trials, monkeypatch):
    ends(monkeypatch, TrialEnded("tokenizer.json", "ended"), trials)
    for _ in range(2):
        with pytest.raises(TrialEnded):
            await Opening(db).check(version, "mine")
    assert len(trials) == 2
    monkeypatch.setattr(module, "try_folder", trials.append)
    await Opening(db).check(version, "mine")


async def test_a_version_that_is_gone_is_not_refused(db, tmp_path):
    with pytest.raises(VersionNotFound):
        await Opening(db).check(tmp_path / "v1", "mine")
