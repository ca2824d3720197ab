"""Audit every kind of payload for membership inference.

python -m benchmarks.privacy.membership_inference                # every row
python -m benchmarks.privacy.membership_inference FedCGS FedPFT  # some; the others stay

This is `osfl audit` on the digits' six clients with ten images per class, each method with its
defaults, and the same test images for all.
"""

from collections.abc import Iterator, Sequence

from benchmarks.federation import CLIENTS, Settings, config_of
from benchmarks.harness import Experiment, Line
from osfl.cli.audit import ALL, COLUMNS, Finding, find_audited_clients, format_finding, run_audit
from osfl.util.files import make_private_folder

# The columns of `osfl audit` without client and attacked part
FIGURES = COLUMNS[2:]
REPEATS = 2
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
    "FedLMG, FedCADO, Local, epsilon 8": {"method": "fedlmg", "epsilon": 8.0},
    "FedCGS": {"method": "fedcgs"},
    "FedPFT": {"method": "fedpft"},
    "FedPFT, epsilon 1": {"method": "fedpft", "epsilon": 1.0},
}
EXPERIMENT = Experiment(
    __file__,
    ROWS,
    "Either a training image or a test image of the same class and client is in the payload; an "
    f"attack guesses which. Six clients of the digits with 100 images each, {REPEATS} payloads of "
    "each. The 95 % intervals hold for these images and payloads. TPR: members found at one false "
    "alarm in a thousand; the threshold rests on one image. ε at least: what all guesses or the "
    "surest fifth of them show, at 99 % for all statistics of a row together, 14 for each of its "
    "attacks. 50 % and 0.5 are chance. Likeness: PSNR of the most similar decoded latent to an "
    "image in the payload, and to one outside it, medians.",
)


def findings_of(row: str) -> list[Finding]:
    """Audit a row's clients, and all of them together."""
    config = config_of({**ROWS[row], "num-clients": len(CLIENTS)})
    return run_audit(config, list(find_audited_clients(config, "")), REPEATS, EXPERIMENT.work)


def lines_of(row: str, _: Sequence[int] = ()) -> Iterator[Line]:
    """Yield a line per attacked part: all clients together, and the worst client's AUC."""
    make_private_folder(EXPERIMENT.work)
    findings = findings_of(row)
    for finding in findings:
        if finding.client != ALL:
            continue
        areas = {
            peer.client: peer.auc[0]
            for peer in findings
            if peer.attacked == finding.attacked and peer.client != ALL
        }
        worst = max(areas, key=lambda client: areas[client])
        line = {"": f"{row}: {finding.attacked}"}
        line |= {name: text for name, text in format_finding(finding).items() if name in FIGURES}
        line["worst client's AUC"] = f"{areas[worst]:.2f} ({worst})"
        yield line


if __name__ == "__main__":
    EXPERIMENT.main(__doc__, lines_of)
