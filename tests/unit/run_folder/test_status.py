"""`status.json`, which must not be rewritten at each change of thousands of clients."""

from pathlib import Path

from osfl.run_folder.status import AT_ONCE, Status, read_status


def test_each_change_of_few_clients_is_written_at_once(tmp_path: Path) -> None:
    status = Status(tmp_path)
    for number in range(AT_ONCE):
        status.client(f"client-{number}", "joined")
        assert len(read_status(tmp_path)["clients"]) == number + 1


def test_changes_of_many_clients_are_written_together(tmp_path: Path) -> None:
    """And no later than the phase's next progress, if its last step is done, or its next phase."""
    status = Status(tmp_path)
    count = 1000
    for number in range(count):
        status.client(f"client-{number}", "joined")
    written = len(read_status(tmp_path)["clients"])
    assert AT_ONCE <= written < count
    status.advance(count, count)
    assert len(read_status(tmp_path)["clients"]) == count
    status.client("client-1", "asked")
    status.phase("waiting for payloads")
    assert read_status(tmp_path)["clients"]["client-1"] == "asked"
