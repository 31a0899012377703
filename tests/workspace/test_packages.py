"""Who may import whom, and that what is imported is declared."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import import_all
import pytest

PACKAGES = {
    "eagle3_core": "eagle3-core",
    "eagle3_train": "eagle3-train",
    "eagle3_serve": "eagle3-serve",
}
HEAVY = [
    "accelerate",
    "deepspeed",
    "triton",
    "datasets",
    "pydantic",
    "fastapi",
    "starlette",
    "uvicorn",
]
# Where a module is not named as what brings it. pydantic and fastapi cannot exist without
# pydantic_core and starlette, whose classes are part of their interface.
DISTRIBUTION = {"yaml": "pyyaml", "pydantic_core": "pydantic", "starlette": "fastapi"}


def imported_roots(source: Path) -> dict[str, Path]:
    """Top-level names that the package's files import, wherever in a file they do."""
    found: dict[str, Path] = {}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            found |= {name.split(".")[0]: path for name in names}
    return found


@pytest.mark.parametrize("module", PACKAGES)
def test_what_is_imported_is_declared(root: Path, module: str) -> None:
    folder = root / "packages" / PACKAGES[module]
    metadata = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in metadata["dependencies"]
    }
    optional = {
        re.split(r"[<>=!~;\[ ]", requirement)[0]
        for requirements in metadata.get("optional-dependencies", {}).values()
        for requirement in requirements
    }
    imported = {
        DISTRIBUTION.get(name, name.replace("_", "-")): path
        for name, path in imported_roots(folder / "src" / module).items()
        if name not in sys.stdlib_module_names and name != module
    }
    undeclared = {
        name: str(path) for name, path in imported.items() if name not in declared | optional
    }
    assert not undeclared, f"imported but not declared in {PACKAGES[module]}: {undeclared}"
    assert "eagle3-core" in declared or module == "eagle3_core"


@pytest.mark.parametrize("module", PACKAGES)
def test_a_package_imports_without_its_strangers(root: Path, module: str) -> None:
    """In a fresh interpreter where the packages that it must not know cannot be imported."""
    strangers = sorted(import_all.ALLOWED.keys() - import_all.ALLOWED[module])
    blocked = [*strangers, *(HEAVY if module == "eagle3_core" else [])]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"sys.path.insert(0, {str(root / 'scripts')!r})\n"
        "import import_all\n"
        f"for name in import_all.module_names({module!r}): importlib.import_module(name)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


def test_import_contracts_hold(root: Path) -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "0 broken" in run.stdout


def test_the_contracts_can_break(root: Path, tmp_path: Path) -> None:
    """A contract that nothing breaks would prove nothing: a core that imports serve breaks it."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "eagle3_core/__init__.py").write_text("import eagle3_serve\n")
    (tmp_path / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    run = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "BROKEN" in run.stdout
