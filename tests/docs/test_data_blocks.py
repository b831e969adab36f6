"""What the pages show as YAML and JSON is what the programs that it is for would read, or write."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from runtime.observe.audit import AuditLog
from tests.docs.blocks import PAGES, Block, blocks

DATA = {
    language: [block for page in PAGES for block in blocks(page) if block.language == language]
    for language in ("json", "yaml")
}


def shown(text: str) -> Block:
    (block,) = (block for found in DATA.values() for block in found if text in block.code)
    return block


CERTIFICATE, POD, LINE = shown("kind: Certificate"), shown("volumeMounts"), shown('"action"')


def test_all_data_blocks_are_tested() -> None:
    """Every YAML and JSON block of the pages is tested here."""
    assert {str(block) for found in DATA.values() for block in found} == {
        str(b) for b in (CERTIFICATE, POD, LINE)
    }


def test_certificate_block_serves_both_sides() -> None:
    """The certificate of the page serves both sides and has the secret that the pod mounts."""
    asked = yaml.safe_load(CERTIFICATE.code)["spec"]
    assert {"server auth", "client auth"} <= set(asked["usages"])
    assert all("." in name for name in asked["dnsNames"])
    mounted = yaml.safe_load(POD.code)["volumes"][0]["secret"]["secretName"]
    assert mounted == asked["secretName"]


def test_pod_block_is_known_to_kubernetes() -> None:
    """The pod of the page has only fields that Kubernetes knows."""
    kubernetes = pytest.importorskip("kubernetes", reason="needs PyPI's kubernetes")
    api = kubernetes.client.ApiClient()
    part = yaml.safe_load(POD.code)
    container = {
        "name": "task",
        "image": "mnist",
        "volumeMounts": part["volumeMounts"],
        "env": part["env"],
    }
    pod = {"spec": {"containers": [container], "volumes": part["volumes"]}}
    assert (
        api.sanitize_for_serialization(
            api.deserialize(json.dumps(pod), "V1Pod", "application/json")
        )
        == pod
    )
    assert {mount["name"] for mount in part["volumeMounts"]} == {
        volume["name"] for volume in part["volumes"]
    }
    (variable,) = part["env"]
    assert variable["value"] == part["volumeMounts"][0]["mountPath"]


def test_audit_line_has_written_fields(tmp_path: Path) -> None:
    """The audit line of the page has the fields that are written."""
    line = ast.literal_eval(LINE.code)
    log = AuditLog(line["task"], tmp_path / "audit")
    log.write(
        line["action"],
        peer=line["peer"],
        outcome=line["outcome"],
        who=line["who"],
        what=line["what"],
    )
    log.close()
    written = json.loads((tmp_path / "audit").read_text())
    assert {**written, "time": line["time"]} == line and list(written) == list(line)
