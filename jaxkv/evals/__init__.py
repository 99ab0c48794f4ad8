"""The experiments: the folder `evals` of a clone. An installed wheel has none."""

import sys
from importlib.metadata import metadata
from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "evals")]

if not Path(__path__[0], "lib", "record.py").is_file():
    repository = metadata("jaxkv").get("Project-URL", "").rpartition(" ")[2]
    message = (
        "experiments are in a clone of the repository, and this jaxkv is installed without them; "
        f"git clone {repository} && cd jaxkv && pip install -e '.[dev]'"
    )
    if sys.argv[:1] == ["-m"]:  # `python -m jaxkv.evals.NAME` looks for the module
        print(f"jaxkv: error: {message}", file=sys.stderr)
        raise SystemExit(2)
    raise ModuleNotFoundError(message, name=__name__)
