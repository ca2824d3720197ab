"""A payload's declaration says all that server and wire format know of it.

A new kind is a class and a message.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch

from osfl.config import parse_run_config
from osfl.methods import METHODS
from osfl.payload.fields import (
    CLIENT_DIMENSIONS,
    DIMENSIONS,
    Form,
    Shape,
    Values,
    field_tensors,
    fields_of,
)
from osfl.payload.kinds import KINDS, Encodings, Mixtures, kind_of
from server_app import expected
from tests.helpers.settings import ROOT, quick
from tests.helpers.toy import add_method, copy_project, run_toys

KIND = '''
@dataclass(frozen=True)
class Colours:
    """Toy: the mean colour of a class, of how many images, and where from."""

    classes: tuple[str, ...]
    means: Annotated[torch.Tensor, Shape("classes", 3)]
    counts: Annotated[torch.Tensor, Shape("classes", dtype=torch.int64)]
    origin: str


Payload = (
    Colours |
'''
MESSAGE = """
message Colours {
  Tensor means = 1;
  Tensor counts = 2;
  string origin = 3;
}
"""
ROW = """Method(
    client="toy", server="toy", payload="Colours", sends="a mean colour", samples=False
)"""
CLIENT = """
import torch
from osfl.payload.kinds import Colours
def make_payload(job):
    images = job.load(16)
    held = images.held()
    chosen = [images.pixels[images.labels == label].float() for label in held]
    means = torch.stack([pixels.mean(dim=(0, 2, 3)) for pixels in chosen])
    counts = torch.tensor([len(pixels) for pixels in chosen])
    return Colours(tuple(job.classes[label] for label in held), means, counts, job.client)
"""
SERVER = """
import torch
from server_app.training import train_global
def run(job, payloads):
    assert [payload.origin for payload in payloads.values()] == ["client-0", "client-1"]
    assert sum(int(payload.counts.sum()) for payload in payloads.values()) == 60
    means = torch.cat([payload.means for payload in payloads.values()]).to(torch.uint8)
    names = [name for payload in payloads.values() for name in payload.classes]
    pixels = means[:, :, None, None].expand(-1, -1, 16, 16).contiguous()
    labels = torch.tensor([job.classes.index(name) for name in names])
    return {"colours": train_global(job, "colours", pixels, labels)}
"""

# A method that sends a kind that there is, and synthesizes images as another does
PLAIN = (
    'Method(client="plain", server="plain", payload="Descriptions", sends="a toy", '
    "client_parts=DIFFUSION_PARTS)"
)
PLAIN_CLIENT = '''"""Toy. Differences: none."""
from osfl.payload.kinds import Descriptions
def make_payload(job):
    import torch
    held = job.load(32).held()
    return Descriptions(tuple(job.classes[i] for i in held), torch.zeros(len(held), 8, 32))
'''
PLAIN_SERVER = '''"""Toy. Differences: none."""
from server_app.pipeline import synthesize_and_train
from server_app.methods.feddeo import sampler
def run(job, payloads):
    return synthesize_and_train(job, payloads, sampler)
'''


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


def add_kind(folder: Path, declaration: str) -> None:
    """Edits 1 and 2 of the recipe, a class and a message, and `make proto`."""
    replace(folder / "osfl" / "payload" / "kinds.py", "\nPayload = (\n", declaration)
    schema = Path("proto", "osfl", "payload", "v1", "payload.proto")
    proto = folder / schema
    proto.parent.mkdir(parents=True)
    proto.write_text((ROOT / schema).read_text() + MESSAGE)
    replace(
        proto, "    Domain domain = 17;\n", "    Domain domain = 17;\n    Colours colours = 99;\n"
    )
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", "--python_out=."]
    subprocess.run([*command, "osfl/payload/v1/payload.proto"], cwd=folder, check=True)


@pytest.mark.slow
def test_methods_and_a_payload_kind_are_added_with_few_edits(
    tmp_path: Path, tiny_kit: Path
) -> None:
    """Contributing's steps, literally: a method is a declaration, a client half and a server half,
    a kind a class in kinds.py and a message in payload.proto; then a method that sends it runs,
    and one that sends another. Nothing else is touched.
    """
    pytest.importorskip("grpc_tools")
    copy_project(tmp_path)
    add_kind(tmp_path, KIND)
    methods = {"toy": (ROW, CLIENT, SERVER), "plain": (PLAIN, PLAIN_CLIENT, PLAIN_SERVER)}
    for name, (declaration, client, server) in methods.items():
        add_method(tmp_path, name, declaration)
        (tmp_path / "client_app" / "methods" / f"{name}.py").write_text(client)
        (tmp_path / "server_app" / "methods" / f"{name}.py").write_text(server)
    result = run_toys(tmp_path, tiny_kit, *methods)
    assert result.returncode == 0, result.stderr[-3000:]
    for name in methods:
        assert (tmp_path / "runs" / name / "report.html").is_file()


@pytest.mark.slow
def test_a_kind_without_shapes_ends_the_import(tmp_path: Path) -> None:
    copy_project(tmp_path)
    bare = KIND.replace('Annotated[torch.Tensor, Shape("classes", 3)]', "torch.Tensor")
    replace(tmp_path / "osfl" / "payload" / "kinds.py", "\nPayload = (\n", bare)
    command = [sys.executable, "-c", "import osfl.payload.kinds"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert (
        "TypeError: payload Colours: means: a tensor must have a shape. Declare it" in result.stderr
    )


Real = torch.Tensor


@dataclass(frozen=True)
class Late:
    means: Annotated[Real, Shape("classes")]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Misspelt:
    classes: tuple[str, ...]
    means: Annotated[Real, Shape("classes", "width")]


@dataclass(frozen=True)
class Uncounted:
    classes: tuple[str, ...]
    means: Annotated[Real, Shape("images", "d")]


@dataclass(frozen=True)
class Countless:
    classes: tuple[str, ...]
    sums: Annotated[Real, Shape("classes", "d"), Values.SUMS]


@dataclass(frozen=True)
class Nameless:
    classes: tuple[str, ...]
    state: dict[str, Real]


@dataclass(frozen=True)
class Number:
    classes: tuple[str, ...]
    count: int


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Late, "payload Late: its first field must be `classes`"),
        (Misspelt, "payload Misspelt: means: dimension 'width' is unknown"),
        (Uncounted, r"payload Uncounted: it requires a tensor with Shape\(\"images\"\)"),
        (Countless, "payload Countless: sums over images require a field `counts`"),
        (Nameless, "payload Nameless: a state dict requires a field `architecture`"),
        (Number, "payload Number: count: the wire format cannot carry <class 'int'>"),
    ],
)
def test_a_declaration_that_says_too_little_is_named(kind: type, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fields_of(kind)


def test_a_shape_is_the_first_that_the_run_can_have() -> None:
    real = torch.float32
    pooled = {"vectors": (("classes", 5), real)}
    assert field_tensors(Encodings, {"L": 3, "d": 5}) == {"vectors": (("classes", 3, 5), real)}
    assert field_tensors(Encodings, {"d": 5}) == pooled
    with pytest.raises(TypeError, match=r"Encodings: vectors: .* \['classes', 'd'\]"):
        field_tensors(Encodings, {"L": 3})
    plain = field_tensors(Mixtures, {"J": 2, "L": 3, "d": 5, "c": 4, "h": 8, "w": 8})
    assert list(plain) == ["conditions", "weights"]


def test_a_run_has_all_dimensions_that_a_payload_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "shapes_of_kit", lambda kit: ((8, 32), (4, 9, 10), 24))

    def sizes(method: str, **settings: object) -> dict[str, int]:
        return dict(expected.run_dimensions(parse_run_config(quick(method=method, **settings))))

    kit = sizes("fedbip")
    assert kit == {"L": 8, "d": 32, "p": 8, "c": 4, "h": 9, "w": 10, "2e": 24}
    # The features of quick's ShuffleNet
    assert sizes("fedcgs") == {"f": 1024, "t": 1024 * 1025 / 2}
    assert sizes("fedcgs", fedcgs__projection=5) == {"f": 5, "t": 15}
    assert sizes("fedcgs", fedcgs__projection=5, payload_codec="int4") == {"f": 5, "r": 15}
    assert sizes("fedpft") == {"f": 1024, "K": 5, "v": 1}
    diagonal = sizes("fedpft", fedpft__covariance="diag", fedpft__components=3)
    assert diagonal == {"f": 1024, "K": 3, "v": 1024}
    assert kit.keys() - sizes("oscar-pooled").keys() == {"L"}
    assert sizes("oscar") == kit
    assert sizes("espresso") == {**kit, "J": 2, "M": 2}
    assert sizes("espresso", espresso__gmm=False) == {**kit, "J": 2}
    assert sizes("fedld") == {**kit, "M": 2}
    assert sizes("latent-gaussian") == kit
    assert sizes("feddisc") == {**kit, "K + 1": 3}
    assert sizes("domain-vector") == kit
    assert sizes("domain-vector", domain_vector__class_lr=0.1) == {**kit, "o": 1}
    assert sizes("feddeo", feddeo__tokens="all") == {**kit, "p": 1}
    every = {name for method in METHODS for name in sizes(method, domain_vector__class_lr=0.1)}
    every |= set(sizes("fedcgs", payload_codec="int8"))
    # Those of a secure sum depend on its members, too
    every |= {"4s", "m"}
    assert every | set(CLIENT_DIMENSIONS) == set(DIMENSIONS)


def has_real_numbers(payload: str | None) -> bool:
    """Return whether a payload has numbers that a codec could round."""
    declared = fields_of(kind_of(payload)).values() if payload else ()
    return any(
        field.form is Form.STATE or any(shape.dtype.is_floating_point for shape in field.shapes)
        for field in declared
    )


def test_the_table_of_methods_says_what_leaves_a_client() -> None:
    for name, method in METHODS.items():
        assert method.sends.startswith("nothing") == (not method.payload and not method.rounds)
        assert bool(method.payload) == bool(method.client), name
        if method.payload:
            assert kind_of(method.payload) is KINDS[method.payload]
        assert (method.numbers == "none") == (not has_real_numbers(method.payload)), name
    with pytest.raises(TypeError, match="payload 'Magic' must be a member of Payload"):
        kind_of("Magic")
