"""Checks across keys: values that contradict each other, and texts that lack a placeholder."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain

from osfl.config.kinds import all_parts, is_mixed, spelling_problems
from osfl.config.sections import ClassifierConfig, RunConfig
from osfl.defenses import DEFENSES, LABEL_CONSISTENCY
from osfl.methods import METHODS
from osfl.methods.iterative import aggregation_problems
from osfl.util.names import (
    BACKBONES,
    IDENTIFIER_RULE,
    TRACKERS,
    is_absolute,
    is_identifier,
    not_absolute,
    parse_words,
    problem_of_backbone,
    split_names,
)
from osfl.util.prompts import to_words
from osfl.util.text import (
    is_public_uri,
    masked_uri,
    name_problem,
    quote,
    safe_name,
    sanitize,
)

DIGITS_KITS = ("digits", "digits-unclip")
# Limit of AES-GCM in the library that seals
MAX_SEALED_BYTES = 2**31 - 1000
# With two clients that contradict each other, either may be malicious
MIN_CONTRIBUTION_CLIENTS = 3
# Each client costs a training
MAX_CONTRIBUTION_CLIENTS = 20
# The keys that partition a data set into clients, with their defaults
CUTS = (
    ("partition", "domain"),
    ("shards-per-client", 2),
    ("alpha", 0.5),
    ("subset", ""),
    ("domains", ""),
)
# No part may begin with a dot, because hf:../images would be a local folder
_HUB_DATA = re.compile(r"hf:\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


def problems(run: RunConfig) -> Iterator[str]:
    """Yield every problem that keeps a configuration from being run, as texts.

    A mixed run can be run if a pure run of each of its methods can.
    """
    if run.secure_sum and is_mixed(run):
        yield (
            "secure-sum = true: must be false in a mixed run, whose payloads are of several kinds"
        )
    if not is_mixed(run):
        yield from _pure_problems(run)
    elif misspelled := list(spelling_problems(run)):
        yield from misspelled
    else:
        by_part = [list(_pure_problems(part)) for part in all_parts(run).values()]
        yield from dict.fromkeys(chain.from_iterable(by_part))


def _pure_problems(run: RunConfig) -> Iterator[str]:
    yield from _run_problems(run)
    yield from _data_problems(run)
    yield from _classifier_problems(run)
    yield from _synthesis_problems(run)
    if "{class}" not in run.synthesis.prompt:
        yield f"synthesis.prompt = {quote(run.synthesis.prompt)}: must contain {{class}}"
    yield from _section_problems(run)
    yield from METHODS[run.method].problems(run)
    yield from aggregation_problems(run, METHODS)


def _section_problems(run: RunConfig) -> Iterator[str]:
    """Yield what the methods' sections say about themselves, whichever method is run."""
    for item in fields(run):
        section = getattr(run, item.name)
        if hasattr(section, "problems"):
            yield from section.problems()


def guarantee_problem(run: RunConfig) -> str:
    """Return the setting that rules out a guarantee (epsilon), with a hint; "" if there is none."""
    return METHODS[run.method].guarantee_problem(run)


# ---- Keys without a section ----


def _run_problems(run: RunConfig) -> Iterator[str]:
    if run.job_id and not is_identifier(run.job_id):
        yield f"job-id = {quote(run.job_id)}: {IDENTIFIER_RULE}"
    yield from _privacy_problems(run)
    yield from _sealing_problems(run)
    yield from _secure_sum_problems(run)
    yield from _payload_source_problems(run)
    yield from _continuation_problems(run)
    if 0 < run.max_weight_ratio < 1:
        yield (
            f"max-weight-ratio = {run.max_weight_ratio:g}: must be at least 1, or 0 for no cap; "
            "below 1 it would scale down clients with as many images as the others"
        )
    yield from _codec_problems(run)
    yield from _label_filter_problems(run)
    yield from _defense_problems(run)
    yield from _contribution_problems(run)
    if run.personalization.steps and not METHODS[run.method].global_model:
        yield (
            f"personalization.steps = {run.personalization.steps}: must be 0 with method "
            f"{run.method!r}, which trains no global model that clients could adapt"
        )
    if run.local_baseline and not METHODS[run.method].global_model:
        yield (
            f"local-baseline = true: must be false with method {run.method!r}, whose models are "
            "the clients' own"
        )
    yield from _class_balance_problems(run)
    yield from _public_domain_problems(run)
    yield from _client_problems(run)
    yield from _tracking_problems(run)
    if run.runs_dir and not is_absolute(run.runs_dir):
        yield (
            f"runs-dir = {quote(run.runs_dir)}: must be an absolute path, because Flower starts "
            "the server in a folder of its own"
        )
    if run.kit.startswith("."):
        yield f"kit = {quote(run.kit)}: must be a shipped kit's name, an absolute path or a hub id"
    draws_digits = run.sampling_kit in DIGITS_KITS
    if METHODS[run.method].samples and draws_digits and run.data.name != "digits":
        yield digits_kit_problem(run.sampling_kit_key, run.sampling_kit, run.data.name)


def _privacy_problems(run: RunConfig) -> Iterator[str]:
    if run.epsilon and not METHODS[run.method].privacy:
        private = ", ".join(name for name, method in METHODS.items() if method.privacy)
        yield (
            f"epsilon = {run.epsilon:g}: method {run.method!r} gives no guarantee; set epsilon to "
            f"0, or method to one that does: {private}"
        )
    if run.epsilon and (problem := guarantee_problem(run)):
        yield problem


def _tracking_problems(run: RunConfig) -> Iterator[str]:
    names = split_names(run.tracking)
    if unknown := sorted(set(names) - set(TRACKERS)):
        yield (
            f"tracking = {quote(run.tracking)}: {quote(unknown[0])} must be one of "
            f"{', '.join(TRACKERS)}"
        )
    # A run-config is stored in plain text, and sent to every client
    if not is_public_uri(run.mlflow_uri):
        yield (
            f"mlflow-uri = {quote(masked_uri(run.mlflow_uri))}: must be without credentials, "
            "query, fragment and white space; set $MLFLOW_TRACKING_USERNAME and "
            "$MLFLOW_TRACKING_PASSWORD, or $MLFLOW_TRACKING_TOKEN, on the server"
        )


def _sealing_problems(run: RunConfig) -> Iterator[str]:
    if run.sealing_key and not is_absolute(run.sealing_key):
        yield not_absolute("sealing-key", run.sealing_key)
    if run.sealing_key and METHODS[run.method].shares_models:
        yield (
            f"sealing-key = {quote(run.sealing_key)}: method {run.method!r} exchanges models, "
            'which are not sealed; set sealing-key to ""'
        )
    if run.sealed_store and not run.sealing_key:
        yield "sealed-store = true: requires a sealing-key; set one, or set sealed-store to false"
    if run.sealed_store and run.synthesis.workers:
        yield (
            f"sealed-store = true: with synthesis.workers = {run.synthesis.workers} decrypted "
            "payloads go to Ray's object store, which may spill to a disk; set workers to 0, or "
            "sealed-store to false"
        )
    if run.sealing_key and run.max_payload_mb * 1e6 > MAX_SEALED_BYTES:
        yield (
            f"max-payload-mb = {run.max_payload_mb:g}: a sealed payload has at most "
            f"{MAX_SEALED_BYTES / 1e6:.0f} MB; set it to that, or set no sealing-key"
        )


def _secure_sum_problems(run: RunConfig) -> Iterator[str]:
    """Yield what contradicts a server that sees no single payload."""
    if not run.secure_sum:
        return
    if not METHODS[run.method].summand_bound:
        additive = ", ".join(name for name, method in METHODS.items() if method.summand_bound)
        yield (
            f"secure-sum = true: method {run.method!r} requires each client's own payload; set "
            f"secure-sum to false, or method to one whose payloads add up: {additive}"
        )
    others = {
        "payload-codec": run.payload_codec if run.payload_codec != "raw" else "",
        "sealing-key": run.sealing_key,
        "payloads-from": run.payloads_from,
        "continue-from": run.continue_from,
        "defense": run.defense if run.defense != "off" else "",
        "client-contribution": "true" if run.client_contribution else "",
    }
    for key, value in others.items():
        if value:
            yield (
                f"{key} = {quote(value)}: not with secure-sum = true, because the server has no "
                "single payload and adds whole numbers; set one of the two to its default"
            )
    if problem := METHODS[run.method].sum_problem(run):
        yield problem
    lowest = lowest_threshold(run.training_clients)
    if run.needed_clients < lowest:
        yield (
            f"min-clients = {run.min_clients}: must be at least {lowest} of {run.training_clients} "
            "clients with secure-sum = true, or a server that names other drop-outs to each "
            "client could open sums of few"
        )


def lowest_threshold(members: int) -> int:
    """Return the least `min-clients` t of a secure sum of m clients: 2 t >= m + 2.

    To open a client's mask the server needs shares from t clients, so at most m - t others can have
    been told that it is absent. The client itself accepts at most m - t others as absent. So a
    server that names different absent clients to different clients can open no sum of fewer than
    2 t - m clients.
    """
    return max(2, (members + 3) // 2)


def _payload_source_problems(run: RunConfig) -> Iterator[str]:
    method = METHODS[run.method]
    setting = f"payloads-from = {quote(run.payloads_from)}"
    if run.payloads_from and method.rounds:
        yield (
            f"{setting}: with the iterative method {run.method!r} clients train in every round, "
            'from the last round\'s model; set payloads-from to ""'
        )
    elif run.payloads_from and not method.client:
        yield f'{setting}: with method {run.method!r} clients send none; set payloads-from to ""'


def _continuation_problems(run: RunConfig) -> Iterator[str]:
    method = METHODS[run.method]
    setting = f"continue-from = {quote(run.continue_from)}"
    if run.continue_from and (method.rounds or not method.client):
        yield (
            f"{setting}: with method {run.method!r} the server keeps no payload that a new "
            'version could use; set continue-from to ""'
        )
    if run.continue_from and run.payloads_from:
        yield f'{setting}: must be "" with payloads-from, which asks no client'
    dependent = {
        "new-clients": run.new_clients,
        "continue-from-model": run.continue_from_model,
        "replace-clients": run.replace_clients,
    }
    key = next((key for key, value in dependent.items() if value), "")
    if key and not run.continue_from:
        yield f"{key}: requires continue-from; set it to the run to continue"
    if run.continue_from_model and run.replace_clients:
        yield (
            "continue-from-model = true: must be false with replace-clients, because a model that "
            "a payload has shaped cannot forget it"
        )


def _codec_problems(run: RunConfig) -> Iterator[str]:
    numbers = METHODS[run.method].numbers
    if run.payload_codec == "raw":
        return
    if numbers == "none":
        yield (
            f"payload-codec = {run.payload_codec!r}: method {run.method!r} sends no payload with "
            "numbers; set payload-codec = 'raw'"
        )
    elif numbers == "exact":
        yield (
            f"payload-codec = {run.payload_codec!r}: the sums of method {run.method!r} must be "
            "exact; set payload-codec = 'raw'"
        )


def _label_filter_problems(run: RunConfig) -> Iterator[str]:
    if run.label_filter == "none":
        return
    setting = f"label-filter = {run.label_filter!r}"
    if METHODS[run.method].teachers or not METHODS[run.method].samples:
        yield (
            f"{setting}: method {run.method!r} has teachers of its own, or synthesizes no images; "
            "set label-filter to none"
        )
    elif run.synthesis.images_per_class < 2:
        yield (
            f"{setting}: requires synthesis.images-per-class to be at least 2: one image for each "
            "of the two classifiers"
        )


def _defense_problems(run: RunConfig) -> Iterator[str]:
    if DEFENSES.get(run.defense) != LABEL_CONSISTENCY:
        return
    if not METHODS[run.method].samples_payloads:
        yield (
            f"defense = {run.defense!r} requires a method that synthesizes images from payloads; "
            f"with {run.method!r} set defense = 'off'"
        )
    elif METHODS[run.method].image_conditions:
        yield (
            f"defense = {run.defense!r}: method {run.method!r} samples with an unCLIP kit, which "
            "is conditioned on images and cannot score a prompt; set defense = 'off'"
        )


def _contribution_problems(run: RunConfig) -> Iterator[str]:
    if not run.client_contribution:
        return
    if not METHODS[run.method].samples_payloads:
        yield (
            "client-contribution = true requires a method that synthesizes images from payloads; "
            f"with {run.method!r} set client-contribution to false"
        )
    elif not MIN_CONTRIBUTION_CLIENTS <= run.training_clients <= MAX_CONTRIBUTION_CLIENTS:
        yield (
            "client-contribution = true trains the model once more without each client, and "
            f"requires {MIN_CONTRIBUTION_CLIENTS} to {MAX_CONTRIBUTION_CLIENTS} clients, but there "
            f"are {run.training_clients}; set it to false"
        )
    elif run.synthesis.images_per_class < 3:
        yield (
            "client-contribution = true requires synthesis.images-per-class to be at least 3: two "
            "images to train on, and one to test on"
        )


def _class_balance_problems(run: RunConfig) -> Iterator[str]:
    if not run.class_balance:
        return
    if not METHODS[run.method].samples:
        yield (
            f"class-balance = true: method {run.method!r} synthesizes no images; set it to false"
        )
    elif METHODS[run.method].payload is None:
        yield (
            f"class-balance = true: method {run.method!r} synthesizes every class for every "
            "client, which is balanced already; set it to false"
        )


def _public_domain_problems(run: RunConfig) -> Iterator[str]:
    names = run.public_domain_names
    setting = f"public-domains = {sanitize(run.public_domains, 200)!r}"
    if names and not METHODS[run.method].samples_prompts:
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
    setting = f"held-out = {quote(run.held_out)}"
    if invalid := [name for name in run.held_out_clients if not is_identifier(name)]:
        yield f"{setting}: {quote(invalid[0])} is not a client's name"
    if len(set(run.held_out_clients)) < len(run.held_out_clients) or run.training_clients < 1:
        yield (
            f"{setting}: must be different clients, and fewer than num-clients = {run.num_clients}"
        )
    elif run.min_clients > run.training_clients:
        yield (
            f"min-clients = {run.min_clients}: must be at most num-clients = {run.num_clients} "
            "minus the held-out clients"
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
    if run.data.name == "digits" and run.data.domains:
        yield (
            f"data.domains = {quote(run.data.domains)}: must be empty with data.name = 'digits', "
            "whose domains are the clients; set num-clients"
        )
    if run.data.name == "digits" and run.data.split_by:
        yield (
            f"data.split-by = {run.data.split_by!r}: must be empty with data.name = 'digits', "
            "where no scan is in two splits"
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
    if run.data.root and not is_absolute(run.data.root):
        yield not_absolute("data.root", run.data.root)


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
    if not split_names(run.classifier.architecture):
        yield "classifier.architecture: must name at least one torchvision model"
    if len(split_names(run.global_model.architecture)) != 1:
        yield (
            f"global-model.architecture = {quote(run.global_model.architecture)}: must name one "
            "torchvision model"
        )


def _digits_weight_problems(run: RunConfig) -> Iterator[str]:
    """Refuse initial weights that were trained on digits for other images."""
    method = METHODS[run.method]
    # A method that samples with such a kit has its own error
    has_error = method.samples and run.sampling_kit in DIGITS_KITS
    if has_error or run.data.name == "digits" or run.kit not in DIGITS_KITS:
        return
    inits = {}
    if method.rounds or method.loads_initial_weights:
        inits["classifier"] = run.classifier.init
    if method.trains_on_images:
        inits["global-model"] = run.global_model.init
    for section, init in inits.items():
        if init == "kit":
            yield (
                f"{section}.init = 'kit': the weights in kits/{run.kit} are of digits, but "
                f"data.name = {quote(run.data.name)}. Set {section}.init=imagenet, or none "
                "without a network, or a file; or set kit to one for your images"
            )


def _init_problems(section: str, settings: ClassifierConfig) -> Iterator[str]:
    if settings.init not in ("kit", "imagenet", "pretrained", "none") and not is_absolute(
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
    if settings.cache_interval != 1 and settings.compile != "off":
        yield (
            "synthesis.cache-interval: must be 1 with synthesis.compile, which would compile every "
            "step anew"
        )
