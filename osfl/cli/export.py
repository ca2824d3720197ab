"""`osfl export`: a run's model for programs without OSFL."""

from pathlib import Path

from osfl.cli import display
from osfl.config import ConfigError
from osfl.inference.hub_export import write_hub_folder
from osfl.inference.loading import load_model
from osfl.inference.model_card import read_run_record
from osfl.inference.onnx_export import OPSET, to_onnx
from osfl.util.files import write_atomically
from osfl.util.text import sanitize

FORMATS = ("onnx", "huggingface")


def export_onnx(file: Path, out: Path, preprocessing: bool, overwrite: bool) -> None:
    """Write a model as ONNX.

    Raises:
        ConfigError, OSError: the model or an option is unusable, or the file exists.
    """
    if out.is_dir():
        raise ConfigError(f"--out = {sanitize(out, 1000)}: is a folder; set --out to a file")
    if out.exists() and not overwrite:
        raise ConfigError(
            f"--out = {sanitize(out, 1000)}: exists; set another file, or --overwrite"
        )
    export = to_onnx(load_model(file), preprocessing)
    write_atomically(out, export.content)
    check = "not compared with PyTorch: the package onnxruntime is not installed"
    if export.difference is not None:
        check = f"ONNX Runtime's logits differ from PyTorch's by at most {export.difference:.1g}"
    display.print_text(f"ONNX (opset {OPSET}): {sanitize(out, 1000)}; {check}")


def export_hub_folder(
    file: Path, out: Path, run: Path | None, client_names: bool, overwrite: bool
) -> None:
    """Write a model as a folder for timm or transformers.

    Raises:
        ConfigError, OSError: the model or an option is unusable, or the folder is not empty.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out = {sanitize(out, 1000)}: is a file; set --out to a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise ConfigError(
            f"--out = {sanitize(out, 1000)}: is not empty; set another folder, or --overwrite, "
            "which replaces an export in it and keeps other files"
        )
    model = load_model(file)
    record = read_run_record(file, run, len(model.classes))
    library = write_hub_folder(model, out, record, client_names)
    loader = (
        'timm.create_model("local-dir:FOLDER", pretrained=True)'
        if library == "timm"
        else "AutoModelForImageClassification.from_pretrained(FOLDER, trust_remote_code=True)"
    )
    display.print_text(f"{library}: {sanitize(out, 1000)}; load it with {loader}")
    if record is None:
        display.print_text(
            "README.md states no figures, because MODEL lies in no finished run; "
            "set --run to its folder"
        )


def show_export(
    file: Path,
    output_format: str,
    out: Path,
    preprocessing: bool,
    run: Path | None,
    client_names: bool,
    overwrite: bool,
) -> None:
    """Export a model in one of `FORMATS`.

    Raises:
        ConfigError, OSError: as the format's function, or an option is not the format's.
    """
    if output_format not in FORMATS:
        raise ConfigError(f"--to = {sanitize(repr(output_format))}: must be {' or '.join(FORMATS)}")
    is_onnx = output_format == "onnx"
    if is_onnx and (run is not None or client_names):
        option = "--client-names" if client_names else "--run"
        raise ConfigError(f"{option}: requires --to huggingface, which writes a model card")
    if preprocessing and not is_onnx:
        raise ConfigError(
            "--preprocessing: requires --to onnx; a folder for the hub states the preprocessing"
        )
    if is_onnx:
        export_onnx(file, out, preprocessing, overwrite)
    else:
        export_hub_folder(file, out, run, client_names, overwrite)
