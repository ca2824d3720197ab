"""Table files: the methods, settings and seeds that a table compares.

A table file (configs/tables/*.toml) has

    title = "..."            # the table's subject
    seeds = [0, 1, 2]
    reference = "espresso C" # optional: compare every row with this one, paired by seed
    [common]                 # run-config of every run
    num-clients = 6
    [rows."espresso C"]      # run-config of one row
    method = "espresso"
    espresso.gmm = false
    [grid]                   # optional: run every row with every combination
    "espresso.epochs" = [5, 15]

A table that differs from another one in little names it, and has everything of it that it does not
set itself: keys of [common], rows, and the rest.

    extends = "frontier-pacs.toml"   # beside this file

A table that a paper has published (configs/papers/*.toml) also has

    source = "..."           # paper, table and page
    preset = "pacs"          # in [common] or a row: configs/data/pacs.toml, which they override;
                             # "worlds/pacs" is configs/worlds/pacs.toml
    [published."espresso C"] # the paper's figures, by client name, and `average`
    average = 71.3
    [lacks]                  # the paper's rows that are missing here, and why
    "DENSE" = "a baseline that OSFL does not have"

Each cell, which is a row with a seed, is one `osfl run`. A finished run with the same settings and
kits is reused. Runs whose clients would make the same payloads share them: the first row's run
makes them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from osfl.config import (
    NOT_IDENTITY,
    ConfigError,
    Scalar,
    flatten,
    payload_settings,
    sends_payloads,
)
from osfl.config.toml import read_toml
from osfl.kit.used_parts import digests_by_step, outside_digests
from osfl.settings import (
    RECOMMENDED,
    UnseenDataError,
    find_config,
    flatten_toml,
    merge_settings,
    read_overrides,
    resolve_config,
)
from osfl.util.text import quote, sanitize

KEYS = (
    "extends",
    "title",
    "source",
    "seeds",
    "reference",
    "common",
    "rows",
    "grid",
    "published",
    "lacks",
)
SECTIONS = ("common", "rows", "grid", "published", "lacks")
STRING_KEYS = ("extends", "title", "source", "reference")
# The global models of FedCADO and FedLMG
MODELS = ("FT", "MD", "SD")
# Keys of runs that begin with what another run left
_BEGINNINGS = ("payloads-from", "continue-from", "continue-from-model", "replace-clients")
# Keys that the table sets for every run
RESERVED = ("job-id", "runs-dir", "seed")


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    Attributes:
        settings: `key=value` arguments of `osfl run`.
        payload_key: digest of everything that shapes its clients' payloads; "" if there are none.
    """

    row: str
    seed: int
    job_id: str
    settings: tuple[str, ...]
    payload_key: str = ""


@dataclass(frozen=True)
class TableFile:
    """A parsed and checked table file.

    Attributes:
        rows: run-config of each row, with the common settings and the grid merged in.
        source: paper, table and page of the published figures.
        published: figures by row and column.
        lacks: rows of the published table that are missing here, with the reasons.
        unseen: rows whose data set is unavailable, with the reasons.
        reference: the row that all others are compared with; "" for none.
    """

    name: str
    title: str
    seeds: tuple[int, ...]
    rows: dict[str, dict[str, Scalar]]
    source: str = ""
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""

    def cells(self) -> list[Cell]:
        """Return all cells, seed by seed: the first seed alone makes a complete table."""
        cells = []
        for seed in self.seeds:
            for row, settings in self.rows.items():
                arguments = (*as_arguments(settings), f"seed={seed}")
                cells.append(_cell(self.name, row, arguments, seed))
        return cells


def _cell(table: str, row: str, settings: tuple[str, ...], seed: int) -> Cell:
    """Return a cell whose job id contains a digest of its configuration, kits and other weights.

    A finished run is therefore only reused for exactly the same run.
    """
    config, _ = resolve_config(settings)
    identity = {
        key: value
        for key, value in flatten(config).items()
        # A job may change its adaptation and test again; in a table these are different cells
        if key not in NOT_IDENTITY
        or (config.personalization.steps and key.startswith("personalization."))
        # So are runs that begin with what others left
        or (value and key in _BEGINNINGS)
    }
    kits = digests_by_step(config)
    digest = _digest([identity, {**kits, **outside_digests(config)}])[:8]
    name = re.sub(r"[^A-Za-z0-9_]+", "-", f"{table}-{row}").strip("-")[:45]
    payload_key = ""
    may_share = not (config.secure_sum or config.payloads_from or config.continue_from)
    if sends_payloads(config) and may_share:
        shaping = [payload_settings(config), kits.get("payloads", {}), config.sealing_key]
        payload_key = _digest(shaping)
    return Cell(row, seed, f"{name}-s{seed}-{digest}", settings, payload_key)


def _digest(inputs: list[Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def read_table(
    file: Path,
    overrides: Iterable[str] = (),
    seeds: str = "",
    rows: str = "",
    without_data: bool = False,
) -> TableFile:
    """Read a table file, and check every row's run-config.

    Args:
        overrides: `key=value` settings for every run, which override the file's.
        seeds, rows: comma-separated; "" for the file's.
        without_data: add rows whose data set is unavailable to `unseen`, with two placeholder
            classes, instead of raising.

    Raises:
        ConfigError: the file is invalid, a row does not exist, or a run-config is invalid.
    """
    content = _read_content(file)
    all_rows = _expand_rows(file, content)
    reference = str(content.get("reference", ""))
    if reference and reference not in all_rows:
        raise ConfigError(
            f"{file}: reference = {quote(reference)}: there is no such row; the rows are "
            f"{sanitize(', '.join(all_rows), 1000)}"
        )
    selected = _select_rows(file, all_rows, rows)
    return TableFile(
        file.stem,
        str(content.get("title", file.stem)),
        _parse_seeds(content, seeds),
        selected,
        str(content.get("source", "")),
        _published(file, content),
        {str(row): str(reason) for row, reason in content.get("lacks", {}).items()},
        _check_rows(file, selected, tuple(overrides), without_data),
        reference,
    )


def _read_content(file: Path) -> dict[str, Any]:
    """Return the checked content of a table file, over that of the one which it extends.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    content = read_toml(file)
    _check_keys(file, content)
    if name := content.get("extends", ""):
        base_file = file.parent / name
        try:
            base = read_toml(base_file)
        except ConfigError as error:
            raise ConfigError(f"{file}: extends = {quote(name)}: {error}") from None
        _check_keys(base_file, base)
        if "extends" in base:
            raise ConfigError(
                f"{file}: extends = {quote(name)}: that file extends another one itself; name "
                f"{quote(base['extends'])}"
            )
        content = _merged(base, content)
    _check_rows_and_grid(file, content)
    return content


def _merged(base: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return a table's content over that of another one, section by section."""
    sections = {
        part: {**base.get(part, {}), **content.get(part, {})}
        for part in SECTIONS
        if part in base or part in content
    }
    commons = (flatten_toml(part.get("common", {})) for part in (base, content))
    return {**base, **content, **sections, "common": merge_settings(*commons)}


def _check_keys(file: Path, content: dict[str, Any]) -> None:
    """Check the keys and types of a table file.

    Raises:
        ConfigError: one is invalid.
    """
    if unknown := set(content) - set(KEYS):
        raise ConfigError(
            f"{file}: {quote(sorted(unknown)[0])} is unknown; the keys of a table file are "
            f"{', '.join(KEYS)}"
        )
    _check_types(file, content)


def _check_rows_and_grid(file: Path, content: dict[str, Any]) -> None:
    """Check that a table has rows, with names that `--rows` accepts, and lists in its grid.

    Raises:
        ConfigError: it has not.
    """
    if not content.get("rows"):
        raise ConfigError(f"{file}: has no [rows.NAME]")
    for key, values in content.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{file}: [grid] {sanitize(key)}: must be a list of values")
    for name in content["rows"]:
        if "," in name:
            raise ConfigError(
                f"{file}: [rows.{quote(name)}]: a row's name must not have a comma, because "
                "commas separate the names in --rows"
            )


def _expand_rows(file: Path, content: dict[str, Any]) -> dict[str, dict[str, Scalar]]:
    """Return the settings of each row, with every combination of the grid."""
    common = content.get("common", {})
    axes = content.get("grid", {})
    rows: dict[str, dict[str, Scalar]] = {}
    for name, row in content["rows"].items():
        for values in product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            labels = [f"{key.rpartition('.')[2]}={_text(value)}" for key, value in point.items()]
            rows[" ".join([name, *labels])] = merge_settings(_with_preset(file, common, row), point)
    return rows


def _select_rows(
    file: Path, rows: dict[str, dict[str, Scalar]], names: str
) -> dict[str, dict[str, Scalar]]:
    """Return the rows named by --rows, or all.

    Raises:
        ConfigError: a row does not exist.
    """
    selected = [name.strip() for name in names.split(",") if name.strip()]
    if not selected:
        return rows
    if missing := [name for name in selected if name not in rows]:
        raise ConfigError(
            f"--rows {quote(missing[0])}: {file} has no such row; the rows are "
            f"{sanitize(', '.join(rows), 1000)}"
        )
    return {name: rows[name] for name in selected}


def _parse_seeds(content: dict[str, Any], seeds: str) -> tuple[int, ...]:
    """Return the seeds from --seeds, or the file's.

    Raises:
        ConfigError: one is not an integer.
    """
    values = seeds.split(",") if seeds else content.get("seeds", [0])
    try:
        return tuple(int(seed) for seed in values)
    except (TypeError, ValueError):
        raise ConfigError(
            f"seeds = {quote(seeds or content.get('seeds'))}: must be integers"
        ) from None


def _check_types(file: Path, content: dict[str, Any]) -> None:
    """Check that sections are tables, texts are strings, and seeds are a list.

    Raises:
        ConfigError: one has another type.
    """
    sections = {part: content[part] for part in SECTIONS if part in content}
    for part in ("rows", "published"):
        if isinstance(section := sections.get(part), dict):
            sections |= {f"{part}.{name}": row for name, row in section.items()}
    for name, value in sections.items():
        if not isinstance(value, dict):
            name = sanitize(name)
            raise ConfigError(f"{file}: {name} = {quote(value)}: must be a section, [{name}]")
    for name in STRING_KEYS:
        if not isinstance(content.get(name, ""), str):
            raise ConfigError(f"{file}: {name} = {quote(content[name])}: must be a string")
    if not isinstance(content.get("seeds", []), list):
        raise ConfigError(
            f"{file}: seeds = {quote(content['seeds'])}: must be a list of integers, such as [0]"
        )


def _check_rows(
    file: Path,
    rows: Mapping[str, dict[str, Scalar]],
    overrides: Iterable[str],
    without_data: bool,
) -> dict[str, str]:
    """Apply the overrides to every row, and check its run-config.

    Returns:
        with `without_data`, the rows whose classes are unknown, with the reasons. They get two
        placeholder classes.

    Raises:
        ConfigError: a run-config is invalid.
    """
    unseen: dict[str, str] = {}
    # Cached by data set: an unreachable hub takes half a minute to fail
    reasons: dict[Scalar, str] = {}
    for name, settings in rows.items():
        try:
            settings.update(read_overrides(overrides))
            if "method" not in settings:
                settings.update(merge_settings(read_overrides([RECOMMENDED]), settings))
            for key in RESERVED:
                if key not in settings:
                    continue
                raise ConfigError(
                    f"{key} = {settings[key]!r}: the table sets this key; use its seeds, --seeds "
                    "or --runs"
                )
            data = settings.get("data.name", "")
            if data not in reasons:
                try:
                    resolve_config(as_arguments(settings))
                    continue
                except UnseenDataError as error:
                    if not without_data:
                        raise
                    reasons[data] = str(error)
            unseen[name] = reasons[data]
            settings["data.classes"] = "one,two"
            resolve_config(as_arguments(settings))
        except ConfigError as error:
            raise ConfigError(f"{file}, row {quote(name)}: {error}") from None
    return unseen


def _with_preset(file: Path, common: dict[str, Any], row: dict[str, Any]) -> dict[str, Scalar]:
    """Merge a row's settings over the common ones, and both over their data preset.

    Raises:
        ConfigError: the preset does not exist.
    """
    settings = merge_settings(flatten_toml(common), flatten_toml(row))
    preset = settings.pop("preset", "")
    if not preset:
        return settings
    try:
        folder = "configs" if "/" in str(preset) else "configs/data"
        preset_settings = read_toml(find_config(f"{folder}/{preset}.toml"))
    except ConfigError as error:
        raise ConfigError(f"{file}: preset = {quote(preset)}: {error}") from None
    return {**flatten_toml(preset_settings), **settings}


def _published(file: Path, content: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the published figures by row and column.

    Raises:
        ConfigError: a row does not exist, or a figure is not a number.
    """
    published: dict[str, dict[str, float]] = content.get("published", {})
    for row, figures in published.items():
        # A run with several global models has a row for each, such as `FedLMG MD`
        base_row, _, model = row.rpartition(" ")
        if row not in content["rows"] and not (base_row in content["rows"] and model in MODELS):
            raise ConfigError(f"{file}: [published.{quote(row)}]: there is no such row")
        for column, figure in figures.items():
            if isinstance(figure, bool) or not isinstance(figure, int | float):
                raise ConfigError(
                    f"{file}: [published.{quote(row)}] {sanitize(column)} = {quote(figure)}: must "
                    "be a number"
                )
    return published


def as_arguments(settings: Mapping[str, Scalar]) -> list[str]:
    """Format a row's settings as arguments of `osfl run`."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
