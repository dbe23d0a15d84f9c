"""openai-python's own tests pass against the control app, every one of them."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.conformance.run import ROOT, SourcesMissing, fetch_sources, run_tests, served_app

EXPECTED_TESTS = 1022  # of openai 3.52.0, less the three that skip themselves; fewer: a file was not collected


def test_the_sdks_own_tests_pass(tmp_path: Path):
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
