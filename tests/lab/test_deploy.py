"""The files of deploy: commands, ports, users and probes agree."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxkv.cli import _parser as cli_parser
from jaxkv.cli import serve
from tests.lab.test_wheel import git_files
from tests.pages import ROOT, blocks
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
UNIT = (DEPLOY / "systemd/jaxkv.service").read_text("utf-8")
PORT, HEALTH, CACHE = 8000, "/health", "/var/cache/jaxkv"
AFTER_DRAIN = 15  # seconds that a supervisor must wait beyond --drain
BESIDE_MEMORY = 10**9  # bytes of a container beyond --memory
# File -> paths of the keys that its schema, or its use, requires.
REQUIRED = {
    "compose.yaml": ("services/cpu/build/context", "services/cuda/build/context", "volumes/cache"),
    "prometheus.yaml": ("scrape_configs/0/job_name", "scrape_configs/0/static_configs/0/targets"),
    "kubernetes/kustomization.yaml": ("apiVersion", "kind", "resources"),
    "kubernetes/cuda/kustomization.yaml": ("apiVersion", "kind", "patches/0/target/kind"),
    "kubernetes/deployment.yaml": (
        *("apiVersion", "kind", "metadata/name", "spec/selector/matchLabels"),
        *("spec/template/metadata/labels", "spec/template/spec/containers/0/name"),
        "spec/template/spec/containers/0/image",
    ),
    "kubernetes/service.yaml": (
        *("apiVersion", "kind", "metadata/name", "spec/selector", "spec/ports/0/port"),
    ),
    "kubernetes/pvc.yaml": (
        *("apiVersion", "kind", "metadata/name", "spec/accessModes"),
        "spec/resources/requests/storage",
    ),
    "kubernetes/podmonitor.yaml": (
        *("apiVersion", "kind", "metadata/name", "spec/selector"),
        "spec/podMetricsEndpoints/0/port",
    ),
    "kubernetes/endpoint-picker.yaml": ("apiVersion", "kind", "plugins/0/type"),
    "skypilot/serve.yaml": (
        *("service/readiness_probe/path", "service/replicas", "resources/ports", "setup", "run"),
    ),
    "skypilot/train.yaml": ("resources/accelerators", "file_mounts", "setup", "run"),
}
API_VERSIONS = {
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "Component": "kustomize.config.k8s.io/v1alpha1",
    "Deployment": "apps/v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "EndpointPickerConfig": "inference.networking.x-k8s.io/v1alpha1",
}


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def at(document: Any, path: str) -> Any:
    """The value at a path of keys and indices."""
    for key in path.split("/"):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


DEPLOYMENT, COMPOSE = read("kubernetes/deployment.yaml"), read("compose.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SERVICE, TRAIN = read("skypilot/serve.yaml"), read("skypilot/train.yaml")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, continued lines joined."""
    code = "\n".join(x for x in DOCKERFILE.splitlines() if not x.lstrip().startswith("#"))
    lines = [line.strip() for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def argument(instruction: str) -> str:
    """The argument of the last instruction of that name."""
    return [value for name, value in instructions() if name == instruction][-1]


def setting(name: str) -> str:
    return re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[1]


def shell_lines(script: str) -> Iterator[list[str]]:
    for line in script.replace("\\\n", " ").splitlines():
        yield shlex.split(line, comments=True)


def jaxkv_words(words: Sequence[str]) -> list[str]:
    """The words after the program `jaxkv`; none for another command."""
    programs = [n for n, word in enumerate(words) if word.split("/")[-1] == "jaxkv"]
    return list(words[programs[0] + 1 :]) if programs and words[0] != "conda" else []


ENTRYPOINT = json.loads(argument("ENTRYPOINT"))
COMMANDS = {
    "systemd": shlex.split(setting("ExecStart"))[1:],
    "kubernetes": [*ENTRYPOINT[1:], *CONTAINER["args"]],
    **{
        f"compose {name}": [*ENTRYPOINT[1:], *service["command"]]
        for name, service in COMPOSE["services"].items()
    },
    **{
        f"skypilot {words[0]}": words
        for task in (SERVICE, TRAIN)
        for words in map(jaxkv_words, shell_lines(task["run"]))
        if words
    },
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command, by the parser of `jaxkv`; unknown flags raise UserError."""
    return cli_parser(words).parse_args(words)


def test_every_yaml_file_has_the_required_keys():
    names = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.yaml")}
    assert names == REQUIRED.keys()
    for name, paths in REQUIRED.items():
        document = read(name)
        assert all(at(document, path) for path in paths if path != "volumes/cache"), name
        if "kind" in document:
            assert document["apiVersion"] == API_VERSIONS[document["kind"]], name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_flags_that_exist(name):
    args = parse(COMMANDS[name])
    if COMMANDS[name][0] == "serve":
        assert args.port == PORT and args.drain > 0 and args.log == "json"
        assert (args.host == "0.0.0.0") == (name != "systemd")


def test_every_runner_has_a_command():
    runners = {"systemd", "kubernetes", "compose cpu", "compose cuda"}
    assert COMMANDS.keys() - runners == {"skypilot serve", "skypilot data", "skypilot pretrain"}


def test_flags_of_the_page_exist():
    page = (DEPLOY / "README.md").read_text("utf-8")
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    flags = set(re.findall(r"`(--[a-z][a-z-]+)[ `]", prose)) - {"--gpus"}  # of Docker
    pickers = {"--lora-info-metric", "--cache-info-metric"}  # of the inference gateway
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    assert flags - pickers and flags - pickers <= set(parser._option_string_actions)
    (docker_run,) = [x for x in shell_lines("".join(blocks("deploy/README.md", "bash")))
                     if x[:2] == ["docker", "run"]]  # fmt: skip
    image = next(n for n, word in enumerate(docker_run) if word.startswith("jaxkv:"))
    assert parse([*ENTRYPOINT[1:], *docker_run[image + 1 :]]).drain


def test_ports_agree():
    assert argument("EXPOSE") == str(PORT)
    for service in COMPOSE["services"].values():
        assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]  # not for other machines
    (port,) = CONTAINER["ports"]
    (service_port,) = read("kubernetes/service.yaml")["spec"]["ports"]
    assert port["containerPort"] == service_port["port"] == PORT
    (metrics,) = read("kubernetes/podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    probes = [CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    names = {service_port["targetPort"], metrics["port"], *(probe["port"] for probe in probes)}
    assert names == {port["name"]}
    assert SERVICE["resources"]["ports"] == PORT
    (target,) = read("prometheus.yaml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.endswith(f":{PORT}")


def test_probes_ask_for_health():
    probes = [CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    paths = {probe["httpGet"]["path"] for probe in probes}
    assert paths | {SERVICE["service"]["readiness_probe"]["path"]} == {HEALTH}
    assert f"127.0.0.1:{PORT}{HEALTH}" in argument("HEALTHCHECK")
    assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] == 600
    assert "--start-period=10m" in argument("HEALTHCHECK")


def test_the_health_check_of_the_image():
    python, *words = json.loads(argument("HEALTHCHECK").partition("CMD ")[2])
    assert python == "python"

    def check(port: int) -> int:
        code = [word.replace(f":{PORT}/", f":{port}/") for word in words]
        return subprocess.run([sys.executable, *code], capture_output=True).returncode

    with serving(FakeEngine()) as served:
        assert check(served.port) == 0
    assert check(served.port) == 1


def test_users_and_folders_agree():
    (user,) = re.findall(r"useradd --uid (\d+) (\w+)", DOCKERFILE)
    assert int(user[0]) and argument("USER") == f"{user[0]}:{user[0]}"
    context = POD["securityContext"]
    assert context["runAsNonRoot"]
    assert {context[f"{key}"] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user[0])}
    assert setting("User") == user[1]
    assert json.loads(argument("VOLUME")) == [CACHE]
    assert f"/var/cache/{setting('CacheDirectory')}" == CACHE
    folders = f"XDG_CACHE_HOME={CACHE} HF_HOME={CACHE}/hub"
    assert setting("Environment") == folders and argument("ENV").startswith(folders)
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts["cache"] == CACHE
    assert all(x["volumes"] == [f"cache:{CACHE}"] for x in COMPOSE["services"].values())
    keys = {parse(COMMANDS[name]).api_key_file for name in ("systemd", "kubernetes")}
    assert keys == {f"{mounts['keys']}/keys"}


def test_nothing_else_can_be_written():
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert all(service["read_only"] for service in COMPOSE["services"].values())
    assert setting("ProtectSystem") == "strict"


def test_supervisors_wait_until_the_server_has_drained():
    waits = {
        "systemd": int(setting("TimeoutStopSec")),
        "kubernetes": POD["terminationGracePeriodSeconds"],
        **{
            f"compose {name}": int(service["stop_grace_period"].removesuffix("s"))
            for name, service in COMPOSE["services"].items()
        },
    }
    for name, seconds in waits.items():
        assert seconds >= parse(COMMANDS[name]).drain + AFTER_DRAIN, name


def test_containers_have_memory_beside_the_arrays():
    limit = int(COMPOSE["services"]["cpu"]["mem_limit"].removesuffix("g")) * 2**30
    assert limit >= parse(COMMANDS["compose cpu"]).memory + BESIDE_MEMORY
    resources = CONTAINER["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    limit = int(resources["limits"]["memory"].removesuffix("Gi")) * 2**30
    assert limit >= parse(COMMANDS["kubernetes"]).memory + BESIDE_MEMORY


def test_the_manifests_name_each_other():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    service, monitor = read("kubernetes/service.yaml"), read("kubernetes/podmonitor.yaml")
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes.keys()
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == read("kubernetes/pvc.yaml")["metadata"]["name"]
    credentials = monitor["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]
    assert credentials["name"] == volumes["keys"]["secret"]["secretName"]
    admin_file = parse(COMMANDS["kubernetes"]).admin_key_file
    assert admin_file == f"/etc/jaxkv/{credentials['key']}"
    page = (DEPLOY / "README.md").read_text("utf-8")
    assert f"create secret generic {credentials['name']} --from-file=keys=" in page
    files = read("kubernetes/kustomization.yaml")["resources"]
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in files)


def test_an_exposed_service_needs_api_keys():
    """SkyPilot opens its port to the Internet; null values must be given at the start."""
    assert SERVICE["secrets"] == {"JAXKV_API_KEYS": None, "JAXKV_ADMIN_KEYS": None}
    page = (DEPLOY / "README.md").read_text("utf-8")
    assert all(f"--secret {name}" in page for name in SERVICE["secrets"])
    assert all(f"--env {name}=" in page for name, value in TRAIN["envs"].items() if value is None)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_shell_scripts_have_valid_syntax():
    scripts = [value for name, value in instructions() if name == "RUN"]
    scripts += [task[part] for task in (SERVICE, TRAIN) for part in ("setup", "run")]
    scripts += blocks("deploy/README.md", "bash")
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, f"{done.stderr}\n{script}"


@pytest.mark.skipif(shutil.which("sh") is None, reason="no sh")
@pytest.mark.parametrize("device, extras", [("cpu", "serve"), ("cuda", "serve,cuda"),
                                            ("tpu", "serve,tpu"), ("gpu", None)])  # fmt: skip
def test_the_device_chooses_the_extras(device, extras):
    """With a pip that prints its arguments."""
    (script,) = [value for name, value in instructions() if name == "RUN" and "$DEVICE" in value]
    stubs = 'pip() { echo "$@"; }\nrm() { :; }\n'
    done = subprocess.run(
        ["sh", "-c", stubs + script], env=os.environ | {"DEVICE": device}, capture_output=True,
        text=True,
    )  # fmt: skip
    if extras is None:
        assert done.returncode == 2 and "must be cpu, cuda or tpu, got gpu" in done.stderr
        return
    assert done.returncode == 0 and done.stdout.rstrip().endswith(f".whl[{extras}]")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_platforms_of_the_image():
    """`cpu,cpu`, which the image for a CPU sets, is a list of platforms that JAX accepts."""
    platforms = re.search(r"JAX_PLATFORMS=(\S+)", argument("ENV"))[1].replace("${DEVICE}", "cpu")
    done = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"],
        env=os.environ | {"JAX_PLATFORMS": platforms}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "cpu"), done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    path = tmp_path / "jaxkv.service"
    path.write_text(UNIT.replace(shlex.split(setting("ExecStart"))[0], "/bin/true"))  # must exist
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert path.name not in done.stderr, done.stderr


def kustomize(folder: Path) -> dict[str, Any]:
    """The objects that kustomize makes, by kind; skips where there is no kustomize."""
    command = next((x for x in (["kustomize", "build"], ["kubectl", "kustomize"])
                    if shutil.which(x[0])), None)  # fmt: skip
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}


def test_kustomize_makes_the_objects():
    objects = kustomize(DEPLOY / "kubernetes")
    assert objects.keys() == {"Deployment", "Service", "PersistentVolumeClaim"}
    assert objects["Deployment"] == DEPLOYMENT


def test_kustomize_adds_a_gpu_and_the_monitor(tmp_path):
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    path = folder / "kustomization.yaml"
    text = re.sub(r"# (components:|- podmonitor)", r"\1", path.read_text("utf-8"))
    path.write_text(text.replace("newName: jaxkv", "newName: registry.example/jaxkv"))
    objects = kustomize(folder)
    assert objects["PodMonitor"] == read("kubernetes/podmonitor.yaml")
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/jaxkv:cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    args = parse([*ENTRYPOINT[1:], *container["args"]])
    assert args.memory is None and args.drain and args.admin_key_file


def is_ignored(path: str) -> bool:
    """Whether Docker leaves a file out of the context: the last pattern that matches decides.

    A pattern also matches what is in a folder that it matches.
    """
    ignored = False
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!"))
            pattern = pattern.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(?:/.*)?", path):
                ignored = not line.startswith("!")
    return ignored


def test_the_context_of_the_image_has_only_the_sources():
    kept = {name for name in git_files() if not is_ignored(name)}
    assert {"pyproject.toml", "jaxkv/cli/serve.py", "models/default/config.json"} <= kept
    folders = {name.split("/")[0] for name in kept}
    assert folders == {"LICENSE", "README.md", "pyproject.toml", "jaxkv", "models",
                       "pallas_kernels", "colab"}  # fmt: skip
    assert is_ignored(".git/config") and is_ignored("jaxkv/cli/__pycache__/serve.pyc")
