"""Prints the third-party requirements of an extra of this project, its nested extras included.

`build`: those of a build; `base`: those without any extra."""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extra: str) -> list[str]:
    """Every requirement that `pip install .[extra]` would ask for, the project itself left out."""
    found = list(project["dependencies"])
    for item in project["optional-dependencies"][extra] if extra != "base" else ():
        if item.startswith(project["name"] + "["):
            nested = item[len(project["name"]) + 1 : -1]
            found += requirements(project, nested)
        else:
            found.append(item)
    return sorted(set(found))


if __name__ == "__main__":
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    wanted = sys.argv[1]
    found = pyproject["build-system"]["requires"] if wanted == "build" else requirements(pyproject["project"], wanted)
    print("\n".join(found))
