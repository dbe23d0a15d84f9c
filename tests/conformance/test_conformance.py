"""All of openai-python's own tests pass against the control app."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.conformance.run import ROOT, SourcesMissing, fetch_sources, run_tests, served_app

EXPECTED_TESTS = 1022  # of openai 3.52.0, without three that skip themselves; fewer means that a file was not collected


def test_openai_sdk_own_tests_pass(tmp_path: Path):
    try:
        sources = fetch_sources(ROOT / "build" / "conformance")
    except SourcesMissing as error:
        pytest.skip(str(error))
    report = tmp_path / "report.xml"
    with served_app(tmp_path) as url:
        code = run_tests(sources, f"{url}/v1", tmp_path, [f"--junitxml={report}"])
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    assert code == 0
    assert int(suite.attrib["failures"]) == int(suite.attrib["errors"]) == 0
    assert int(suite.attrib["tests"]) - int(suite.attrib["skipped"]) == EXPECTED_TESTS
