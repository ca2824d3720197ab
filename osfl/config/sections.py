"""Every key, declared once: its type, its range, what it means, and what it is to a run.

A class is a section of the run-config. A key is part of a run's identity, which a resumption must
share, unless it is marked `NotIdentity`. Defaults are in pyproject.toml; what no key can say alone
is in osfl/config/problems.py. docs/configuration.md is made from here (`make docs-pages`).
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
from osfl.config.names import named_words, split_names
from osfl.methods import METHODS
from osfl.util.prompts import fill

Scale = Annotated[float, Range(0, 100)]
Weight = Annotated[float, Range(0, 1e4)]
Switch = Annotated[str, OneOf("off", "on", "auto")]
# What a node-config key says that fixes a run-config key of the same name
PINNED = (
    "The only `data.{}` that this site accepts; empty or 0: any, but with an `epsilon` or "
    "`epsilon-total` here the run-config's default alone."
)


@dataclass(frozen=True)
class DataConfig:
    """Which images there are, and how they are cut into clients."""

    name: Annotated[
        str,
        Doc(
            "Where images come from: `digits`, the embedded ones; `folder`, folders "
            "(`<data-dir>/{train,test}/<class>/*`, where test/ may be missing); or "
            "`hf:OWNER/NAME@REVISION`, a data set of the Hugging Face hub."
        ),
        SitePath("client"),
    ]
    subset: Annotated[
        str, Doc("Of a hub's data set that has several: which (its configuration's name).")
    ]
    partition: Annotated[
        str,
        OneOf("domain", "label", "dirichlet", "dirichlet-domain", "iid"),
        Doc(
            "How the data are cut into clients: a domain each (feature skew), by label or by a "
            "Dirichlet distribution over labels (label skew), each domain by such a distribution "
            "(both), or at random. Folders are clients already, and accept `domain` alone."
        ),
    ]
    shards_per_client: Annotated[
        int,
        Range(1, 1000),
        Doc(
            "With partition = label: how many pieces of the label-sorted data a client has, of one "
            "class or two each (McMahan et al. 2017)."
        ),
    ]
    alpha: Annotated[
        float,
        Range(1e-3, 1e6),
        Doc("With partition = dirichlet: the concentration; smaller is more uneven."),
    ]
    classes: Annotated[
        str,
        ManyNames(),
        Doc(
            "The classes' names, comma-separated; empty: the digits' own, or all that a hub's data "
            "set stores, in its order; `0-89`: its first ninety."
        ),
    ]
    words: Annotated[
        str,
        ManyNames(),
        Doc(
            "What prompts say in the place of a class's or domain's name: "
            "`mouse=computer mouse, nail=nail of iron`; empty: the names themselves."
        ),
    ]
    image_column: Annotated[str, Doc("Of a hub's data set: the column of the images.")]
    label_column: Annotated[str, Doc("Of a hub's data set: the column of the labels.")]
    domain_column: Annotated[
        str,
        Doc(
            "Of a hub's data set: the column of each image's domain, hospital or writer; for the "
            "partitions by domain."
        ),
    ]
    group_column: Annotated[
        str,
        Doc(
            "Of a hub's or saved data set: the column of each image's patient, or other group. All "
            "images of a group stay with one client, on one side of training and test; a group in "
            "two domains is refused with the partitions by domain. Empty: each image is on its "
            "own. In folders, the folder within a class is the group."
        ),
    ]
    train_split: Annotated[str, Doc("Of a hub's data set: the split of the clients' images.")]
    test_split: Annotated[
        str,
        Doc(
            "Of a hub's data set: the split of the test images; empty: `test-share` of the train's."
        ),
    ]
    test_share: Annotated[
        float,
        Range(0.01, 0.99),
        Doc(
            "Without a split or folder of test images: the share of each client's images of every "
            "class, by whole groups where there are groups."
        ),
    ]
    max_per_class: Annotated[
        int,
        Range(0, 10**9),
        Doc(
            "Of a hub's data set: the most images of a class that a client trains on, chosen by "
            "the seed; 0: all."
        ),
    ]
    image_size: Annotated[
        int,
        Range(8, 2048),
        ByData(digits=32, others=224),
        Doc("Pixels on a side of what classifiers see; the kit has a size of its own."),
    ]
    root: Annotated[
        str,
        Doc(
            "An absolute path. With name = folder: the folder with all clients' folders, for "
            "simulations and method = ceiling. With a hub's data set: a copy of it on every "
            "machine, in place of the hub."
        ),
        SitePath("client"),
    ]

    def word(self, name: str) -> str:
        """A class or domain in the words of a prompt."""
        return named_words(self.words).get(name, name)


@dataclass(frozen=True)
class ClassifierConfig:
    """A torchvision classifier and its training (SGD)."""

    architecture: Annotated[
        str,
        Doc(
            "A torchvision model; or `timm:NAME`, or `hf-hub:OWNER/NAME@REVISION`, a model in "
            "timm's format. The clients' may be several, comma-separated: a simulated client i "
            "takes the i-th, and so on in turn."
        ),
        SitePath("client"),
    ]
    small_stem: Annotated[
        bool,
        ByData(digits=True, others=False),
        Doc("Whether the first layers keep the resolution, for images of some 32 pixels."),
    ]
    init: Annotated[
        str,
        Doc(
            "The first weights: kit, the kit's; imagenet, torchvision's; pretrained, those of a "
            "timm: or hf-hub: model; none, random; or the absolute path of a file of weights "
            "(safetensors, or torchvision's .pth), or of a folder of `<architecture>.*` for "
            "several architectures."
        ),
        SitePath("client"),
    ]
    trained: Annotated[
        str, OneOf("all", "head"), Doc("What is trained: all, or the last layer alone.")
    ]
    epochs: Annotated[int, Range(1, 10_000), Doc("Passes over the images.")]
    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc(
            "Steps of the training, in place of epochs; 0: epochs. Methods with rounds train by "
            "`rounds.local-epochs`."
        ),
    ]
    batch_size: Annotated[int, Range(2, 65_536), Doc("Images in a step.")]
    lr: Annotated[float, Range(1e-8, 100), Doc("Learning rate.")]
    momentum: Annotated[float, Range(0, 0.9999), Doc("Momentum of SGD.")]
    weight_decay: Annotated[float, Range(0, 1), Doc("Weight decay of SGD.")]
    schedule: Annotated[
        str,
        OneOf("constant", "cosine", "one-cycle"),
        Doc(
            "The course of the learning rate over a whole training; in a round's local training it "
            "is constant."
        ),
    ]
    warm_up: Annotated[
        float, Range(0, 0.9), Doc("Share of the steps in which a schedule goes up to `lr`.")
    ]
    label_smoothing: Annotated[
        float, Range(0, 0.9), Doc("Share of a label that is spread over all classes.")
    ]
    augmentation: Annotated[
        str,
        OneOf("none", "flip-crop", "affine-color", "randaugment", "trivialaugment"),
        ByData(digits="affine-color", others="trivialaugment"),
        Doc(
            "What an image goes through each time that it is trained on: a flip and a shifted "
            "crop, with RandAugment or TrivialAugment behind them; or affine-color, small turns, "
            "shifts, sizes and colours, for digits and letters."
        ),
    ]
    mixing: Annotated[
        str,
        OneOf("none", "mixup", "cutmix"),
        Doc("How the images of a batch, and their labels, are mixed; no teacher bears it."),
    ]
    ema: Annotated[
        float,
        Range(0, 0.99999),
        Doc("Decay of the average of the weights, which a whole training ends with; 0: the last."),
    ]
    precision: Annotated[
        str,
        OneOf("auto", "float32", "bfloat16"),
        Doc("Of the products in training; bfloat16 is mixed; auto: bfloat16 on a GPU that has it."),
    ]


@dataclass(frozen=True)
class AdaptationConfig:
    """What a client makes of the global model for itself: all else is as `[global-model]` says."""

    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc(
            "Steps that every client trains the global model on its own images after the test, to "
            "test it once more, left-out clients too. Nothing else is sent of it. With an epsilon "
            "not even that is, and only sites with a `models-dir` adapt. 0: none. A finished run "
            "that is called again tests again."
        ),
        NotIdentity(),
    ]
    lr: Annotated[float, Range(1e-8, 100), Doc("Learning rate of these steps."), NotIdentity()]
    batch_size: Annotated[int, Range(2, 65_536), Doc("Images in a step."), NotIdentity()]


@dataclass(frozen=True)
class SynthesisConfig:
    """What the server renders, and on what."""

    images_per_class: Annotated[
        int, Range(1, 1_000_000), Doc("R: images of every class of each client.")
    ]
    steps: Annotated[int, Range(2, 999), Doc("Denoising steps of an image.")]
    unit_size: Annotated[int, Range(1, 4096), Doc("Images that are committed to disk together.")]
    batch_size: Annotated[
        int,
        Range(0, 4096),
        Doc("Images of a unit in one batch; 0: the fastest, by a measurement."),
    ]
    units_at_once: Annotated[
        int,
        Range(0, 1024),
        Doc(
            "On a CPU without workers: units that are sampled side by side, each with its share of "
            "the cores; 0: the faster of one and one a core, by a measurement."
        ),
    ]
    prompt: Annotated[str, Doc("The prompt of a class; `{class}` stands for its name.")]
    workers: Annotated[
        int,
        Range(0, 10_000),
        Doc("Ray actors, each on a device of its own; 0: the server's own process alone."),
        NotIdentity(),
    ]
    threads: Annotated[
        int,
        Range(0, 1024),
        Doc("CPU threads of a worker; 0: its share of the machine's cores."),
    ]
    ray_address: Annotated[
        str,
        Doc("Address of a Ray cluster; empty: this machine."),
        NotIdentity(),
    ]
    dtype: Annotated[
        str,
        OneOf("float32", "bfloat16", "float16", "auto"),
        Doc("Number format of the networks; auto: the faster of float32 and bfloat16."),
    ]
    attention: Annotated[
        str,
        OneOf("default", "flash", "efficient", "cudnn", "math", "auto"),
        Doc("Which of torch's attention implementations; default: torch's choice; auto: fastest."),
    ]
    memory_format: Annotated[
        str,
        OneOf("contiguous", "channels-last", "auto"),
        Doc("Order of an image's numbers in memory; auto: the faster, by a measurement."),
    ]
    compile: Annotated[
        Switch,
        Doc("Whether torch compiles the networks; auto: on a GPU the faster, by a measurement."),
    ]
    solver: Annotated[
        str,
        OneOf("ddim", "dpm-solver++", "unipc", "lcm", "tcd"),
        Doc("How a denoising step is taken; lcm and tcd are for a few-step `lora`."),
        Approximate("ddim", "solver {solver}"),
    ]
    lora: Annotated[
        str,
        Doc(
            "Weights that let the UNet draw in few steps: kit (its `lora/`), a file, a folder, or "
            "a hub id such as `latent-consistency/lcm-lora-sdv1-5`; empty: none."
        ),
        SitePath("server"),
        Approximate("", "few-step weights"),
    ]
    base_steps: Annotated[
        int,
        Range(0, 998),
        Doc("How many of the first steps are taken without the `lora`."),
    ]
    guided_from: Annotated[
        int,
        Range(0, 1000),
        Doc("The lowest timestep that is guided; outside, the condition alone predicts."),
        Approximate(0, "guidance at timesteps {guided_from} to {guided_to} alone"),
    ]
    guided_to: Annotated[
        int,
        Range(0, 1000),
        Doc("The highest timestep that is guided."),
        Approximate(1000, "guidance at timesteps {guided_from} to {guided_to} alone"),
    ]
    cache_interval: Annotated[
        int,
        Range(1, 100),
        Doc("Of so many steps, one computes the UNet's inner blocks; 1: every step."),
        Approximate(1, "the UNet's inner blocks at one of {cache_interval} steps"),
    ]
    small_decoder: Annotated[
        str,
        Doc(
            "Through which a classifier that guides sees the image: kit (its `small_decoder/`), or "
            "a folder or hub id such as `madebyollin/taesd`; empty: the decoder itself."
        ),
        SitePath("server"),
        Approximate("", "guidance through a small decoder", methods=("fedlmg", "fedcado")),
    ]
    checkpointing: Annotated[
        Switch,
        Doc(
            "Whether classifier guidance computes activations again for a gradient: less memory, "
            "more time; auto: on a GPU."
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
    """How a client learns conditions through the frozen diffusion model (Adam)."""

    epochs: Annotated[int, Range(1, 100_000), Doc("S: passes over a condition's images.")]
    steps: Annotated[
        int,
        Range(0, 10_000_000),
        Doc("Steps of every condition, in place of epochs; 0: epochs."),
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images of one condition in a step.")]
    at_once: Annotated[
        int,
        Range(1, 100_000),
        Doc("Conditions that share a UNet batch; fewer take less memory and give the same."),
    ]
    lr: Annotated[float, Range(1e-8, 1000), Doc("Learning rate of Adam.")]


@dataclass(frozen=True)
class FedDEOConfig(ConditionTraining):
    """FedDEO: descriptions, a learned condition of every class."""

    epochs: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "S: passes over a class's images. With epsilon: over each image by itself; then steps "
            "and batch-size do not count."
        ),
    ]
    tokens: Annotated[
        str,
        OneOf("each", "all"),
        Doc(
            "each: a description is free in every token; all: it is its prompt's encoding and one "
            "vector that all tokens get, a 77th of the bytes with Stable Diffusion."
        ),
    ]
    guidance_text: Annotated[Scale, Doc("Guidance scale of the prompt; 0: without it.")]
    guidance_description: Annotated[Scale, Doc("Guidance scale of the description.")]


@dataclass(frozen=True)
class FedLMGConfig:
    """FedLMG: classifier guidance, and the global model's training."""

    guidance: Annotated[Scale, Doc("Scale of classifier-free guidance.")]
    classifier_weight: Annotated[
        Weight, Doc("Weight of the classifier's cross-entropy in L; 0: without it.")
    ]
    bn_weight: Annotated[
        Weight, Doc("lambda: weight of the BatchNorm statistics' loss in L; 0: without it.")
    ]
    bn_statistics: Annotated[
        str,
        OneOf("image", "unit"),
        Doc(
            "Whose statistics are compared: of each image alone, as in the papers, or of a whole "
            "unit, which mixes the classes."
        ),
    ]
    gradient_scale: Annotated[float, Range(0, 1e6), Doc("Factor of L's gradient; 1 in the paper.")]
    gradient: Annotated[
        str,
        OneOf("full", "x0"),
        Doc("Through the UNet (full), or at its estimate of the image (x0), for half the cost."),
        Approximate("full", "the classifier's gradient at x0"),
    ]
    strategies: Annotated[str, Doc("Global models to train, comma-separated, of ft, md and sd.")]
    distillation_weight: Annotated[Weight, Doc("Weight of the teachers' loss in MD and SD.")]
    teacher_mean: Annotated[
        str,
        OneOf("known-classes", "plain"),
        Doc("MD's teacher of a class: the mean of the clients that hold it, or of all clients."),
    ]


@dataclass(frozen=True)
class FedCADOConfig(FedLMGConfig):
    """FedCADO: FedLMG's guidance, and an initial noise that is edited first."""

    noise_edits: Annotated[int, Range(0, 10_000), Doc("M: edits of the initial noise.")]
    noise_edit_lr: Annotated[Weight, Doc("eta: step size of an edit.")]


@dataclass(frozen=True)
class OscarConfig:
    """OSCAR and oscar-pooled: mean caption encodings."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]


@dataclass(frozen=True)
class EspressoConfig(ConditionTraining):
    """Espresso: clusters' conditions (C), Gaussian mixtures of the noise (G), Z-Sampling (Z)."""

    clusters: Annotated[int, Range(1, 1000), Doc("J: clusters of a class.")]
    gmm: Annotated[bool, Doc("G: whether z_T comes from Gaussian mixtures; else from plain noise.")]
    components: Annotated[int, Range(1, 1000), Doc("M: components of a mixture.")]
    mixture_fit: Annotated[
        str,
        OneOf("closed", "sampled"),
        Doc(
            "What mixtures are fitted to: clean latents, diffused forward in closed form, or draws "
            "of noised latents, as the paper words it."
        ),
    ]
    noise_draws: Annotated[
        int, Range(1, 10_000), Doc("With mixture-fit = sampled: draws of every latent.")
    ]
    z_sampling: Annotated[bool, Doc("Z: whether sampling goes in zig-zags.")]
    z_threshold: Annotated[int, Range(0, 1000), Doc("T_z: zig-zags at the timesteps above it.")]
    guidance: Annotated[Scale, Doc("gamma_1: guidance scale of a denoising step.")]
    inversion_guidance: Annotated[Scale, Doc("gamma_2: guidance scale of a zig-zag's way back.")]


@dataclass(frozen=True)
class FGLConfig:
    """FGL: captions as prompts."""

    guidance: Annotated[Scale, Doc("Guidance scale.")]
    prompt: Annotated[str, Doc("The prompt; `{class}` and `{caption}` stand for the texts.")]
    negative_prompt: Annotated[str, Doc("The prompt that guidance leads away from.")]


@dataclass(frozen=True)
class FedDISCConfig:
    """FedDISC: cluster centres of image embeddings."""

    kit: Annotated[
        str, Doc("A Stable unCLIP folder or hub id; empty: the run's kit."), SitePath("client")
    ]
    clusters: Annotated[int, Range(1, 1000), Doc("K: clusters of a class.")]
    noise_level: Annotated[int, Range(0, 999), Doc("Timestep of the noise on image embeddings.")]
    guidance_cluster: Annotated[Scale, Doc("Guidance scale of a cluster's centre.")]
    guidance_domain: Annotated[Scale, Doc("Guidance scale of a class's mean.")]


@dataclass(frozen=True)
class FedBiPConfig:
    """FedBiP: learned words for domain and class, and interpolated latents."""

    epochs: Annotated[int, Range(1, 100_000), Doc("Passes over the client's images.")]
    steps: Annotated[int, Range(0, 10_000_000), Doc("Steps, in place of epochs; 0: epochs.")]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images in a step.")]
    lr: Annotated[float, Range(1e-8, 1000), Doc("Learning rate of Adam.")]
    guidance: Annotated[Scale, Doc("Guidance scale.")]
    domain_noise: Annotated[Scale, Doc("Standard deviation of the noise on the domain's word.")]


@dataclass(frozen=True)
class DomainVectorConfig:
    """domain-vector: a learned vector of the client's domain, for all of its classes."""

    epochs: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "Passes over the client's images. With epsilon: over each image by itself; then steps "
            "and batch-size do not count."
        ),
    ]
    steps: Annotated[int, Range(0, 10_000_000), Doc("Steps, in place of epochs; 0: epochs.")]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images in a step.")]
    lr: Annotated[
        float, Range(1e-8, 1000), Doc("Learning rate of Adam at the first step; it falls to 0.")
    ]
    class_lr: Annotated[
        Weight,
        Doc("The same for a vector that every class adds; 0: classes add none, and send none."),
    ]
    tokens: Annotated[
        str,
        OneOf("each", "all"),
        Doc("Whether each token of a condition has a vector of its own, or all have the same one."),
    ]
    guidance: Annotated[Scale, Doc("Guidance scale.")]
    classes: Annotated[
        str,
        OneOf("held", "all"),
        Doc("Which classes are drawn in a client's domain: those that it holds, or all of them."),
    ]


@dataclass(frozen=True)
class VotesConfig:
    """votes: images vote for the prompt that is nearest to them."""

    candidates: Annotated[
        str,
        ManyNames(),
        Doc("Domains by name, comma-separated, at most 256, for which images vote."),
    ]
    electorate: Annotated[
        str,
        OneOf("class", "client"),
        Doc("Who elects together: the images of each class, or all of a client for all classes."),
    ]
    draws: Annotated[
        int, Range(1, 1000), Doc("Timesteps at which an image is held against a prompt.")
    ]
    batch_size: Annotated[int, Range(1, 4096), Doc("Images in a batch.")]
    prompt: Annotated[str, Doc("The prompt; `{domain}` and `{class}` stand for the names.")]
    guidance: Annotated[Scale, Doc("Guidance scale.")]

    @property
    def words(self) -> tuple[str, ...]:
        """The candidates, in order."""
        return split_names(self.candidates)


@dataclass(frozen=True)
class FedCGSConfig:
    """FedCGS: a head in closed form, on `[classifier]` as it begins."""

    shrinkage: Annotated[
        float,
        Range(0.0, 1.0),
        Doc(
            "gamma: how far the features' covariance is drawn to a multiple of the identity; "
            "0: not at all."
        ),
    ]


@dataclass(frozen=True)
class FedPFTConfig:
    """FedPFT: Gaussian mixtures of features, on `[classifier]` as it begins."""

    components: Annotated[int, Range(1, 1000), Doc("K: Gaussians of a class.")]
    covariance: Annotated[
        str,
        OneOf("spherical", "diag"),
        Doc("Variances of a Gaussian: one for all features, or one a feature."),
    ]
    samples: Annotated[
        int,
        Range(1, 100_000),
        Doc("The most features that are drawn of a client's class; it counts as its images do."),
    ]
    inverse_penalty: Annotated[
        float, Range(1e-6, 1e6), Doc("C: by how much the head's L2 penalty is divided.")
    ]
    iterations: Annotated[int, Range(1, 1_000_000), Doc("The most that the head trains for.")]


@dataclass(frozen=True)
class RoundsConfig:
    """FedAvg and its kin (fedavg, fedprox, feddyn, feddf), which train as `[classifier]` says.

    FedDF ends with a model of `global-model.architecture`.
    """

    count: Annotated[int, Range(1, 100_000), Doc("Rounds.")]
    local_epochs: Annotated[
        int, Range(1, 10_000), Doc("Passes of a client over its images in a round.")
    ]
    proximal_mu: Annotated[Weight, Doc("FedProx: weight of the distance to the global model.")]
    dyn_alpha: Annotated[float, Range(1e-8, 1e4), Doc("FedDyn: weight of the dynamic regulariser.")]
    proxy: Annotated[
        str,
        Doc(
            "FedDF: the server's unlabelled images: public (the digits' public split), or the "
            "absolute path of a folder of images."
        ),
        SitePath("server"),
    ]
    proxy_images: Annotated[
        int,
        Range(2, 10_000_000),
        Doc("FedDF: how many of them, a seeded sample; all where there are no more."),
    ]
    distillation_steps: Annotated[
        int, Range(1, 1_000_000), Doc("FedDF: steps of distillation after every round.")
    ]
    distillation_batch_size: Annotated[
        int, Range(2, 65_536), Doc("FedDF: images in a step of distillation.")
    ]
    distillation_lr: Annotated[float, Range(1e-8, 100), Doc("FedDF: learning rate of Adam.")]


@dataclass(frozen=True)
class RunConfig:
    """What is equal on all nodes of a run."""

    method: Annotated[str, OneOf(*METHODS), Doc("Which method; the table in `osfl/methods.py`.")]
    job_id: Annotated[
        str,
        Doc(
            "Names the run's folder; the same id again resumes the run. Empty: the method and "
            "Flower's run id."
        ),
        NotIdentity(),
    ]
    seed: Annotated[int, Range(0, 2**31 - 1), Doc("What all randomness comes from.")]
    num_clients: Annotated[
        int,
        Range(1, 100_000),
        Doc(
            "How many clients to wait for, and how many a simulation has; more nodes than that "
            "are spares."
        ),
    ]
    min_clients: Annotated[
        int,
        Range(0, 100_000),
        Doc("With how many payloads the run goes on at the deadline; 0: all."),
        NotIdentity(),
    ]
    epsilon: Annotated[
        float,
        Range(0, 20),
        Doc(
            "Differential privacy of a client's payload, for one image replaced; 0: no guarantee. "
            "docs/privacy.md has the methods that give one, and what it covers."
        ),
    ]
    delta: Annotated[
        float,
        Range(1e-9, 0.01),
        Doc(
            "With `epsilon`: the chance that the guarantee does not hold; far below 1 / images. "
            "`votes` has none."
        ),
    ]
    clip_norm: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc(
            "With `epsilon`: how far one image may move a mean before it is divided by their "
            "number, times the mean distance of the class prompts' encodings from their mean; of "
            "FedDISC's and FedPFT's vectors, times the root of their length. Less means less "
            "noise, and more bias."
        ),
    ]
    clip_gradient: Annotated[
        float,
        Range(1e-6, 1e6),
        Doc(
            "With `epsilon`, of classifiers: the norm that the gradient of each image is cut to "
            "(DP-SGD). Less means less noise, and more bias."
        ),
    ]
    payload_codec: Annotated[
        str,
        OneOf("raw", "float16", "int8", "int4"),
        Doc(
            "How the numbers of a payload are sent: raw (float32), float16, or int8 and int4 in "
            "blocks of 64 with a scale each, deflated. Variances go in float16 at least; shares, "
            "counts and what has one dimension as they are."
        ),
    ]
    sealing_key: Annotated[
        str,
        Doc(
            "Absolute path on the server of the private key that payloads are sealed to (`osfl "
            "certs sealing`): the SuperLink then holds ciphertext alone. Empty: they are not."
        ),
        SitePath("server"),
        NotIdentity(),
    ]
    sealed_store: Annotated[
        bool,
        Doc(
            "Whether sealed payloads stay so in the run's folder, and are opened in memory alone. "
            "A run that goes on needs the same key. Not with synthesis.workers."
        ),
        NotIdentity(),
    ]
    label_check: Annotated[
        str,
        OneOf("none", "filter", "soft"),
        Doc(
            "What a second opinion on synthetic images does, of classifiers trained on the other "
            "half of them: filter (leaves out what they take for another class), or soft (teaches "
            "beside the label). Each is trained as the global model is. Not with FedLMG and "
            "FedCADO, which have teachers."
        ),
    ]
    robust: Annotated[
        str,
        OneOf("off", "report", "exclude"),
        Doc(
            "What the server does about clients, or single classes of them, whose synthetic images "
            "do not show their class, as the kit sees it: report (says so, and trains with them), "
            "or exclude (trains without them). What the kit does not know it judges not. Not with "
            "methods that draw no image from what clients send, nor with FedDISC."
        ),
    ]
    influence: Annotated[
        bool,
        Doc(
            "Whether the server trains the model again without each client, of 3 to 20, and "
            "reports what each gives it: plainly, without label-check and teachers. A finished run "
            "that is called again with it adds the table. Not with methods that draw no image from "
            "what clients send."
        ),
        NotIdentity(),
    ]
    class_balance: Annotated[
        bool,
        Doc(
            "Whether the server draws as many images of every class as of the one that most "
            "clients hold; else images-per-class for each client that holds it. For clients of "
            "different classes. Not where every class is drawn for every client."
        ),
    ]
    left_out: Annotated[
        str,
        ManyNames(),
        Doc(
            "Clients, comma-separated, whose images train nothing, and who alone test the global "
            "models: leave one domain out. They are among the num-clients."
        ),
    ]
    public_domains: Annotated[
        str,
        ManyNames(),
        Doc(
            "Domains, comma-separated, in which the server draws every class beside the clients' "
            "images, by `prompts-domain.prompt` and no client's data: for users whose domain no "
            "client has, where the kit knows its name. Not with FedLMG and FedCADO, whose images "
            "have teachers, and FedDISC."
        ),
    ]
    join_timeout: Annotated[
        float, Range(1, 1e7), Doc("Seconds to wait for clients to appear."), NotIdentity()
    ]
    deadline: Annotated[float, Range(1, 1e7), Doc("Seconds to wait for payloads."), NotIdentity()]
    test_timeout: Annotated[
        float,
        Range(1, 1e7),
        Doc("Seconds to wait for the clients' test of each global model."),
        NotIdentity(),
    ]
    max_payload_mb: Annotated[
        float,
        Range(1e-3, 1e5),
        Doc("The largest payload that is taken, in MB; a VGG-16 at 224 px has 537."),
        NotIdentity(),
    ]
    max_images: Annotated[
        int,
        Range(1, 10**9),
        Doc(
            "The most training images that a client may state, and test images that it may test "
            "on. A client that states more is refused."
        ),
        NotIdentity(),
    ]
    max_weight_ratio: Annotated[
        float,
        Range(0, 1e9),
        Doc(
            "How much more a client may weigh than is typical: its image count, in all and of each "
            "class, is capped at this multiple of the other clients' median. At least 1; 0: none. "
            "For methods that weight clients by their images (fedcgs, fedpft, fedavg, fedprox, "
            "feddf)."
        ),
    ]
    runs_dir: Annotated[
        str,
        Doc("Folder of all runs, an absolute path; empty: `$OSFL_RUNS`, else `~/.osfl/runs`."),
        SitePath("server"),
        NotIdentity(),
    ]
    kit: Annotated[
        str,
        Doc(
            "The diffusion model and its kin: a shipped kit, an absolute path, or a hub id such as "
            "`stable-diffusion-v1-5/stable-diffusion-v1-5`, `@REVISION` behind it or not. "
            "Node-config kit goes first."
        ),
        SitePath("client"),
        SitePath("client"),
    ]
    captioner: Annotated[
        str, Doc("A BLIP or BLIP-2 folder or hub id; empty: the kit's."), SitePath("client")
    ]
    image_encoder: Annotated[
        str, Doc("A DINOv2 or CLIP folder or hub id; empty: the kit's."), SitePath("client")
    ]
    device: Annotated[
        str,
        Doc("The server's: auto, cpu, cuda, cuda:1, and so on; a client's is in its node-config."),
        NotIdentity(),
    ]
    checkpointing: Annotated[
        Switch,
        Doc(
            "Whether clients learn conditions in less memory and more time; auto: on a GPU. "
            "Node-config checkpointing goes first."
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
        """The prompt of every class."""
        return [fill(self.synthesis.prompt, {"class": self.data.word(name)}) for name in names]

    @property
    def guaranteed_delta(self) -> float:
        """Of the guarantee; 0 where there is none, or where it has no delta."""
        approximate = METHODS[self.method].private == "approximate"
        return self.delta if self.epsilon and approximate else 0.0

    @property
    def sampling_kit(self) -> str:
        """The diffusion model's kit; FedDISC has one of its own."""
        return (self.feddisc.kit if self.method == "feddisc" else "") or self.kit

    @property
    def needed_clients(self) -> int:
        """With how many clients a run goes on."""
        return self.min_clients or self.training_clients

    @property
    def testers(self) -> tuple[str, ...]:
        """The clients that are left out of all but the test."""
        return split_names(self.left_out)

    @property
    def domains_by_name(self) -> tuple[str, ...]:
        """The domains that the server adds."""
        return split_names(self.public_domains)

    @property
    def training_clients(self) -> int:
        """How many clients' images train the global model."""
        return self.num_clients - len(self.testers)


@dataclass(frozen=True)
class NodeConfig:
    """What differs by machine: `flower-supernode --node-config`, or given by the simulation."""

    partition_id: Annotated[
        int, Doc("Which part of an embedded data set this node holds; -1: none.")
    ] = -1
    num_partitions: Annotated[int, Doc("How many parts there are.")] = 0
    client_id: Annotated[str, Doc("The client's name; empty: `client-<partition-id>`.")] = ""
    data_dir: Annotated[
        str,
        Doc(
            "The folder with `{train,test}/<class>/*`; empty: the partition-id-th folder of "
            "`data.root`."
        ),
    ] = ""
    allowed_dirs: Annotated[
        str,
        Doc(
            "Absolute folders, comma-separated: a path in a run's settings must lie below one of "
            "them, links followed, or is refused here. Shipped kits and the hub's cache are always "
            "allowed. Empty: `$OSFL_ALLOWED_DIRS`, else nothing more."
        ),
        NotIdentity(),
    ] = ""
    kit: Annotated[
        str, Doc("Where the kit is on this machine; empty: the run's."), NotIdentity()
    ] = ""
    device: Annotated[str, Doc("auto, cpu, cuda, cuda:1, and so on."), NotIdentity()] = "auto"
    architecture: Annotated[
        str,
        Doc("This client's classifier, one that the run allows; empty: the run's."),
        NotIdentity(),
    ] = ""
    domain: Annotated[
        str, Doc("The domain's name, for prompts-domain; empty: the simulation's.")
    ] = ""
    cache_dir: Annotated[
        str,
        Doc(
            "Where finished payloads are kept until the server has them, and those with an "
            "epsilon until the site removes them; empty: `$OSFL_CACHE`, else `~/.osfl/cache`."
        ),
        NotIdentity(),
    ] = ""
    ledger_dir: Annotated[
        str,
        Doc(
            "An absolute path: where the privacy ledger is kept, the sum of every epsilon that "
            "was spent. It must outlive the cache. Empty: `$OSFL_STATE`, else `~/.osfl/state`."
        ),
        NotIdentity(),
    ] = ""
    checkpointing: Annotated[
        str,
        OneOf("off", "on", "auto", ""),
        Doc("As the run-config's; empty: the run's."),
        NotIdentity(),
    ] = ""
    epsilon: Annotated[
        float,
        Range(0, 20),
        Doc(
            "The largest `epsilon` of a payload of this site: a larger one of the run is lowered "
            "to it, and methods that give no guarantee are refused; 0: the run's."
        ),
        NotIdentity(),
    ] = 0.0
    delta: Annotated[
        float,
        Range(1e-9, 0.01),
        Doc("The largest `delta` of a payload of this site: a larger one of the run is lowered."),
        NotIdentity(),
    ] = 1e-5
    epsilon_total: Annotated[
        float,
        Range(0, 1000),
        Doc(
            "The most `epsilon` that the payloads of all jobs together may spend; then the client "
            "refuses. A run without an epsilon, and a method without a guarantee, are refused at "
            "once. What was spent is kept in `ledger-dir`, by `client-id`, which it needs. 0: no "
            "limit."
        ),
        NotIdentity(),
    ] = 0.0
    seal_to: Annotated[
        str,
        Doc(
            "Fingerprint of the server's sealing key, 64 hex digits: this site sends no payload "
            "that is not sealed to that key. Empty: it takes the run's key, or none."
        ),
        NotIdentity(),
    ] = ""
    min_class_images: Annotated[
        int,
        Range(1, 1_000_000),
        Doc(
            "Classes with fewer training images here are left out of the payload, for what is "
            "learned of one image is nearly that image. `adaptation` leaves them out, too. The "
            "test's confusion matrix still has them."
        ),
    ] = 1
    models_dir: Annotated[
        str,
        Doc(
            "An absolute path: where this site keeps the global models, as "
            "`<job>-<model>-<client>.safetensors`, and with `adaptation.steps` the adapted ones "
            "beside them, `-adapted`. Empty: it keeps none."
        ),
        NotIdentity(),
    ] = ""
    test_results: Annotated[
        str,
        OneOf("exact", "off", ""),
        Doc(
            "Whether this site answers a test of a global model with its confusion matrix, for "
            "which no guarantee holds: exact, or off. Empty: off where `epsilon` or "
            "`epsilon-total` is set here, else exact."
        ),
        NotIdentity(),
    ] = ""
    classes: Annotated[
        str,
        Doc(
            "The only `data.classes` that this site accepts, comma-separated, in the run's order; "
            "empty: any. With an `epsilon` here, text labels require it."
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
    def demands_guarantee(self) -> bool:
        """Whether this site sends no payload without differential privacy."""
        return bool(self.epsilon or self.epsilon_total)

    @property
    def tells_tests(self) -> bool:
        """Whether the confusion matrix of a global model leaves this site."""
        return (self.test_results or ("off" if self.demands_guarantee else "exact")) == "exact"
