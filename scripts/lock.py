"""Keep uv.lock free of download addresses, so that it resolves on whichever index uv is set to.

    scripts/lock.py           resolve, then strip the addresses
    scripts/lock.py --check   exit 1 when the lock is stale, or holds an address at HEAD or staged
    scripts/lock.py --strip   strip the addresses that uv wrote back into the working copy
    scripts/lock.py --clean   filter for git: stdin to stdout, addresses stripped

uv reads the stripped lock as a set of preferred versions and resolves afresh: same versions, no
addresses. Standard library only: `--clean` runs before there is an environment.
"""

import argparse
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


def addresses(text: str, where: str) -> list[str]:
    """One line for each line that holds an address."""
    numbered = enumerate(text.splitlines(), 1)
    return [f"{where}:{n}: holds an address" for n, line in numbered if "://" in line]


def resolve() -> str:
    """Run `uv lock` on a copy of the workspace's metadata; return the new lock, unstripped.

    Raises:
        CalledProcessError: uv found no resolution, and said why on stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in [ROOT / "pyproject.toml", LOCK, *ROOT.glob("packages/*/pyproject.toml")]:
            if source.exists():
                copy = folder / source.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(source.read_text())
        (folder / "wheelhouse").mkdir()
        subprocess.run(["uv", "lock", "--quiet"], cwd=folder, check=True)
        return (folder / "uv.lock").read_text()


def check() -> list[str]:
    """What is wrong with the lock, a line each.

    Addresses are looked for in what git holds, at HEAD and staged: uv writes them into the
    working copy whenever it runs, and that does no harm as long as nobody commits them.
    """
    faults = []
    for revision in ["HEAD:", ":"]:
        shown = subprocess.run(
            ["git", "show", f"{revision}uv.lock"], cwd=ROOT, capture_output=True, text=True
        )
        faults += addresses(shown.stdout, f"{revision}uv.lock")
    changed = locked_versions(LOCK.read_text()) ^ locked_versions(resolve())
    if changed:
        names = ", ".join(sorted({name for name, _ in changed})[:8])
        faults.append(f"uv.lock: stale ({names}); run scripts/lock.py and commit uv.lock")
    return faults


def main() -> int:
    """Run the one action asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for action in ["check", "strip", "clean"]:
        parser.add_argument(f"--{action}", dest="action", action="store_const", const=action)
    action = parser.parse_args().action
    if action == "clean":
        sys.stdout.write(strip(sys.stdin.read()))
    elif action == "strip":
        LOCK.write_text(strip(LOCK.read_text()))
    elif action == "check":
        faults = check()
        print("\n".join(faults) or "uv.lock: fresh, no addresses")
        return 1 if faults else 0
    else:
        LOCK.write_text(strip(resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
