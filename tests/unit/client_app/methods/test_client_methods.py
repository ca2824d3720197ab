"""The client halves and samplers on a tiny kit."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from client_app.learning import conditions
from client_app.methods import classifier as classifier_half
from client_app.methods import feddeo as feddeo_half
from osfl.config import parse_run_config
from osfl.data.load import Images
from osfl.models import classifiers, training
from osfl.models.classifiers import ClassifierError
from osfl.models.conditioning import Conditioning
from osfl.models.diffusion import KitError, forward_noise, load_kit
from osfl.models.training import fit
from osfl.util.costs import FlopMeter
from osfl.util.seeds import generator_of, seed_of
from server_app.methods import feddeo, fedlmg, prompts_only
from server_app.synthesis.guidance import as_teacher
from server_app.synthesis.plan import cut_units, initial_noise, plan_images
from tests.helpers.client_jobs import CLASSES, images, job_of
from tests.helpers.settings import plain_classifier, quick


@pytest.mark.slow
def test_each_class_learns_as_if_it_were_alone(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """Classes share a UNet batch and nothing else, also when they have different numbers of images
    and so of steps.
    """
    settings = {"feddeo__epochs": 3, "feddeo__batch_size": 2, "feddeo__lr": 0.05}
    both = images(2, 2, 2, 2, 2, 7, 7)
    together = feddeo_half.make_payload(job_of(tiny_kit, both, **settings))
    assert together.classes == ("two", "seven")
    for index, label in enumerate((2, 7)):
        rows = both.labels == label
        alone = feddeo_half.make_payload(
            job_of(tiny_kit, Images(both.pixels[rows], both.labels[rows]), **settings)
        )
        similarity = torch.cosine_similarity(
            alone.vectors[0].flatten(), together.vectors[index].flatten(), dim=0
        )
        assert similarity >= 0.9999
        assert torch.allclose(alone.vectors[0], together.vectors[index], atol=1e-3)


def test_a_frugal_node_learns_the_same(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """With checkpointing a step computes the UNet's blocks twice, and the descriptions are the same
    bits.
    """
    from diffusers.models.resnet import ResnetBlock2D

    calls = []
    forward = ResnetBlock2D.forward
    job = job_of(tiny_kit, images(0, 4), feddeo__epochs=3)
    monkeypatch.setattr(
        FlopMeter, "_count", lambda meter, kind, step: (meter._flops.update({kind: 0}), step())[1]
    )
    monkeypatch.setattr(
        ResnetBlock2D, "forward", lambda *a, **k: (calls.append(1), forward(*a, **k))[1]
    )
    plain = feddeo_half.make_payload(job)
    once = len(calls)
    frugal = feddeo_half.make_payload(replace(job, saves_memory=True))
    assert torch.equal(plain.vectors, frugal.vectors)
    assert len(calls) - once > 1.5 * once


@pytest.mark.slow
def test_groups_of_classes_learn_what_all_together_learn(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(0, 0, 4, 4, 9)
    steps = []
    together = feddeo_half.make_payload(job_of(tiny_kit, data, feddeo__epochs=3))
    job = replace(
        job_of(tiny_kit, data, feddeo__epochs=3, feddeo__conditions_per_batch=2),
        progress=lambda *step: steps.append(step),
    )
    grouped = feddeo_half.make_payload(job)
    assert grouped.classes == together.classes == ("zero", "four", "nine")
    assert torch.allclose(grouped.vectors, together.vectors, atol=1e-3)
    assert steps[:2] == [(0, 5, "encoding image"), (5, 5, "encoding image")]
    assert steps[2:] == [(0, 6), (1, 6), (2, 6), (3, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


@pytest.mark.slow
def test_descriptions_start_at_the_prompt_and_lower_the_denoising_loss(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(*[3] * 8)
    kit = load_kit(tiny_kit)
    job = job_of(tiny_kit, data, feddeo__epochs=30, feddeo__batch_size=4, feddeo__lr=0.05)
    learned = feddeo_half.make_payload(job).vectors
    start = kit.text.states(["an image of three"])
    assert learned.shape == start.shape

    @torch.no_grad()
    def loss(d: torch.Tensor) -> float:
        x0, _ = kit.encode(next(data.batches(100)))
        t = torch.arange(0, 1000, 8)
        eps = torch.randn(len(t), *x0.shape[1:], generator=torch.Generator().manual_seed(0))
        z = forward_noise(x0[torch.arange(len(t)) % 8], eps, kit.alphas_cumprod[t])
        return (eps - kit.eps(z, t, Conditioning(d).expand(len(t)))).square().mean().item()

    assert loss(learned) < loss(start) - 0.01
    one_step = feddeo_half.make_payload(
        replace(job, config=parse_run_config(quick(feddeo__epochs=1, feddeo__lr=1e-8)))
    ).vectors
    assert torch.allclose(one_step, start, atol=1e-6)


def test_description_flops_are_counted(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    short, long = (
        job_of(tiny_kit, images(1, 1, 1, 1), feddeo__epochs=n, feddeo__batch_size=4) for n in (1, 3)
    )
    for job in (short, long):
        feddeo_half.make_payload(job)
    from torch.utils.flop_counter import FlopCounterMode

    kit = load_kit(tiny_kit)
    with FlopCounterMode(display=False) as counter:
        kit.encode(next(images(1, 1, 1, 1).batches(8)))
    encode = counter.get_total_flops()
    assert encode > 0
    assert long.meter.total - encode == 3 * (short.meter.total - encode)


def test_flop_meter_knows_a_matrix_product() -> None:
    meter = FlopMeter()
    for _ in range(3):
        meter.run("product", lambda: torch.ones(4, 5) @ torch.ones(5, 6))
    assert meter.total == 3 * 2 * 4 * 5 * 6


@pytest.mark.slow
def test_classifier_payload_is_the_trained_model(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(0, 0, 0, 4, 4, 4)
    payload = classifier_half.make_payload(
        job_of(tiny_kit, data, classifier__epochs=60, classifier__lr=0.01)
    )
    assert payload.classes == ("zero", "four")
    model = classifiers.build_classifier(payload.architecture, 10, small_stem=True)
    model.load_state_dict(payload.state)
    assert payload.state["conv1.1.num_batches_tracked"] == 60
    assert (
        classifiers.compute_logits(model, data.pixels, torch.device("cpu")).argmax(1).tolist()
        == data.labels.tolist()
    )


def test_one_image_is_too_few_for_a_classifier(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ClassifierError, match=r"1 image.*requires at least 2"):
        classifier_half.make_payload(job_of(tiny_kit, images(0)))


def test_one_image_in_a_class_is_enough_for_both(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    data = images(0, 3, 3)
    assert classifier_half.make_payload(job_of(tiny_kit, data)).classes == ("zero", "three")
    assert feddeo_half.make_payload(job_of(tiny_kit, data)).vectors.shape[0] == 2


@pytest.mark.slow
def test_training_that_diverges_says_so(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ClassifierError, match=r"diverged at step \d+ .*lower lr = 100"):
        classifier_half.make_payload(
            job_of(tiny_kit, images(*[0, 1] * 20), classifier__lr=100.0, classifier__epochs=100)
        )


def test_unknown_architectures_and_initialisations_are_named(tmp_path, tiny_kit) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ClassifierError, match="'resnet19' is not a torchvision model"):
        classifiers.build_classifier("resnet19", 10)
    with pytest.raises(
        ClassifierError, match="'mnasnet1_0' cannot be rebuilt from its tensors alone"
    ):
        classifiers.build_classifier("mnasnet1_0", 10)
    with pytest.raises(
        ClassifierError, match="small-stem is for ResNet, ShuffleNet, MobileNet and VGG"
    ):
        classifiers.build_classifier("densenet121", 10, small_stem=True)
    with pytest.raises(ClassifierError, match=r"nothing\.safetensors.*cannot be read"):
        classifiers.load_initial_weights(torch.nn.Linear(2, 2), tmp_path / "nothing.safetensors")
    with pytest.raises(
        ClassifierError, match="does not fit this architecture or stem: 'conv1.weight'"
    ):
        classifiers.load_initial_weights(
            classifiers.build_classifier("resnet18", 10),
            tiny_kit / "classifiers" / "resnet18.safetensors",
        )


def test_a_missing_or_damaged_kit_is_named(tmp_path, tiny_kit) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KitError, match=r"nowhere.*no such folder"):
        load_kit(tmp_path / "nowhere")
    (tmp_path / "half").mkdir()
    with pytest.raises(KitError, match="half. lacks vae, unet, text_encoder, tokenizer, scheduler"):
        load_kit(tmp_path / "half")
    for part in ("unet", "text_encoder"):
        copy = tmp_path / part
        shutil.copytree(tiny_kit, copy)
        weights = next((copy / part).glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:1000])
        with pytest.raises(KitError, match="cannot be loaded"):
            load_kit(copy)


def test_weight_files_of_torchvision_are_taken(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """1000 classes, a .pth, and without the counters that the first versions did not have."""
    weights = classifiers.build_classifier("resnet18", 1000).state_dict()
    torch.save(
        {name: value for name, value in weights.items() if "num_batches" not in name},
        tmp_path / "resnet18.pth",
    )
    model = classifiers.build_classifier("resnet18", 10)
    classifiers.load_initial_weights(model, tmp_path / "resnet18.pth")
    assert torch.equal(model.conv1.weight, weights["conv1.weight"])
    for name, content in (
        ("empty", b""),
        ("short", (tmp_path / "resnet18.pth").read_bytes()[:5000]),
    ):
        (tmp_path / f"{name}.pth").write_bytes(content)
        with pytest.raises(ClassifierError, match=rf"{name}\.pth' cannot be read"):
            classifiers.load_initial_weights(model, tmp_path / f"{name}.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ClassifierError, match="is not a state dict"):
        classifiers.load_initial_weights(model, tmp_path / "list.pth")


@pytest.mark.slow
def test_training_does_not_depend_on_memory_layout() -> None:
    """The same images, channels-last as a decoder makes them and contiguous as a file is loaded.

    The same weights, bit for bit.
    """
    pixels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(8)
    settings = plain_classifier(epochs=2, batch_size=4, lr=0.01, momentum=0.9)
    states = []
    for batch in (pixels, pixels.contiguous(memory_format=torch.channels_last)):
        model = classifiers.new_classifier(settings, 10, "", 0)
        logits = classifiers.compute_logits(model, batch, torch.device("cpu"))
        fit(model, batch, labels, settings, 0, torch.device("cpu"))
        states.append([logits, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.slow
def test_mixed_precision_is_of_the_products() -> None:
    """bfloat16: what a convolution gives.

    The weights stay in float32, and end near those of float32. `auto` leaves a CPU alone.
    """
    pixels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(8)
    settings = parse_run_config(quick()).classifier
    states = {}
    for precision in ("float32", "auto", "bfloat16"):
        model = classifiers.new_classifier(
            replace(settings, init="none", architecture="resnet18"), 10, "", 0
        )
        dtypes = []
        model.conv1.register_forward_hook(
            lambda _, args, out, dtypes=dtypes: dtypes.append(out.dtype)
        )
        fit(
            model,
            pixels,
            labels,
            replace(settings, precision=precision, lr=1e-3),
            0,
            torch.device("cpu"),
        )
        assert set(dtypes) == {torch.bfloat16 if precision == "bfloat16" else torch.float32}
        states[precision] = model.state_dict()
    assert all(
        torch.equal(value, states["auto"][name]) for name, value in states["float32"].items()
    )
    assert {value.dtype for value in states["bfloat16"].values()} == {torch.float32, torch.int64}
    way = (
        states["float32"]["fc.weight"]
        - classifiers.new_classifier(
            replace(settings, init="none", architecture="resnet18"), 10, "", 0
        ).fc.weight
    )
    assert (
        0
        < (states["bfloat16"]["fc.weight"] - states["float32"]["fc.weight"]).norm()
        < 0.2 * way.norm()
    )


def test_mixed_precision_by_itself_is_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a process that trains on its CPU has a GPU that could."""
    auto = replace(parse_run_config(quick()).classifier, precision="auto")
    for able in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda able=able: able)
        assert training._in_bfloat16(auto, torch.device("cuda")) == able
        assert not training._in_bfloat16(auto, torch.device("cpu"))


def test_dropout_is_seeded() -> None:
    pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 0, 1])
    settings = parse_run_config(quick()).classifier
    weights = []
    for _ in range(2):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2)
        )
        torch.manual_seed(len(weights))
        weights.append(fit(model, pixels, labels, settings, 0, torch.device("cpu"))[1].weight)
    assert torch.equal(*weights)


def test_initialisation_keeps_the_trunk_and_a_fresh_head(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    config = parse_run_config(quick()).classifier
    first_model, second_model = (
        classifiers.new_classifier(config, 10, str(tiny_kit), seed) for seed in (0, 1)
    )
    assert torch.equal(first_model.conv1[0].weight, second_model.conv1[0].weight)  # type: ignore[index]
    assert not torch.equal(first_model.fc.weight, second_model.fc.weight)  # type: ignore[union-attr]


# ---- Plan and samplers ----


def test_seeds_are_fixed_for_ever() -> None:
    """A change here changes every image and figure."""
    assert seed_of(0, "feddeo", "client-1", 3, 7) == 7304840197337381941
    assert (
        len(
            {
                seed_of(0, "ab", "c"),
                seed_of(0, "a", "bc"),
                seed_of(0, "abc"),
                seed_of(1, "ab", "c"),
                seed_of("ab", "c", 0),
            }
        )
        == 5
    )
    assert torch.equal(
        torch.randn(2, generator=generator_of(1, "x")),
        torch.randn(2, generator=generator_of(1, "x")),
    )


def test_a_plan_is_every_client_class_and_index() -> None:
    plan = plan_images("feddeo", 0, {"b": [3], "a": [0, 2]}, 2)
    assert [(j.client, j.label, j.index) for j in plan] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("a", 2, 0),
        ("a", 2, 1),
        ("b", 3, 0),
        ("b", 3, 1),
    ]
    assert len({j.noise_seed for j in plan}) == 6


def test_a_later_client_adds_units_and_changes_none() -> None:
    def names(held: dict, digests: dict, **settings: object) -> set[str]:
        return {u.name for u in cut_units(plan_images("feddeo", 0, held, 5), 4, digests, settings)}

    before = names({"a": [0, 1]}, {"a": "x"}, steps=2)
    after = names({"a": [0, 1], "b": [0]}, {"a": "x", "b": "y"}, steps=2)
    assert before < after
    assert names({"a": [0, 1]}, {"a": "other"}, steps=2).isdisjoint(before)
    assert names({"a": [0, 1]}, {"a": "x"}, steps=3).isdisjoint(before)


@pytest.mark.slow
def test_rows_do_not_depend_on_their_batch(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """A mixed batch of classes and clients gives what each image gives alone, for every sampler."""
    kit = load_kit(tiny_kit)
    client_classes = {"a": [0, 3], "b": [3]}
    plan = plan_images("m", 0, client_classes, 1)
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    learned = {
        (j.client, j.label): torch.randn(kit.text.shape, generator=generator_of(j.client, j.label))
        for j in plan
    }
    torch.manual_seed(0)
    teachers = {
        c: as_teacher(classifiers.build_classifier("resnet18", 10, small_stem=True))
        for c in client_classes
    }
    settings = parse_run_config(quick()).fedlmg
    samplers = {
        "prompts-only": lambda jobs: prompts_only.sample(
            kit, jobs, prompts[[j.label for j in jobs]], 3.0, 4
        ),
        "feddeo": lambda jobs: feddeo.sample(kit, jobs, prompts, learned, (3.0, 3.0), 4),
        "fedlmg": lambda jobs: fedlmg.sample(kit, jobs, prompts, teachers, settings, 4),
    }
    for name, sample in samplers.items():
        together = sample(plan)
        for row, job in enumerate(plan):
            difference = (together[row].int() - sample([job])[0].int()).abs()
            assert difference.float().mean() < 0.5, name
            assert difference.max() <= 8, name
        assert not torch.equal(together[0], together[1])


def test_noise_belongs_to_the_image_alone() -> None:
    plan = plan_images("m", 0, {"a": [0, 1]}, 3)
    noise = initial_noise(plan, (4, 8, 8), torch.device("cpu"))
    assert torch.equal(initial_noise(plan[4:5], (4, 8, 8), torch.device("cpu"))[0], noise[4])
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05


def test_a_branch_of_scale_zero_costs_nothing(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """2 UNet rows an image and step without the text branch, 3 with it."""
    kit = load_kit(tiny_kit)
    rows = []
    plan = plan_images("m", 0, {"a": [0]}, 2)
    prompts = kit.text([f"an image of {name}" for name in CLASSES])
    forward = kit.unet.forward
    monkeypatch.setattr(
        kit.unet,
        "forward",
        lambda z, *args, **kwargs: (rows.append(len(z)), forward(z, *args, **kwargs))[1],
    )
    for scales, branches in (((0.0, 3.0), 2), ((3.0, 3.0), 3)):
        rows.clear()
        feddeo.sample(kit, plan, prompts, {("a", 0): prompts.states[0]}, scales, 5)
        assert rows == [2 * branches] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "predicts"), [(2, "epsilon"), (20, "epsilon"), (50, "epsilon"), (20, "v_prediction")]
)
def test_sampling_equals_diffusers_own_pipeline(
    tiny_kit, tmp_path, steps: int, predicts: str
) -> None:  # type: ignore[no-untyped-def]
    """Same noise, same prompt, fp32: the decoded latents agree to 1e-4.

    Also for a UNet that predicts v, as Stable Diffusion 2.1's.
    """
    shutil.copytree(tiny_kit, tmp_path / "kit")
    tiny_kit = tmp_path / "kit"
    scheduler = tiny_kit / "scheduler" / "scheduler_config.json"
    scheduler.write_text(
        json.dumps({**json.loads(scheduler.read_text()), "prediction_type": predicts})
    )
    from diffusers import DDIMScheduler

    from osfl.models.diffusion import load_pipeline
    from server_app.synthesis.guidance import Condition, compose
    from server_app.synthesis.samplers import ddim

    kit = load_kit(tiny_kit)
    pipeline = load_pipeline(tiny_kit)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    z = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    texts = ["an image of one", "an image of two"]
    theirs = pipeline(
        texts, latents=z, num_inference_steps=steps, guidance_scale=3.0, output_type="latent"
    ).images
    with torch.no_grad():
        condition = Condition(kit.text(texts), 3.0)
        ours = ddim(kit, z, steps, lambda z, t: compose(kit, z, t, kit.text([""]), [condition]))
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


def test_descriptions_that_diverge_say_so(tiny_kit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    kit = load_kit(tiny_kit)
    kit.unet.conv_out.bias.data.fill_(float("nan"))
    monkeypatch.setattr(conditions, "load_kit", lambda *args: kit)
    with pytest.raises(ValueError, match=r"diverged.*lower feddeo.lr = 0.03"):
        feddeo_half.make_payload(job_of(tiny_kit, images(1, 1), feddeo__lr=0.03))


def test_guidance_sees_the_classifiers_own_size(tiny_kit) -> None:  # type: ignore[no-untyped-def]
    """The classifier works at 16 px, the kit draws 32: the loss is that of the resized image."""
    from torch.nn.functional import interpolate

    from server_app.synthesis.guidance import classifier_loss

    teacher = as_teacher(classifiers.build_classifier("resnet18", 10, small_stem=True))
    labels = torch.tensor([1, 2])
    pictures = torch.rand(2, 3, 32, 32) * 2 - 1
    small = interpolate(pictures, size=(16, 16), mode="bilinear", antialias=True)
    assert torch.allclose(
        classifier_loss(teacher, pictures, labels, 1, 1, 16),
        classifier_loss(teacher, small, labels, 1, 1),
    )
    assert not torch.allclose(
        classifier_loss(teacher, pictures, labels, 1, 1),
        classifier_loss(teacher, small, labels, 1, 1),
    )
