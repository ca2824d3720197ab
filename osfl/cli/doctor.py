"""`osfl doctor`: check that this machine can run OSFL, with a hint for each problem.

Packages that may be missing or outdated (torch, Flower) are only imported after their metadata was
checked.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import psutil
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.markup import escape

from osfl.cli import display
from osfl.config import ConfigError, RunConfig

OK = "ok"
WARN = "warn"
FAIL = "fail"
COLORS = {OK: "green", WARN: "yellow", FAIL: "red"}

GB = 1e9
# Resident memory of a server process with the digits' diffusion model: 0.94 GB on Linux with
# torch's CUDA build. A client process needs about the same.
PROCESS_BYTES = 0.95 * GB
# Clock error that is a failure, not only a warning
CLOCK_SECONDS = 300.0
# Allowed difference between this machine's clock and the disk's, which may be a network disk
DISK_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        state: OK, WARN or FAIL.
        subject: what is checked.
        text: the result.
        hint: the fix, or "" if none is needed.
    """

    state: str
    subject: str
    text: str
    hint: str = ""


def show_findings(settings: Iterable[str], runs: Path | None) -> None:
    """Run all checks, and print their findings.

    Raises:
        typer.Exit: a check failed.
    """
    with display.expected_errors():
        states = [_show(finding) for finding in check_installation()]
        if FAIL not in states:
            from osfl.launch.jobs import runs_folder
            from osfl.settings import resolve_config

            config, _ = resolve_config(settings)
            findings = check_machine(config, runs_folder(config, runs))
            states += [_show(finding) for finding in findings]
    if FAIL in states:
        raise typer.Exit(1)


def _show(finding: Finding) -> str:
    color = COLORS[finding.state]
    text = f"[{color}]{finding.state:<5}[/]{finding.subject:<9}{escape(finding.text)}"
    display.console.print(text, highlight=False, soft_wrap=True)
    if finding.hint:
        display.console.print(" " * 14 + escape(finding.hint), highlight=False, soft_wrap=True)
    return finding.state


def check_installation() -> Iterator[Finding]:
    """Check Python and the installed packages, by their metadata."""
    yield check_python(platform.python_version())
    yield from check_packages(requires("osfl") or [])


def check_machine(config: RunConfig, runs: Path) -> Iterator[Finding]:
    """Check this machine's device, models, disk, ports, clock and memory for a run.

    Args:
        config: the run's configuration.
        runs: parent folder of the run's folder.
    """
    from server_app.app import estimate_disk_bytes

    yield check_device(config.device)
    yield from check_models(config)
    yield check_disk(runs, estimate_disk_bytes(config))
    yield check_ports()
    yield check_clock(runs)
    yield check_memory(config, psutil.virtual_memory().available)


def check_python(python_version: str) -> Finding:
    """Check that osfl supports this version of Python."""
    allowed = metadata("osfl")["Requires-Python"]
    if python_version in SpecifierSet(allowed):
        return Finding(OK, "Python", python_version)
    hint = f"create an environment with Python {allowed}"
    return Finding(FAIL, "Python", f"{python_version}; osfl requires {allowed}", hint)


def check_packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Check the packages that osfl requires; problems with optional ones are warnings.

    Args:
        requirements: as in the metadata of osfl.
    """
    problems_by_extra: dict[str, list[str]] = {}
    for requirement in map(Requirement, requirements):
        extra = _extra_of(requirement)
        if extra in ("dev", "docs") or requirement.name in ("osfl", "flwr"):
            continue
        if problem := _package_problem(requirement):
            problems_by_extra.setdefault(extra, []).append(problem)
    flower = Requirement(next(r for r in requirements if Requirement(r).name == "flwr"))
    yield _flower(flower)
    for extra, problems in problems_by_extra.items():
        name = f"osfl[{extra}]" if extra else "osfl"
        hint = f"pip install '{name}'"
        if extra:
            hint += f", if this machine needs the extra {extra}"
        yield Finding(WARN if extra else FAIL, "packages", "; ".join(problems), hint)
    if not problems_by_extra:
        yield Finding(OK, "packages", f"osfl {version('osfl')}, with all of its extras")


def _extra_of(requirement: Requirement) -> str:
    """Return the extra that a requirement belongs to, or ""."""
    marker = str(requirement.marker or "")
    return marker.partition("extra == ")[2].strip("\"' ")


def _package_problem(requirement: Requirement) -> str:
    """Return what is wrong with an installed package, or ""."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return ""
    return f"{requirement.name} {installed} is not {requirement.specifier}"


def _flower(requirement: Requirement) -> Finding:
    problem = _package_problem(requirement)
    if not problem:
        return Finding(OK, "Flower", version("flwr"))
    hint = f"pip install 'flwr{requirement.specifier}', the same version on every machine"
    return Finding(FAIL, "Flower", problem, hint)


def check_device(name: str) -> Finding:
    """Check torch and the server's device."""
    import torch

    from osfl.util.devices import pick_device

    try:
        device = pick_device(name)
    except ConfigError as error:
        return Finding(FAIL, "torch", f"{torch.__version__}; {error}")
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        text = f"{torch.__version__}; {gpu.name}, {gpu.total_memory / GB:.0f} GB"
        return Finding(OK, "torch", text)
    text = f"{torch.__version__}; {device.type}, {os.cpu_count()} cores"
    if shutil.which("nvidia-smi") and name == "auto":
        hint = "the driver is installed, but torch cannot use the GPU: install torch's CUDA build"
        return Finding(WARN, "torch", text, hint)
    return Finding(OK, "torch", text)


def check_models(config: RunConfig) -> Iterator[Finding]:
    """Check all models that the run loads: the kit's, and those set apart from it."""
    from osfl.kit.run_check import check_run_models
    from osfl.kit.used_parts import run_models
    from server_app.kit import check_subject

    models = run_models(config)
    kits = [model for model in models if model.is_in_kit]
    others = [model for model in models if not model.is_in_kit]
    finding = _finding("kit", lambda: check_subject(config), f"{config.method} needs none")
    if finding.state == OK:
        finding = _finding("kit", lambda: check_run_models(config, kits), finding.text)
    yield finding
    if others and finding.state == OK:
        yield _finding("models", lambda: check_run_models(config, others))


def _finding(subject: str, check: Callable[[], Sequence[object] | None], text: str = "") -> Finding:
    """Run a check of models, and return its finding.

    Args:
        subject: of the check.
        check: returns the models' locations.
        text: for a check that returns none.
    """
    from osfl.kit.folder import KitError
    from osfl.models.classifiers import ClassifierError

    try:
        places = check() or ()
    except (ClassifierError, ConfigError, KitError, OSError) as error:
        return Finding(FAIL, subject, str(error))
    return Finding(OK, subject, ", ".join(dict.fromkeys(map(str, places))) or text)


def check_disk(runs: Path, needed: int) -> Finding:
    """Check that a run's folder is writable and has enough space.

    Args:
        runs: parent folder of the run's folder.
        needed: bytes.
    """
    from osfl.launch import flower

    try:
        return Finding(OK, "disk", flower.check_disk(runs, needed))
    except flower.LaunchError as error:
        return Finding(FAIL, "disk", str(error))


def check_ports() -> Finding:
    """Check that two ports are available for a simulation's SuperLink."""
    from osfl.launch import flower

    try:
        ports = flower.free_ports(2)
    except OSError as error:
        hint = "allow this user's programs to listen on 127.0.0.1"
        return Finding(FAIL, "ports", f"none on 127.0.0.1: {error}", hint)
    return Finding(OK, "ports", f"free on 127.0.0.1, such as {ports[0]} and {ports[1]}")


def check_clock(runs: Path, now: Callable[[], float] = time.time) -> Finding:
    """Check the clock against osfl's installation date and the time stamp of a new file.

    Args:
        runs: parent folder of the run's folder, whose disk is tested.
        now: returns the seconds since 1970.
    """
    hint = (
        "synchronize it by NTP; Flower rejects a node whose clock is more than 5 seconds ahead of "
        "the server's, or more than 305 seconds behind"
    )
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now()))
    if now() < Path(__file__).stat().st_mtime - CLOCK_SECONDS:
        return Finding(FAIL, "clock", f"{date}, before osfl was installed", hint)
    from osfl.launch import flower

    folder = flower.nearest_folder(runs)
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        difference = abs(os.stat(file.name).st_mtime - now())
    if difference <= DISK_CLOCK_SECONDS:
        return Finding(OK, "clock", date)
    state = FAIL if difference > CLOCK_SECONDS else WARN
    return Finding(state, "clock", f"{date}, {difference:,.0f} s apart from {folder}'s", hint)


def check_memory(config: RunConfig, free: int) -> Finding:
    """Check the memory for a simulation's processes: the server, and a client per core.

    Args:
        config: the run's configuration.
        free: bytes.
    """
    clients = min(config.num_clients, os.cpu_count() or 1)
    needed = (1 + clients) * PROCESS_BYTES
    text = f"{free / GB:,.1f} GB free; a server and {clients} clients of the digits need about "
    text += f"{needed / GB:,.1f} GB"
    if free < PROCESS_BYTES:
        return Finding(FAIL, "memory", text, "end other programs, or use another machine")
    if free < needed:
        hint = f"run one client at a time: --client-cpus {os.cpu_count()}"
        return Finding(WARN, "memory", text, hint)
    return Finding(OK, "memory", text)
