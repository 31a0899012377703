"""Import every module of one installed package, and none of its siblings.

    scripts/import_all.py PACKAGE

Exit 1 when a module cannot be imported, or when a package of this workspace that PACKAGE must not
know is installed or imported.
"""

import importlib
import importlib.util
import pkgutil
import sys

ALLOWED = {
    "eagle3_core": {"eagle3_core"},
    "eagle3_train": {"eagle3_core", "eagle3_train"},
    "eagle3_serve": {"eagle3_core", "eagle3_serve"},
}


def module_names(package_name: str) -> list[str]:
    """The package and every module below it."""
    package = importlib.import_module(package_name)
    found = pkgutil.walk_packages(package.__path__, package_name + ".")
    # A `__main__` runs when it is imported.
    return [package_name, *(m.name for m in found if not m.name.endswith("__main__"))]


def main() -> int:
    """Import all of the package named on the command line."""
    package_name = sys.argv[1]
    strangers = ALLOWED.keys() - ALLOWED[package_name]
    present = sorted(name for name in strangers if importlib.util.find_spec(name))
    if present:
        print(f"{package_name}: {', '.join(present)} should not be installed here")
        return 1
    names = module_names(package_name)
    for name in names:
        importlib.import_module(name)
    print(f"{package_name}: {len(names)} modules import from the wheel alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
