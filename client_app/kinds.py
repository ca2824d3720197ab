"""The kind of payload that a site sends in a mixed run (node-config `method`).

A named kind must be one that the run welcomes. In a simulation a run can assign kinds to clients
(`mixed.assignment`). With `auto` a site sends the first kind, in the run's order, that fits it. The
rule is deterministic:

1. A kind whose payload this job has cached here stays: making another would repeat the work, and
   with a guarantee spend epsilon twice.
2. Policy: the site would not refuse a pure run of the kind's methods. Its guarantee, its allowed
   folders, the parts of the kit and the packages that it has decide this.
3. Memory: `MEMORY_FACTOR` times the bytes of the kit's parts that the kind loads are free on the
   site's device.
4. Device: on a CPU, those bytes times the training images are at most `CPU_WORK`. A GPU has no such
   limit.
5. Images: a payload that is learned needs `MIN_CLASS_IMAGES` training images for each class that
   the site holds, on average. With fewer it nearly is the images.

With a guarantee 4 and 5 are skipped, because the kind would reveal the number of images.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from client_app.errors import PublicConfigError
from osfl.config import NodeConfig, RunConfig, kinds_of, parts_of
from osfl.kit.kits import download_bytes
from osfl.kit.used_parts import kit_parts
from osfl.methods import METHODS
from osfl.util.log import log
from osfl.util.markers import AUTO
from osfl.util.text import sanitize

# Weights, activations and gradients, in units of the weights
MEMORY_FACTOR = 4
# Bytes of weights times images. A kit of Stable Diffusion's size allows 100 images
CPU_WORK = 4e11
MIN_CLASS_IMAGES = 5.0


@dataclass(frozen=True)
class Site:
    """The figures of a site that the choice depends on.

    Attributes:
        has_gpu: whether its device is a GPU.
        free_bytes: of the device's memory.
        images: number of training images; None with a guarantee.
        classes: number of classes that it holds; None with a guarantee.
    """

    has_gpu: bool
    free_bytes: int
    images: int | None = None
    classes: int | None = None


@dataclass(frozen=True)
class Work:
    """The figures of a kind that the choice depends on.

    Attributes:
        weight_bytes: bytes of the kit's parts that it loads.
        learns: whether its payload is learned from the images.
    """

    weight_bytes: int
    learns: bool


def misfit(work: Work, site: Site) -> str:
    """Return what a site lacks for a kind by rules 3 to 5: memory, device or images; "" if none."""
    if MEMORY_FACTOR * work.weight_bytes > site.free_bytes:
        return "memory"
    if site.images is None or site.classes is None:
        return ""
    if not site.has_gpu and work.weight_bytes * site.images > CPU_WORK:
        return "device"
    if work.learns and site.images < MIN_CLASS_IMAGES * site.classes:
        return "images"
    return ""


def choose_kind(
    config: RunConfig,
    node: NodeConfig,
    kit_of: Callable[[str], str],
    is_cached: Callable[[str], bool],
) -> str:
    """Return the kind of payload that this site sends.

    Args:
        kit_of: returns the kit of a kind, or raises if this site would refuse a pure run of it.
        is_cached: whether a payload of this kind is cached here for the run's job.

    Raises:
        PublicConfigError: the named kind is not welcome, or none fits.
    """
    kinds = kinds_of(config)
    if node.method != AUTO:
        return check_kind(node.method, config, node)
    if config.method_settings.assignment == "cyclic" and node.partition_id >= 0:
        return kinds[node.partition_id % len(kinds)]
    misfits: dict[str, str] = {}
    kits: dict[str, str] = {}
    for kind in kinds:
        try:
            kits[kind] = kit_of(kind)
        # Errors of settings, data, kits and classifiers are of these two types
        except (ValueError, OSError) as error:
            log.info("this site cannot send a payload of kind %s: %s", kind, sanitize(error))
            misfits[kind] = "policy or parts"
    if cached_kinds := [kind for kind in kits if is_cached(kind)]:
        return cached_kinds[0]
    site = _site(config, node)
    for kind, kit in kits.items():
        if not (lack := misfit(_work(config, kind, kit), site)):
            return kind
        misfits[kind] = lack
    raise PublicConfigError(
        f"node-config method = 'auto': none of {', '.join(kinds)} fits this site "
        f"({_format_misfits(misfits)}); set method to one of them, or ask the run to welcome "
        "another, such as prompts-domain"
    )


def check_kind(kind: str, config: RunConfig, node: NodeConfig) -> str:
    """Return a kind that the run and the site welcome.

    Raises:
        PublicConfigError: the run does not welcome it, or the site names another one.
    """
    kinds = kinds_of(config)
    if kind not in kinds:
        raise PublicConfigError(
            f"node-config method = {kind[:80]!r}: this run welcomes {', '.join(kinds)} "
            "(mixed.methods); set it to one of them, or to auto"
        )
    if node.method not in (AUTO, kind):
        raise PublicConfigError(
            f"node-config method = {node.method!r}: the server asks this site for {kind}; restart "
            "the site, so that it joins with its own kind"
        )
    return kind


def _work(config: RunConfig, kind: str, kit: str) -> Work:
    methods = parts_of(config, kind)
    files = dict.fromkeys(part for run in methods.values() for part in kit_parts(run, kit))
    size = download_bytes(kit, files) if kit else 0
    return Work(size, any(METHODS[method].learns for method in methods))


def _site(config: RunConfig, node: NodeConfig) -> Site:
    """Measure this site; import torch only for a device that may be a GPU, and for labels."""
    free = int(psutil.virtual_memory().available)
    has_gpu = False
    if node.device != "cpu":
        import torch

        from osfl.util.devices import pick_device

        device = pick_device(node.device)
        has_gpu = device.type == "cuda"
        free = int(torch.cuda.mem_get_info(device)[0]) if has_gpu else free
    if config.epsilon or node.requires_guarantee:
        return Site(has_gpu, free)
    from osfl.data.load import image_labels

    labels = image_labels(config.data, node, "train", config.seed)
    return Site(has_gpu, free, len(labels), len(set(labels)))


def _format_misfits(misfits: Mapping[str, str]) -> str:
    return "; ".join(f"{kind} lacks {lack}" for kind, lack in misfits.items())
