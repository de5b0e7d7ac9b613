"""Imports point one way, and the core imports torch alone."""

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("subquad").origin).parent

# Every layer may import the layers before it. Parts of one layer do not import each other.
LAYERS = (
    ("errors", "shapes"),
    ("options", "pages"),
    ("registry",),
    ("data", "features", "kernels", "positions"),
    ("attention",),
    ("models",),
    ("generation", "convert", "distributed"),
    ("training",),  # recovery trains what convert has made
    ("",),  # subquad/__init__.py: the public names
    ("arena",),
    ("cli",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# Packages of an extra, imported at the top of a file: the command line is made of typer, and
# the generation cache of transformers' classes. Others import these files inside functions.
AT_TOP = {
    "cli": {"typer", "rich"},
    "convert.cache": {"transformers"},
    "models": {"transformers"},
    "generation.noise": {"transformers"},
    # imported at the first call that the kernels run
    "kernels.triton.backward_kernels": {"triton"},
    "kernels.triton.engine": {"triton"},
    "kernels.triton.forward_kernels": {"triton"},
    "kernels.triton.tiles": {"triton"},
    "kernels.triton.tuning": {"triton"},
}
# Parts that may import packages of an extra inside a function.
WITH_EXTRAS = ("pages", "data", "models", "generation", "training", "convert", "arena", "cli")


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    parts = ("subquad", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module):
    """The layer's part that a module belongs to: "" for subquad itself."""
    return [*module.split("."), ""][1]


class Imports(ast.NodeVisitor):
    """(module, line, inside a function) of every import that runs; TYPE_CHECKING blocks do not."""

    def __init__(self, name, is_package):
        self.found, self.depth = [], 0
        self.parents = name.split(".") if is_package else name.split(".")[:-1]

    def visit_If(self, node):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node):
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def add(self, module, node):
        self.found.append((module, node.lineno, self.depth > 0))

    def visit_Import(self, node):
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node):
        base = node.module or ""
        if node.level:
            parents = self.parents[: len(self.parents) - node.level + 1]
            base = ".".join([*parents, base]).rstrip(".")
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            self.add(inner if is_module(inner) else base, node)


@functools.cache
def is_module(name):
    parts = name.split(".")
    if parts[0] != "subquad":
        return False
    path = PACKAGE.joinpath(*parts[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@functools.cache
def imports(path):
    visitor = Imports(module_name(path), path.name == "__init__.py")
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return visitor.found


def test_every_part_has_a_layer():
    parts = {part_of(module_name(path)) for path in sources()}
    assert parts <= RANK.keys(), f"say in LAYERS where these belong: {parts - RANK.keys()}"


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_one_way(path):
    own = part_of(module_name(path))
    wrong = [
        f"line {line}: {own or 'subquad'} imports {module}"
        for module, line, _ in imports(path)
        if module.split(".")[0] == "subquad"
        and part_of(module) != own
        and RANK[part_of(module)] >= RANK[own]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_packages_of_an_extra_are_imported_where_they_are_used(path):
    own = part_of(module_name(path))
    known = sys.stdlib_module_names | {"torch", "subquad"}
    wrong = []
    for module, line, inside in imports(path):
        top = module.split(".")[0]
        file = module_name(path).removeprefix("subquad.")
        allowed = AT_TOP.get(own, set()) | AT_TOP.get(file, set())
        if top in known or top in allowed or (inside and own in WITH_EXTRAS):
            continue
        wrong.append(f"line {line}: {module}" + (" inside a function" if inside else ""))
    assert not wrong, f"the core imports torch alone; {own or 'subquad'} imports\n" + "\n".join(
        wrong
    )


def test_the_registry_names_mechanisms_without_importing_them():
    from subquad.registry import MECHANISMS

    for name, target in MECHANISMS.items():
        module, _, attribute = target.partition(":")
        assert module.startswith("subquad.attention."), name
        assert is_module(module) and attribute, f"{name} → {target} does not exist"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_loads_no_mechanism_and_no_extra():
    loaded = run("import sys, subquad; print(*sys.modules)")
    from subquad.registry import MECHANISMS

    mechanisms = {target.partition(":")[0] for target in MECHANISMS.values()}
    extras = {"transformers", "tokenizers", "safetensors", "matplotlib", "typer", "rich"}
    assert not (mechanisms | extras) & set(loaded)


def test_the_core_works_without_any_extra():
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "tokenizers", "safetensors", "accelerate",
                                  "matplotlib", "typer", "rich", "scipy"}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refuse())
import torch, subquad as sq

q = torch.randn(1, 2, 5, 4)
for name in sq.mechanisms(qkv=True):
    mech = sq.build(name, head_dim=4, num_heads=2, embed_dim=8, max_length=8)
    print(name, *mech(q, q, q).shape)
try:
    sq.convert(torch.nn.Linear(1, 1), "performer")
except ImportError as error:
    print("subquad[hf]" in str(error))
"""
    assert run(code)[-1] == "True"
