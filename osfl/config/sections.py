"""Declarations of all configuration keys: type, range, meaning, and role in a run's identity.

Each class is a section of the run-config. A key is part of a run's identity, which a resumption
must share, unless it is marked `NotIdentity`. Defaults are in pyproject.toml, and checks across
keys in osfl/config/problems.py. `make docs-pages` generates docs/configuration.md from this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from osfl.config.markers import (
    Approximate,
    ByData,
    Doc,
    ManyNames,
    NotIdentity,
    OneOf,
    Range,
    SitePath,
)
from osfl.config.names import parse_words, split_names
from osfl.methods import METHODS
from osfl.util.prompts import fill_prompt

Scale = Annotated[float, Range(0, 100)]
Weight = Annotated[float, Range(0, 1e4)]
Switch = Annotated[str, OneOf("off", "on", "auto")]
# Meaning of a node-config key that pins the run-config key of the same name
PINNED = (
    "The only `data.{}` that this site accepts. Empty or 0: any; but with an `epsilon` or "
    "`epsilon-total` here, only the run-config's default."
)


@dataclass(frozen=True)
class DataConfig:
    """The images, and their partition into clients."""

    name: Annotated[
        str,
        Doc(
            "The source of the images: `digits`, the embedded ones; `folder`, image folders "
            "(`<data-dir>/{train,test}/<class>/*`, where test/ may be missing); or "
            "`hf:OWNER/NAME@REVISION`, a data set of the Hugging Face hub."
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
            "How the data are partitioned into clients: `domain`, one domain per client "
            "(feature skew); `label`, shards of the label-sorted data, or `dirichlet`, a "
            "Dirichlet distribution over labels (label skew); `dirichlet-domain`, such a "
            "distribution within every domain (both); or `iid`, at random. Folders are clients "
            "already, and accept `domain` alone."
        ),
    ]
    shards_per_client: Annotated[
        int,
        Range(1, 1000),
        Doc(
            "With partition = label: the number of shards of the label-sorted data per client, "
            "each with images of one or two classes (McMahan et al. 2017)."
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
            "`mouse=computer mouse, nail=nail of iron`. Empty: prompts use the names."
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
    group_column: Annotated[
        str,
        Doc(
            "Hub data or saved data: the column of each image's group, such as a patient. All "
            "images of a group stay with one client, and either in its training set or in its "
            "test set. A group in two domains is refused with the partitions by domain. Empty: "
            "images have no groups. In folders, the folder within a class is the group."
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
            "class that are test images, by whole groups if there are groups."
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
            "An absolute path. With name = folder: the folder that contains all clients' "
            "folders, for simulations and for method = ceiling. With hub data: a copy of the "
            "data set on every machine, in place of the hub."
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
            "Training steps, in place of epochs. 0: train for `epochs`. Iterative baselines "
            "train for `rounds.local-epochs` per round."
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
        Doc("Label smoothing: the share of each label that is spread over all classes."),
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
            "How the images and labels of a batch are mixed. Not possible with teachers, which "
            "score whole images."
        ),
    ]
    ema: Annotated[
        float,
        Range(0, 0.99999),
        Doc(
            "Decay of the exponential moving average of the weights, which is the result of a "
            "whole training. 0: the last weights are the result."
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
class AdaptationConfig:
    """Personalization: each client fine-tunes the global model on its own images.

    All other settings of the training are those of `[global-model]`.
    """

    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc(
            "Steps in which every client fine-tunes the global model on its own training "
            "images, after its test. The result is tested once more, also by left-out clients, "
            "and nothing else about it is sent. With an epsilon not even that is sent, and only "
            "sites with a `models-dir` adapt. 0: no adaptation. Repeating a finished run tests "
            "again."
        ),
        NotIdentity(),
    ]
    lr: Annotated[float, Range(1e-8, 100), Doc("Learning rate of these steps."), NotIdentity()]
    batch_size: Annotated[int, Range(2, 65_536), Doc("Images per step."), NotIdentity()]


@dataclass(frozen=True)
class SynthesisConfig:
    """The synthesis of images on the server."""

    images_per_class: Annotated[int, Range(1, 1_000_000), Doc("R: images per class and client.")]
    steps: Annotated[int, Range(2, 999), Doc("Denoising steps per image.")]
    unit_size: Annotated[
        int,
        Range(1, 4096),
        Doc(
            "Images per work unit, which is committed to disk as a whole. A resumed run repeats "
            "at most the units in flight."
        ),
    ]
    batch_size: Annotated[
        int,
        Range(0, 4096),
        Doc("Images of a work unit per batch. 0: the fastest size, by a measurement."),
    ]
    units_at_once: Annotated[
        int,
        Range(0, 1024),
        Doc(
            "On a CPU without workers: units that are sampled in parallel, each with its share "
            "of the cores. 0: the faster of one unit and one per core, by a measurement."
        ),
    ]
    prompt: Annotated[str, Doc("The prompt of a class; `{class}` stands for its name.")]
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
    ray_address: Annotated[
        str,
        Doc("The address of a Ray cluster. Empty: Ray starts on this machine."),
        NotIdentity(),
    ]
    dtype: Annotated[
        str,
        OneOf("float32", "bfloat16", "float16", "auto"),
        Doc(
            "The number format of the networks; auto: the faster of float32 and bfloat16, by a "
            "measurement."
        ),
    ]
    attention: Annotated[
        str,
        OneOf("default", "flash", "efficient", "cudnn", "math", "auto"),
        Doc(
            "The attention implementation of torch; default: torch chooses; auto: the fastest, "
            "by a measurement."
        ),
    ]
    memory_format: Annotated[
        str,
        OneOf("contiguous", "channels-last", "auto"),
        Doc("The order of an image's dimensions in memory; auto: the faster, by a measurement."),
    ]
    compile: Annotated[
        Switch,
        Doc(
            "Whether torch compiles the networks; auto: on a GPU the faster choice, by a "
            "measurement."
        ),
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
            "or a hub id such as `latent-consistency/lcm-lora-sdv1-5`. Empty: none."
        ),
        SitePath("server"),
        Approximate("", "distilled LoRA weights"),
    ]
    base_steps: Annotated[
        int,
        Range(0, 998),
        Doc("The number of first steps that are taken without the `lora`."),
    ]
    guided_from: Annotated[
        int,
        Range(0, 1000),
        Doc(
            "The lowest timestep with guidance. Outside of the range the prediction is that of "
            "the condition alone."
        ),
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
            "The UNet's inner blocks are computed once in this many steps, and reused in "
            "between. 1: they are computed in every step."
        ),
        Approximate(1, "the UNet's inner blocks in one of {cache_interval} steps"),
    ]
    small_decoder: Annotated[
        str,
        Doc(
            "A tiny autoencoder (TAESD), whose decoder replaces the kit's in classifier "
            "guidance: kit (its `small_decoder/`), or a folder or hub id such as "
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
class PromptsOnlyConfig:
    """prompts-only: classifier-free guidance on the class prompt."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]


@dataclass(frozen=True)
class PromptsDomainConfig:
    """prompts-domain: classifier-free guidance on a prompt that names class and domain."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]
    prompt: Annotated[str, Doc("The prompt; `{domain}` and `{class}` stand for the names.")]


@dataclass(frozen=True)
class ConditionTraining:
    """The training of a client's conditions through the frozen diffusion model (Adam)."""

    epochs: Annotated[int, Range(1, 100_000), Doc("S: passes over a condition's images.")]
    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc("Training steps per condition, in place of epochs. 0: train for `epochs`."),
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images of one condition per step.")]
    at_once: Annotated[
        int,
        Range(1, 100_000),
        Doc("Conditions that share a UNet batch. Fewer take less memory, with the same result."),
    ]
    lr: Annotated[float, Range(1e-8, 1000), Doc("Learning rate of Adam.")]


@dataclass(frozen=True)
class FedDEOConfig(ConditionTraining):
    """FedDEO: descriptions, one learned condition per class."""

    epochs: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "S: passes over a class's images. With epsilon each image is trained on by itself, "
            "for this many passes, and `steps` and `batch-size` have no effect."
        ),
    ]
    tokens: Annotated[
        str,
        OneOf("each", "all"),
        Doc(
            "`each`: every token of a description is learned. `all`: a description is its "
            "prompt's encoding plus one learned vector that is added to every token, with "
            "Stable Diffusion a 77th of the bytes."
        ),
    ]
    guidance_text: Annotated[
        Scale, Doc("Guidance scale of the prompt. 0: no guidance by the prompt.")
    ]
    guidance_description: Annotated[Scale, Doc("Guidance scale of the description.")]


@dataclass(frozen=True)
class FedLMGConfig:
    """FedLMG: classifier guidance, and the training of the global models."""

    guidance: Annotated[Scale, Doc("Scale of classifier-free guidance.")]
    classifier_weight: Annotated[
        Weight, Doc("Weight of the classifier's cross-entropy in L. 0: without it.")
    ]
    bn_weight: Annotated[
        Weight, Doc("lambda: weight of the BatchNorm statistics' loss in L. 0: without it.")
    ]
    bn_statistics: Annotated[
        str,
        OneOf("image", "unit"),
        Doc(
            "The images whose statistics are compared: each image alone, as in the papers, or a "
            "whole work unit, which mixes the classes."
        ),
    ]
    gradient_scale: Annotated[float, Range(0, 1e6), Doc("Factor of L's gradient; 1 in the paper.")]
    gradient: Annotated[
        str,
        OneOf("full", "x0"),
        Doc(
            "The gradient's path: through the UNet (full), or only to its estimate of the image "
            "(x0), for half the cost."
        ),
        Approximate("full", "the classifier's gradient at x0"),
    ]
    strategies: Annotated[
        str,
        Doc(
            "The global models to train, comma-separated: fine-tuning (ft), multi-teacher "
            "distillation (md) and specific-teacher distillation (sd)."
        ),
    ]
    distillation_weight: Annotated[Weight, Doc("Weight of the teachers' loss in md and sd.")]
    teacher_mean: Annotated[
        str,
        OneOf("known-classes", "plain"),
        Doc(
            "The teacher of a class in md: the mean of the clients that hold the class "
            "(known-classes), or the uniform mean of all clients (plain)."
        ),
    ]


@dataclass(frozen=True)
class FedCADOConfig(FedLMGConfig):
    """FedCADO: FedLMG's guidance, and edits of the initial noise."""

    noise_edits: Annotated[int, Range(0, 10_000), Doc("M: edits of the initial noise.")]
    noise_edit_lr: Annotated[Weight, Doc("eta: step size of an edit.")]


@dataclass(frozen=True)
class OscarConfig:
    """OSCAR and oscar-pooled: mean caption encodings."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]


@dataclass(frozen=True)
class EspressoConfig(ConditionTraining):
    """Espresso: clusters' conditions (C), Gaussian mixtures of the noise (G), Z-Sampling (Z)."""

    clusters: Annotated[int, Range(1, 1000), Doc("J: clusters per class.")]
    gmm: Annotated[
        bool,
        Doc("G: whether z_T is drawn from Gaussian mixtures, in place of standard Gaussian noise."),
    ]
    components: Annotated[int, Range(1, 1000), Doc("M: components of a mixture.")]
    mixture_fit: Annotated[
        str,
        OneOf("closed", "sampled"),
        Doc(
            "The data that mixtures are fitted to: clean latents, then diffused forward in "
            "closed form (closed), or samples of noisy latents, as the paper says (sampled)."
        ),
    ]
    noise_draws: Annotated[
        int, Range(1, 10_000), Doc("With mixture-fit = sampled: noise samples per latent.")
    ]
    z_sampling: Annotated[bool, Doc("Z: whether sampling uses zig-zags.")]
    z_threshold: Annotated[int, Range(0, 1000), Doc("T_z: zig-zags happen at timesteps above it.")]
    guidance: Annotated[Scale, Doc("gamma_1: guidance scale of a denoising step.")]
    inversion_guidance: Annotated[
        Scale, Doc("gamma_2: guidance scale of a zig-zag's inversion step.")
    ]


@dataclass(frozen=True)
class FGLConfig:
    """FGL: captions as prompts."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]
    prompt: Annotated[str, Doc("The prompt; `{class}` and `{caption}` stand for the texts.")]
    negative_prompt: Annotated[str, Doc("The negative prompt, which guidance leads away from.")]


@dataclass(frozen=True)
class FedDISCConfig:
    """FedDISC: cluster centers of image embeddings."""

    kit: Annotated[
        str, Doc("A Stable unCLIP folder or hub id. Empty: the run's kit."), SitePath("client")
    ]
    clusters: Annotated[int, Range(1, 1000), Doc("K: clusters per class.")]
    noise_level: Annotated[int, Range(0, 999), Doc("Timestep of the noise on image embeddings.")]
    guidance_cluster: Annotated[Scale, Doc("Guidance scale of a cluster's center.")]
    guidance_domain: Annotated[Scale, Doc("Guidance scale of a class's mean.")]


@dataclass(frozen=True)
class FedBiPConfig:
    """FedBiP: learned words for domain and class, and interpolated latents."""

    epochs: Annotated[int, Range(1, 100_000), Doc("Passes over the client's images.")]
    steps: Annotated[
        int, Range(0, 10_000_000), Doc("Training steps, in place of epochs. 0: train for `epochs`.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images per step.")]
    lr: Annotated[float, Range(1e-8, 1000), Doc("Learning rate of Adam.")]
    guidance: Annotated[Scale, Doc("Guidance scale.")]
    domain_noise: Annotated[Scale, Doc("Standard deviation of the noise on the domain's word.")]


@dataclass(frozen=True)
class DomainVectorConfig:
    """domain-vector: one learned vector of the client's domain for all of its classes."""

    epochs: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "Passes over the client's images. With epsilon each image is trained on by itself, "
            "for this many passes, and `steps` and `batch-size` have no effect."
        ),
    ]
    steps: Annotated[
        int, Range(0, 10_000_000), Doc("Training steps, in place of epochs. 0: train for `epochs`.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images per step.")]
    lr: Annotated[
        float, Range(1e-8, 1000), Doc("Learning rate of Adam at the first step. It decays to 0.")
    ]
    class_lr: Annotated[
        Weight,
        Doc("Learning rate of a further vector per class. 0: classes have none, and send none."),
    ]
    tokens: Annotated[
        str,
        OneOf("each", "all"),
        Doc(
            "`each`: every token of a condition has a vector of its own. `all`: all tokens "
            "share one."
        ),
    ]
    guidance: Annotated[Scale, Doc("Guidance scale.")]
    classes: Annotated[
        str,
        OneOf("held", "all"),
        Doc(
            "The classes that are synthesized in a client's domain: those that it holds (held), "
            "or all of the run's (all)."
        ),
    ]


@dataclass(frozen=True)
class VotesConfig:
    """votes: each image votes for the prompt that fits it best."""

    candidates: Annotated[
        str,
        ManyNames(),
        Doc("The names of the candidate domains, comma-separated, at most 256."),
    ]
    electorate: Annotated[
        str,
        OneOf("class", "client"),
        Doc(
            "The aggregation granularity of the votes: per class, or over all classes of a client."
        ),
    ]
    draws: Annotated[
        int, Range(1, 1000), Doc("Timesteps at which an image is compared with a prompt.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images per batch.")]
    prompt: Annotated[str, Doc("The prompt; `{domain}` and `{class}` stand for the names.")]
    guidance: Annotated[Scale, Doc("Guidance scale.")]

    @property
    def words(self) -> tuple[str, ...]:
        """The candidate domains, in order."""
        return split_names(self.candidates)


@dataclass(frozen=True)
class FedCGSConfig:
    """FedCGS: a head in closed form, on the frozen features of `[classifier]`'s initial weights."""

    shrinkage: Annotated[
        float,
        Range(0.0, 1.0),
        Doc(
            "gamma: shrinkage of the features' covariance towards a multiple of the identity. "
            "0: none."
        ),
    ]


@dataclass(frozen=True)
class FedPFTConfig:
    """FedPFT: Gaussian mixtures of the frozen features of `[classifier]`'s initial weights."""

    components: Annotated[int, Range(1, 1000), Doc("K: Gaussians per class.")]
    covariance: Annotated[
        str,
        OneOf("spherical", "diag"),
        Doc(
            "The variances of a Gaussian: one for all features (spherical), or one per feature "
            "(diag)."
        ),
    ]
    samples: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "Upper bound on the features that are drawn per client and class. The class's "
            "weight is its number of images all the same."
        ),
    ]
    inverse_penalty: Annotated[
        float, Range(1e-6, 1e6), Doc("C: the factor by which the head's L2 penalty is divided.")
    ]
    iterations: Annotated[
        int, Range(1, 1_000_000), Doc("Upper bound on the iterations of the head's training.")
    ]


@dataclass(frozen=True)
class RoundsConfig:
    """Iterative baselines: fedavg, fedprox, feddyn and feddf. Clients train as `[classifier]` says.

    The result of FedDF is a model of `global-model.architecture`.
    """

    count: Annotated[int, Range(1, 100_000), Doc("Rounds.")]
    local_epochs: Annotated[
        int, Range(1, 10_000), Doc("A client's passes over its images per round.")
    ]
    proximal_mu: Annotated[Weight, Doc("FedProx: weight of the distance to the global model.")]
    dyn_alpha: Annotated[float, Range(1e-8, 1e4), Doc("FedDyn: weight of the dynamic regularizer.")]
    proxy: Annotated[
        str,
        Doc(
            "FedDF: the server's unlabeled proxy images: public (the digits' public split), or "
            "the absolute path of a folder of images."
        ),
        SitePath("server"),
    ]
    proxy_images: Annotated[
        int,
        Range(2, 10_000_000),
        Doc("FedDF: the number of proxy images, a seeded sample; all of them if there are fewer."),
    ]
    distillation_steps: Annotated[
        int, Range(1, 1_000_000), Doc("FedDF: distillation steps after every round.")
    ]
    distillation_batch_size: Annotated[
        int, Range(2, 65_536), Doc("FedDF: images per distillation step.")
    ]
    distillation_lr: Annotated[float, Range(1e-8, 100), Doc("FedDF: learning rate of Adam.")]


@dataclass(frozen=True)
class RunConfig:
    """Settings that are equal on all nodes of a run."""

    method: Annotated[str, OneOf(*METHODS), Doc("The method; `osfl methods` lists them.")]
    job_id: Annotated[
        str,
        Doc(
            "The name of the run's folder. The same id again resumes the run. Empty: the method "
            "and Flower's run id."
        ),
        NotIdentity(),
    ]
    seed: Annotated[
        int,
        Range(0, 2**31 - 1),
        Doc("The seed of the run's randomness. Noise for privacy comes from the operating system."),
    ]
    num_clients: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "The number of clients to wait for, and of a simulation's clients. Further nodes "
            "are standby clients."
        ),
    ]
    min_clients: Annotated[
        int,
        Range(0, 100_000),
        Doc(
            "The number of payloads with which the run continues at the deadline. 0: all are "
            "required."
        ),
        NotIdentity(),
    ]
    epsilon: Annotated[
        float,
        Range(0, 20),
        Doc(
            "Differential privacy of a client's payload, for the replacement of one image. 0: "
            "no guarantee. docs/privacy.md lists the methods that give one, and what it covers."
        ),
    ]
    delta: Annotated[
        float,
        Range(1e-9, 0.01),
        Doc(
            "With `epsilon`: the probability that the guarantee fails. It should be far below 1 "
            "/ number of images. `votes` has no delta."
        ),
    ]
    clip_norm: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc(
            "With `epsilon`: the clipping bound of an image's contribution to a mean. Its "
            "unit is the mean distance of the class prompts' encodings from their mean; for "
            "FedDISC's and FedPFT's vectors, the square root of their dimension. A smaller "
            "bound means less noise, and more bias."
        ),
    ]
    clip_gradient: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc(
            "With `epsilon`, for classifiers: the clipping bound of the gradient of each image "
            "(DP-SGD). A smaller bound means less noise, and more bias."
        ),
    ]
    payload_codec: Annotated[
        str,
        OneOf("raw", "float16", "int8", "int4"),
        Doc(
            "The encoding of a payload's numbers: raw (float32), float16, or int8 and int4 in "
            "blocks of 64 with a scale each, deflated. Variances are sent in float16 at least; "
            "shares, counts and tensors of one dimension are sent raw."
        ),
    ]
    sealing_key: Annotated[
        str,
        Doc(
            "Absolute path on the server of the private key that payloads are sealed to (made "
            "by `osfl certs sealing`). The SuperLink then holds only ciphertext. Empty: "
            "payloads are not sealed."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    sealed_store: Annotated[
        bool,
        Doc(
            "Whether sealed payloads stay sealed in the run's folder, and are opened only in "
            "memory. Resuming the run requires the same key. Not with synthesis.workers."
        ),
        NotIdentity(),
    ]
    label_check: Annotated[
        str,
        OneOf("none", "filter", "soft"),
        Doc(
            "Noisy-label filtering of synthetic images by cross-fitting: classifiers trained "
            "on one half of the images score the other half. `filter` drops images that they "
            "assign to another class; `soft` also trains on their predictions. These "
            "classifiers are trained like the global model. Not with FedLMG and FedCADO, "
            "which have teachers."
        ),
    ]
    robust: Annotated[
        str,
        OneOf("off", "report", "exclude"),
        Doc(
            "The defense against malicious (label-flipping) clients by label consistency: a "
            "diffusion classifier, the kit, scores whether a client's synthetic images show "
            "their class. `report` lists suspicious clients and classes, and trains with "
            "them; `exclude` trains without them. Classes that the kit does not know are not "
            "scored. Not with methods that synthesize no images from payloads, nor with "
            "FedDISC."
        ),
    ]
    influence: Annotated[
        bool,
        Doc(
            "Whether the server estimates each client's contribution by leave-one-out "
            "retraining, for 3 to 20 clients. The retraining is without label-check and "
            "teachers. Repeating a finished run with this key adds the table. Not with methods "
            "that synthesize no images from payloads."
        ),
        NotIdentity(),
    ]
    class_balance: Annotated[
        bool,
        Doc(
            "Whether the server synthesizes equally many images of every class: as many as of "
            "the class that most clients hold. Otherwise it synthesizes images-per-class for "
            "each client that holds the class. For label skew. Not if every class is "
            "synthesized for every client."
        ),
    ]
    left_out: Annotated[
        str,
        ManyNames(),
        Doc(
            "Names of clients, comma-separated, that do not train: they alone test the global "
            "models (leave-one-domain-out). They count towards num-clients."
        ),
    ]
    public_domains: Annotated[
        str,
        ManyNames(),
        Doc(
            "Names of domains, comma-separated, in which the server synthesizes every class "
            "beside the clients' images, by `prompts-domain.prompt` and without client data. "
            "This helps users from a domain that no client has, if the kit knows its name. Not "
            "with FedLMG and FedCADO, whose images have teachers, nor with FedDISC."
        ),
    ]
    join_timeout: Annotated[
        float, Range(1, 1e7), Doc("Seconds to wait for clients to join."), NotIdentity()
    ]
    deadline: Annotated[
        float,
        Range(1, 1e7),
        Doc("Seconds to wait for payloads. The default is ten hours."),
        NotIdentity(),
    ]
    test_timeout: Annotated[
        float,
        Range(1, 1e7),
        Doc("Seconds to wait for the clients' test of each global model."),
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
            "Upper bound on the number of training images that a client may report, and of test "
            "images that it may test on. A client that reports more is refused."
        ),
        NotIdentity(),
    ]
    max_weight_ratio: Annotated[
        float,
        Range(0, 1e9),
        Doc(
            "Cap on a client's weight: its image count, in total and per class, is capped at "
            "this multiple of the other clients' median. At least 1; 0: no cap. It affects "
            "methods that weight clients by their images (fedcgs, fedpft, fedavg, fedprox, "
            "feddf)."
        ),
    ]
    runs_dir: Annotated[
        str,
        Doc(
            "The folder of all runs, an absolute path. Empty: `$OSFL_RUNS`, or else `~/.osfl/runs`."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    kit: Annotated[
        str,
        Doc(
            "The model bundle (kit) with the base diffusion model: a shipped kit, an absolute "
            "path, or a hub id such as `stable-diffusion-v1-5/stable-diffusion-v1-5`, "
            "optionally with `@REVISION`. The node-config's kit takes precedence."
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
    global_model: Annotated[ClassifierConfig, Doc("The server's global model.")]
    adaptation: AdaptationConfig
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
    domain_vector: DomainVectorConfig
    votes: VotesConfig
    fedcgs: FedCGSConfig
    fedpft: FedPFTConfig
    rounds: RoundsConfig

    def prompts(self, names: Iterable[str]) -> list[str]:
        """Return the prompt of every class."""
        return [
            fill_prompt(self.synthesis.prompt, {"class": self.data.prompt_name(name)})
            for name in names
        ]

    @property
    def guaranteed_delta(self) -> float:
        """The guarantee's delta; 0 without a guarantee, or for one without a delta."""
        approximate = METHODS[self.method].privacy == "approximate"
        return self.delta if self.epsilon and approximate else 0.0

    @property
    def sampling_kit(self) -> str:
        """The kit of the diffusion model that samples; FedDISC may have its own."""
        return (self.feddisc.kit if self.method == "feddisc" else "") or self.kit

    @property
    def needed_clients(self) -> int:
        """The number of clients with which a run continues at the deadline."""
        return self.min_clients or self.training_clients

    @property
    def left_out_clients(self) -> tuple[str, ...]:
        """The left-out clients, which only test."""
        return split_names(self.left_out)

    @property
    def public_domain_names(self) -> tuple[str, ...]:
        """The domains that the server adds by their names."""
        return split_names(self.public_domains)

    @property
    def training_clients(self) -> int:
        """The number of clients whose images train the global model."""
        return self.num_clients - len(self.left_out_clients)


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
            "Absolute folders, comma-separated. A path in a run's settings must be inside one "
            "of them, after links are followed, or this site refuses it. Shipped kits and the "
            "hub's cache are always allowed. Empty: `$OSFL_ALLOWED_DIRS`, or else no further "
            "folder."
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
            "An absolute path: the folder of the privacy ledger, which sums every epsilon that "
            "was spent. It must outlive the cache. Empty: `$OSFL_STATE`, or else "
            "`~/.osfl/state`."
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
            "spend. Then the client refuses. A run without an epsilon, or with a method without "
            "a guarantee, is refused at once. `ledger-dir` keeps what was spent under "
            "`client-id`, which is required. 0: no limit."
        ),
        NotIdentity(),
    ] = 0.0
    seal_to: Annotated[
        str,
        Doc(
            "The fingerprint of the server's sealing key, 64 hex digits: this site sends only "
            "payloads that are sealed to that key. Empty: the run's key is accepted, or none."
        ),
        NotIdentity(),
    ] = ""
    min_class_images: Annotated[
        int,
        Range(1, 1_000_000),
        Doc(
            "Classes with fewer training images on this node are left out of the payload, "
            "because a condition learned from one image nearly is that image. `adaptation` "
            "leaves them out, too. The test's confusion matrix includes them."
        ),
    ] = 1
    models_dir: Annotated[
        str,
        Doc(
            "An absolute path: the folder in which this site keeps the global models, as "
            "`<job>-<model>-<client>.safetensors`, and with `adaptation.steps` the adapted "
            "ones, with `-adapted` before the ending. Empty: it keeps none."
        ),
        NotIdentity(),
    ] = ""
    test_results: Annotated[
        str,
        OneOf("exact", "off", ""),
        Doc(
            "Whether this site answers a test of a global model with its confusion matrix, "
            "which no guarantee covers: exact, or off. Empty: off if `epsilon` or "
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
    def sends_test_results(self) -> bool:
        """Return whether this site sends the confusion matrix of a global model."""
        return (self.test_results or ("off" if self.requires_guarantee else "exact")) == "exact"
