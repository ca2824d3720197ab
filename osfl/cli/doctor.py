"""`osfl doctor`: whether this machine can run OSFL, and what to do where it cannot.

What may be missing or of another version (torch, Flower) is imported after the packages were looked
at.
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
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}

GB = 1e9
# A server's process with the digits' diffusion model: 0.94 GB, resident, on Linux with torch's CUDA
# build. A client's has about as much.
PROCESS_BYTES = 0.95 * GB
# Farther off than this is wrong, and not only odd
CLOCK_SECONDS = 300.0
# Between a file's time and this machine's own, on a disk that another machine has
DISK_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """One line of what the doctor says."""

    state: str  # OK, WARN or FAIL
    what: str  # was looked at
    text: str  # what was found
    cure: str = ""  # what to do


def show_findings(settings: Iterable[str], runs: Path | None) -> None:
    """Look, and print every finding.

    Raises:
        typer.Exit: something is wrong.
    """
    with display.named_errors():
        states = [_show(finding) for finding in check_installation()]
        if FAIL not in states:
            from osfl.cli import launch
            from osfl.cli.run import runs_folder

            config, _ = launch.resolve_config(settings)
            findings = check_machine(config, runs_folder(config, runs))
            states += [_show(finding) for finding in findings]
    if FAIL in states:
        raise typer.Exit(1)


def _show(finding: Finding) -> str:
    colour = COLOURS[finding.state]
    text = f"[{colour}]{finding.state:<5}[/]{finding.what:<9}{escape(finding.text)}"
    display.console.print(text, highlight=False, soft_wrap=True)
    if finding.cure:
        display.console.print(" " * 14 + escape(finding.cure), highlight=False, soft_wrap=True)
    return finding.state


def check_installation() -> Iterator[Finding]:
    """Python and the packages, by their metadata."""
    yield check_python(platform.python_version())
    yield from check_packages(requires("osfl") or [])


def check_machine(config: RunConfig, runs: Path) -> Iterator[Finding]:
    """All that a run finds on its machine.

    Args:
        config: what shall be run.
        runs: where its folder will be.
    """
    from server_app.app import estimate_disk_bytes

    yield check_device(config.device)
    yield from check_models(config)
    yield check_disk(runs, estimate_disk_bytes(config))
    yield check_ports()
    yield check_clock(runs)
    yield check_memory(config, psutil.virtual_memory().available)


def check_python(found: str) -> Finding:
    """Whether this Python is one that osfl is made for."""
    allowed = metadata("osfl")["Requires-Python"]
    if found in SpecifierSet(allowed):
        return Finding(OK, "Python", found)
    cure = f"make an environment with Python {allowed}"
    return Finding(FAIL, "Python", f"{found}; osfl needs {allowed}", cure)


def check_packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Whether the packages are there that osfl asks for; without those of a role, a warning.

    Args:
        requirements: as in the metadata of osfl.
    """
    wrong: dict[str, list[str]] = {}
    for requirement in map(Requirement, requirements):
        extra = _extra_of(requirement)
        if extra in ("dev", "docs") or requirement.name in ("osfl", "flwr"):
            continue
        if problem := _package_problem(requirement):
            wrong.setdefault(extra, []).append(problem)
    flower = Requirement(next(r for r in requirements if Requirement(r).name == "flwr"))
    yield _flower(flower)
    for extra, problems in wrong.items():
        name = f"osfl[{extra}]" if extra else "osfl"
        cure = f"pip install '{name}'"
        if extra:
            cure += f", where this machine is to be of that kind: {extra}"
        yield Finding(WARN if extra else FAIL, "packages", "; ".join(problems), cure)
    if not wrong:
        yield Finding(OK, "packages", f"osfl {version('osfl')}, with all that its roles need")


def _extra_of(requirement: Requirement) -> str:
    """The extra that a requirement belongs to; "" for everybody's."""
    marker = str(requirement.marker or "")
    return marker.partition("extra == ")[2].strip("\"' ")


def _package_problem(requirement: Requirement) -> str:
    """What is wrong with an installed package; "" for nothing."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} {found} is not {requirement.specifier}"


def _flower(requirement: Requirement) -> Finding:
    problem = _package_problem(requirement)
    if not problem:
        return Finding(OK, "Flower", version("flwr"))
    cure = f"pip install 'flwr{requirement.specifier}', the same on every machine"
    return Finding(FAIL, "Flower", problem, cure)


def check_device(name: str) -> Finding:
    """Torch, and what the server would compute on."""
    import torch

    from osfl.util.devices import pick_device

    try:
        device = pick_device(name)
    except ConfigError as error:
        return Finding(FAIL, "torch", f"{torch.__version__}; {error}")
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        text = f"{torch.__version__}; {about.name}, {about.total_memory / GB:.0f} GB"
        return Finding(OK, "torch", text)
    cores = f"{torch.__version__}; {device.type}, {os.cpu_count()} cores"
    if shutil.which("nvidia-smi") and name == "auto":
        cure = "the driver is there, but torch cannot use the GPU: install torch's CUDA build"
        return Finding(WARN, "torch", cores, cure)
    return Finding(OK, "torch", cores)


def check_models(config: RunConfig) -> Iterator[Finding]:
    """Check all models that the run loads: those of the kit, and those named apart from it."""
    from osfl.kit.run_check import check_run_models
    from osfl.kit.used_parts import run_models
    from server_app.kit import check_subject

    models = run_models(config)
    kits = [model for model in models if model.is_of_kit]
    others = [model for model in models if not model.is_of_kit]
    found = _finding("kit", lambda: check_run_models(config, kits), f"{config.method} needs none")
    if found.state == OK:
        found = _finding("kit", lambda: check_subject(config), found.text)
    yield found
    if others and found.state == OK:
        yield _finding("models", lambda: check_run_models(config, others))


def _finding(what: str, check: Callable[[], Sequence[object] | None], text: str = "") -> Finding:
    """Return what a check of models found.

    Args:
        text: where it found none.
    """
    from osfl.kit.kits import KitError
    from osfl.models.classifiers import ClassifierError

    try:
        places = check() or ()
    except (ClassifierError, ConfigError, KitError, OSError) as error:
        return Finding(FAIL, what, str(error))
    return Finding(OK, what, ", ".join(dict.fromkeys(map(str, places))) or text)


def check_disk(runs: Path, needed: int) -> Finding:
    """Whether a run's folder can be written, and holds what a run of these settings leaves.

    Args:
        needed: bytes.
    """
    from osfl.cli import launch

    try:
        return Finding(OK, "disk", launch.check_disk(runs, needed))
    except launch.LaunchError as error:
        return Finding(FAIL, "disk", str(error))


def check_ports() -> Finding:
    """Whether a simulation's SuperLink will find its two ports."""
    from osfl.cli import launch

    try:
        ports = launch.free_ports(2)
    except OSError as error:
        cure = "allow programs of this user to listen on 127.0.0.1"
        return Finding(FAIL, "ports", f"none on 127.0.0.1: {error}", cure)
    return Finding(OK, "ports", f"free on 127.0.0.1, such as {ports[0]} and {ports[1]}")


def check_clock(runs: Path, now: Callable[[], float] = time.time) -> Finding:
    """Whether the clock is sane, and the disk's is the same.

    By a file that is written, and this program's.

    Args:
        now: seconds since 1970.
    """
    cure = (
        "set it by NTP; Flower refuses a node whose clock is more than 5 seconds ahead of the "
        "server's, or more than 305 behind"
    )
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now()))
    if now() < Path(__file__).stat().st_mtime - CLOCK_SECONDS:
        return Finding(FAIL, "clock", f"{shown}, before osfl was installed", cure)
    from osfl.cli import launch

    folder = launch.nearest_folder(runs)
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        apart = abs(os.stat(file.name).st_mtime - now())
    if apart > CLOCK_SECONDS:
        return Finding(FAIL, "clock", f"{shown}, {apart:,.0f} s apart from {folder}'s", cure)
    if apart > DISK_CLOCK_SECONDS:
        return Finding(WARN, "clock", f"{shown}, {apart:,.0f} s apart from {folder}'s", cure)
    return Finding(OK, "clock", shown)


def check_memory(config: RunConfig, free: int) -> Finding:
    """Whether a simulation's processes have room: the server and as many clients as cores.

    Args:
        free: bytes.
    """
    clients = min(config.num_clients, os.cpu_count() or 1)
    needed = (1 + clients) * PROCESS_BYTES
    text = f"{free / GB:,.1f} GB free; a server and {clients} clients of the digits take about "
    text += f"{needed / GB:,.1f} GB"
    if free < PROCESS_BYTES:
        return Finding(FAIL, "memory", text, "end other programs, or take another machine")
    if free < needed:
        cure = f"one client at a time takes less: --client-cpus {os.cpu_count()}"
        return Finding(WARN, "memory", text, cure)
    return Finding(OK, "memory", text)
