"""Keep uv.lock free of download addresses, so that it resolves on whichever index a user's uv is set to.

    scripts/lock.py           resolve, then strip the addresses
    scripts/lock.py --check   exit 1 when the lock is stale or holds an address
    scripts/lock.py --clean   filter for git: stdin to stdout, addresses stripped

uv reads the stripped lock as a set of preferred versions and resolves afresh: same versions, no addresses.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "uv.lock"


def strip(text: str) -> str:
    """Replace every registry by the name "index" and every file's address by its file name."""
    text = re.sub(r'source = \{ registry = "[^"]*" \}', 'source = { registry = "index" }', text)
    text = re.sub(r'\b(?:url|path) = "[^"]*/([^/"]+)"', r'path = "\1"', text)
    return re.sub(r', upload-time = "[^"]*"', "", text)


def locked_versions(text: str) -> set[tuple[str, str]]:
    """(name, version) of every locked package."""
    return set(re.findall(r'^name = "([^"]+)"\nversion = "([^"]+)"', text, flags=re.MULTILINE))


def resolve(folder: Path) -> str:
    """Run `uv lock` on a copy of the workspace's metadata; return the new lock's text."""
    for source in [ROOT / "pyproject.toml", LOCK, *sorted(ROOT.glob("packages/*/pyproject.toml"))]:
        if source.exists():
            copy = folder / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text())
    (folder / "wheelhouse").mkdir()
    subprocess.run(["uv", "lock", "--quiet"], cwd=folder, check=True)
    return (folder / "uv.lock").read_text()


def check(current: str, fresh: str) -> list[str]:
    """What is wrong with the committed lock, a line each."""
    faults = [f"uv.lock:{n}: holds an address" for n, line in enumerate(current.splitlines(), 1) if "://" in line]
    changed = locked_versions(current) ^ locked_versions(fresh)
    if changed:
        names = ", ".join(sorted({name for name, _ in changed})[:8])
        faults.append(f"uv.lock: stale ({names}); run scripts/lock.py")
    return faults


def main() -> int:
    """Run the one action asked for."""
    action = sys.argv[1] if len(sys.argv) > 1 else ""
    if action == "--clean":
        sys.stdout.write(strip(sys.stdin.read()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = resolve(Path(folder))
    if action == "--check":
        # What git would commit, since uv writes addresses back into the working copy.
        faults = check(strip(LOCK.read_text()) if os.environ.get("LOCK_FROM_WORKTREE") else _committed(), fresh)
        print("\n".join(faults) or "uv.lock: fresh, no addresses")
        return 1 if faults else 0
    if action:
        print(__doc__)
        return 2
    LOCK.write_text(strip(fresh))
    return 0


def _committed() -> str:
    shown = subprocess.run(["git", "show", ":uv.lock"], cwd=ROOT, capture_output=True, text=True)
    return shown.stdout if shown.returncode == 0 else LOCK.read_text()


if __name__ == "__main__":
    sys.exit(main())
