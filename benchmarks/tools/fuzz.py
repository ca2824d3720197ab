"""Decode hostile payloads, and measure memory and time of each.

python -m benchmarks.tools.fuzz --seconds 300        # inputs for so long, and the table
python -m benchmarks.tools.fuzz --inputs 200 --json  # so many inputs, and their maxima as JSON

Every input is made in one process and decoded in another, both forked for it: the peak of the
second is the decoder's, the message included, and a crash is noticed.
"""

import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Experiment, command_line
from osfl.methods import METHODS
from osfl.payload import wire
from osfl.payload.fields import field_tensors
from osfl.payload.kinds import Captions, Classifier, Domain, Payload, kind_of
from osfl.payload.v1 import payload_pb2 as pb
from osfl.util.costs import release_memory

REAL = torch.float32
WHOLE = torch.int64
CODECS = ("raw", "raw", "float16", "int8", "int4")
# Kinds whose numbers must be exact, or that have none
UNCODED = ("FeatureStatistics", "Captions", "Domain", "Votes")
# Also allowed for a short message: 20,000 texts, as many Python objects, take up to 2.4 MB beyond
# four times its size; the rest are pages that a forked process touches for the first time
SLACK_MB = 6.0
MOST_SECONDS = 120  # for one input
MOST_MEMORY = 12 * 2**30
CAPTION = (
    "Maxima of decoding payloads, most of them hostile: peak memory, the message included, over "
    "the message's size, and CPU seconds a MB, both of messages of 1 MB and more whose numbers are "
    "not coded; MB beyond what is allowed, and CPU seconds, of all. Allowed are four times the "
    "message, and where numbers are coded one and a half times these in float32."
)
Run = tuple[wire.Expected, Payload]


# ---- Runs, and honest payloads of them ----


def some_run(rng: random.Random) -> Run:
    """Return a random run, of small shapes or Stable Diffusion's, and an honest payload of it."""
    classes = tuple(f"class-{number}" for number in range(rng.choice((1, 3, 20, 60))))
    text = rng.choice(((2, 3), (8, 32), (77, 768)))
    latent = rng.choice(((1, 2, 2), (4, 16, 16)))
    method = rng.choice([name for name, row in METHODS.items() if row.payload])
    kind = str(METHODS[method].payload)
    sizes = dict(zip(("L", "d", "c", "h", "w"), (*text, *latent), strict=True))
    sizes |= {
        "2e": 2 * text[1],
        "f": text[1],
        "t": text[1] * (text[1] + 1) // 2,
        "J": 2,
        "M": 2,
        "o": 1,
        "p": 1,
        "K": 3,
        "v": 1,
        "K + 1": 6,
    }
    tensors = field_tensors(kind_of(kind), sizes)
    images = rng.choice((5, 300))
    states = {}
    if kind == "Concepts":
        images = max(images, len(classes))
    elif kind == "Captions":
        images = rng.choice((100, 20_000))
    elif kind == "Classifier":
        states = {"resnet18": some_state(rng)}
    codec = "raw" if kind in UNCODED else rng.choice(CODECS)
    expected = wire.Expected(
        method, "job-1", "client-0", classes, 10**9, tensors, states, images, codec
    )
    return expected, honest(expected, rng)


def encoded(expected: wire.Expected, payload: Payload) -> bytes:
    """Encode a payload as an honest client does."""
    return wire.encode(payload, expected.method, expected.job, expected.client, expected.codec)


def allowed_mb(expected: wire.Expected, size: int) -> float:
    """Return the MB that a message of `size` bytes may take."""
    if expected.codec == "raw":
        return 4 * size / 1e6
    counts = {"classes": len(expected.classes), "images": expected.max_images}
    raw = replace(expected, codec="raw")
    shapes = (expected.tensors, *expected.architectures.values())
    return (4 * size + 1.5 * max(wire.number_bytes(shape, counts, raw) for shape in shapes)) / 1e6


def some_state(rng: random.Random) -> wire.Tensors:
    """Return shapes like a ResNet-18's, or a VGG's with one tensor of three quarters, or a few."""
    state: dict[str, tuple[wire.Shape, torch.dtype]] = {}
    for number in range(rng.choice((1, 6, 122))):
        state[f"layer{number}.weight"] = ((rng.choice((1, 64, 512)), rng.choice((1, 200))), REAL)
        state[f"layer{number}.running_var"] = ((64,), REAL)
        state[f"layer{number}.num_batches_tracked"] = ((), WHOLE)
    if rng.random() < 0.2:
        state["classifier.0.weight"] = ((4096, 1024), REAL)
    return state


def honest(expected: wire.Expected, rng: random.Random) -> Payload:
    """Return a payload that fits a run."""
    classes = expected.classes
    kind = METHODS[expected.method].payload
    size = {"classes": len(classes), "images": expected.max_images}

    # Equal numbers deflate to nothing; random ones do not
    even = rng.random() < 0.5 and expected.codec != "raw"

    def filled(shape: wire.Shape, dtype: torch.dtype) -> torch.Tensor:
        lengths = [size[n] if isinstance(n, str) else n for n in shape]
        if even and dtype == REAL and len(lengths) > 1:
            source = torch.Generator().manual_seed(len(lengths))
            return torch.rand(lengths, generator=source) + 0.5
        return torch.ones(lengths, dtype=dtype)

    if kind == "Classifier":
        state = {n: filled(*want) for n, want in expected.architectures["resnet18"].items()}
        return Classifier(classes, "resnet18", state)
    if kind == "Captions":
        each = expected.max_images // len(classes)
        words = " ".join(rng.choices(("a", "photo", "of", "dog", "été", "猫"), k=10))
        return Captions(classes, ((words,) * each,) * len(classes))
    if kind == "Domain":
        return Domain(classes, "sketch")
    values = {name: filled(*want) for name, want in expected.tensors.items()}
    for name in ("weights", "component_weights"):
        if name in values:
            values[name] /= values[name].sum(dim=-1, keepdim=True)
    if "labels" in values:
        values["labels"] = torch.arange(expected.max_images) % len(classes)
    return kind_of(str(kind))(classes, **values)


# ---- Hostile inputs ----

# Elements that are short on the wire, by the message that contains them
FIELDS = {
    "Payload": (b"\x2a\x00", b"\x08\x01", b"\x12\x00", b"\x2a\x01a", b"\x5a\x00", b"\x72\x00"),
    "Tensor": (b"\x10\x01", b"\x12\x00", b"\x12\x01\x01", b"\x0a\x00", b"\x18\x01", b"\x2a\x00"),
    "Texts": (b"\x0a\x00", b"\x0a\x01a", b"\x0a\x03\xe7\x8c\xab", b"\x0a\x04\xf0\x9f\x90\x88"),
    "body": (b"\x0a\x00", b"\x12\x00", b"\x1a\x00", b"\x0a\x02\x0a\x00", b"\x12\x02\x10\x01"),
}
STRANGE = (
    b"\xf8\x07\x01",  # an unknown field: a number,
    b"\xfa\x07\x00",  # bytes,
    b"\xfd\x07\x00\x00\x00\x00",  # and four of them
    b"\xf9\x07" + bytes(8),
    b"\x0b\x0c",  # a group
    b"\x0b",  # that never ends
    b"\x10" + b"\x80" * 9 + b"\x01",  # numbers longer than they need to be
    b"\x80" * 10 + b"\x01",
    b"\x0a\xff\xff\xff\xff\x07",  # a length of 2 GB
    b"\x80",  # cut short
    b"\x00",
)


def head(expected: wire.Expected) -> bytes:
    """Return the correct fields before the body."""
    names = {"method": expected.method, "job": expected.job, "client": expected.client}
    return pb.Payload(version=1, classes=expected.classes, **names).SerializeToString()


def around(expected: wire.Expected, body: bytes) -> bytes:
    """Return a message with this body."""
    kind = str(METHODS[expected.method].payload).lower()
    return head(expected) + joined(pb.Payload.DESCRIPTOR.fields_by_name[kind].number, body)


def joined(number: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    return b"".join(wire._field(number, content))


def submessage(expected: wire.Expected, rng: random.Random) -> int:
    """Return the number of a body's field that is a message: a tensor, or a class's texts."""
    kind = pb.DESCRIPTOR.message_types_by_name[str(METHODS[expected.method].payload)]
    return rng.choice([field.number for field in kind.fields if field.message_type] or [1])


def room(expected: wire.Expected, rng: random.Random) -> int:
    """Return a length of a message: up to the run's limit, or a few hundred bytes."""
    limit = wire._max_payload_bytes(expected)
    return rng.choice((200, 10_000, 1_000_000, limit, limit))


def mutated(run: Run, rng: random.Random) -> bytes:
    """Change, cut, repeat or insert a few bytes of an honest payload."""
    expected, payload = run
    data = bytearray(encoded(expected, payload))
    for _ in range(rng.randint(1, 2)):
        near = min(len(data), rng.choice((40, 400, len(data))))
        at = rng.randrange(max(near, 1))
        count = rng.choice((1, 8, 1000))
        match rng.choice((0, 0, 0, 1, 2, 3)):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + count]
            case 2:
                data[at:at] = data[at : at + count]
            case 3:
                data[at:at] = rng.choice((*STRANGE, *FIELDS["Tensor"])) * count
    return bytes(data)


def en_masse(run: Run, rng: random.Random) -> bytes:
    """Repeat one small field up to the length limit: before, after or without honest fields."""
    expected, payload = run
    place = rng.choice(list(FIELDS))
    element = rng.choice((*FIELDS[place], rng.choice(STRANGE)))
    repeated = element * (room(expected, rng) // len(element))
    if place in ("Tensor", "Texts"):
        repeated = joined(submessage(expected, rng), repeated)
    if place == "Payload":
        return rng.choice((repeated, head(expected) + repeated))
    blob = encoded(expected, payload)
    kind = str(METHODS[expected.method].payload).lower()
    inner = b""
    if len(blob) < 10**6:
        inner = getattr(pb.Payload.FromString(blob), kind).SerializeToString()
    return around(expected, rng.choice((repeated, repeated + inner, inner + repeated)))


def many_small_messages(run: Run, rng: random.Random) -> bytes:
    """Fill the message with submessages of a few fields each."""
    expected, _ = run
    fields = rng.choices((*FIELDS["Tensor"], *FIELDS["Texts"]), k=rng.choice((0, 0, 1, 3)))
    small = joined(submessage(expected, rng), b"".join(fields))
    return around(expected, small * (room(expected, rng) // len(small)))


def one_long_shape(run: Run, rng: random.Random) -> bytes:
    """Write a long shape, packed or number by number, of one to ten bytes each."""
    expected, _ = run
    number = rng.choice((b"\x00", b"\x01", b"\xff\x7f", b"\x80" * 9 + b"\x01"))
    count = room(expected, rng) // (len(number) + 1)
    shape = joined(2, number * count) if rng.random() < 0.5 else (b"\x10" + number) * count
    return around(expected, joined(submessage(expected, rng), joined(1, b"vectors") + shape))


def nested(run: Run, rng: random.Random) -> bytes:
    """Nest messages or groups as deeply as the length allows."""
    expected, _ = run
    depth = room(expected, rng) // rng.choice((2, 20, 2000))
    if rng.random() < 0.5:
        return around(expected, rng.choice((b"\x0b", b"\x13", b"\xfb\x07")) * depth)
    inner = b""
    for _ in range(min(depth, 300)):
        inner = joined(rng.choice((1, 2, 10, 127)), inner)
    return around(expected, inner)


def at_the_bounds(run: Run, rng: random.Random) -> bytes:
    """Use all that the counts allow: texts and names of wide characters, empty tensors."""
    expected, payload = run
    letters = rng.choice(("a", "é", "猫", "\U0001f408", "a" * 70 + "猫", "a" * 298 + "\U0001f408"))
    text = (letters * rng.choice((1, 5, 20, 300)))[: rng.choice((1, 20, 300, 2000))]
    if isinstance(payload, Captions):
        each = expected.max_images // len(expected.classes)
        texts = joined(1, joined(1, text.encode()) * each) * len(expected.classes)
        return around(expected, texts)
    if isinstance(payload, Domain):
        return around(expected, joined(1, text.encode()))
    count = 1 + max(map(len, (expected.tensors, *expected.architectures.values())))
    name = joined(1, text.encode())
    shape = b"\x10\x01" * rng.choice((0, 1, 8))
    data = joined(5, bytes(rng.choice((0, 8, room(expected, rng) // count // 2))))
    tensor = name + shape + data
    if isinstance(payload, Classifier):
        return around(expected, joined(1, b"resnet18") + joined(2, tensor) * count)
    return around(expected, b"".join(joined(number, tensor) for number in range(1, count)))


def random_tree(run: Run, rng: random.Random) -> bytes:
    """Write fields of the schema and others, in any order, with correct or false lengths."""
    expected, _ = run

    def message(kind: Any, depth: int) -> bytes:
        result = b""
        for field in rng.choices(list(kind.fields), k=rng.randint(0, 12)):
            content = bytes(rng.choice((0, 1, 7, 100)))
            if field.message_type and depth < 6:
                content = message(field.message_type, depth + 1)
            tag = wire._varint(field.number << 3 | rng.choice((0, 2, 2, 2, rng.randrange(8))))
            length = len(content) if rng.random() < 0.95 else rng.randrange(2**20)
            result += tag + wire._varint(length) + content
        return result

    kind = str(METHODS[expected.method].payload)
    body = message(pb.DESCRIPTOR.message_types_by_name[kind], 0)
    return rng.choice((around(expected, body), message(pb.Payload.DESCRIPTOR, 0)))


def deflated(run: Run, rng: random.Random) -> bytes:
    """Replace honest tensors by bytes that inflate to too many, too few or corrupt numbers."""
    expected, payload = run
    blob = encoded(expected, payload)
    kind = str(METHODS[expected.method].payload).lower()
    if len(blob) > 10**7:
        return blob
    message = pb.Payload.FromString(blob)
    tensors = [
        value
        for _, content in getattr(message, kind).ListFields()
        for value in ([content] if isinstance(content, pb.Tensor) else content)
        if isinstance(value, pb.Tensor)
    ]
    for tensor in rng.sample(tensors, min(len(tensors), 3)):
        squeezed = zlib.compress(bytes(rng.choice((1, 1000, 10**6, 2 * 10**8))), level=1)
        squeezed = squeezed[: rng.choice((len(squeezed), len(squeezed) // 2, 5))]
        tensor.data = squeezed + rng.choice((b"", b"", b"more"))
    return message.SerializeToString()


def as_it_should_be(run: Run, rng: random.Random) -> bytes:
    """Return an honest payload."""
    expected, payload = run
    return encoded(expected, payload)


INPUTS = (
    as_it_should_be,
    mutated,
    en_masse,
    many_small_messages,
    one_long_shape,
    nested,
    at_the_bounds,
    random_tree,
    deflated,
)


# ---- The cost of decoding ----


def in_a_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in a forked process; {"died": signal or exit code} if it does not return."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(MOST_SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {str(error)[:300]}\n".encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(answer) if code == 0 else {"died": code}


def cost(file: Path, expected: wire.Expected, warm: Run) -> dict[str, Any]:
    """Return the additional peak memory (MB) and CPU seconds of reading and decoding a file."""
    usual, payload = warm
    blob = encoded(usual, payload)
    wire.decode(blob, usual)  # loads code from the disk, which is not the input's cost
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = memory("VmRSS")
    began = time.process_time()
    problem = ""
    try:
        payload = wire.decode(file.read_bytes(), expected)
    except wire.PayloadError as error:
        problem = str(error)[:200]
    seconds = time.process_time() - began
    return {"mb": memory("VmHWM") - before, "seconds": seconds, "refused": problem}


def memory(key: str) -> float:
    """Return a value of /proc/self/status in MB."""
    line = next(n for n in Path("/proc/self/status").read_text().splitlines() if key in n)
    return int(line.split()[1]) * 1024 / 1e6


def measured(seed: int, folder: Path) -> dict[str, Any]:
    """Make and decode one input by its number."""
    file = folder / "payload.pb"

    def make() -> dict[str, Any]:
        rng = random.Random(seed)
        expected, payload = some_run(rng)
        file.write_bytes(INPUTS[seed % len(INPUTS)]((expected, payload), rng))
        size = file.stat().st_size
        columns = {"method": expected.method, "coded": expected.codec != "raw"}
        return {**columns, "allowed_mb": allowed_mb(expected, size)}

    def decode() -> dict[str, Any]:
        return cost(file, some_run(random.Random(seed))[0], some_run(random.Random(1)))

    record = {"seed": seed, "kind": INPUTS[seed % len(INPUTS)].__name__, **in_a_process(make)}
    if "died" in record:
        raise SystemExit(f"input {seed} could not be made")
    size = file.stat().st_size
    result = in_a_process(decode)
    # Pages of libraries that a busy machine dropped count as new memory: take the lower of two
    if "died" not in result and result["mb"] - record["allowed_mb"] > SLACK_MB:
        again = in_a_process(decode)
        result = again if "died" in again or again["mb"] < result["mb"] else result
    return {**record, "bytes": size, **result}


def inputs(first: int, count: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield measured inputs until either limit is reached."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            if time.monotonic() > end:
                return
            yield measured(seed, Path(folder))


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the maxima of one kind of input."""
    lived = [r for r in results if "died" not in r]
    large = [r for r in lived if r["bytes"] >= 10**6 and not r["coded"]]
    return {
        "inputs": len(results),
        "died": len(results) - len(lived),
        "accepted": sum(not r["refused"] for r in lived),
        "largest_mb": max(r["bytes"] for r in results) / 1e6,
        "times": max((r["mb"] * 1e6 / r["bytes"] for r in large), default=0.0),
        "beyond_mb": max((r["mb"] - r["allowed_mb"] for r in lived), default=0.0),
        "seconds_a_mb": max((r["seconds"] * 1e6 / r["bytes"] for r in large), default=0.0),
        "seconds": max((r["seconds"] for r in lived), default=0.0),
    }


def main() -> None:
    """Run the inputs of a range of numbers; equal numbers are equal inputs."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--inputs", type=int, default=10**9)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    by_kind = defaultdict[str, list[dict[str, Any]]](list)
    gc.freeze()  # otherwise garbage collection in a child copies this process
    for result in inputs(args.first, args.inputs, args.seconds):
        by_kind[result["kind"]].append(result)
        if "died" in result or result["mb"] - result["allowed_mb"] > SLACK_MB:
            print(json.dumps(result), file=sys.stderr)
    maxima = {kind: summary(results) for kind, results in by_kind.items()}
    if args.json:
        print(json.dumps(maxima))
        return
    rows = [row(kind, most) for kind, most in maxima.items()]
    total = sum(most["inputs"] for most in maxima.values())
    caption = f"{CAPTION} {total:,} inputs from number {args.first}."
    Experiment(__file__, caption=caption, options="--seconds 300").write_all(rows)


def row(kind: str, most: dict[str, Any]) -> dict[str, str]:
    """Return a line of the table."""
    return {
        "input": kind.replace("_", " "),
        "number": f"{most['inputs']:,}",
        "accepted": f"{most['accepted']:,}",
        "died": str(most["died"]),
        "largest MB": f"{most['largest_mb']:.1f}",
        "memory / size": f"{most['times']:.2f}",
        "MB beyond what is allowed": f"{most['beyond_mb']:.1f}",
        "s/MB": f"{most['seconds_a_mb']:.3f}",
        "s": f"{most['seconds']:.2f}",
    }


if __name__ == "__main__":
    main()
