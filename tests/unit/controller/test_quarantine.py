"""What a start does with bytes that no row of the database names."""

from __future__ import annotations

import errno
from pathlib import Path

from appliance.controller.files import quarantine, storage
from appliance.store.objects import files
from tests.unit.controller.conftest import Control


def aside(control: Control) -> dict[str, bytes]:
    """What lies in the quarantine, by its path below the folder of the day."""
    root = control.context.files_dir.parent / "quarantine"
    found = [path for path in root.rglob("*") if path.is_file()]
    return {"/".join(path.relative_to(root).parts[1:]): path.read_bytes() for path in found}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def test_sweep_of_a_file_without_a_row_keeps_it_aside(control: Control):
    kept = await control.upload(b"x", "a", "assistants")
    (control.context.files_dir / "file-unknown").write_bytes(b"whole")
    quarantine.sweep(control.context)
    assert names(control.context.files_dir) == [kept]
    assert aside(control) == {"files/file-unknown": b"whole"}


async def test_sweep_of_a_half_written_file_deletes_it(control: Control):
    (control.context.files_dir / ".incoming-file-1").write_bytes(b"half")
    quarantine.sweep(control.context)
    assert names(control.context.files_dir) == [] and aside(control) == {}


async def test_sweep_after_a_lost_database_and_its_return_changes_nothing(control: Control):
    file_id = await control.upload(b"x", "a", "assistants")
    row = files.find(control.db, file_id, viewer=None, now_s=0)
    files.delete(control.db, file_id)
    quarantine.sweep(control.context)
    assert aside(control) == {f"files/{file_id}": b"x"}
    files.insert(control.db, row)
    quarantine.sweep(control.context)
    assert aside(control) == {}
    assert (await control.sdk.files.content(file_id)).content == b"x"


async def test_sweep_that_cannot_move_a_file_leaves_it_and_goes_on(control: Control, monkeypatch):
    def refuses(path: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))

    monkeypatch.setattr(Path, "rename", refuses)
    (control.context.files_dir / "file-unknown").write_bytes(b"whole")
    quarantine.sweep(control.context)
    assert names(control.context.files_dir) == ["file-unknown"]


async def test_sweep_after_a_crash_in_a_deletion_completes_it(control: Control):
    """Its owner deleted it: it is not to come back in a folder that others read."""
    gone, stays = [await control.upload(b"x", name, "assistants") for name in "ab"]
    for file_id in (gone, stays):
        (control.context.files_dir / f"{storage.LEAVING_PREFIX}{file_id}").touch()
    files.delete(control.db, gone)
    quarantine.sweep(control.context)
    assert names(control.context.files_dir) == [stays] and aside(control) == {}


async def test_sweep_of_an_upload_keeps_its_parts_aside_unless_it_has_ended(control: Control):
    made = [
        (await control.sdk.uploads.create(filename="a", purpose="assistants", bytes=4, mime_type="text/plain")).id
        for _ in range(2)
    ]
    await control.sdk.uploads.cancel(made[1])
    folder = control.context.uploads_dir
    for name in ("upload_unknown", *made):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "part_unknown").write_bytes(b"data")
    quarantine.sweep(control.context)
    assert names(folder) == [made[0]] and names(folder / made[0]) == []
    assert set(aside(control)) == {"uploads/upload_unknown/part_unknown", f"uploads/{made[0]}/part_unknown"}


async def test_sweep_of_answers_of_an_unknown_batch_keeps_them_aside(control: Control):
    (control.context.batches_dir / "batch_unknown.output.jsonl").write_bytes(b"{}")
    quarantine.sweep(control.context)
    assert set(aside(control)) == {"batches/batch_unknown.output.jsonl"}
