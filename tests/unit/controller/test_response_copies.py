"""What a gateway sends to be stored, and cannot be."""

from appliance.controller.responses.stored import _rows


def test_a_log_has_no_more_of_what_cannot_be_stored_than_a_line(caplog):
    """Of a time that is no number the error has all its text: a line of the log had as many bytes as a request."""
    copy = {
        "key": "k",
        "input": [],
        "previous": None,
        "response": {"id": "resp_1", "status": "completed", "created_at": "x" * 100_000},
    }
    assert _rows([copy, copy], {"k": "me"}) == []
    (line,) = caplog.messages
    assert line.startswith("a gateway sent 2 responses that cannot be stored") and len(line) < 300
