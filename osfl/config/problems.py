"""Checks across keys: values that contradict each other, and texts that lack a placeholder."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from osfl.config.names import (
    BACKBONES,
    IDENTIFIER_RULE,
    is_identifier,
    parse_words,
    problem_of_backbone,
    split_names,
)
from osfl.config.sections import ClassifierConfig, FedLMGConfig, RunConfig
from osfl.methods import METHODS
from osfl.util.prompts import to_words
from osfl.util.text import name_problem, quote, safe_name, sanitize

DIGITS_KITS = ("digits", "digits-unclip")
# Limit of AES-GCM in the library that seals
MAX_SEALED_BYTES = 2**31 - 1000
# With two clients that contradict each other, either may be malicious
MIN_INFLUENCE_CLIENTS = 3
# Each client costs a training
MAX_INFLUENCE_CLIENTS = 20
# The keys that partition a data set into clients, with their defaults
CUTS = (("partition", "domain"), ("shards-per-client", 2), ("alpha", 0.5), ("subset", ""))
# No part may begin with a dot, because hf:../images would be a local folder
_HUB_DATA = re.compile(r"hf:\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


def problems(run: RunConfig) -> Iterator[str]:
    """Yield every problem that keeps a configuration from being run, as texts."""
    yield from _run_problems(run)
    yield from _data_problems(run)
    yield from _classifier_problems(run)
    yield from _synthesis_problems(run)
    yield from _cache_problems(run)
    yield from _prompt_problems(run)
    yield from _votes_problems(run)
    yield from _feddeo_problems(run)
    yield from _strategy_problems("fedlmg", run.fedlmg)
    yield from _strategy_problems("fedcado", run.fedcado)
    yield from _espresso_problems(run)
    yield from _rounds_problems(run)


def guarantee_problem(run: RunConfig) -> str:
    """Return the setting that rules out a guarantee (epsilon), with a hint; "" if there is none."""
    if run.method == "domain-vector" and run.domain_vector.class_lr:
        return (
            f"domain-vector.class-lr = {run.domain_vector.class_lr:g}: must be 0 with epsilon, "
            "because only the domain's vector can be sent with a guarantee"
        )
    if METHODS[run.method].payload == "Classifier" and run.classifier.mixing != "none":
        return (
            f"classifier.mixing = {run.classifier.mixing!r}: must be none with epsilon, because "
            "DP-SGD clips the gradient of each image"
        )
    return ""


# ---- Keys without a section ----


def _run_problems(run: RunConfig) -> Iterator[str]:
    if run.job_id and not is_identifier(run.job_id):
        yield f"job-id = {quote(run.job_id)}: {IDENTIFIER_RULE}"
    yield from _privacy_problems(run)
    yield from _sealing_problems(run)
    if 0 < run.max_weight_ratio < 1:
        yield (
            f"max-weight-ratio = {run.max_weight_ratio:g}: must be at least 1, or 0 for no cap; "
            "below 1 it would scale down clients with as many images as the others"
        )
    yield from _codec_problems(run)
    yield from _label_check_problems(run)
    yield from _robust_problems(run)
    yield from _influence_problems(run)
    if run.adaptation.steps and run.method == "local":
        yield (
            f"adaptation.steps = {run.adaptation.steps}: must be 0 with method 'local', which "
            "trains no global model that clients could adapt"
        )
    yield from _class_balance_problems(run)
    yield from _public_domain_problems(run)
    yield from _client_problems(run)
    if run.runs_dir and not _is_absolute(run.runs_dir):
        yield (
            f"runs-dir = {quote(run.runs_dir)}: must be an absolute path, because Flower starts "
            "the server in a folder of its own"
        )
    if run.kit.startswith("."):
        yield f"kit = {quote(run.kit)}: must be a shipped kit's name, an absolute path or a hub id"
    draws_digits = run.sampling_kit in DIGITS_KITS
    if METHODS[run.method].samples and draws_digits and run.data.name != "digits":
        key = "feddisc.kit" if run.method == "feddisc" and run.feddisc.kit else "kit"
        yield digits_kit_problem(key, run.sampling_kit, run.data.name)


def _privacy_problems(run: RunConfig) -> Iterator[str]:
    if run.epsilon and not METHODS[run.method].privacy:
        private = ", ".join(name for name, method in METHODS.items() if method.privacy)
        yield (
            f"epsilon = {run.epsilon:g}: method {run.method!r} gives no guarantee; set epsilon to "
            f"0, or method to one that does: {private}"
        )
    if run.epsilon and (problem := guarantee_problem(run)):
        yield problem


def _sealing_problems(run: RunConfig) -> Iterator[str]:
    if run.sealing_key and not _is_absolute(run.sealing_key):
        yield _not_absolute("sealing-key", run.sealing_key)
    if run.sealing_key and METHODS[run.method].shares_models:
        yield (
            f"sealing-key = {quote(run.sealing_key)}: method {run.method!r} exchanges models, "
            'which are not sealed; set sealing-key to ""'
        )
    if run.sealed_store and not run.sealing_key:
        yield "sealed-store = true: requires a sealing-key; set one, or set sealed-store to false"
    if run.sealed_store and run.synthesis.workers:
        yield (
            f"sealed-store = true: with synthesis.workers = {run.synthesis.workers} opened "
            "payloads go to Ray's object store, which may spill to a disk; set workers to 0, or "
            "sealed-store to false"
        )
    if run.sealing_key and run.max_payload_mb * 1e6 > MAX_SEALED_BYTES:
        yield (
            f"max-payload-mb = {run.max_payload_mb:g}: a sealed payload has at most "
            f"{MAX_SEALED_BYTES / 1e6:.0f} MB; set it to that, or set no sealing-key"
        )


def _codec_problems(run: RunConfig) -> Iterator[str]:
    payload = METHODS[run.method].payload
    if run.payload_codec == "raw":
        return
    if payload in (None, "Captions", "Domain", "Votes"):
        yield (
            f"payload-codec = {run.payload_codec!r}: method {run.method!r} sends no payload with "
            "numbers; set payload-codec = 'raw'"
        )
    elif payload == "FeatureStatistics":
        yield (
            f"payload-codec = {run.payload_codec!r}: the sums of method {run.method!r} must be "
            "exact; set payload-codec = 'raw'"
        )


def _label_check_problems(run: RunConfig) -> Iterator[str]:
    if run.label_check == "none":
        return
    setting = f"label-check = {run.label_check!r}"
    if run.method in ("fedlmg", "fedcado") or not METHODS[run.method].samples:
        yield (
            f"{setting}: method {run.method!r} has teachers of its own, or synthesizes no images; "
            "set label-check to none"
        )
    elif run.synthesis.images_per_class < 2:
        yield (
            f"{setting}: requires synthesis.images-per-class to be at least 2: one image for each "
            "of the two classifiers"
        )


def _robust_problems(run: RunConfig) -> Iterator[str]:
    if run.robust == "off":
        return
    if not _synthesizes_from_payloads(run):
        yield (
            f"robust = {run.robust!r} requires a method that synthesizes images from payloads; "
            f"with {run.method!r} set robust = 'off'"
        )
    elif run.method == "feddisc":
        yield (
            f"robust = {run.robust!r}: method {run.method!r} samples with an unCLIP kit, which is "
            "conditioned on images and cannot score a prompt; set robust = 'off'"
        )


def _synthesizes_from_payloads(run: RunConfig) -> bool:
    return METHODS[run.method].samples and METHODS[run.method].payload is not None


def _influence_problems(run: RunConfig) -> Iterator[str]:
    if not run.influence:
        return
    if not _synthesizes_from_payloads(run):
        yield (
            "influence = true requires a method that synthesizes images from payloads; with "
            f"{run.method!r} set influence to false"
        )
    elif not MIN_INFLUENCE_CLIENTS <= run.training_clients <= MAX_INFLUENCE_CLIENTS:
        yield (
            "influence = true trains the model once more without each client, and requires "
            f"{MIN_INFLUENCE_CLIENTS} to {MAX_INFLUENCE_CLIENTS} clients, but there are "
            f"{run.training_clients}; set it to false"
        )
    elif run.synthesis.images_per_class < 3:
        yield (
            "influence = true requires synthesis.images-per-class to be at least 3: two images to "
            "train on, and one to test on"
        )


def _class_balance_problems(run: RunConfig) -> Iterator[str]:
    if not run.class_balance:
        return
    if not METHODS[run.method].samples:
        yield (
            f"class-balance = true: method {run.method!r} synthesizes no images; set it to false"
        )
    elif run.method == "domain-vector" and run.domain_vector.classes == "all":
        yield (
            "class-balance = true: with domain-vector.classes = 'all' the server synthesizes every "
            "class for every client, which is balanced already; set it to false"
        )
    elif METHODS[run.method].payload is None:
        yield (
            f"class-balance = true: method {run.method!r} synthesizes every class for every "
            "client, which is balanced already; set it to false"
        )


def _public_domain_problems(run: RunConfig) -> Iterator[str]:
    names = run.public_domain_names
    setting = f"public-domains = {sanitize(run.public_domains, 200)!r}"
    has_teachers = run.method in ("fedlmg", "fedcado")
    from_prompts = METHODS[run.method].samples and run.method != "feddisc"
    if names and (has_teachers or not from_prompts):
        yield (
            f"{setting}: method {run.method!r} has teachers for its images, or synthesizes none "
            'from a prompt alone; set public-domains to ""'
        )
    # Each domain's images have their own folder
    if len({safe_name(to_words(name)) for name in names}) < len(names):
        yield f"{setting}: two of the names give the same folder; list each domain once"
    for name in names:
        if problem := name_problem(name):
            yield (
                f"{setting}: {sanitize(name, 80)!r} {problem}; a domain's name is part of a prompt"
            )


def _client_problems(run: RunConfig) -> Iterator[str]:
    setting = f"left-out = {quote(run.left_out)}"
    if invalid := [name for name in run.left_out_clients if not is_identifier(name)]:
        yield f"{setting}: {quote(invalid[0])} is not a client's name"
    if len(set(run.left_out_clients)) < len(run.left_out_clients) or run.training_clients < 1:
        yield (
            f"{setting}: must be different clients, and fewer than num-clients = {run.num_clients}"
        )
    elif run.min_clients > run.training_clients:
        yield (
            f"min-clients = {run.min_clients}: must be at most num-clients = {run.num_clients} "
            "minus the left-out clients"
        )


def digits_kit_problem(key: str, kit: str, data: str) -> str:
    """Return the error for a kit of digits with other data, with hints on what to set."""
    return (
        f"{key} = {quote(kit)}: it draws digits, but data.name = {quote(data)}. For a first run "
        "without a diffusion model set method=fedcgs classifier.init=imagenet, or "
        f"classifier.init=none without a network; to synthesize images set {key} to a diffusion "
        "model for your data (docs/your-data.md)"
    )


# ---- [data] ----


def _data_problems(run: RunConfig) -> Iterator[str]:
    classes = split_names(run.data.classes)
    if run.data.name not in ("digits", "folder") and not _HUB_DATA.fullmatch(run.data.name):
        yield (
            f"data.name = {quote(run.data.name)}: must be digits, folder, or "
            "hf:OWNER/NAME@REVISION, a data set of the Hugging Face hub"
        )
    if run.data.name == "digits" and run.data.partition == "dirichlet-domain":
        yield (
            "data.partition = 'dirichlet-domain': must be another with data.name = 'digits', which "
            "are partitioned by domain or by label"
        )
    yield from _folder_problems(run)
    if run.data.name == "folder" and len(classes) < 2:
        yield (
            "data.classes: must list at least two names, comma-separated, with data.name = 'folder'"
        )
    if run.data.name == "digits" and classes:
        yield (
            f"data.classes = {quote(run.data.classes)}: must be empty with data.name = 'digits', "
            "which has its own"
        )
    yield from _class_name_problems(classes)
    if run.data.test_split == run.data.train_split:
        yield (
            f"data.test-split = {run.data.test_split!r}: must not be data.train-split; set it to "
            'another split, or to "" for a share of the training split'
        )
    try:
        parse_words(run.data.words)
    except ValueError as error:
        yield f"data.words = {quote(run.data.words)}: {error}, comma-separated"
    if run.data.root and not _is_absolute(run.data.root):
        yield _not_absolute("data.root", run.data.root)


def _folder_problems(run: RunConfig) -> Iterator[str]:
    """Check that folders, which are clients already, have no keys of a partition."""
    if run.data.name != "folder":
        return
    for key, usual in CUTS:
        value = getattr(run.data, key.replace("-", "_"))
        if value != usual:
            yield (
                f"data.{key} = {quote(value)}: has no effect with data.name = 'folder', whose "
                f"folders are clients already; set it to {usual!r}, or data.name to a data set"
            )


def _class_name_problems(classes: tuple[str, ...]) -> Iterator[str]:
    """Check that names are fit for folders on every disk, and for prompts."""
    by_folded_name: dict[str, str] = {}
    for name, count in Counter(classes).items():
        if problem := name_problem(name):
            yield (
                f"data.classes: {sanitize(name, 80)!r} {problem}; a class's name is that of its "
                "folder, and part of a prompt: rename the folder, and set its new name here"
            )
        first = by_folded_name.setdefault(name.casefold(), name)
        if count > 1:
            yield f"data.classes: {sanitize(name, 80)!r} is listed twice; list each class once"
        if first != name:
            yield (
                f"data.classes: {sanitize(first, 80)!r} and {sanitize(name, 80)!r} differ only "
                "in case, "
                "and are the same folder on some disks; rename one of them"
            )


# ---- [classifier] and [global-model] ----


def _classifier_problems(run: RunConfig) -> Iterator[str]:
    yield from _init_problems("classifier", run.classifier)
    yield from _init_problems("global-model", run.global_model)
    yield from _digits_weight_problems(run)
    yield from _mixing_problems(run)
    architectures = split_names(run.classifier.architecture)
    if not architectures:
        yield "classifier.architecture: must name at least one torchvision model"
    averages = METHODS[run.method].rounds and run.method != "feddf"
    if METHODS[run.method].features and len(architectures) > 1:
        yield (
            f"classifier.architecture = {quote(run.classifier.architecture)}: must name one "
            f"model, because {run.method} uses the features of one architecture"
        )
    if averages and len(architectures) > 1:
        yield (
            f"classifier.architecture = {quote(run.classifier.architecture)}: must name one "
            f"model, because {run.method} averages models of one architecture; feddf allows several"
        )
    if len(split_names(run.global_model.architecture)) != 1:
        yield (
            f"global-model.architecture = {quote(run.global_model.architecture)}: must name one "
            "torchvision model"
        )


def _mixing_problems(run: RunConfig) -> Iterator[str]:
    """Refuse to mix images whose teachers score whole images."""
    mixing = run.global_model.mixing
    if run.method not in ("fedlmg", "fedcado") or mixing == "none":
        return
    settings = run.fedlmg if run.method == "fedlmg" else run.fedcado
    if set(split_names(settings.strategies)) & {"md", "sd"}:
        yield (
            f"global-model.mixing = {mixing!r}: must be none with {run.method}.strategies = "
            f"{quote(settings.strategies)}, whose teachers score whole images; or set strategies "
            "to ft"
        )


def _digits_weight_problems(run: RunConfig) -> Iterator[str]:
    """Refuse initial weights that were trained on digits for other images."""
    method = METHODS[run.method]
    # A method that samples with such a kit has its own error
    has_error = method.samples and run.sampling_kit in DIGITS_KITS
    if has_error or run.data.name == "digits" or run.kit not in DIGITS_KITS:
        return
    inits = {}
    if method.rounds or method.features or method.payload == "Classifier":
        inits["classifier"] = run.classifier.init
    if not (method.rounds or method.features or run.method == "local"):
        inits["global-model"] = run.global_model.init
    for section, init in inits.items():
        if init == "kit":
            yield (
                f"{section}.init = 'kit': the weights in kits/{run.kit} are of digits, but "
                f"data.name = {quote(run.data.name)}. Set {section}.init=imagenet, or none "
                "without a network, or a file; or set kit to one for your images"
            )


def _init_problems(section: str, settings: ClassifierConfig) -> Iterator[str]:
    if settings.init not in ("kit", "imagenet", "pretrained", "none") and not _is_absolute(
        settings.init
    ):
        yield (
            f"{section}.init = {quote(settings.init)}: must be kit, imagenet, pretrained, none, "
            "or the absolute path of a file of weights, or of a folder with a file for every "
            "architecture"
        )
    for architecture in split_names(settings.architecture):
        is_timm = architecture.startswith(BACKBONES)
        if problem := problem_of_backbone(architecture, f"{section}.architecture"):
            yield problem
        if is_timm and settings.init in ("kit", "imagenet"):
            yield (
                f"{section}.init = {quote(settings.init)}: has no weights for "
                f"{quote(architecture)}; set it to pretrained for the model's own"
            )
        if not is_timm and settings.init == "pretrained":
            yield (
                f"{section}.init = 'pretrained': is for timm: and hf-hub: models; for "
                f"{architecture} set it to imagenet"
            )


# ---- [synthesis] and prompts ----


def _synthesis_problems(run: RunConfig) -> Iterator[str]:
    settings = run.synthesis
    if settings.guided_from > settings.guided_to:
        yield (
            f"synthesis.guided-from = {settings.guided_from}: must be at most guided-to = "
            f"{settings.guided_to}"
        )
    if settings.base_steps and not settings.lora:
        yield f"synthesis.base-steps = {settings.base_steps}: requires synthesis.lora; set it to 0"
    if settings.base_steps >= settings.steps:
        yield (
            f"synthesis.base-steps = {settings.base_steps}: must be below synthesis.steps = "
            f"{settings.steps}"
        )
    if settings.base_steps and settings.compile != "off":
        yield "synthesis.base-steps: must be 0 with synthesis.compile, which would compile twice"
    if run.method == "espresso" and settings.solver != "ddim":
        yield (
            f"synthesis.solver = {settings.solver!r}: Espresso requires 'ddim', whose steps its "
            "zig-zags invert, and whose first timestep its clients' mixtures are fitted at"
        )


def _cache_problems(run: RunConfig) -> Iterator[str]:
    interval = run.synthesis.cache_interval
    if interval == 1:
        return
    if run.synthesis.compile != "off":
        yield (
            "synthesis.cache-interval: must be 1 with synthesis.compile, which would compile every "
            "step anew"
        )
    if _differentiates_unet(run):
        yield (
            f"synthesis.cache-interval = {interval}: must be 1 with {run.method}.gradient = "
            "'full', which differentiates through the UNet; or set the gradient to 'x0', and "
            "fedcado.noise-edits to 0"
        )
    if run.method == "espresso" and run.espresso.z_sampling:
        yield (
            "synthesis.cache-interval: must be 1 with espresso.z-sampling, whose zig-zags step "
            "back and forth"
        )


def _differentiates_unet(run: RunConfig) -> bool:
    """Return whether the sampler computes a gradient through the UNet."""
    if run.method == "fedcado":
        return run.fedcado.gradient == "full" or run.fedcado.noise_edits > 0
    return run.method == "fedlmg" and run.fedlmg.gradient == "full"


def _prompt_problems(run: RunConfig) -> Iterator[str]:
    class_prompt = run.synthesis.prompt
    domain_prompt = run.prompts_domain.prompt
    if "{class}" not in class_prompt:
        yield f"synthesis.prompt = {quote(class_prompt)}: must contain {{class}}"
    if "{class}" not in domain_prompt or "{domain}" not in domain_prompt:
        yield (
            f"prompts-domain.prompt = {quote(domain_prompt)}: must contain {{class}} and {{domain}}"
        )
    if "{caption}" not in run.fgl.prompt:
        yield f"fgl.prompt = {quote(run.fgl.prompt)}: must contain {{caption}}"


# ---- Methods' own sections ----


def _votes_problems(run: RunConfig) -> Iterator[str]:
    names = run.votes.words
    setting = f"votes.candidates = {sanitize(run.votes.candidates, 200)!r}"
    if not 2 <= len(names) <= 256:
        yield f"{setting}: {len(names)} names; must be 2 to 256, comma-separated"
    if len(set(names)) < len(names):
        yield f"{setting}: a name is listed twice; list each domain once"
    for name in names:
        if problem := name_problem(name):
            yield (
                f"{setting}: {sanitize(name, 80)!r} {problem}; a domain's name is part of a prompt"
            )
    prompt = run.votes.prompt
    if "{class}" not in prompt or "{domain}" not in prompt:
        yield f"votes.prompt = {quote(prompt)}: must contain {{class}} and {{domain}}"


def _feddeo_problems(run: RunConfig) -> Iterator[str]:
    is_guided = run.feddeo.guidance_text or run.feddeo.guidance_description
    if run.method == "feddeo" and not is_guided:
        yield (
            "feddeo.guidance-text and feddeo.guidance-description are both 0: set one of them, or "
            "images would have no class"
        )


def _strategy_problems(section: str, settings: FedLMGConfig) -> Iterator[str]:
    strategies = split_names(settings.strategies)
    if not strategies or set(strategies) - {"ft", "md", "sd"}:
        yield f"{section}.strategies = {quote(settings.strategies)}: must name some of ft, md, sd"


def _espresso_problems(run: RunConfig) -> Iterator[str]:
    settings = run.espresso
    is_sampled = settings.gmm and settings.mixture_fit == "sampled"
    if is_sampled and settings.noise_draws < settings.components:
        yield (
            f"espresso.noise-draws = {settings.noise_draws}: must be at least espresso.components "
            f"= {settings.components}, or a class with one image has too few latents for its "
            "mixture"
        )
    if settings.z_sampling and settings.inversion_guidance >= settings.guidance:
        yield (
            f"espresso.inversion-guidance = {settings.inversion_guidance:g}: must be below "
            f"espresso.guidance = {settings.guidance:g}, or the zig-zag removes guidance"
        )


def _rounds_problems(run: RunConfig) -> Iterator[str]:
    proxy = run.rounds.proxy.removeprefix("public")
    if proxy and not _is_absolute(proxy):
        yield _not_absolute("rounds.proxy", proxy)
    if run.method == "feddf" and run.data.name != "digits" and run.rounds.proxy == "public":
        yield (
            "rounds.proxy = 'public': those images are digits, but the clients' are not; set it to "
            "a folder of unlabeled images"
        )


def _is_absolute(path: str) -> bool:
    try:
        return Path(path).expanduser().is_absolute()
    # The home of an unknown user
    except RuntimeError:
        return False


def _not_absolute(key: str, path: str) -> str:
    return (
        f"{key} = {quote(path)}: must be an absolute path, because Flower starts server and "
        "clients in a folder of its own"
    )
