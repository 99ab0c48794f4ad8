"""Rules of the repository: imports, names, lengths of files and functions."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"jaxkv", "models", "pallas_kernels", "evals", "colab", "tests"}

# Path -> packages that its files may import, besides the standard library and their own package.
# The longest prefix of a path applies. None: any package.
MAY_IMPORT = {
    "pallas_kernels": {"jax", "numpy"},
    "jaxkv": {"pallas_kernels", "jax", "numpy"},
    "jaxkv/typing.py": {"jax", "numpy", "jaxtyping"},
    "jaxkv/adapters": {"jax", "numpy", "flax", "gemma"},
    "jaxkv/serve/http": {
        *("pallas_kernels", "jax", "numpy", "starlette", "uvicorn", "h11", "prometheus_client"),
    },
    "jaxkv/cli": {"models", "pallas_kernels", "jax", "numpy", "flax"},
    "models": {
        *("jaxkv", "pallas_kernels", "jax", "numpy", "ml_dtypes", "flax", "optax", "orbax"),
        *("safetensors", "tokenizers", "sentencepiece", "jinja2", "huggingface_hub"),
        *("gguf", "pyarrow", "llguidance", "transformers"),
        *("matplotlib", "tensorboardX"),
        "tunix",
    },
    "evals": {
        *("models", "jaxkv", "pallas_kernels", "jax", "numpy", "ml_dtypes"),
        *("matplotlib", "scipy", "torch", "transformers", "kvpress", "llama_cpp", "openvino"),
        *("openvino_genai", "tunix", "flax", "optax"),
        *("safetensors", "tokenizers", "yaml", "jsonschema"),
    },
    "tests": None,
    "colab": {"models", "jaxkv", "jax", "numpy", "tunix"},  # the wheel has no evals
    "colab/lib": {
        *("models", "jaxkv", "pallas_kernels", "jax", "numpy", "matplotlib"),
        *("jupytext", "nbclient", "nbformat", "PIL", "IPython"),
    },
}
COMPARED_WITH = {
    "torch",
    "transformers",
    "kvpress",
    "llama_cpp",
    "openvino",
    "openvino_genai",
}  # imported only in functions: they may be absent

# Files that every reader of a policy knows, and files that say nothing about a policy.
KNOWN = {"contract", "draws", "attention", "rotary"}
ASIDE = {"typing", "errors", "defaults", "arguments", "platform"}
# Files to read for a policy besides these, its own included: at most so many, by module or folder.
# The aim is four. A tree or an index has more parts, and a compressed prompt is stored per head.
FILES_OF_A_POLICY = {
    "window": 3, "streaming": 3, "full": 3, "h2o": 4, "reservoir": 4,
    "sparse_attention": 4,
    # Heads with budgets of their own, perhaps of a file, are stored per layer; `every`.
    "prompt_compression": 8,
    "prompt_compression/retrieval": 9,  # and keydiff
    "prompt_compression/balance": 9,  # and the halving
    "prompt_compression/pyramidkv": 9,  # and snapkv
    **dict.fromkeys((f"prompt_compression/{x}" for x in ("tova", "rkv", "vase")), 9),  # so here
    "merge_reduce": 8,
    "magicpig": 7,
    "discrepancy": 1,
}  # fmt: skip

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 600, 60, 150
FILE_BYTES = 10_000_000
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:home|root|work|tmp|Users)/\w")


class Import(NamedTuple):
    line: int
    package: str  # the first part of the dotted name; `models` for jaxkv.models
    lazy: bool  # inside a function


def git(*words):
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout


def tracked():
    paths = (ROOT / name for name in git("ls-files", "-z").split("\0") if name)
    return [path for path in paths if path.is_file()]


def name(path):
    return path.relative_to(ROOT).as_posix()


def python_files():
    return {name(path): path.read_text("utf-8") for path in tracked() if path.suffix == ".py"}


def folder_of(module):
    """The top-level folder that a dotted name is installed from, or its first part elsewhere."""
    first, *rest = module.split(".")
    return rest[0] if first == "jaxkv" and rest and rest[0] in PACKAGES else first


def imports(node, package, lazy=False):
    """Every import under a node. A relative one is an import of the file's own package."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, folder_of(alias.name), lazy)
        elif isinstance(child, ast.ImportFrom) and child.module == "jaxkv":
            for alias in child.names:
                yield Import(child.lineno, folder_of(f"jaxkv.{alias.name}"), lazy)
        elif isinstance(child, ast.ImportFrom):
            yield Import(child.lineno, package if child.level else folder_of(child.module), lazy)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, package, lazy or inside)


def allowed(path):
    """Packages that the file may import. None: any. Empty for a path without an entry."""
    prefixes = [p for p in MAY_IMPORT if path == p or path.startswith(p + "/")]
    return MAY_IMPORT[max(prefixes, key=len)] if prefixes else set()


def broken_imports(path, text):
    package = path.split("/")[0]
    may = allowed(path)
    for module in imports(ast.parse(text), package):
        own_or_stdlib = module.package in sys.stdlib_module_names or module.package == package
        if may is not None and not own_or_stdlib and module.package not in may:
            yield f"{path}:{module.line} imports {module.package}"
        if module.package in COMPARED_WITH and not module.lazy:
            yield f"{path}:{module.line} imports {module.package} outside a function"


def test_imports_follow_the_import_direction():
    broken = [line for path, text in python_files().items() for line in broken_imports(path, text)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "path, text",
    [
        ("pallas_kernels/a/api.py", "import jaxkv"),
        ("jaxkv/step.py", "from jaxkv.models import load"),
        ("jaxkv/serve/engine/engine.py", "def f():\n    import flax"),
        ("models/llama.py", "from jaxkv import evals"),
        ("evals/benchmarks/latency.py", "import torch"),
    ],
)
def test_a_wrong_import_is_found(path, text):
    assert list(broken_imports(path, text))


def file_of(module):
    """The file of the library that a dotted name is imported from, or None."""
    path = module.replace(".", "/") + ".py"
    return path if (ROOT / path).is_file() else None


def files_to_read(path, files):
    """The files that a module of the library reaches by imports, itself included."""
    if path is None or path in files or {Path(path).stem, Path(path).parent.name} & (KNOWN | ASIDE):
        return files
    files.add(path)
    for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                files_to_read(file_of(module) or file_of(node.module), files)
    return files


def test_few_files_explain_a_policy():
    folder, counts = "jaxkv/policies/", {}
    for path in python_files():
        if path.startswith(folder) and not path.endswith("__init__.py"):
            module = path.removeprefix(folder).removesuffix(".py")
            part = module if module in FILES_OF_A_POLICY else module.split("/")[0]
            counts[part] = max(counts.get(part, 0), len(files_to_read(path, set())))
    assert counts == FILES_OF_A_POLICY  # fewer: lower the number


def test_every_package_is_installed():
    """A folder without an __init__.py imports from a checkout but is missing from a wheel.

    Experiments and tests are in no wheel.
    """
    folders = {path.rpartition("/")[0] for path in python_files()} - {"colab"}
    packages = [x for x in folders if x.split("/")[0] in PACKAGES - {"evals", "tests"}]
    assert not [folder for folder in packages if not (ROOT / folder / "__init__.py").is_file()]
    dotted = {folder.replace("colab/lib", "colab").replace("/", ".") for folder in packages}
    installed = {name if name.split(".")[0] == "jaxkv" else f"jaxkv.{name}" for name in dotted}
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert sorted(tool["packages"]) == sorted(installed)


def test_files_and_functions_are_short():
    long = []
    for path, text in python_files().items():
        count = len(text.splitlines())
        if count > FILE_LINES:
            long.append(f"{path}: {count} lines, limit {FILE_LINES}")
        limit = KERNEL_LINES if path.startswith("pallas_kernels/") else FUNCTION_LINES
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = node.end_lineno - node.lineno + 1
                if count > limit:
                    long.append(f"{path}:{node.lineno} {node.name}: {count} lines, limit {limit}")
    assert not long, "\n".join(long)


def public_types(text):
    """The names of the classes, and of the aliases of types at the top of a module."""
    tree = ast.parse(text)
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        alias = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if re.fullmatch(r"[A-Z]+[a-z]\w*", alias):
            yield alias


# Names that tell neither type nor role. Their share among stored names, at most, by package.
DETERMINERS = re.compile(
    "found|given|one|each|most|least|whole|own|known|wanted|others?|what|theirs|ours|made|here|"
    "there|some|few|both|far|left|more|same|begun|of"
)
MAX_SHARE = dict.fromkeys(("jaxkv", "models", "pallas_kernels"), 0.005)


def stored_names(tree: ast.AST) -> list[str]:
    """Names of variables, parameters, functions and classes."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return names


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_names_say_type_or_role(package):
    names = [
        name
        for path, text in python_files().items()
        if path.startswith(f"{package}/")
        for name in stored_names(ast.parse(text))
    ]
    empty = Counter(name for name in names if DETERMINERS.fullmatch(name.strip("_")))
    assert empty.total() <= MAX_SHARE.get(package, 0.015) * len(names), empty.most_common(10)


def test_no_two_public_types_share_a_name():
    where = defaultdict(list)
    for path, text in python_files().items():
        if not path.startswith("tests/"):
            for type_name in public_types(text):
                where[type_name].append(path)
    assert not {n: paths for n, paths in where.items() if len(paths) > 1 and n[0] != "_"}


def test_no_file_is_large_or_names_a_local_path():
    problems = []
    for path in tracked():
        data = path.read_bytes()
        if len(data) > FILE_BYTES:
            problems.append(f"{name(path)}: {len(data)} bytes, limit {FILE_BYTES}")
        if b"\0" in data:  # not text
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                problems.append(f"{name(path)}:{number} names a path of one machine: {line[:100]}")
    assert not problems, "\n".join(problems)


def test_warnings_name_the_line_of_the_caller():
    """`jaxkv.errors.warn` finds it; a fixed stacklevel depends on who calls."""
    library = {p: text for p, text in python_files().items() if not p.startswith("tests/")}
    assert [p for p, text in library.items() if "warnings.warn(" in text] == ["jaxkv/errors.py"]


def test_versions_agree():
    version = project()["version"]
    written = {
        path: match[1]
        for path, text in python_files().items()
        if (match := re.search(r'^__version__ = "(.*)"', text, re.MULTILINE))
    }
    assert set(written.values()) == {version}, written
    newest = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    assert newest.startswith("Unreleased" if "dev" in version else version)


def test_the_command_line_starts_without_jax():
    code = "import sys, jaxkv.cli; print(*{'jax', 'flax', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_an_import_starts_no_backend():
    """It would reserve the memory of a GPU, and fix settings that a script has still to make."""
    code = (
        "import importlib, pkgutil, jaxkv, jaxkv.models, jaxkv.pallas_kernels\n"
        "for package in (jaxkv, jaxkv.models, jaxkv.pallas_kernels):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        if module.name != 'jaxkv.__main__':\n"
        "            importlib.import_module(module.name)\n"
        "from jax._src import xla_bridge; print(*xla_bridge._backends)\n"
        "import jax; jax.devices(); print(*xla_bridge._backends)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "\ncpu\n"), done.stdout + done.stderr


def test_parity_tests_have_their_mark():
    """Without the mark they would fail, instead of being skipped, where torch is absent."""
    bare = []
    for path, text in python_files().items():
        uses = {module.package for module in imports(ast.parse(text), "tests")} & COMPARED_WITH
        if re.match(r"tests/(.*/)?test_", path) and uses and "mark.parity" not in text:
            bare.append(path)
    assert not bare


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
