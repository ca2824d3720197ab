"""Write the files of a table."""

from pathlib import Path
from typing import Any

from osfl.tables.markdown import as_markdown
from osfl.tables.plot import plot
from osfl.tables.records import as_csv, describe_sharing, records_of
from osfl.tables.runner import Outcome
from osfl.tables.table_file import TableFile
from osfl.util.files import make_private_folder, write_atomically


def write_table(
    table: TableFile, outcomes: list[Outcome], out: Path, command: str, parallel_runs: int
) -> list[dict[str, Any]]:
    """Write `<name>.md`, `<name>.csv` and, if a row uploads anything, `<name>.png` into `out`.

    Returns:
        the records of the table.
    """
    ordered = sorted(outcomes, key=lambda outcome: list(table.rows).index(outcome.cell.row))
    records = [record for outcome in ordered for record in records_of(outcome)]
    make_private_folder(out)
    write_atomically(out / f"{table.name}.csv", as_csv(records).encode())
    page = as_markdown(table, records, command, parallel_runs)
    if sharing := describe_sharing(ordered):
        page += f"\n{sharing}\n"
    write_atomically(out / f"{table.name}.md", page.encode())
    plot_file = out / f"{table.name}.png"
    # An earlier table's plot would be misleading
    plot_file.unlink(missing_ok=True)
    if any(record.get("upload_bytes") and record["average"] >= 0 for record in records):
        plot(records, plot_file)
    return records
