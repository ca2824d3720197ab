"""Declarations of all configuration keys: type, range, meaning, and role in a run's identity.

Each class is a section of the run-config; a method's own section is in osfl/methods. A key is part
of a run's identity, which a resumption must share, unless it is marked `NotIdentity`. Defaults are
in pyproject.toml, and checks across keys in osfl/config/problems.py. `make docs-pages` generates
docs/configuration.md from this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from osfl.defenses import DEFENSES
from osfl.methods import METHODS
from osfl.methods.domain_vector import DomainVectorConfig
from osfl.methods.espresso import EspressoConfig
from osfl.methods.fedbip import FedBiPConfig
from osfl.methods.fedcado import FedCADOConfig
from osfl.methods.fedcgs import FedCGSConfig
from osfl.methods.feddeo import FedDEOConfig
from osfl.methods.feddisc import FedDISCConfig
from osfl.methods.fedld import FedLDConfig
from osfl.methods.fedlmg import FedLMGConfig
from osfl.methods.fedpft import FedPFTConfig
from osfl.methods.fgl import FGLConfig
from osfl.methods.iterative import RoundsConfig
from osfl.methods.latent_gaussian import LatentGaussianConfig
from osfl.methods.oscar import OscarConfig
from osfl.methods.prompts_domain import PromptsDomainConfig
from osfl.methods.prompts_only import PromptsOnlyConfig
from osfl.methods.real_and_synthetic import RealAndSyntheticConfig
from osfl.methods.votes import VotesConfig
from osfl.methods.zero_shot import ZeroShotConfig
from osfl.util.markers import (
    Approximate,
    ByData,
    Doc,
    ManyNames,
    NotIdentity,
    OneOf,
    Range,
    ServerKey,
    SitePath,
)
from osfl.util.names import parse_words, split_names
from osfl.util.prompts import fill_prompt

Switch = Annotated[str, OneOf("off", "on", "auto")]
# The record that asks for a test of a local-only model. It is here because a client that joins
# does not import torch, which the messages do
LOCAL_BASELINE = "local-baseline"
# The key of a reply to `query.join` from a site that asks for images of its own
COMPARISON = "comparison"
# A node's roles
TRAIN_AND_TEST = "train and test"
TEST_ONLY = "test"
# Meaning of a node-config key that pins the run-config key of the same name
PINNED = "Pins `data.{}`."


@dataclass(frozen=True)
class DataConfig:
    """The images, and their partition into clients."""

    name: Annotated[
        str,
        Doc(
            "The source of the images: `digits`, the embedded ones; `folder`, image folders "
            "(docs/your-data.md); or `hf:OWNER/NAME@REVISION`, a data set of the Hugging Face "
            "hub."
        ),
        SitePath("client"),
    ]
    subset: Annotated[
        str, Doc("Hub data: the name of a configuration, for a data set that has several.")
    ]
    partition: Annotated[
        str,
        OneOf("domain", "label", "dirichlet", "dirichlet-domain", "iid"),
        Doc(
            "The partition into clients: `domain`, one domain per client (feature skew); `label`, "
            "shards of the label-sorted data, or `dirichlet`, a Dirichlet distribution over "
            "labels (label skew); `dirichlet-domain`, such a distribution within every domain "
            "(both); or `iid`, at random. Folders are clients already, and accept `domain` alone."
        ),
    ]
    shards_per_client: Annotated[
        int,
        Range(1, 1000),
        Doc(
            "With partition = label: shards per client, each with images of one or two classes "
            "(McMahan et al. 2017)."
        ),
    ]
    alpha: Annotated[
        float,
        Range(1e-3, 1e6),
        Doc("With a Dirichlet partition: the concentration parameter. Smaller is more skewed."),
    ]
    classes: Annotated[
        str,
        ManyNames(),
        Doc(
            "The names of the classes, comma-separated. Empty: the digits' own, or all classes "
            "of a hub data set, in its order. `0-89`: the first ninety classes of a hub data "
            "set."
        ),
    ]
    words: Annotated[
        str,
        ManyNames(),
        Doc(
            "The text that replaces a class's or domain's name in prompts, such as "
            "`mouse=computer mouse`. Empty: the names."
        ),
    ]
    image_column: Annotated[str, Doc("Hub data: the column of the images.")]
    label_column: Annotated[str, Doc("Hub data: the column of the labels.")]
    domain_column: Annotated[
        str,
        Doc(
            "Hub data: the column of each image's domain, such as a hospital or a writer, which "
            "the partitions by domain use."
        ),
    ]
    domains: Annotated[
        str,
        ManyNames(),
        Doc(
            "Hub data: the domains whose images are used, comma-separated; all others are left "
            "out. Empty: all."
        ),
    ]
    group_column: Annotated[
        str,
        Doc(
            "Hub data or saved data: the column of each image's group, such as a patient. A group "
            "stays with one client, in its training or its test set (docs/your-data.md). Empty: "
            "no groups."
        ),
    ]
    split_by: Annotated[
        str,
        OneOf("", "near-duplicates"),
        Doc(
            "`near-duplicates`: images that look alike, also mirrored, are either training or "
            "test images. Test images of the data set that look like a training image become "
            "training images. Not at sites that demand a guarantee. Empty: the data set's split, "
            "or `test-share` by image."
        ),
    ]
    train_split: Annotated[str, Doc("Hub data: the split of the clients' training images.")]
    test_split: Annotated[
        str,
        Doc("Hub data: the split of the test images. Empty: `test-share` of the training split."),
    ]
    test_share: Annotated[
        float,
        Range(0.01, 0.99),
        Doc(
            "Without a split or folder of test images: the share of each client's images of every "
            "class that are test images, the same in every run, by whole groups if there are "
            "any."
        ),
    ]
    max_per_class: Annotated[
        int,
        Range(0, 10**9),
        Doc(
            "Hub data: upper bound on a client's training images per class, which the seed "
            "selects. 0: no bound."
        ),
    ]
    image_size: Annotated[
        int,
        Range(8, 2048),
        ByData(digits=32, others=224),
        Doc("Side length of the classifiers' input, in pixels. The kit has its own size."),
    ]
    root: Annotated[
        str,
        Doc(
            "An absolute path. Folders: the folder of all clients' folders, for simulations and "
            "method = ceiling. Hub data: a copy of the data set on every machine, in place of the "
            "hub."
        ),
        SitePath("client"),
    ]

    def prompt_name(self, name: str) -> str:
        """Return the text that stands for a class or domain in prompts."""
        return parse_words(self.words).get(name, name)


@dataclass(frozen=True)
class ClassifierConfig:
    """A torchvision or timm classifier, and its training (SGD)."""

    architecture: Annotated[
        str,
        Doc(
            "A torchvision model; or `timm:NAME`, or `hf-hub:OWNER/NAME@REVISION` for a model "
            "in timm's format. Clients may have several, comma-separated: simulated client i "
            "gets the i-th, cyclically."
        ),
        SitePath("client"),
    ]
    small_stem: Annotated[
        bool,
        ByData(digits=True, others=False),
        Doc("Whether the first layers keep the resolution, for images of about 32 pixels."),
    ]
    init: Annotated[
        str,
        Doc(
            "The initial weights: `kit`, the kit's; `imagenet`, torchvision's; `pretrained`, "
            "those of a timm: or hf-hub: model; `none`, random; or an absolute path: of a file "
            "of weights (safetensors, or torchvision's .pth), or for several architectures of a "
            "folder of `<architecture>.*` files."
        ),
        SitePath("client"),
    ]
    trained: Annotated[
        str,
        OneOf("all", "head"),
        Doc("The trained parameters: all, or only those of the last layer (head)."),
    ]
    epochs: Annotated[int, Range(1, 10_000), Doc("Passes over the training images.")]
    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc(
            "Training steps, in place of epochs. 0: `epochs`. Iterative baselines train for "
            "`rounds.local-epochs` per round."
        ),
    ]
    batch_size: Annotated[int, Range(2, 65_536), Doc("Images per training step.")]
    lr: Annotated[float, Range(1e-8, 100), Doc("Learning rate.")]
    momentum: Annotated[float, Range(0, 0.9999), Doc("Momentum of SGD.")]
    weight_decay: Annotated[float, Range(0, 1), Doc("Weight decay of SGD.")]
    schedule: Annotated[
        str,
        OneOf("constant", "cosine", "one-cycle"),
        Doc(
            "The learning-rate schedule over a whole training. Local training within a round "
            "always has a constant rate."
        ),
    ]
    warm_up: Annotated[
        float,
        Range(0, 0.9),
        Doc("Share of the steps in which a schedule increases the rate to `lr`."),
    ]
    label_smoothing: Annotated[
        float,
        Range(0, 0.9),
        Doc("The share of each label that is spread over all classes."),
    ]
    augmentation: Annotated[
        str,
        OneOf("none", "flip-crop", "affine-color", "randaugment", "trivialaugment"),
        ByData(digits="affine-color", others="trivialaugment"),
        Doc(
            "The augmentation of training images: `flip-crop`, a random flip and a shifted "
            "crop; `randaugment` or `trivialaugment`, which follow the flip and crop; or "
            "`affine-color`, small changes of rotation, position, size and color, for digits "
            "and letters."
        ),
    ]
    mixing: Annotated[
        str,
        OneOf("none", "mixup", "cutmix"),
        Doc(
            "How the images and labels of a batch are mixed. Not with teachers, which score whole "
            "images."
        ),
    ]
    ema: Annotated[
        float,
        Range(0, 0.99999),
        Doc(
            "Decay of the exponential moving average of the weights, the result of a whole "
            "training. 0: the last weights."
        ),
    ]
    precision: Annotated[
        str,
        OneOf("auto", "float32", "bfloat16"),
        Doc(
            "The number format of matrix products in training: bfloat16 is mixed precision; "
            "auto is bfloat16 on a GPU that supports it."
        ),
    ]


@dataclass(frozen=True)
class PersonalizationConfig:
    """Personalization: each client fine-tunes the global model on its own images.

    All other settings of the training are those of `[global-model]`.
    """

    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc(
            "Steps in which every client fine-tunes the global model on its own training images, "
            "after its test, and tests it again; with an epsilon as docs/privacy.md says. 0: "
            "none."
        ),
        NotIdentity(),
    ]
    lr: Annotated[float, Range(1e-8, 100), Doc("Learning rate of these steps."), NotIdentity()]
    batch_size: Annotated[int, Range(2, 65_536), Doc("Images per step."), NotIdentity()]


@dataclass(frozen=True)
class SynthesisConfig:
    """The synthesis of images on the server."""

    images_per_class: Annotated[int, Range(1, 1_000_000), Doc("R: images per class and client.")]
    steps: Annotated[
        int,
        Range(2, 999),
        Doc("Denoising steps per image."),
        # Mixtures are fitted at the first of the sampling timesteps
        ServerKey(except_for=("espresso", "fedld")),
    ]
    unit_size: Annotated[
        int,
        Range(1, 4096),
        Doc("Images per work unit. A resumed run repeats at most the units in flight."),
    ]
    batch_size: Annotated[
        int,
        Range(0, 4096),
        Doc("Images of a work unit per batch. 0: the fastest size."),
    ]
    parallel_units: Annotated[
        int,
        Range(0, 1024),
        Doc(
            "On a CPU without workers: units that are sampled in parallel. 0: the faster of one "
            "and one per core."
        ),
    ]
    prompt: Annotated[
        str,
        Doc("The prompt of a class; `{class}` stands for its name."),
        # The start of what is learned, and with an epsilon the unit of `clip-norm`
        ServerKey(except_for=("domain_vector", "espresso", "feddeo", "oscar")),
    ]
    workers: Annotated[
        int,
        Range(0, 10_000),
        Doc("Ray actors, each on a device of its own. 0: the server's process samples all images."),
        NotIdentity(),
    ]
    threads: Annotated[
        int,
        Range(0, 1024),
        Doc("CPU threads per worker. 0: its share of the machine's cores."),
    ]
    overlap: Annotated[
        Switch,
        Doc(
            "Whether the server synthesizes a client's images while others still work on their "
            "payloads; auto: not in a simulation, whose clients share its machine. Never with "
            "`class-balance`, workers, or a method of an installed package."
        ),
        NotIdentity(),
    ]
    ray_address: Annotated[
        str,
        Doc("The address of a Ray cluster. Empty: Ray starts on this machine."),
        NotIdentity(),
    ]
    dtype: Annotated[
        str,
        OneOf("float32", "bfloat16", "float16", "auto"),
        Doc("The number format of the networks; auto: the faster of float32 and bfloat16."),
    ]
    attention: Annotated[
        str,
        OneOf("default", "flash", "efficient", "cudnn", "math", "auto"),
        Doc("The attention implementation of torch; default: torch chooses; auto: the fastest."),
    ]
    memory_format: Annotated[
        str,
        OneOf("contiguous", "channels-last", "auto"),
        Doc("The order of an image's dimensions in memory; auto: the faster."),
    ]
    compile: Annotated[
        Switch,
        Doc("Whether torch compiles the networks; auto: on a GPU the faster choice."),
    ]
    solver: Annotated[
        str,
        OneOf("ddim", "dpm-solver++", "unipc", "lcm", "tcd"),
        Doc(
            "The solver of the denoising steps; lcm and tcd are for few-step sampling with "
            "a distilled `lora`."
        ),
        Approximate("ddim", "solver {solver}"),
    ]
    lora: Annotated[
        str,
        Doc(
            "Distilled LoRA weights for few-step sampling: kit (its `lora/`), a file, a folder, "
            "or a hub id. Empty: none."
        ),
        SitePath("server"),
        Approximate("", "distilled LoRA weights"),
    ]
    base_steps: Annotated[
        int,
        Range(0, 998),
        Doc("First steps that are taken without the `lora`."),
    ]
    guided_from: Annotated[
        int,
        Range(0, 1000),
        Doc("The lowest timestep with guidance. Outside the range the condition alone predicts."),
        Approximate(0, "guidance only at timesteps {guided_from} to {guided_to}"),
    ]
    guided_to: Annotated[
        int,
        Range(0, 1000),
        Doc("The highest timestep with guidance."),
        Approximate(1000, "guidance only at timesteps {guided_from} to {guided_to}"),
    ]
    cache_interval: Annotated[
        int,
        Range(1, 100),
        Doc(
            "The UNet's inner blocks are computed once in this many steps, and reused in between. "
            "1: no reuse."
        ),
        Approximate(1, "the UNet's inner blocks in one of {cache_interval} steps"),
    ]
    tiny_decoder: Annotated[
        str,
        Doc(
            "A tiny autoencoder (TAESD), whose decoder replaces the kit's in classifier "
            "guidance: kit (its `tiny_decoder/`), or a folder or hub id such as "
            "`madebyollin/taesd`. Empty: the kit's decoder."
        ),
        SitePath("server"),
        Approximate("", "guidance through a tiny decoder", methods=("fedlmg", "fedcado")),
    ]
    checkpointing: Annotated[
        Switch,
        Doc(
            "Whether classifier guidance recomputes activations for a gradient, which takes "
            "less memory and more time; auto: on a GPU."
        ),
        NotIdentity(),
    ]


@dataclass(frozen=True)
class RunConfig:
    """Settings that are equal on all nodes of a run."""

    method: Annotated[str, OneOf(*METHODS), Doc("The method; `osfl methods` lists them.")]
    job_id: Annotated[
        str,
        Doc(
            "The name of the run's folder. The same id resumes the run. Empty: method and "
            "Flower's run id."
        ),
        NotIdentity(),
    ]
    seed: Annotated[
        int,
        Range(0, 2**31 - 1),
        Doc("Seed of the run's randomness, except the noise for privacy."),
    ]
    num_clients: Annotated[
        int,
        Range(1, 100_000),
        Doc("Clients to wait for, and a simulation's clients. Further nodes are standby clients."),
    ]
    min_clients: Annotated[
        int,
        Range(0, 100_000),
        Doc("Payloads with which the run continues at the deadline. 0: all."),
        NotIdentity(),
    ]
    epsilon: Annotated[
        float,
        Range(0, 20),
        Doc(
            "Differential privacy of a client's payload, for the replacement of one image "
            "(docs/privacy.md). 0: no guarantee."
        ),
    ]
    delta: Annotated[
        float,
        Range(1e-9, 0.01),
        Doc(
            "With `epsilon`: the probability that the guarantee fails, far below 1 / number of "
            "images. `votes` has none."
        ),
    ]
    clip_norm: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc(
            "With `epsilon`: the clipping bound of an image's contribution to a mean, in units of "
            "the mean distance of the class prompts' encodings from their mean (FedDISC, FedPFT: "
            "the square root of the dimension). Smaller: less noise, more bias."
        ),
    ]
    clip_gradient: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc(
            "With `epsilon`, for classifiers: the clipping bound of each image's gradient "
            "(DP-SGD). Smaller: less noise, more bias."
        ),
    ]
    payload_codec: Annotated[
        str,
        OneOf("raw", "float16", "int8", "int4"),
        Doc(
            "The encoding of a payload's numbers: raw (float32), float16, or int8 and int4 in "
            "blocks of 64 with a scale each, deflated. Variances have float16 at least; shares, "
            "counts and tensors of one dimension are raw."
        ),
    ]
    sealing_key: Annotated[
        str,
        Doc(
            "Absolute path on the server of the private key that payloads are sealed to (`osfl "
            "certs sealing`). Empty: not sealed."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    sealed_store: Annotated[
        bool,
        Doc(
            "Whether sealed payloads stay sealed in the run's folder. Resuming requires the same "
            "key. Not with synthesis.workers."
        ),
        NotIdentity(),
    ]
    secure_sum: Annotated[
        bool,
        Doc(
            "Whether the server learns only the sum of all clients' payloads (docs/privacy.md). "
            "For fedcgs, latent-gaussian, oscar, oscar-pooled, votes, feddisc, feddeo with "
            "`epsilon`, and domain-vector without `class-lr`."
        ),
    ]
    secure_sum_images: Annotated[
        int,
        Range(1, 10**6),
        Doc(
            "In a secure sum, upper bound on a client's training images. A lower bound gives more "
            "precise sums."
        ),
    ]
    secure_sum_bound: Annotated[
        float,
        Range(0, 1e6),
        Doc(
            "In a secure sum, upper bound on the magnitude of each of an image's numbers. A lower "
            "bound gives more precise sums. 0: the method's (fedcgs 32, others 64)."
        ),
    ]
    payloads_from: Annotated[
        str,
        Doc("A run (folder or job id) whose payloads are used again. Clients only test."),
        SitePath("server"),
        NotIdentity(),
    ]
    continue_from: Annotated[
        str,
        Doc(
            "A run (folder or job id) to continue: its payloads and images are kept, and only "
            "clients that it lacks are asked."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    new_clients: Annotated[
        int,
        Range(0, 100_000),
        Doc(
            "With `continue-from`, in place of num-clients: new clients to wait for. After "
            "join-timeout one is enough. 0: num-clients."
        ),
        NotIdentity(),
    ]
    continue_from_model: Annotated[
        bool,
        Doc("With `continue-from`: train from that run's models, not anew."),
        NotIdentity(),
    ]
    replace_clients: Annotated[
        str,
        ManyNames(),
        Doc("With `continue-from`: clients, comma-separated, whose payload a new one replaces."),
        NotIdentity(),
    ]
    label_filter: Annotated[
        str,
        OneOf("none", "filter", "soft"),
        Doc(
            "Noisy-label filtering of synthetic images by cross-fitting: classifiers trained on "
            "one half of the images score the other half. `filter` drops images that they assign "
            "to another class; `soft` also trains on their predictions. Not with FedLMG and "
            "FedCADO."
        ),
        ServerKey(),
    ]
    defense: Annotated[
        str,
        OneOf("off", *DEFENSES),
        Doc(
            "The defense against malicious (label-flipping) clients (docs/robustness.md): "
            "`label-consistency` trains without suspicious clients and classes; "
            "`label-consistency-report` only lists them."
        ),
        ServerKey(),
    ]
    client_contribution: Annotated[
        bool,
        Doc(
            "Whether the server estimates each client's contribution by leave-one-out retraining, "
            "for 3 to 20 clients. Not with methods that synthesize no images from payloads."
        ),
        NotIdentity(),
    ]
    class_balance: Annotated[
        bool,
        Doc(
            "Whether the server synthesizes equally many images of every class: as many as of the "
            "class that most clients hold. Not if every class is synthesized for every client."
        ),
        ServerKey(),
    ]
    held_out: Annotated[
        str,
        ManyNames(),
        Doc(
            "Clients, comma-separated, that do not train: they alone test the global models "
            "(leave-one-domain-out). They count towards num-clients."
        ),
    ]
    advise: Annotated[
        bool,
        Doc(
            "Whether clients only measure how well three kinds of frozen models know their images "
            "(`osfl advise`)."
        ),
        NotIdentity(),
    ]
    local_baseline: Annotated[
        bool,
        Doc(
            "Whether clients also train the global model's recipe on their own images alone, and "
            "test that model, for the report's gains. Not with an epsilon, nor with `local`."
        ),
        NotIdentity(),
    ]
    public_domains: Annotated[
        str,
        ManyNames(),
        Doc(
            "Domains, comma-separated, in which the server also synthesizes every class, by "
            "`prompts-domain.prompt` without client data. Not with FedLMG, FedCADO and FedDISC."
        ),
        ServerKey(),
    ]
    join_timeout: Annotated[
        float, Range(1, 1e7), Doc("Seconds to wait for clients to join."), NotIdentity()
    ]
    deadline: Annotated[
        float,
        Range(1, 1e7),
        Doc("Seconds to wait for payloads."),
        NotIdentity(),
    ]
    test_timeout: Annotated[
        float,
        Range(1, 1e7),
        Doc("Seconds to wait for the clients' test of each global model."),
        NotIdentity(),
    ]
    test_specificity: Annotated[
        float,
        Range(0.5, 0.999),
        Doc("The specificity at which the report states a model's sensitivity for each class."),
        NotIdentity(),
    ]
    max_payload_mb: Annotated[
        float,
        Range(1e-3, 1e5),
        Doc("Upper bound on the size of a payload, in MB; a VGG-16 at 224 px has 537."),
        NotIdentity(),
    ]
    max_images: Annotated[
        int,
        Range(1, 10**9),
        Doc(
            "Upper bound on a client's reported training images, beyond which it is refused, and "
            "on its test images."
        ),
        NotIdentity(),
    ]
    max_weight_ratio: Annotated[
        float,
        Range(0, 1e9),
        Doc(
            "Cap on a client's image count, in total and per class: this multiple of the other "
            "clients' median. At least 1; 0: no cap. For methods that weight clients by their "
            "images (fedcgs, fedpft, fedavg, fedprox, feddf)."
        ),
        ServerKey(),
    ]
    runs_dir: Annotated[
        str,
        Doc(
            "The folder of all runs, an absolute path. Empty: `$OSFL_RUNS`, or else `~/.osfl/runs`."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    signatures: Annotated[
        str,
        Doc("Signatures of the run, which `osfl run --signed` sets."),
        NotIdentity(),
    ]
    tracking: Annotated[
        str,
        Doc(
            "Where the server logs the run: `tensorboard` (in the run's folder), `mlflow`, or "
            "both, comma-separated."
        ),
        NotIdentity(),
    ]
    mlflow_uri: Annotated[
        str,
        Doc(
            "The MLflow server or store, without credentials (docs/running-tracking.md). Empty: "
            "the server's $MLFLOW_TRACKING_URI."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    kit: Annotated[
        str,
        Doc(
            "The model bundle (kit) with the base diffusion model: a shipped kit, an absolute "
            "path, or a hub id, optionally with `@REVISION`. The node-config's takes precedence."
        ),
        SitePath("client"),
        SitePath("client"),
    ]
    captioner: Annotated[
        str,
        Doc("A BLIP or BLIP-2 folder or hub id. Empty: the kit's captioner."),
        SitePath("client"),
    ]
    image_encoder: Annotated[
        str,
        Doc("A DINOv2 or CLIP folder or hub id. Empty: the kit's image encoder."),
        SitePath("client"),
    ]
    device: Annotated[
        str,
        Doc(
            "The server's device: auto, cpu, cuda, cuda:1, and so on. A client's is in its "
            "node-config."
        ),
        NotIdentity(),
    ]
    checkpointing: Annotated[
        Switch,
        Doc(
            "Whether clients learn conditions with less memory and more time (gradient "
            "checkpointing); auto: on a GPU. The node-config's checkpointing takes precedence."
        ),
        NotIdentity(),
    ]
    data: DataConfig
    classifier: Annotated[ClassifierConfig, Doc("The clients' classifiers.")]
    global_model: Annotated[ClassifierConfig, Doc("The server's global model."), ServerKey()]
    personalization: PersonalizationConfig
    synthesis: Annotated[SynthesisConfig, ServerKey()]
    prompts_only: PromptsOnlyConfig
    prompts_domain: Annotated[PromptsDomainConfig, ServerKey()]
    feddeo: FedDEOConfig
    fedlmg: Annotated[FedLMGConfig, ServerKey()]
    fedcado: Annotated[FedCADOConfig, ServerKey()]
    oscar: OscarConfig
    espresso: EspressoConfig
    fedld: FedLDConfig
    latent_gaussian: LatentGaussianConfig
    fgl: Annotated[FGLConfig, ServerKey()]
    feddisc: FedDISCConfig
    fedbip: FedBiPConfig
    domain_vector: DomainVectorConfig
    votes: VotesConfig
    fedcgs: FedCGSConfig
    fedpft: FedPFTConfig
    zero_shot: Annotated[ZeroShotConfig, ServerKey()]
    real_and_synthetic: Annotated[RealAndSyntheticConfig, ServerKey()]
    rounds: RoundsConfig
    # The section of a method that an installed package adds; None with other methods
    installed_settings: Any = None

    def prompts(self, names: Iterable[str]) -> list[str]:
        """Return the prompt of every class."""
        return [
            fill_prompt(self.synthesis.prompt, {"class": self.data.prompt_name(name)})
            for name in names
        ]

    @property
    def summand_bound(self) -> float:
        """The upper bound on the magnitude of an image's numbers in a secure sum."""
        return self.secure_sum_bound or METHODS[self.method].summand_bound

    @property
    def guaranteed_delta(self) -> float:
        """The guarantee's delta; 0 without a guarantee, or for one without a delta."""
        approximate = METHODS[self.method].privacy == "approximate"
        return self.delta if self.epsilon and approximate else 0.0

    @property
    def method_settings(self) -> Any:
        """The section of the run's method; None if it has none."""
        method = METHODS[self.method]
        if method.settings:
            return self.installed_settings
        return getattr(self, method.section.replace("-", "_"), None)

    @property
    def sampling_kit(self) -> str:
        """The kit of the diffusion model that samples; a method may have its own."""
        return getattr(self.method_settings, "kit", "") or self.kit

    @property
    def sampling_kit_key(self) -> str:
        """The key that names `sampling_kit`."""
        has_kit = bool(getattr(self.method_settings, "kit", ""))
        return f"{METHODS[self.method].section}.kit" if has_kit else "kit"

    @property
    def needed_clients(self) -> int:
        """The number of clients with which a run continues at the deadline."""
        return self.min_clients or self.training_clients

    @property
    def held_out_clients(self) -> tuple[str, ...]:
        """The held-out clients, which only test."""
        return split_names(self.held_out)

    @property
    def public_domain_names(self) -> tuple[str, ...]:
        """The domains that the server adds by their names."""
        return split_names(self.public_domains)

    @property
    def training_clients(self) -> int:
        """The number of clients whose images train the global model."""
        return self.num_clients - len(self.held_out_clients)


@dataclass(frozen=True)
class NodeConfig:
    """Settings that differ between machines.

    They come from `flower-supernode --node-config`, or from the simulation.
    """

    partition_id: Annotated[
        int, Doc("The number of the part of an embedded data set that this node holds; -1: none.")
    ] = -1
    num_partitions: Annotated[int, Doc("The number of parts.")] = 0
    client_id: Annotated[str, Doc("The client's name. Empty: `client-<partition-id>`.")] = ""
    method: Annotated[
        str,
        Doc(
            "In a mixed run, the kind of payload that this site sends: one of `mixed.methods`, or "
            "`auto` (docs/methods.md)."
        ),
        NotIdentity(),
    ] = "auto"
    data_dir: Annotated[
        str,
        Doc(
            "The folder with `{train,test}/<class>/*`. Empty: the folder number `partition-id` "
            "in `data.root`."
        ),
    ] = ""
    allowed_dirs: Annotated[
        str,
        Doc(
            "Absolute folders, comma-separated. This site refuses paths in a run's settings "
            "outside them, after links are followed. Shipped kits and the hub's cache are always "
            "allowed. Empty: `$OSFL_ALLOWED_DIRS`, or else no further folder."
        ),
        NotIdentity(),
    ] = ""
    kit: Annotated[
        str, Doc("The path of the kit on this machine. Empty: the run's."), NotIdentity()
    ] = ""
    device: Annotated[
        str, Doc("The device: auto, cpu, cuda, cuda:1, and so on."), NotIdentity()
    ] = "auto"
    architecture: Annotated[
        str,
        Doc("This client's classifier, one of those that the run allows. Empty: the run's."),
        NotIdentity(),
    ] = ""
    domain: Annotated[
        str, Doc("The name of the client's domain, for prompts-domain. Empty: the simulation's.")
    ] = ""
    role: Annotated[
        str,
        OneOf(TRAIN_AND_TEST, TEST_ONLY),
        Doc("`test`: this site sends no payload and only tests."),
        NotIdentity(),
    ] = TRAIN_AND_TEST
    cache_dir: Annotated[
        str,
        Doc(
            "The folder that keeps finished payloads until the server has them, and those with "
            "an epsilon until the site removes them. Empty: `$OSFL_CACHE`, or else "
            "`~/.osfl/cache`."
        ),
        NotIdentity(),
    ] = ""
    ledger_dir: Annotated[
        str,
        Doc(
            "An absolute path: the folder of the privacy ledger, which must outlive the cache. "
            "Empty: `$OSFL_STATE`, or else `~/.osfl/state`."
        ),
        NotIdentity(),
    ] = ""
    checkpointing: Annotated[
        str,
        OneOf("off", "on", "auto", ""),
        Doc("As in the run-config. Empty: the run's."),
        NotIdentity(),
    ] = ""
    epsilon: Annotated[
        float,
        Range(0, 20),
        Doc(
            "The largest `epsilon` of a payload of this site. A larger one of the run is "
            "lowered to it, and methods without a guarantee are refused. 0: the run's."
        ),
        NotIdentity(),
    ] = 0.0
    delta: Annotated[
        float,
        Range(1e-9, 0.01),
        Doc(
            "The largest `delta` of a payload of this site. A larger one of the run is lowered "
            "to it."
        ),
        NotIdentity(),
    ] = 1e-5
    epsilon_total: Annotated[
        float,
        Range(0, 1000),
        Doc(
            "The privacy budget: the most `epsilon` that the payloads of all jobs together may "
            "spend. A run without an epsilon, or with a method without a guarantee, is refused. "
            "Requires `client-id`, under which `ledger-dir` keeps the sum. 0: no limit."
        ),
        NotIdentity(),
    ] = 0.0
    seal_to: Annotated[
        str,
        Doc(
            "The fingerprint of the server's sealing key, 64 hex digits: this site seals every "
            "payload to it. Empty: to the run's key, if any."
        ),
        NotIdentity(),
    ] = ""
    secure_sum: Annotated[
        bool,
        Doc("Whether this site sends payloads only as summands of a secure sum."),
        NotIdentity(),
    ] = False
    secure_sum_key: Annotated[
        str,
        Doc(
            "An absolute path: the private key (`osfl certs signer`) with which this site signs "
            "its key of each secure sum. Empty: unsigned."
        ),
        NotIdentity(),
    ] = ""
    secure_sum_peers: Annotated[
        str,
        Doc(
            "An absolute path: a file with a line `ssh-ed25519 KEY CLIENT-ID` for each site with "
            "which this one takes part in a secure sum. Others are refused. Empty: any."
        ),
        NotIdentity(),
    ] = ""
    min_class_images: Annotated[
        int,
        Range(1, 1_000_000),
        Doc(
            "Classes with fewer training images on this node are left out of the payload and of "
            "`personalization`, not of the test's confusion matrix (docs/privacy.md)."
        ),
    ] = 1
    models_dir: Annotated[
        str,
        Doc(
            "An absolute path: the folder in which this site keeps the global models, as "
            "`<job>-<model>-<client>.safetensors`, and with `personalization.steps` the adapted "
            "ones (`-adapted`). Empty: none."
        ),
        NotIdentity(),
    ] = ""
    predictions_dir: Annotated[
        str,
        Doc(
            "An absolute path: the folder in which this site keeps, in "
            "`<job>-<model>-<client>.csv`, the classes and probabilities of each test image, "
            "under the SHA-256 of its path. Empty: none."
        ),
        NotIdentity(),
    ] = ""
    comparison_dir: Annotated[
        str,
        Doc(
            "An absolute path: the folder in which this site keeps `<job>-<client>.html`, with "
            "images of its own beside synthetic ones, which it asks the server for. Empty: none."
        ),
        NotIdentity(),
    ] = ""
    test_results: Annotated[
        str,
        OneOf("exact", "confusion", "off", ""),
        Doc(
            "This site's answer to a test of a global model, which no guarantee covers: exact "
            "(the confusion matrix and, without an epsilon, score histograms), confusion (the "
            "matrix alone, and no `local-baseline`), or off. Empty: off if `epsilon` or "
            "`epsilon-total` is set here, or else exact."
        ),
        NotIdentity(),
    ] = ""
    classes: Annotated[
        str,
        Doc(
            "The only `data.classes` that this site accepts, comma-separated, in the run's "
            "order. Empty: any. With an `epsilon` here, text labels require it."
        ),
        NotIdentity(),
    ] = ""
    image_column: Annotated[str, Doc(PINNED.format("image-column")), NotIdentity()] = ""
    label_column: Annotated[str, Doc(PINNED.format("label-column")), NotIdentity()] = ""
    domain_column: Annotated[str, Doc(PINNED.format("domain-column")), NotIdentity()] = ""
    group_column: Annotated[str, Doc(PINNED.format("group-column")), NotIdentity()] = ""
    train_split: Annotated[str, Doc(PINNED.format("train-split")), NotIdentity()] = ""
    test_split: Annotated[str, Doc(PINNED.format("test-split")), NotIdentity()] = ""
    test_share: Annotated[
        float, Range(0, 0.99), Doc(PINNED.format("test-share")), NotIdentity()
    ] = 0.0

    @property
    def requires_guarantee(self) -> bool:
        """Return whether this site only sends payloads with differential privacy."""
        return bool(self.epsilon or self.epsilon_total)

    @property
    def tests_only(self) -> bool:
        """Return whether this site takes part in tests alone: it trains nothing."""
        return self.role == TEST_ONLY

    @property
    def sends_test_results(self) -> bool:
        """Return whether this site sends the confusion matrix of a global model."""
        return self._sent_results != "off"

    @property
    def sends_exact_results(self) -> bool:
        """Return whether this site sends more of a test than the confusion matrix."""
        return self._sent_results == "exact"

    @property
    def _sent_results(self) -> str:
        return self.test_results or ("off" if self.requires_guarantee else "exact")
