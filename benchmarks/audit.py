"""What every kind of payload gives away of whose images made it; to
benchmarks/tables/audit.{md,json}.

python -m benchmarks.audit                  # every row
python -m benchmarks.audit FedCGS FedPFT    # some; the table keeps its other rows

As `osfl audit` on the digits' six clients, of ten images a class, with each method's defaults, and
the same test images for all. Interrupted, the same command goes on.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import TABLES, command_line, listed, some_of, with_others, write_table
from benchmarks.clients import Settings
from osfl.cli import display
from osfl.cli.audit import ALL, COLUMNS, Finding, audited, find_players, words_of
from osfl.config import parse_run_config
from osfl.settings import default_config
from osfl.util.files import make_private_folder

WORK = Path(__file__).resolve().parent.parent / "runs" / "audit"
# Of `osfl audit`'s columns, without who and what
FIGURES = COLUMNS[2:]
ROWS: dict[str, Settings] = {
    "prompts-domain": {"method": "prompts-domain"},
    "votes": {"method": "votes"},
    "votes, epsilon 1": {"method": "votes", "epsilon": 1.0},
    "domain-vector": {"method": "domain-vector"},
    "domain-vector, epsilon 8": {"method": "domain-vector", "epsilon": 8.0},
    "domain-vector, epsilon 1": {"method": "domain-vector", "epsilon": 1.0},
    "FedDEO": {"method": "feddeo"},
    "FedDEO, epsilon 8": {"method": "feddeo", "epsilon": 8.0},
    "OSCAR": {"method": "oscar"},
    "OSCAR, epsilon 1": {"method": "oscar", "epsilon": 1.0},
    "OSCAR-pooled": {"method": "oscar-pooled"},
    "OSCAR-pooled, epsilon 1": {"method": "oscar-pooled", "epsilon": 1.0},
    "FGL": {"method": "fgl"},
    "FedDISC": {"method": "feddisc"},
    "FedDISC, epsilon 1": {"method": "feddisc", "epsilon": 1.0},
    "Espresso": {"method": "espresso"},
    "FedBiP": {"method": "fedbip"},
    "FedLMG, FedCADO, Local": {"method": "fedlmg"},
    "FedCGS": {"method": "fedcgs"},
    "FedPFT": {"method": "fedpft"},
    "FedPFT, epsilon 1": {"method": "fedpft", "epsilon": 1.0},
}


def found_of(row: str, repeats: int) -> list[Finding]:
    """Of a row's clients, and of all together."""
    config = parse_run_config({**default_config(), **ROWS[row], "num-clients": 6})
    return audited(config, list(find_players(config, "")), repeats, WORK)


def lines_of(row: str, found: Sequence[Finding]) -> list[dict[str, str]]:
    """What all clients together show of each thing attacked, and the worst single one's AUC."""
    lines = []
    for one in found:
        if one.client != ALL:
            continue
        areas = {
            other.client: other.auc[0]
            for other in found
            if other.attacked == one.attacked and other.client != ALL
        }
        worst = max(areas, key=lambda client: areas[client])
        line = {"": f"{row}: {one.attacked}"}
        line |= {name: text for name, text in words_of(one).items() if name in FIGURES}
        line["worst client's AUC"] = f"{areas[worst]:.2f} ({worst})"
        lines.append(line)
    return lines


def in_order(lines: list[dict[str, str]], file: Path, about: str) -> list[dict[str, str]]:
    """With the lines that the table has of other rows, as `ROWS` has them."""
    before = json.loads(file.read_text())["rows"] if file.is_file() else []
    names = dict.fromkeys(line[""] for line in (*lines, *before))
    rows = list(ROWS)
    order = sorted(names, key=lambda name: rows.index(name.rpartition(": ")[0]))
    return with_others(lines, file, about, order)


def main() -> None:
    """Make the table, and keep it."""
    parser = command_line(__doc__)
    parser.add_argument("rows", nargs="*", help=f"some of {listed(ROWS)}; none: all")
    parser.add_argument("--repeats", type=int, default=2, help="payloads of each client")
    given = parser.parse_args()
    rows = some_of(given.rows, ROWS, parser)
    make_private_folder(WORK)
    lines = []
    for row in rows:
        display.console.print(row)
        lines += lines_of(row, found_of(row, given.repeats))
    about = (
        "Either a training image or a test image of the same class and client is in the payload; "
        "an attack guesses which. Six clients of the digits with 100 images each, "
        f"{given.repeats} payloads of each. The 95 % intervals hold for these images and payloads. "
        "TPR: members found at one false alarm in a thousand; the threshold rests on one image. "
        "ε at least: what all guesses or the surest fifth of them show, at 99 % for all "
        "statistics of a row together, 14 for each of its attacks. 50 % and 0.5 are chance. "
        "Likeness: PSNR of the most similar decoded latent to an image in the payload, and to one "
        f"outside it, medians. Command: `python -m benchmarks.audit --repeats {given.repeats}`."
    )
    table = TABLES / "audit"
    write_table(table, in_order(lines, table.with_suffix(".json"), about), f"{about}")


if __name__ == "__main__":
    main()
