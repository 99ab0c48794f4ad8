"""README names extras and modules that exist; test_examples.py runs its commands."""

import re
import subprocess
import sys
from importlib.util import find_spec

from tests.core.test_house import ROOT, project


def readme_commands():
    """The lines of README's shell blocks, with continued lines joined."""
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split(" #")[0].strip() for line in lines if line.strip()]


def test_readme_and_ci_run_the_same_tests():
    (command,) = [line for line in readme_commands() if re.search(r"\bpytest\b", line)]
    assert command in [line.strip() for line in (ROOT / ".ci/run").read_text("utf-8").splitlines()]


def test_readme_names_extras_and_modules_that_exist():
    commands = "\n".join(readme_commands())
    extras = {e for group in re.findall(r"\[([\w,-]+)\]", commands) for e in group.split(",")}
    assert extras <= set(project()["optional-dependencies"])
    modules = re.findall(r"python -m (jaxkv[\w.]*)", commands)
    assert not [module for module in modules if find_spec(module) is None]


def test_the_extra_models_is_enough_to_load_a_model():
    """README's first install; a package of another extra must not be imported by the way."""
    packages = "safetensors matplotlib gguf starlette uvicorn h11 prometheus_client"
    code = (
        f"import sys; sys.modules |= dict.fromkeys({packages.split()})\n"
        "from jaxkv import models; import jaxkv.cli.generate, jaxkv.cli.chat, jaxkv.cli.view\n"
        "models.Stream(models.load())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
