"""Rules of the repository that no other tool holds, each a function from files to findings."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PACKAGES = ("bench", "decode_worker", "kvstore_service", "models")
BLOB_BYTES_MAX = 1 << 20
BLOBS = ("models/retriever/model.safetensors",)
BINARY = ("csrc/fuzz/corpus/", *BLOBS, "proto/baseline.binpb")
TABBED = ("Makefile", ".pml")
COLUMNS = 120
MEASURED = (".py", ".pyi", ".h", ".inc", ".cc", ".c", ".proto")
# A comment that goes on in the next line fills its own at least so far.
RAGGED_COLUMNS = 70
# Found by their names, by tools or by pytest.
KNOWN_NAMES = {
    "__init__.py", "__init__.pyi", "__main__.py", "_native.pyi", "conftest.py", "sitecustomize.py", "LICENSE",
    "Makefile", "CMakeLists.txt", "pyproject.toml", "buf.yaml", "README.md", "CONTRIBUTING.md",
}  # fmt: skip
# Base classes that call none of our methods by their names.
BASES = {"ABC", "Protocol", "NamedTuple", "Exception", "OSError", "RuntimeError", "ValueError"}
HOME = re.compile(r"(?<![\w}.])/(?:root|home/\w+|Users/\w+)/")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CPP_DEFINED = re.compile(
    r"^\s*(?:inline |static )*"
    r"(?:constexpr [\w:<>, ]+? (\w+)(?:\[\w*\])?\s*[={]|(?:struct|class|enum class) (\w+)\s*[:{])",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Tree:
    """The files of a repository by their path, as bytes."""

    files: Mapping[str, bytes]

    @staticmethod
    def tracked(root: Path) -> Tree:
        """What git tracks or would track, under `root`."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=True).stdout
        return Tree({name: (root / name).read_bytes() for name in names.split("\0") if (root / name).is_file()})

    @cached_property
    def texts(self) -> dict[str, str]:
        return {name: data.decode() for name, data in self.files.items() if not name.startswith(BINARY)}

    def named(self, *endings: str) -> Iterator[tuple[str, str]]:
        return ((name, text) for name, text in self.texts.items() if name.endswith(endings))

    @cached_property
    def modules(self) -> dict[str, list[ast.AST]]:
        """All nodes of each Python file; the first one is the module."""
        return {name: list(ast.walk(ast.parse(text))) for name, text in self.named(".py")}


def blanks(tree: Tree) -> Iterator[str]:
    """Tabs (but where a language wants them), spaces at the end of a line, and a last line without its end."""
    for name, text in tree.texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip():
                yield f"{name}:{number}: space at the end of the line"
            if "\t" in line and not name.endswith(TABBED):
                yield f"{name}:{number}: tab"
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            yield f"{name}: does not end with one newline"


def long_lines(tree: Tree) -> Iterator[str]:
    """A tool's directive behind the code does not count."""
    for name, text in tree.named(*MEASURED):
        for number, line in enumerate(text.splitlines(), 1):
            if len(re.sub(r"  # (type|noqa|fmt).*", "", line)) > COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, at most {COLUMNS}"


def blobs(tree: Tree) -> Iterator[str]:
    for name, data in tree.files.items():
        if len(data) > BLOB_BYTES_MAX and name not in BLOBS:
            yield f"{name}: {len(data)} bytes, at most {BLOB_BYTES_MAX}"


def home_paths(tree: Tree) -> Iterator[str]:
    """Paths of somebody's machine."""
    for name, text in tree.texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if HOME.search(line):
                yield f"{name}:{number}: a path below somebody's home"


def ragged_comments(tree: Tree) -> Iterator[str]:
    """A comment broken in the middle of a sentence, far before the margin: what formatters do to it."""
    for name, text in tree.named(*MEASURED):
        mark = "#" if name.endswith((".py", ".pyi")) else "//"
        lines = text.splitlines()
        for number, (line, after) in enumerate(itertools.pairwise(lines), 1):
            sentence = re.fullmatch(rf"\s*{mark} \S+(?: \S+)* [\w,]+", line)
            if sentence and len(line) < RAGGED_COLUMNS and re.match(rf"\s*{mark} [a-z]+ ", after):
                yield f"{name}:{number}: the comment goes on in the next line; fill this one"


def orphans(tree: Tree) -> Iterator[str]:
    """Files that no other file imports, includes, links, names, or takes with a pattern."""
    imported = {module for name, nodes in tree.modules.items() for module in _imports(name, nodes)}
    imported |= {ending for module in imported for ending in _endings(module, ".")}
    mentions = _mentions(tree)
    patterns = tuple(_patterns(tree))
    for name in tree.files:
        path = PurePosixPath(name)
        if name.startswith((".", BINARY[0])) or path.name in KNOWN_NAMES or path.name.startswith("test_"):
            continue
        dotted = ".".join(path.with_suffix("").parts)
        if name.endswith(".py") and not imported.isdisjoint([dotted, *_endings(dotted, ".")]):
            continue
        if any(fnmatch(name, pattern) or fnmatch(path.name, pattern) for pattern in patterns):
            continue
        if all(mentions.get(each, set()) <= {name} for each in (name, path.name, dotted)):
            yield f"{name}: no other file imports, includes, links or names it"


def dead_names(tree: Tree) -> Iterator[str]:
    """Functions, classes, methods and constants that nothing refers to; C++: types and constants named once."""
    used = Counter(word for nodes in tree.modules.values() for word in _references(nodes))
    classes = BASES | {node.name for nodes in tree.modules.values() for node in nodes if isinstance(node, ast.ClassDef)}
    for name, nodes in tree.modules.items():
        if PurePosixPath(name).parts[0] in PACKAGES:
            dead = (each for each in _definitions(nodes, classes) if not used[each.name])
            yield from (f"{name}:{each.line}: nothing refers to {each.name}" for each in dead)
    sources = {name: CPP_COMMENT.sub("", text) for name, text in tree.named(".h", ".inc", ".cc")}
    seen = Counter(word for text in sources.values() for word in IDENTIFIER.findall(text))
    for name, text in sources.items():
        for groups in CPP_DEFINED.findall(text):
            yield from (f"{name}: nothing refers to {word}" for word in groups if word and seen[word] == 1)


RULES: tuple[Callable[[Tree], Iterator[str]], ...] = (
    blanks, long_lines, blobs, home_paths, ragged_comments, orphans, dead_names,
)  # fmt: skip


def _imports(name: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Dotted names that a module imports, as far as they can be modules."""
    package = PurePosixPath(name).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _endings(path: str, separator: str) -> Iterator[str]:
    """What is left of a path without its first parts."""
    while separator in path:
        path = path.partition(separator)[2]
        yield path


def _mentions(tree: Tree) -> dict[str, set[str]]:
    """Every word that may be a path, and its endings -> the files where it stands."""
    found: dict[str, set[str]] = {}
    for name, text in tree.texts.items():
        for word in set(re.findall(r"[\w./-]*\w", text)):
            for each in (word, *_endings(word, "/")):
                found.setdefault(each, set()).add(name)
    return found


def _patterns(tree: Tree) -> Iterator[str]:
    """Of the build's sources and of files that a test goes through; Python and documentation need a name."""
    for name, text in tree.named("CMakeLists.txt", ".py"):
        quoted = re.findall(
            r"glob\(\"([^\"]+)\"" if name.endswith(".py") else r"GLOB \w+ (?:CONFIGURE_DEPENDS )?(\S+)\)", text
        )
        yield from (pattern for pattern in quoted if not pattern.endswith((".py", ".md", "*")))


class _Definition(NamedTuple):
    name: str
    line: int


def _definitions(nodes: Sequence[ast.AST], classes: set[str]) -> Iterator[_Definition]:
    """A module's and its classes' functions, classes and constants; not those that Python itself calls."""
    for scope in nodes:
        if not isinstance(scope, ast.Module) and not (isinstance(scope, ast.ClassDef) and _is_ours(scope, classes)):
            continue
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not (node.name.startswith("__") or _is_registered(node)):
                    yield _Definition(node.name, node.lineno)
            elif isinstance(node, ast.Assign) and isinstance(scope, ast.Module):
                targets = (target for target in node.targets if isinstance(target, ast.Name))
                yield from (_Definition(each.id, node.lineno) for each in targets if not each.id.startswith("__"))


def _is_ours(node: ast.ClassDef, classes: set[str]) -> bool:
    """Whether no base class of others may call the methods by their names."""
    names = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return all(isinstance(name, ast.Name) and name.id in classes for name in names)


def _is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Something else than its name leads to it: a decorator that takes it, such as a registry's."""
    plain = {"staticmethod", "classmethod", "property", "cached_property", "cache", "abstractmethod", "dataclass"}
    plain |= {"contextmanager", "inference_mode", "override", "setter", "no_grad"}
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) not in plain:
            return True
    return False


def _references(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from IDENTIFIER.findall(node.value) if len(node.value) < 200 else ()
