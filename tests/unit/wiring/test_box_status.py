"""Notes for users in `status`."""

from __future__ import annotations

from appliance.wiring.box_status import certificate_notes

DAY_S = 86400.0


def test_a_certificate_that_ends_within_two_months_is_said_with_what_to_do():
    now_s = 1_800_000_000.0
    ends = {"n2": now_s + 61 * DAY_S, "n1": now_s + 59 * DAY_S, "n0": now_s - DAY_S}
    box, node = certificate_notes(ends, now_s)
    assert box.startswith("the certificate of n0 ended on 2027-01-14: restart the box")
    assert node.startswith("the certificate of n1 ends on 2027-03-15: restart that node")
    assert certificate_notes({}, now_s) == []
