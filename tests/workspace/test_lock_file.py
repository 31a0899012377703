"""The committed lock must resolve on any index: it holds versions and no addresses."""

import subprocess
from pathlib import Path

import lock

RAW = """[[package]]
name = "rich"
version = "14.0.0"
source = { registry = "https://mirror.example/simple" }
wheels = [
    { url = "https://mirror.example/a/rich-14.0.0.whl", hash = "sha256:0a", upload-time = "2025-01-01" },
]
"""  # noqa: E501


def test_strip_keeps_versions_and_hashes_and_drops_addresses() -> None:
    stripped = lock.strip(RAW)
    assert 'source = { registry = "index" }' in stripped
    assert '{ path = "rich-14.0.0.whl", hash = "sha256:0a" }' in stripped
    assert lock.locked_versions(stripped) == {("rich", "14.0.0")} == lock.locked_versions(RAW)
    assert lock.addresses(RAW, "uv.lock") == [
        "uv.lock:4: holds an address",
        "uv.lock:6: holds an address",
    ]
    assert lock.addresses(stripped, "uv.lock") == []
    assert lock.strip(stripped) == stripped


def test_no_committed_or_staged_lock_holds_an_address(root: Path) -> None:
    for revision in ["HEAD:uv.lock", ":uv.lock"]:
        shown = subprocess.run(
            ["git", "show", revision], cwd=root, capture_output=True, text=True, check=True
        )
        assert ("torch" in dict(lock.locked_versions(shown.stdout))) is True
        assert lock.addresses(shown.stdout, revision) == []


def test_git_strips_what_uv_writes_back(root: Path, tmp_path: Path) -> None:
    attributes = (root / ".gitattributes").read_text()
    assert "uv.lock filter=uvlock" in attributes
    cleaned = subprocess.run(
        ["python3", "scripts/lock.py", "--clean"],
        cwd=root,
        input=RAW,
        capture_output=True,
        text=True,
        check=True,
    )
    assert cleaned.stdout == lock.strip(RAW)
