"""The documentation says what is there, and nothing says what only one machine knows."""

import re
import subprocess
import sys
from pathlib import Path

from eagle3_train.config import TrainConfig

# Spelled in parts, so that this file does not find itself.
NOT_IN_THE_REPOSITORY = {
    "a path of one machine": r"(?<![\w.])/(?:ro" + r"ot|home/\w+|Users/\w+|wo" + r"rk)/",
    "an index's address": r"py" + r"pi\.org|python" + r"hosted",
    "something unfinished": r"\bTO" + r"DO\b|\bFIX" + r"ME\b|NotImpl" + r"ementedError",
}


def test_generated_pages_are_up_to_date(root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"], cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


def test_links_lead_somewhere(root: Path) -> None:
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(root)}: {link}"
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_links_to_headings_lead_somewhere(root: Path) -> None:
    def anchors(page: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}

    broken = [
        f"{page.relative_to(root)}: {link}#{anchor}"
        for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert broken == []


def test_settings_that_the_guide_names_exist(root: Path) -> None:
    named = re.findall(r"`([a-z]+)\.(\w+)`", (root / "docs/training.md").read_text())
    known = {
        (section, key)
        for section, field in TrainConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for key in field.annotation.model_fields  # pyright: ignore[reportOptionalMemberAccess]
    }
    sections = {section for section, _ in known}
    assert [f"{s}.{k}" for s, k in named if s in sections and (s, k) not in known] == []
    assert len(named) > 10


def test_no_file_holds_what_does_not_belong_here(root: Path, source_files: list[Path]) -> None:
    found = [
        f"{path.relative_to(root)}:{number}: {what}"
        for path in source_files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for what, pattern in NOT_IN_THE_REPOSITORY.items()
        if re.search(pattern, line) and path.name != "uv.lock"
    ]
    assert found == []
