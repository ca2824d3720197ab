"""What no key can say alone: values that do not go together, and texts that need a word in them."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from osfl.config.names import (
    BACKBONES,
    is_identifier,
    named_words,
    problem_of_backbone,
    split_names,
)
from osfl.config.sections import ClassifierConfig, FedLMGConfig, RunConfig
from osfl.methods import METHODS
from osfl.util.prompts import in_words
from osfl.util.text import name_problem, plain, quoted, safe_name

DIGITS_KITS = ("digits", "digits-unclip")
# AES-GCM's limit in the library that seals
MOST_SEALED = 2**31 - 1000
# Of two clients that contradict each other nobody can say which one lies
FEWEST_WITH_INFLUENCE = 3
# Each client costs a training
MOST_WITH_INFLUENCE = 20
# The keys that cut a data set into clients, with their defaults
CUTS = (("partition", "domain"), ("shards-per-client", 2), ("alpha", 0.5), ("subset", ""))
# No part begins with a dot: hf:../images would be a folder here
_HUB_DATA = re.compile(r"hf:\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


def problems(run: RunConfig) -> Iterator[str]:
    """Everything that keeps a configuration from being run, a text each."""
    yield from _of_the_run(run)
    yield from _of_data(run)
    yield from _of_classifiers(run)
    yield from _of_synthesis(run)
    yield from _of_the_cache(run)
    yield from _of_prompts(run)
    yield from _of_votes(run)
    yield from _of_feddeo(run)
    yield from _of_strategies("fedlmg", run.fedlmg)
    yield from _of_strategies("fedcado", run.fedcado)
    yield from _of_espresso(run)
    yield from _of_rounds(run)


def without_guarantee(run: RunConfig) -> str:
    """What of a run's settings does not go with an epsilon, and the cure; "": nothing."""
    if run.method == "domain-vector" and run.domain_vector.class_lr:
        return (
            f"domain-vector.class-lr = {run.domain_vector.class_lr:g}: with epsilon the vector of "
            "the domain alone is sent; take 0"
        )
    if METHODS[run.method].payload == "Classifier" and run.classifier.mixing != "none":
        return (
            f"classifier.mixing = {run.classifier.mixing!r}: with epsilon the gradient of each "
            "image is cut by itself; take none"
        )
    return ""


def _of_the_run(run: RunConfig) -> Iterator[str]:
    if run.job_id and not is_identifier(run.job_id):
        yield f"job-id = {quoted(run.job_id)}: must be 1 to 64 letters, digits, '-' or '_'"
    if run.epsilon and not METHODS[run.method].private:
        giving = ", ".join(name for name, method in METHODS.items() if method.private)
        yield (
            f"epsilon = {run.epsilon:g}: method {run.method!r} gives no guarantee; take 0, or a "
            f"method that does: {giving}"
        )
    if run.epsilon and (problem := without_guarantee(run)):
        yield problem
    if run.sealing_key and not _is_absolute(run.sealing_key):
        yield _not_absolute("sealing-key", run.sealing_key)
    if run.sealing_key and METHODS[run.method].open_models:
        yield (
            f"sealing-key = {quoted(run.sealing_key)}: with method {run.method!r} models go to and "
            "fro, and these are not sealed; take an empty one"
        )
    if run.sealed_store and not run.sealing_key:
        yield "sealed-store = true: needs a sealing-key; name one, or take false"
    if run.sealed_store and run.synthesis.workers:
        yield (
            f"sealed-store = true: with synthesis.workers = {run.synthesis.workers} opened "
            "payloads go to Ray's store, which may write them to a disk; take 0, or false"
        )
    if run.sealing_key and run.max_payload_mb * 1e6 > MOST_SEALED:
        yield (
            f"max-payload-mb = {run.max_payload_mb:g}: a sealed payload has at most "
            f"{MOST_SEALED / 1e6:.0f} MB; take that, or no sealing-key"
        )
    if 0 < run.max_weight_ratio < 1:
        yield (
            f"max-weight-ratio = {run.max_weight_ratio:g}: must be at least 1, or 0 for no cap; "
            "below 1 it would scale down clients with as many images as the others"
        )
    coded = f"payload-codec = {run.payload_codec!r}"
    without = (None, "Captions", "Domain", "Votes")
    if run.payload_codec != "raw" and METHODS[run.method].payload in without:
        yield f"{coded}: method {run.method!r} sends no payload with numbers; take raw"
    elif run.payload_codec != "raw" and METHODS[run.method].payload == "FeatureStatistics":
        yield f"{coded}: the sums of method {run.method!r} must be exact; take raw"
    if run.label_check != "none" and (
        run.method in ("fedlmg", "fedcado") or not METHODS[run.method].samples
    ):
        yield (
            f"label-check = {run.label_check!r}: method {run.method!r} has teachers of its own, or "
            "draws no image; take none"
        )
    elif run.label_check != "none" and run.synthesis.images_per_class < 2:
        yield (
            f"label-check = {run.label_check!r}: needs synthesis.images-per-class of at least 2: "
            "one for each of the classifiers that judge"
        )
    if run.robust != "off" and not (METHODS[run.method].samples and METHODS[run.method].payload):
        yield (
            f"robust = {run.robust!r}: method {run.method!r} draws no image from what clients "
            "send; take off"
        )
    elif run.robust != "off" and run.method == "feddisc":
        yield (
            f"robust = {run.robust!r}: method {run.method!r} samples with a kit that needs an "
            "image, and judges none by a prompt; take off"
        )
    if run.influence and not (METHODS[run.method].samples and METHODS[run.method].payload):
        yield (
            f"influence = true: method {run.method!r} draws no image from what clients send; take "
            "false"
        )
    elif run.influence and not FEWEST_WITH_INFLUENCE <= run.training_clients <= MOST_WITH_INFLUENCE:
        yield (
            "influence = true: trains the model once more for each client, of "
            f"{FEWEST_WITH_INFLUENCE} to {MOST_WITH_INFLUENCE}, and here are "
            f"{run.training_clients}; take false"
        )
    elif run.influence and run.synthesis.images_per_class < 3:
        yield (
            "influence = true: needs synthesis.images-per-class of at least 3, two to learn and "
            "one to test"
        )
    if run.adaptation.steps and run.method == "local":
        yield (
            f"adaptation.steps = {run.adaptation.steps}: with method 'local' there is no global "
            "model that clients could adapt; take 0"
        )
    if run.class_balance and not METHODS[run.method].samples:
        yield f"class-balance = true: method {run.method!r} draws no image; take false"
    elif run.class_balance and run.method == "domain-vector" and run.domain_vector.classes == "all":
        yield (
            "class-balance = true: with domain-vector.classes = 'all' every class is drawn for "
            "every client, and is balanced already; take false"
        )
    elif run.class_balance and METHODS[run.method].payload is None:
        yield (
            f"class-balance = true: method {run.method!r} draws every class for every client, and "
            "is balanced already; take false"
        )
    yield from _of_public_domains(run)
    if bad := [name for name in run.testers if not is_identifier(name)]:
        yield f"left-out = {quoted(run.left_out)}: {quoted(bad[0])} is no client's name"
    if len(set(run.testers)) < len(run.testers) or run.training_clients < 1:
        yield (
            f"left-out = {quoted(run.left_out)}: must be different clients, and fewer than "
            f"num-clients = {run.num_clients}"
        )
    elif run.min_clients > run.training_clients:
        yield (
            f"min-clients = {run.min_clients}: must be at most num-clients = {run.num_clients}, "
            "less those left-out"
        )
    if run.runs_dir and not _is_absolute(run.runs_dir):
        yield (
            f"runs-dir = {quoted(run.runs_dir)}: must be an absolute path; Flower starts the "
            "server in a folder of its own"
        )
    if run.kit.startswith("."):
        yield f"kit = {quoted(run.kit)}: must be a shipped kit's name, an absolute path or a hub id"
    draws_digits = run.sampling_kit in DIGITS_KITS
    if METHODS[run.method].samples and draws_digits and run.data.name != "digits":
        key = "feddisc.kit" if run.method == "feddisc" and run.feddisc.kit else "kit"
        yield kit_of_digits(key, run.sampling_kit, run.data.name)


def kit_of_digits(key: str, kit: str, data: str) -> str:
    """The problem of a kit that draws digits with other data, and the next step."""
    return (
        f"{key} = {quoted(kit)}: it draws digits, and data.name = {quoted(data)}. For a first run "
        "without a diffusion model set method=fedcgs classifier.init=imagenet, or "
        f"classifier.init=none where there is no network; to draw images set {key} to a diffusion "
        "model for yours (docs/your-data.md)"
    )


def _of_public_domains(run: RunConfig) -> Iterator[str]:
    names = run.domains_by_name
    given = f"public-domains = {plain(run.public_domains, 200)!r}"
    if names and (
        run.method in ("fedlmg", "fedcado", "feddisc") or not METHODS[run.method].samples
    ):
        yield (
            f"{given}: method {run.method!r} draws no image from a prompt alone, or has teachers "
            'for its images; leave it empty ("")'
        )
    # A folder each
    if len({safe_name(in_words(name)) for name in names}) < len(names):
        yield f"{given}: two of the names are one folder's; name each domain once"
    for name in names:
        if problem := name_problem(name):
            yield f"{given}: {plain(name, 80)!r} {problem}; it is words of a prompt"


def _of_data(run: RunConfig) -> Iterator[str]:
    classes = split_names(run.data.classes)
    if run.data.name not in ("digits", "folder") and not _HUB_DATA.fullmatch(run.data.name):
        yield (
            f"data.name = {quoted(run.data.name)}: must be digits, folder, or "
            "hf:OWNER/NAME@REVISION, a data set of the Hugging Face hub"
        )
    if run.data.name == "digits" and run.data.partition == "dirichlet-domain":
        yield "data.partition = 'dirichlet-domain': the digits are cut by domain or by label"
    yield from _of_folders(run)
    if run.data.name == "folder" and len(classes) < 2:
        yield "data.classes: data.name = 'folder' needs at least two class names, comma-separated"
    if run.data.name == "digits" and classes:
        yield (
            f"data.classes = {quoted(run.data.classes)}: must be empty with data.name = 'digits', "
            "which has its own"
        )
    yield from _of_class_names(classes)
    if run.data.test_split == run.data.train_split:
        yield (
            f"data.test-split = {run.data.test_split!r}: must not be data.train-split; set it to "
            'another split, or to "" for a share of the training split'
        )
    try:
        named_words(run.data.words)
    except ValueError as error:
        yield f"data.words = {quoted(run.data.words)}: {error}, comma-separated"
    if run.data.root and not _is_absolute(run.data.root):
        yield _not_absolute("data.root", run.data.root)


def _of_folders(run: RunConfig) -> Iterator[str]:
    """Keys of the cut into clients: folders are clients already, and saved parts are cut."""
    if run.data.name != "folder":
        return
    for key, usual in CUTS:
        value = getattr(run.data, key.replace("-", "_"))
        if value != usual:
            yield (
                f"data.{key} = {quoted(value)}: has no effect with data.name = 'folder', whose "
                f"folders are clients already; set it to {usual!r}, or data.name to a data set"
            )


def _of_class_names(classes: tuple[str, ...]) -> Iterator[str]:
    """Names that can be no folder's on every disk, or no words of a prompt."""
    spelled: dict[str, str] = {}
    for name, count in Counter(classes).items():
        if problem := name_problem(name):
            yield (
                f"data.classes: {plain(name, 80)!r} {problem}; a class's name is its folder's, and "
                "words of a prompt: rename the folder, and take the new name here"
            )
        other = spelled.setdefault(name.casefold(), name)
        if count > 1:
            yield f"data.classes: {plain(name, 80)!r} stands there twice; name each class once"
        if other != name:
            yield (
                f"data.classes: {plain(other, 80)!r} and {plain(name, 80)!r} differ in their "
                "capitals alone, and are one folder on some disks; rename one of them"
            )


def _of_classifiers(run: RunConfig) -> Iterator[str]:
    yield from _of_init("classifier", run.classifier)
    yield from _of_init("global-model", run.global_model)
    yield from _of_digits_weights(run)
    yield from _of_mixing(run)
    architectures = split_names(run.classifier.architecture)
    if not architectures:
        yield "classifier.architecture: must name at least one torchvision model"
    averages = METHODS[run.method].rounds and run.method != "feddf"
    if METHODS[run.method].features and len(architectures) > 1:
        yield (
            f"classifier.architecture = {quoted(run.classifier.architecture)}: {run.method} takes "
            "the features of one architecture; name one"
        )
    if averages and len(architectures) > 1:
        yield (
            f"classifier.architecture = {quoted(run.classifier.architecture)}: {run.method} "
            "averages models of one architecture; feddf takes several"
        )
    if len(split_names(run.global_model.architecture)) != 1:
        yield (
            f"global-model.architecture = {quoted(run.global_model.architecture)}: must name one "
            "torchvision model"
        )


def _of_mixing(run: RunConfig) -> Iterator[str]:
    """Teachers give their opinion of an image, not of two that are mixed."""
    mixing = run.global_model.mixing
    if run.method not in ("fedlmg", "fedcado") or mixing == "none":
        return
    settings = run.fedlmg if run.method == "fedlmg" else run.fedcado
    if set(split_names(settings.strategies)) & {"md", "sd"}:
        yield (
            f"global-model.mixing = {mixing!r}: must be none with {run.method}.strategies = "
            f"{quoted(settings.strategies)}, whose teachers know whole images; or take ft alone"
        )


def _of_digits_weights(run: RunConfig) -> Iterator[str]:
    """First weights that are of digits, for other images."""
    method = METHODS[run.method]
    # Who samples with such a kit has been told already.
    told = method.samples and run.sampling_kit in DIGITS_KITS
    if told or run.data.name == "digits" or run.kit not in DIGITS_KITS:
        return
    begun = {}
    if method.rounds or method.features or method.payload == "Classifier":
        begun["classifier"] = run.classifier.init
    if not (method.rounds or method.features or run.method == "local"):
        begun["global-model"] = run.global_model.init
    for section, init in begun.items():
        if init == "kit":
            yield (
                f"{section}.init = 'kit': the weights in kits/{run.kit} are of digits, and "
                f"data.name = {quoted(run.data.name)}. Set {section}.init=imagenet, or none where "
                "there is no network, or a file; or set kit to one for your images"
            )


def _of_init(section: str, settings: ClassifierConfig) -> Iterator[str]:
    known = ("kit", "imagenet", "pretrained", "none")
    if settings.init not in known and not _is_absolute(settings.init):
        yield (
            f"{section}.init = {quoted(settings.init)}: must be kit, imagenet, pretrained, none, "
            "or the absolute path of a file of weights, or of a folder with a file for every "
            "architecture"
        )
    for architecture in split_names(settings.architecture):
        of_timm = architecture.startswith(BACKBONES)
        if problem := problem_of_backbone(architecture, f"{section}.architecture"):
            yield problem
        if of_timm and settings.init in ("kit", "imagenet"):
            yield (
                f"{section}.init = {quoted(settings.init)}: there is none of "
                f"{quoted(architecture)}; take "
                "pretrained, its own weights"
            )
        if not of_timm and settings.init == "pretrained":
            yield (
                f"{section}.init = 'pretrained': is for timm: and hf-hub: models; for "
                f"{architecture} take imagenet"
            )


def _of_synthesis(run: RunConfig) -> Iterator[str]:
    settings = run.synthesis
    if settings.guided_from > settings.guided_to:
        yield (
            f"synthesis.guided-from = {settings.guided_from}: must be at most guided-to = "
            f"{settings.guided_to}"
        )
    if settings.base_steps and not settings.lora:
        yield (
            f"synthesis.base-steps = {settings.base_steps}: is of synthesis.lora, which is empty"
        )
    if settings.base_steps >= settings.steps:
        yield (
            f"synthesis.base-steps = {settings.base_steps}: must be below synthesis.steps = "
            f"{settings.steps}"
        )
    if settings.base_steps and settings.compile != "off":
        yield "synthesis.base-steps: must be 0 with synthesis.compile, which would compile twice"
    if run.method == "espresso" and settings.solver != "ddim":
        yield (
            f"synthesis.solver = {settings.solver!r}: Espresso needs 'ddim', whose steps its "
            "zig-zags undo and whose first timestep its clients' mixtures are of"
        )


def _of_the_cache(run: RunConfig) -> Iterator[str]:
    interval = run.synthesis.cache_interval
    if interval == 1:
        return
    if run.synthesis.compile != "off":
        yield (
            "synthesis.cache-interval: must be 1 with synthesis.compile, which would compile every "
            "step anew"
        )
    if _differentiates(run):
        yield (
            f"synthesis.cache-interval = {interval}: must be 1 with {run.method}.gradient = "
            "'full', which goes through the UNet; take 'x0', or fedcado.noise-edits = 0 beside it"
        )
    if run.method == "espresso" and run.espresso.z_sampling:
        yield (
            "synthesis.cache-interval: must be 1 with espresso.z-sampling, whose zig-zags go back "
            "and forth"
        )


def _differentiates(run: RunConfig) -> bool:
    """Whether a sampler's gradient goes through the UNet."""
    if run.method == "fedcado":
        return run.fedcado.gradient == "full" or run.fedcado.noise_edits > 0
    return run.method == "fedlmg" and run.fedlmg.gradient == "full"


def _of_prompts(run: RunConfig) -> Iterator[str]:
    of_class = run.synthesis.prompt
    of_domain = run.prompts_domain.prompt
    if "{class}" not in of_class:
        yield f"synthesis.prompt = {quoted(of_class)}: must contain {{class}}"
    if "{class}" not in of_domain or "{domain}" not in of_domain:
        yield f"prompts-domain.prompt = {quoted(of_domain)}: must contain {{class}} and {{domain}}"
    if "{caption}" not in run.fgl.prompt:
        yield f"fgl.prompt = {quoted(run.fgl.prompt)}: must contain {{caption}}"


def _of_votes(run: RunConfig) -> Iterator[str]:
    words = run.votes.words
    given = f"votes.candidates = {plain(run.votes.candidates, 200)!r}"
    if not 2 <= len(words) <= 256:
        yield f"{given}: {len(words)} names; must be 2 to 256, comma-separated"
    if len(set(words)) < len(words):
        yield f"{given}: a name stands there twice; name each domain once"
    for word in words:
        if problem := name_problem(word):
            yield f"{given}: {plain(word, 80)!r} {problem}; it is words of a prompt"
    prompt = run.votes.prompt
    if "{class}" not in prompt or "{domain}" not in prompt:
        yield f"votes.prompt = {quoted(prompt)}: must contain {{class}} and {{domain}}"


def _of_feddeo(run: RunConfig) -> Iterator[str]:
    guided = run.feddeo.guidance_text or run.feddeo.guidance_description
    if run.method == "feddeo" and not guided:
        yield (
            "feddeo.guidance-text and feddeo.guidance-description are both 0: images would have no "
            "class"
        )


def _of_strategies(section: str, settings: FedLMGConfig) -> Iterator[str]:
    strategies = split_names(settings.strategies)
    if not strategies or set(strategies) - {"ft", "md", "sd"}:
        yield f"{section}.strategies = {quoted(settings.strategies)}: must name some of ft, md, sd"


def _of_espresso(run: RunConfig) -> Iterator[str]:
    settings = run.espresso
    sampled = settings.gmm and settings.mixture_fit == "sampled"
    if sampled and settings.noise_draws < settings.components:
        yield (
            f"espresso.noise-draws = {settings.noise_draws}: must be at least espresso.components "
            f"= {settings.components}, or a class with one image has too few latents for its "
            "mixture"
        )
    if settings.z_sampling and settings.inversion_guidance >= settings.guidance:
        yield (
            f"espresso.inversion-guidance = {settings.inversion_guidance:g}: must be below "
            f"espresso.guidance = {settings.guidance:g}, or the zig-zag takes guidance away"
        )


def _of_rounds(run: RunConfig) -> Iterator[str]:
    proxy = run.rounds.proxy.removeprefix("public")
    if proxy and not _is_absolute(proxy):
        yield _not_absolute("rounds.proxy", proxy)
    if run.method == "feddf" and run.data.name != "digits" and run.rounds.proxy == "public":
        yield (
            "rounds.proxy = 'public': those are digits, and the clients' images are not; name a "
            "folder "
            "of unlabelled images"
        )


def _is_absolute(path: str) -> bool:
    try:
        return Path(path).expanduser().is_absolute()
    # The home of a user that there is not
    except RuntimeError:
        return False


def _not_absolute(key: str, path: str) -> str:
    return (
        f"{key} = {quoted(path)}: must be an absolute path; Flower starts server and clients in a "
        "folder of its own"
    )
