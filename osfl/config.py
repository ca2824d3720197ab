"""The configuration: one schema, parsed and checked once at the edge.

*Run-config* is what is equal on all nodes: `[tool.flwr.app.config]` in pyproject.toml, overridden by `--run-config` or by
`osfl run FILE.toml key=value`. *Node-config* is what differs by machine. Nothing deeper in the code reads a Flower context.

The defaults live in pyproject.toml alone. Names are kebab-case there (`feddeo.guidance-text`) and snake_case here.
"""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from osfl.methods import METHODS
from osfl.prompts import fill
from osfl.words import name_problem, plain

Scalar = int | float | bool | str


# Keys that may differ between a run and its resumption: how long to wait and where, not what is computed.
NOT_IDENTITY = frozenset(
    {
        *(
            "job-id",
            "min-clients",
            "join-timeout",
            "deadline",
            "test-timeout",
            "runs-dir",
            "device",
            "checkpointing",
            "max-payload-mb",
        ),
        *("synthesis.workers", "synthesis.ray-address", "synthesis.checkpointing"),
    }
)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value and what is allowed."""


@dataclass(frozen=True)
class Range:
    """A number inside [low, high]."""

    low: float
    high: float


class OneOf:
    """One of some texts."""

    def __init__(self, *choices: str):
        self.choices = choices


@dataclass(frozen=True)
class DataConfig:
    """Which images there are and how they are cut into clients."""

    name: Annotated[str, OneOf("digits", "folder")]
    partition: Annotated[str, OneOf("domain", "label", "dirichlet", "iid")]
    shards_per_client: Annotated[
        int, Range(1, 1000)
    ]  # partition = label: pieces of the label-sorted data (McMahan et al. 2017)
    alpha: Annotated[float, Range(1e-3, 1e6)]  # partition = dirichlet: concentration
    classes: str  # comma-separated names; empty: the data set's own
    image_size: Annotated[
        int, Range(8, 2048)
    ]  # pixels on a side that classifiers see; the kit has its own
    root: str  # name = folder: all clients' folders in one place, for simulations and method = ceiling


@dataclass(frozen=True)
class ClassifierConfig:
    """A torchvision classifier and its training (SGD)."""

    architecture: str  # the clients' may be several, comma-separated: client i takes the i-th, and so on in turn
    small_stem: bool
    init: str  # kit: the kit's; imagenet: torchvision's; none: random; else the path of a file or folder
    epochs: Annotated[int, Range(1, 10_000)]
    batch_size: Annotated[int, Range(2, 65_536)]
    lr: Annotated[float, Range(1e-8, 100)]
    momentum: Annotated[float, Range(0, 0.9999)]
    weight_decay: Annotated[float, Range(0, 1)]
    precision: Annotated[
        str, OneOf("auto", "float32", "bfloat16")
    ]  # of the products in training; auto: bfloat16 on a GPU that has it


@dataclass(frozen=True)
class SynthesisConfig:
    """What the server renders."""

    images_per_class: Annotated[int, Range(1, 1_000_000)]  # R, of each client
    steps: Annotated[int, Range(2, 999)]  # DDIM steps
    unit_size: Annotated[int, Range(1, 4096)]  # images that are committed together
    # Images of a unit in one batch; 0: the fastest, by a measurement.
    batch_size: Annotated[int, Range(0, 4096)]
    # On a CPU without workers: units that threads of this process sample side by side, each with
    # its share of the cores; 0: the faster of one and one a core, by a measurement.
    units_at_once: Annotated[int, Range(0, 1024)]
    prompt: str  # "{class}" stands for the class name
    workers: Annotated[
        int, Range(0, 10_000)
    ]  # Ray actors, each on a device of its own; 0: this process alone
    threads: Annotated[
        int, Range(0, 1024)
    ]  # of the CPU for a worker; 0: its share of the machine's cores
    ray_address: str  # of a Ray cluster; empty: this machine
    dtype: Annotated[
        str, OneOf("float32", "bfloat16", "float16", "auto")
    ]  # of the networks; auto: the faster of the first two
    attention: Annotated[
        str, OneOf("default", "flash", "efficient", "cudnn", "math", "auto")
    ]  # of torch; default: its own choice
    memory_format: Annotated[
        str, OneOf("contiguous", "channels-last", "auto")
    ]  # auto: the faster, by a measurement
    compile: Annotated[
        str, OneOf("off", "on", "auto")
    ]  # auto: on a GPU the faster, by a measurement
    solver: Annotated[str, OneOf("ddim", "dpm-solver++", "unipc")]
    guided_from: Annotated[
        int, Range(0, 1000)
    ]  # timesteps that are guided; outside, the condition alone predicts
    guided_to: Annotated[int, Range(0, 1000)]
    cache_interval: Annotated[
        int, Range(1, 100)
    ]  # of so many steps one computes the UNet's inner blocks; 1: every one
    small_decoder: str  # through which a classifier sees the image: kit (its small_decoder/), a folder or hub id; empty: D itself
    checkpointing: Annotated[
        str, OneOf("off", "on", "auto")
    ]  # activations are computed again for a gradient; auto: on a GPU

    def prompts(self, names: Iterable[str]) -> list[str]:
        """The prompt of every class."""
        return [fill(self.prompt, {"class": name}) for name in names]


@dataclass(frozen=True)
class PromptsOnlyConfig:
    """Classifier-free guidance on the class prompt."""

    guidance: Annotated[float, Range(0, 100)]


@dataclass(frozen=True)
class PromptsDomainConfig:
    """Classifier-free guidance on a prompt that names class and domain."""

    guidance: Annotated[float, Range(0, 100)]
    prompt: str  # "{domain}" and "{class}" stand for the names


@dataclass(frozen=True)
class ConditionTraining:
    """How a client learns conditions through the frozen diffusion model."""

    epochs: Annotated[int, Range(1, 100_000)]  # S
    steps: Annotated[int, Range(0, 10_000_000)]  # of each condition, in place of epochs; 0: epochs
    batch_size: Annotated[int, Range(1, 4096)]  # images of one condition in a step
    at_once: Annotated[int, Range(1, 100_000)]  # conditions that share a UNet batch
    lr: Annotated[float, Range(1e-8, 1000)]


@dataclass(frozen=True)
class FedDEOConfig(ConditionTraining):
    """FedDEO: descriptions."""

    guidance_text: Annotated[float, Range(0, 100)]
    guidance_description: Annotated[float, Range(0, 100)]


@dataclass(frozen=True)
class FedLMGConfig:
    """FedLMG: classifier guidance and the global model's training."""

    guidance: Annotated[float, Range(0, 100)]  # classifier-free
    classifier_weight: Annotated[
        float, Range(0, 1e4)
    ]  # of the cross-entropy in L; 0 switches it off
    bn_weight: Annotated[float, Range(0, 1e4)]  # lambda of L_BN; 0 switches it off
    # image: of each alone, as in the papers; unit: of a whole unit, which then mixes the classes
    bn_statistics: Annotated[str, OneOf("image", "unit")]
    gradient_scale: Annotated[float, Range(0, 1e6)]  # 1 in the paper
    gradient: Annotated[str, OneOf("full", "x0")]
    strategies: str  # of ft, md, sd; comma-separated
    distillation_weight: Annotated[float, Range(0, 1e4)]
    teacher_mean: Annotated[str, OneOf("known-classes", "plain")]


@dataclass(frozen=True)
class FedCADOConfig(FedLMGConfig):
    """FedCADO: FedLMG's guidance, and an initial noise that is edited first."""

    noise_edits: Annotated[int, Range(0, 10_000)]  # M
    noise_edit_lr: Annotated[float, Range(0, 1e4)]  # eta


@dataclass(frozen=True)
class OscarConfig:
    """OSCAR: mean caption encodings."""

    guidance: Annotated[float, Range(0, 100)]


@dataclass(frozen=True)
class EspressoConfig(ConditionTraining):
    """Espresso: clusters' conditions (C), Gaussian mixtures of initial noise (G), Z-Sampling (Z)."""

    clusters: Annotated[int, Range(1, 1000)]  # J
    gmm: bool  # G
    components: Annotated[int, Range(1, 1000)]  # M
    # closed: fitted to clean latents and diffused forward exactly; sampled: fitted to noised draws
    mixture_fit: Annotated[str, OneOf("closed", "sampled")]
    noise_draws: Annotated[int, Range(1, 10_000)]  # sampled: of every mixed latent
    z_sampling: bool  # Z
    z_threshold: Annotated[int, Range(0, 1000)]  # T_z: zig-zag at timesteps above it
    guidance: Annotated[float, Range(0, 100)]  # gamma_1
    inversion_guidance: Annotated[float, Range(0, 100)]  # gamma_2


@dataclass(frozen=True)
class FGLConfig:
    """FGL: captions as prompts."""

    guidance: Annotated[float, Range(0, 100)]
    prompt: str  # "{class}" and "{caption}" stand for the texts
    negative_prompt: str


@dataclass(frozen=True)
class FedDISCConfig:
    """FedDISC: cluster centres of image embeddings."""

    kit: str  # a Stable unCLIP folder or hub id; empty: the run's kit
    clusters: Annotated[int, Range(1, 1000)]  # K
    noise_level: Annotated[int, Range(0, 999)]
    guidance_cluster: Annotated[float, Range(0, 100)]
    guidance_domain: Annotated[float, Range(0, 100)]


@dataclass(frozen=True)
class FedBiPConfig:
    """FedBiP: learned words for domain and class, and interpolated latents."""

    epochs: Annotated[int, Range(1, 100_000)]
    steps: Annotated[int, Range(0, 10_000_000)]  # in place of epochs; 0: epochs
    batch_size: Annotated[int, Range(1, 4096)]
    lr: Annotated[float, Range(1e-8, 1000)]
    guidance: Annotated[float, Range(0, 100)]
    domain_noise: Annotated[
        float, Range(0, 100)
    ]  # standard deviation of the noise on the domain's word


@dataclass(frozen=True)
class RoundsConfig:
    """FedAvg and its kin."""

    count: Annotated[int, Range(1, 100_000)]
    local_epochs: Annotated[int, Range(1, 10_000)]
    proximal_mu: Annotated[float, Range(0, 1e4)]  # fedprox
    dyn_alpha: Annotated[float, Range(1e-8, 1e4)]  # feddyn
    proxy: str  # feddf's unlabelled images on the server: public (the digits' public split), or a folder of images
    proxy_images: Annotated[
        int, Range(2, 10_000_000)
    ]  # a seeded sample; all where there are no more
    distillation_steps: Annotated[int, Range(1, 1_000_000)]  # feddf, after every round
    distillation_batch_size: Annotated[int, Range(2, 65_536)]
    distillation_lr: Annotated[float, Range(1e-8, 100)]


@dataclass(frozen=True)
class RunConfig:
    """Everything that is equal on all nodes of a run."""

    method: str
    job_id: str  # empty: made from the method and Flower's run id
    seed: Annotated[int, Range(0, 2**31 - 1)]
    num_clients: Annotated[int, Range(1, 100_000)]  # how many to wait for
    min_clients: Annotated[int, Range(0, 100_000)]  # how many payloads are enough; 0: all
    join_timeout: Annotated[float, Range(1, 1e7)]  # seconds to wait for clients to appear
    deadline: Annotated[float, Range(1, 1e7)]  # seconds to wait for payloads
    test_timeout: Annotated[
        float, Range(1, 1e7)
    ]  # seconds to wait for the test of each global model
    max_payload_mb: Annotated[float, Range(1e-3, 1e5)]
    runs_dir: str  # empty: ~/.osfl/runs
    kit: str  # a name in kits/, an absolute path or a hub id; node-config `kit` goes first
    captioner: str  # a BLIP folder or hub id; empty: the kit's
    image_encoder: str  # a DINOv2 or CLIP folder or hub id; empty: the kit's
    device: str  # of the server: auto, cpu, cuda, cuda:1, ...
    # On: clients learn conditions in less memory; auto: on a GPU. Node-config `checkpointing` goes first.
    checkpointing: Annotated[str, OneOf("off", "on", "auto")]
    data: DataConfig
    classifier: ClassifierConfig  # the clients'
    global_model: ClassifierConfig  # the server's
    synthesis: SynthesisConfig
    prompts_only: PromptsOnlyConfig
    prompts_domain: PromptsDomainConfig
    feddeo: FedDEOConfig
    fedlmg: FedLMGConfig
    fedcado: FedCADOConfig
    oscar: OscarConfig
    espresso: EspressoConfig
    fgl: FGLConfig
    feddisc: FedDISCConfig
    fedbip: FedBiPConfig
    rounds: RoundsConfig

    @property
    def sampling_kit(self) -> str:
        """The diffusion model's kit; FedDISC has one of its own."""
        return (self.feddisc.kit if self.method == "feddisc" else "") or self.kit

    @property
    def needed_clients(self) -> int:
        """With how many clients a run goes on."""
        return self.min_clients or self.num_clients


@dataclass(frozen=True)
class NodeConfig:
    """What differs by machine: `flower-supernode --node-config`, or given by the simulation."""

    partition_id: int = -1  # which part of an embedded data set this node holds
    num_partitions: int = 0
    client_id: str = ""  # empty: client-<partition-id>
    data_dir: str = (
        ""  # <data-dir>/{train,test}/<class>/*; empty: data.root's partition-id-th folder
    )
    kit: str = ""  # empty: the run's
    device: str = "auto"
    architecture: str = ""  # of this client's classifier; empty: the run's
    domain: str = ""  # its name, for prompts-domain; empty: the simulation's
    cache_dir: str = ""  # finished payloads until acknowledged; empty: ~/.osfl/cache
    checkpointing: Annotated[str, OneOf("off", "on", "auto", "")] = ""  # empty: the run's


def parse_run_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Check a flat Flower run-config (dotted keys) and make it a `RunConfig`.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a value out of range. All of them, one a line.
    """
    known = schema()
    problems = [f"{key}: unknown key{_suggest(key, known)}" for key in values if key not in known]
    problems += [f"{key}: missing" for key in known if key not in values]
    problems += [
        p for key, value in values.items() if key in known and (p := _check(key, value, known[key]))
    ]
    if problems:
        raise ConfigError("bad run-config:\n  " + "\n  ".join(problems))
    config = _build(RunConfig, values, "")
    _check_together(config)
    return config


def parse_node_config(values: Mapping[str, Scalar]) -> NodeConfig:
    """Check a node-config; unknown keys and wrong types are refused.

    Raises:
        ConfigError: as `parse_run_config`.
    """
    known = _schema(NodeConfig, "")
    problems = [f"{key}: unknown key{_suggest(key, known)}" for key in values if key not in known]
    problems += [
        p for key, value in values.items() if key in known and (p := _check(key, value, known[key]))
    ]
    if problems:
        raise ConfigError("bad node-config:\n  " + "\n  ".join(problems))
    return NodeConfig(**{key.replace("-", "_"): value for key, value in values.items()})  # type: ignore[arg-type]


def schema() -> dict[str, Any]:
    """Every run-config key with its annotated type."""
    return _schema(RunConfig, "")


def flatten(config: Any, prefix: str = "") -> dict[str, Scalar]:
    """The inverse of `parse_run_config`: dotted kebab-case keys."""
    flat: dict[str, Scalar] = {}
    for item in fields(config):
        value, key = getattr(config, item.name), prefix + item.name.replace("_", "-")
        flat.update(flatten(value, key + ".") if is_dataclass(value) else {key: value})
    return flat


def _schema(cls: type, prefix: str) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        key = prefix + name.replace("_", "-")
        keys.update(_schema(kind, key + ".") if is_dataclass(kind) else {key: kind})  # type: ignore[arg-type]
    return keys


def _build(cls: Any, values: Mapping[str, Scalar], prefix: str) -> Any:
    made = {}
    for name, kind in get_type_hints(cls).items():
        key = prefix + name.replace("_", "-")
        made[name] = _build(kind, values, key + ".") if is_dataclass(kind) else kind(values[key])
    return cls(**made)


def _check(key: str, value: Scalar, annotated: Any) -> str | None:
    """What is wrong with one value, or None."""
    kind = getattr(annotated, "__origin__", annotated)
    (rule,) = getattr(annotated, "__metadata__", (None,))
    accepted: Any = (int | float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
        return f"{key} = {value!r}: must be {_type_name(accepted)}"
    if isinstance(rule, OneOf) and value not in rule.choices:
        return f"{key} = {value!r}: must be one of {', '.join(c or 'empty' for c in rule.choices)}"
    if isinstance(rule, Range) and not rule.low <= value <= rule.high:
        return f"{key} = {value!r}: must be from {rule.low:g} to {rule.high:g}"
    return None


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", str: "a text", bool: "true or false"}
    return "a number" if isinstance(kind, types.UnionType) else names[kind]


def _suggest(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _check_together(config: RunConfig) -> None:
    problems = []
    if config.method not in METHODS:
        problems.append(f"method = {config.method!r}: must be one of {', '.join(METHODS)}")
    if config.min_clients > config.num_clients:
        problems.append(
            f"min-clients = {config.min_clients}: must be at most num-clients = {config.num_clients}"
        )
    if "{class}" not in config.synthesis.prompt:
        problems.append(f"synthesis.prompt = {config.synthesis.prompt!r}: must contain {{class}}")
    classes = split_names(config.data.classes)
    if config.data.name == "folder" and len(classes) < 2:
        problems.append(
            "data.classes: data.name = 'folder' needs at least two class names, comma-separated"
        )
    if config.data.name == "digits" and classes:
        problems.append(
            f"data.classes = {config.data.classes!r}: must be empty with data.name = 'digits', which has its own"
        )
    problems += _class_problems(classes)
    if config.synthesis.guided_from > config.synthesis.guided_to:
        problems.append(
            f"synthesis.guided-from = {config.synthesis.guided_from}: must be at most guided-to = {config.synthesis.guided_to}"
        )
    if config.synthesis.cache_interval > 1 and config.synthesis.compile != "off":
        problems.append(
            "synthesis.cache-interval: must be 1 with synthesis.compile, which would compile every step anew"
        )
    if config.synthesis.cache_interval > 1 and _differentiates(config):
        problems.append(
            f"synthesis.cache-interval = {config.synthesis.cache_interval}: must be 1 with {config.method}.gradient = 'full', which goes "
            "through the UNet; take 'x0', or fedcado.noise-edits = 0 beside it"
        )
    if (
        config.synthesis.cache_interval > 1
        and config.method == "espresso"
        and config.espresso.z_sampling
    ):
        problems.append(
            "synthesis.cache-interval: must be 1 with espresso.z-sampling, whose zig-zags go back and forth"
        )
    if config.method == "espresso" and config.synthesis.solver != "ddim":
        problems.append(
            f"synthesis.solver = {config.synthesis.solver!r}: Espresso needs 'ddim', whose steps its zig-zags undo and whose first timestep its "
            "clients' mixtures are of"
        )
    if config.runs_dir and not Path(config.runs_dir).expanduser().is_absolute():
        problems.append(
            f"runs-dir = {config.runs_dir!r}: must be an absolute path; Flower starts the server in a folder of its own"
        )
    for key, path in (
        ("data.root", config.data.root),
        ("rounds.proxy", config.rounds.proxy.removeprefix("public")),
    ):
        if path and not Path(path).expanduser().is_absolute():
            problems.append(
                f"{key} = {path!r}: must be an absolute path; Flower starts server and clients in a folder of its own"
            )
    for key, settings in (
        ("classifier.init", config.classifier),
        ("global-model.init", config.global_model),
    ):
        if (
            settings.init not in ("kit", "imagenet", "none")
            and not Path(settings.init).expanduser().is_absolute()
        ):
            problems.append(
                f"{key} = {settings.init!r}: must be kit, imagenet, none, or the absolute path of a file "
                "of weights, or of a folder with a file for every architecture"
            )
    if config.kit.startswith("."):
        problems.append(
            f"kit = {config.kit!r}: must be a shipped kit's name, an absolute path or a hub id"
        )
    sampled = config.espresso.gmm and config.espresso.mixture_fit == "sampled"
    if sampled and config.espresso.noise_draws < config.espresso.components:
        problems.append(
            f"espresso.noise-draws = {config.espresso.noise_draws}: must be at least espresso.components = "
            f"{config.espresso.components}, or a class with one image has too few latents for its mixture"
        )
    from_noise = config.method in METHODS and METHODS[config.method].samples
    if (
        from_noise
        and config.data.name == "folder"
        and config.sampling_kit in ("digits", "digits-unclip")
    ):
        key = "feddisc.kit" if config.method == "feddisc" and config.feddisc.kit else "kit"
        problems.append(
            f"{key} = {config.sampling_kit!r}: it draws digits; with data.name = 'folder', name a kit for your images"
        )
    if (
        config.method == "feddf"
        and config.data.name == "folder"
        and config.rounds.proxy == "public"
    ):
        problems.append(
            "rounds.proxy = 'public': those are digits; with data.name = 'folder', name a folder of unlabelled images"
        )
    if (
        config.method == "feddeo"
        and not config.feddeo.guidance_text
        and not config.feddeo.guidance_description
    ):
        problems.append(
            "feddeo.guidance-text and feddeo.guidance-description are both 0: images would have no class"
        )
    for key, guided in (("fedlmg", config.fedlmg), ("fedcado", config.fedcado)):
        strategies = split_names(guided.strategies)
        if not strategies or set(strategies) - {"ft", "md", "sd"}:
            problems.append(
                f"{key}.strategies = {guided.strategies!r}: must name some of ft, md, sd"
            )
    if (
        "{class}" not in config.prompts_domain.prompt
        or "{domain}" not in config.prompts_domain.prompt
    ):
        problems.append(
            f"prompts-domain.prompt = {config.prompts_domain.prompt!r}: must contain {{class}} and {{domain}}"
        )
    if "{caption}" not in config.fgl.prompt:
        problems.append(f"fgl.prompt = {config.fgl.prompt!r}: must contain {{caption}}")
    if (
        config.espresso.inversion_guidance >= config.espresso.guidance
        and config.espresso.z_sampling
    ):
        problems.append(
            f"espresso.inversion-guidance = {config.espresso.inversion_guidance:g}: must be below espresso.guidance = "
            f"{config.espresso.guidance:g}, or the zig-zag takes guidance away"
        )
    if not split_names(config.classifier.architecture):
        problems.append("classifier.architecture: must name at least one torchvision model")
    if (
        config.method in METHODS
        and METHODS[config.method].rounds
        and config.method != "feddf"
        and len(split_names(config.classifier.architecture)) > 1
    ):
        problems.append(
            f"classifier.architecture = {config.classifier.architecture!r}: {config.method} averages "
            "models of one architecture; feddf takes several"
        )
    if len(split_names(config.global_model.architecture)) != 1:
        problems.append(
            f"global-model.architecture = {config.global_model.architecture!r}: must name one torchvision model"
        )
    if config.job_id and not is_identifier(config.job_id):
        problems.append(f"job-id = {config.job_id!r}: must be 1 to 64 letters, digits, '-' or '_'")
    if problems:
        raise ConfigError("bad run-config:\n  " + "\n  ".join(problems))


def _class_problems(classes: tuple[str, ...]) -> Iterator[str]:
    """Names that can be no folder's on every disk, or no words of a prompt."""
    spelled: dict[str, str] = {}
    for name in classes:
        if problem := name_problem(name):
            yield (
                f"data.classes: {plain(name, 80)!r} {problem}; a class's name is its folder's, and "
                "words of a prompt: rename the folder, and take the new name here"
            )
        other = spelled.setdefault(name.casefold(), name)
        if other == name and classes.count(name) > 1:
            yield f"data.classes: {plain(name, 80)!r} stands there twice; name each class once"
        elif other != name:
            yield (
                f"data.classes: {plain(other, 80)!r} and {plain(name, 80)!r} differ in their "
                "capitals alone, and are one folder on some disks; rename one of them"
            )


def _differentiates(config: RunConfig) -> bool:
    """Whether a sampler's gradient goes through the UNet."""
    if config.method == "fedcado":
        return config.fedcado.gradient == "full" or config.fedcado.noise_edits > 0
    return config.method == "fedlmg" and config.fedlmg.gradient == "full"


def split_names(text: str) -> tuple[str, ...]:
    """`"a, b"` to `("a", "b")`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def is_identifier(text: str) -> bool:
    """Whether a job or client id is safe as a file name, and not `average`, which has its own column in the tables."""
    return (
        text != "average"
        and 0 < len(text) <= 64
        and text.isascii()
        and all(c.isalnum() or c in "-_" for c in text)
    )
