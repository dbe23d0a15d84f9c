"""Configuration from a TOML file, environment variables and the command line: precedence and error messages."""

import json
import re
from pathlib import Path

import pytest

from appliance import DEFAULT_DATA_DIR
from appliance.config import FORMS, BoxConfig, ConfigError, load_config, load_resolved
from appliance.gateway.core.config import GatewayConfig

NODE = "[box]\nnode_address = '10.0.0.1'\n"


def load(tmp_path: Path, text: str, environ: dict[str, str] | None = None, **overrides) -> BoxConfig:
    path = tmp_path / "box.toml"
    path.write_text(text)
    return load_config(path, overrides, environ or {})


def test_load_config_without_settings_returns_defaults(tmp_path):
    config = load_config(None, {"data_dir": str(tmp_path)}, {})
    assert (config.box.host, config.box.port, config.box.devices) == ("127.0.0.1", 8000, "auto")
    assert config.box.hub_offline, "a box calls nobody unless it is told to"
    assert config.box.data_dir == str(tmp_path)
    elsewhere = load_config(None, {}, {}).box.data_dir
    assert elsewhere == str(Path(DEFAULT_DATA_DIR).expanduser()), "where commands look for it"


def test_load_config_prefers_command_line_then_variables_then_file(tmp_path):
    text = '[box]\nport = 1\nhost = "a"\ndevices = 3\n[scheduler]\nturn_s = 7\njob_dwell_s = 8\n'
    environ = {"APPLIANCE_PORT": "2", "APPLIANCE_HOST": "b", "APPLIANCE_SCHEDULER__TURN_S": "9.5"}
    config = load(tmp_path, text, environ, port=3, host=None)
    assert (config.box.port, config.box.host, config.box.devices) == (3, "b", 3)
    assert (config.scheduler.turn_s, config.scheduler.job_dwell_s) == (9.5, 8)


def test_load_config_reads_every_section_from_environment(tmp_path):
    environ = {
        "APPLIANCE_DEVICES": "4",
        "APPLIANCE_HUB_OFFLINE": "false",
        "APPLIANCE_GATEWAY__LIMITS__SEQUENCES": "5",
        "APPLIANCE_GATEWAY__HOLDS__HOLD_S": "60",
        "APPLIANCE_CONTROLLER__ORGANIZATION": "acme",
        "APPLIANCE_SERVE__MAX_NUM_SEQS": "8",
        "APPLIANCE_WEIGHTS__BUDGET_SHARE": "0.25",
        # These variables are not settings: commands find a box by them, Kubernetes adds them, or they are empty.
        "APPLIANCE_URL": "x",
        "APPLIANCE_API_KEY": "x",
        "APPLIANCE_BOX": "0123abcd",
        "APPLIANCE_PORT": "",
        "APPLIANCE_SERVICE_HOST": "10.0.0.1",
        "PATH": "/bin",
    }
    config = load_config(None, {"data_dir": str(tmp_path)}, environ)
    assert (config.box.devices, config.box.hub_offline, config.box.port) == (4, False, 8000)
    assert (config.gateway.limits.sequences, config.gateway.holds.hold_s) == (5, 60)
    assert (config.controller.organization, config.serve.max_num_seqs) == ("acme", 8)
    assert config.weights.budget_share == 0.25


def test_load_config_uses_hf_endpoint_as_fallback(tmp_path):
    environ = {"HF_ENDPOINT": "http://mirror:8080/"}
    assert load(tmp_path, "", environ).box.hub_endpoint == "http://mirror:8080"
    assert load(tmp_path, '[box]\nhub_endpoint = "http://ours"', environ).box.hub_endpoint == "http://ours"
    assert load(tmp_path, "", environ | {"APPLIANCE_HUB_ENDPOINT": "http://ours"}).box.hub_endpoint == "http://ours"


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("[box]\nprot = 1", {}, "box.toml: unknown key box.prot; did you mean port? (known there: data_dir, devices,"),
        ("[bxo]\nport = 1", {}, "box.toml: unknown key bxo; did you mean box? (known there: alerts, backup, box"),
        ("[gateway.limits]\nm = 1", {}, "box.toml: unknown key gateway.limits.m (known there: "),
        ("[box]\nport = 'x'", {}, "box.toml: box.port is 'x': Input should be a valid integer"),
        ("[box]\nport = 70000", {}, "box.toml: box.port is 70000"),
        ("[box]\ndevices = 0", {}, "box.toml: box.devices is 0"),
        ("[box]\ndevices = 'some'", {}, "Input should be 'auto' or Input should be a valid integer"),
        ("[scheduler]\nturn_s = 0", {}, "box.toml: scheduler.turn_s is 0"),
        ("[power.limits_w]\nfast = {a = 1}", {}, "box.toml: power.limits_w.fast is "),
        ("[gateway.limits]\nsequences = -1", {}, "box.toml: gateway.limits.sequences: -1 given"),
        ("[gateway]\ntls_cert_path = 'x'", {}, "tls_cert_path and tls_key_path: only one is set, expected both"),
        ("box = 3", {}, "box.toml: box is 3; expected a section, [box]"),
        ("[box\n", {}, "box.toml is not TOML"),
        ("", {"APPLIANCE_PORT": "tcp://10.0.0.1"}, "the environment: APPLIANCE_PORT is 'tcp://10.0.0.1'"),
        ("", {"APPLIANCE_PROT": "1"}, "unknown variable APPLIANCE_PROT; did you mean APPLIANCE_PORT?"),
        ("", {"APPLIANCE_SERVE__N": "1"}, "the environment: unknown key APPLIANCE_SERVE__N"),
        ("[box]\nport = 1", {"APPLIANCE_PORT": "x"}, "the environment: APPLIANCE_PORT is 'x'"),
        (f"{NODE}node_port = 12000", {}, "the configuration: [box]: node_port is 12000; expected a port other"),
        (f"{NODE}port = 6380", {}, "the configuration: [box]: node_port is 6380; expected a port other"),
        ("[observability]\notlp_endpoint = 'https://a:b@c:4318'", {}, "observability.otlp_endpoint is 'https://***@c"),
        ("", {"HF_ENDPOINT": "https://me:secret@hub"}, "HF_ENDPOINT is 'https://***@hub"),
        ("[weights.remote]\nurl = '/m'\nendpoint = 'https://k:s@minio'", {}, "endpoint is 'https://***@minio"),
    ],
)
def test_config_errors_name_source_and_key(tmp_path, text, environ, said):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environ)
    assert said in str(caught.value)


def test_load_config_with_missing_or_invalid_file_raises(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*none.toml: No such file"):
        load_config(tmp_path / "none.toml", {}, {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "binary.toml", {}, {})


def test_load_config_finds_file_in_data_directory(tmp_path):
    (tmp_path / "appliance.toml").write_text("[box]\nport = 4321\n")
    assert load_config(None, {"data_dir": str(tmp_path)}, {}).box.port == 4321
    assert load_config(None, {}, {"APPLIANCE_DATA_DIR": str(tmp_path)}).box.port == 4321
    (tmp_path / "appliance.toml").write_text("[box]\ndata_dir = '/elsewhere'\n")
    with pytest.raises(ConfigError, match="cannot set another"):
        load_config(None, {"data_dir": str(tmp_path)}, {})
    assert load_config(tmp_path / "appliance.toml", {}, {}).box.data_dir == "/elsewhere"


def test_certificate_paths_are_relative_to_config_file(tmp_path):
    config = load(tmp_path, "[gateway]\ntls_cert_path = 'cert.pem'\ntls_key_path = '/etc/key.pem'")
    assert config.gateway.tls_cert_path == str(tmp_path / "cert.pem")
    assert config.gateway.tls_key_path == "/etc/key.pem"


def test_load_resolved_restores_dumped_config(tmp_path):
    config = load(
        tmp_path, "[gateway.limits]\nsequences = 5\n[gateway]\ntls_cert_path='c'\ntls_key_path='k'", port=1234
    )
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    assert load_resolved(file) == config
    file.write_text(json.dumps({"other": {}}))
    with pytest.raises(ConfigError, match="unknown key other"):
        load_resolved(file)


def test_gateway_config_accepts_gateway_section_of_box_config(tmp_path):
    """`appliance.boot.main` passes the section to the gateway with four more keys."""
    config = load_config(None, {"data_dir": str(tmp_path)}, {})
    added = {"host": "127.0.0.1", "port": 1, "controller_socket": "/c", "bus_socket": "/b"}
    built = GatewayConfig.from_mapping(config.gateway.model_dump() | added)
    assert (built.limits, built.holds) == (config.gateway.limits, config.gateway.holds)
    assert built.shutdown_s == config.gateway.shutdown_s and built.access_log == config.gateway.access_log


def test_public_url_is_base_of_login_callback(tmp_path):
    path, login = tmp_path / "box.toml", 'issuer = "https://l.example.org"\nclient_id = "b"\ngroups = {a = ["read"]}\n'
    path.write_text(f'[box]\npublic_url = "https://box.example.org/v1/"\n[controller.oidc]\n{login}')
    config = load_config(path, environ={})
    assert config.public_url == "https://box.example.org"
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert load_resolved(tmp_path / "config.json") == config
    for url in ("", "http://box.example.org"):
        path.write_text(f'[box]\npublic_url = "{url}"\n[controller.oidc]\n{login}')
        with pytest.raises(ConfigError, match=r"public_url.*expected a URL that begins with https://"):
            load_config(path, environ={})
    path.write_text('[box]\npublic_url = "box.example.org"\n')
    with pytest.raises(ConfigError, match=r"public_url.*expected a URL that begins with https://"):
        load_config(path, environ={})


@pytest.mark.parametrize(
    "text",
    [
        "[backup]\nurl = 'ftp://key:secret@host/x'",
        "[backup]\nurl = 'https://secret@host/x'",
        "[backup]\nendpoint = 'key:secret@minio'",
        "[backup]\nendpoint = 'https:/key:secret@minio'",
        "[weights.remote]\nurl = 'ftp://key:se@secret@host'",
        "[observability]\notlp_endpoint = 'http://key:secret@host x'",
        "[gateway]\ncors_origins = ['https://key:secret@page']",
    ],
)
def test_config_errors_hide_credentials(tmp_path, text: str):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, {})
    assert "secret" not in str(caught.value) and "secret" not in repr(caught.value)
    assert text.split("\n")[1].split(" = ")[0] in str(caught.value), "it names the key"


def test_config_error_describes_pattern_in_words():
    """Messages describe each pattern instead of quoting the regular expression."""
    told = re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', json.dumps(BoxConfig.model_json_schema()))
    assert {json.loads(one) for one in told} == FORMS.keys()
    with pytest.raises(ConfigError, match="ORGANIZATION is '客服公司': expected 1 to 32 characters of a-z"):
        load_config(None, {}, {"APPLIANCE_CONTROLLER__ORGANIZATION": "客服公司"})
