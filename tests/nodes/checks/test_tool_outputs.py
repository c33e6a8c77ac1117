"""Outputs of NVIDIA's and libfabric's programs are read as public sources show them.

Nothing of them is trusted: other lines are left out, and numbers and names are bounded.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nodes.checks.check_calls import call
from unbroken.nodes.checks import efa, gpu, nvlink, tools
from unbroken.nodes.checks.dcgm import read_diagnosis
from unbroken.spec.nodes.kinds import Outcome

# `nvidia-smi nvlink -s`: of machines with A100-SXM4 and H100, and of one with H100 PCIe cards and
# bridges, as their users have published them (nvlink inspection notes, 2024 to 2026).
A100 = "GPU {}: NVIDIA A100-SXM4-40GB (UUID: GPU-fde0a018-ad1a-bbec-ccf6-50a9f64bd178)\n"
H100 = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-abcdefab-cdef-abdc-abcd-abababababab)\n"
BRIDGED = "GPU {}: NVIDIA H100 PCIe (UUID: GPU-6968dfc2-d444-d92c-c36b-6abe53445cb9)\n"
NONE_ACTIVE = "NVML: Unable to retrieve Nvlink information as all links are inActive\n"
UNSUPPORTED = "\t NVML: Unable to retrieve NVLink information: Not Supported\n"


def shown(head: str, number: int, links: Mapping[int, str]) -> str:
    """The lines of one GPU."""
    return head.format(number) + "".join(f"\t Link {n}: {one}\n" for n, one in links.items())


def all_links(count: int, speed: str, **other: str) -> dict[int, str]:
    """Links with one speed, but for some of other numbers (`l5="<inactive>"`)."""
    return {n: other.get(f"l{n}", speed) for n in range(count)}


def judged(text: str) -> dict[str, tuple[Outcome, str]]:
    found = nvlink.judge(nvlink.read_links(text))
    return {one.test: (one.outcome, one.message) for one in found}


def test_eight_gpus_with_all_links_are_good() -> None:
    text = "".join(shown(A100, gpu, all_links(12, "25 GB/s")) for gpu in range(8))
    assert judged(text) == {
        "nvlink": (Outcome.PASS, "8 GPUs, the fewest active links of one, at 25 GB/s")
    }


def test_the_gpu_with_an_inactive_link_is_named() -> None:
    gpus = [all_links(18, "26.562 GB/s") for _ in range(8)]
    gpus[3] = all_links(18, "26.562 GB/s", l17="<inactive>", l4="<inactive>")
    text = "".join(shown(H100, number, links) for number, links in enumerate(gpus))
    assert judged(text) == {
        "gpu3-nvlink": (
            Outcome.FAIL,
            "GPU 3: fewer links are active than of the others; inactive: 4, 17",
        )
    }


def test_the_one_gpu_without_any_active_link_is_named() -> None:
    text = "".join(shown(H100, gpu, all_links(18, "53.125 GB/s")) for gpu in (0, 1, 3, 4))
    text += H100.format(2) + NONE_ACTIVE
    assert judged(text)["gpu2-nvlink"][0] is Outcome.FAIL


def test_a_link_below_the_speed_of_the_others_is_named() -> None:
    gpus = [all_links(18, "26.562 GB/s") for _ in range(4)]
    gpus[1] = all_links(18, "26.562 GB/s", l5="13.281 GB/s")
    text = "".join(shown(H100, number, links) for number, links in enumerate(gpus))
    assert judged(text) == {
        "gpu1-nvlink": (Outcome.FAIL, "GPU 1: link 5 is slower than the others")
    }


def test_cards_with_bridges_are_good_and_those_without_are_no_fault() -> None:
    bridged = all_links(18, "26.562 GB/s", **dict.fromkeys(("l4", "l5", "l10"), "<inactive>"))
    pair = shown(BRIDGED, 0, bridged) + shown(BRIDGED, 1, bridged)
    assert judged(pair)["nvlink"][0] is Outcome.PASS
    rest = shown(BRIDGED, 2, bridged) + shown(BRIDGED, 3, bridged)
    silent = "".join(BRIDGED.format(number) + NONE_ACTIVE for number in (4, 5))
    outcome, text = judged(pair + rest + silent)["nvlink"]
    assert (outcome, text) == (
        Outcome.UNKNOWN,
        "GPUs without an active link: 4, 5; bridges join only pairs",
    )


def test_gpus_without_nvlink_are_skipped_not_passed() -> None:
    text = "".join(f"GPU {n}: NVIDIA L4 (UUID: GPU-0000feed)\n{UNSUPPORTED}" for n in range(4))
    assert judged(text) == {"nvlink": (Outcome.SKIPPED, "these GPUs have no NVLink")}
    silent = "".join(A100.format(number) + NONE_ACTIVE for number in range(2))
    assert judged(silent)["nvlink"][0] is Outcome.UNKNOWN


@given(st.text())
def test_no_text_breaks_the_reading_of_links(text: str) -> None:
    for one in (text, f"GPU 0: x\n Link 0: {text}", f"GPU {text}: x\n Link {text}: 1 GB/s"):
        list(nvlink.judge(nvlink.read_links(one)))


# `fi_info -p efa -t FI_EP_RDM` of a p4d.24xlarge, and with libfabric 2 (aws-ofi notes, 2026).
FI_INFO = """provider: efa
    fabric: EFA-fe80::10d8:baff:fec9:6c1
    domain: rdmap16s27-rdm
    version: 111.20
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: EFA-fe80::1011:66ff:feeb:c5af
    domain: rdmap32s27-rdm
    version: 111.20
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
"""
FI_INFO_2 = """provider: efa
    fabric: efa-direct
    domain: rdmap16s27-rdm
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: efa
    domain: rdmap16s27-rdm
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
"""
# `efa_test.sh` of the EFA installer (EC2 user guide, "Get started with EFA and MPI").
PINGPONG = """Starting server...
Starting client...
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      10      =10      1.2k        0.02s      0.06    1123.55       0.00
256     10      =10      5k          0.00s     17.66      14.50       0.07
1k      10      =10      20k         0.00s     67.81      15.10       0.07
4k      10      =10      80k         0.00s    237.45      17.25       0.06
64k     10      =10      1.2m        0.00s    921.10      71.15       0.01
1m      10      =10      20m         0.01s   2122.41     494.05       0.00
"""


def test_domains_of_efa_are_read_and_the_fabric_is_named_only_where_there_are_two() -> None:
    found = efa.read_domains(FI_INFO)
    assert found == [efa.FabricDomain("rdmap16s27-rdm"), efa.FabricDomain("rdmap32s27-rdm")]
    assert [one.device for one in found] == ["rdmap16s27", "rdmap32s27"]
    assert efa.read_domains(FI_INFO_2) == [efa.FabricDomain("rdmap16s27-rdm", "efa")]


@pytest.mark.parametrize("said", ["", "fi_getinfo: -61\n", "provider: efa\n    domain: -rf /\n"])
def test_what_is_no_domain_is_none(said: str) -> None:
    assert efa.read_domains(said) == []


def test_figures_of_a_pingpong_are_told_as_in_hyperpods_log() -> None:
    found = efa.read_pingpong(PINGPONG)
    assert found is not None
    assert found.best == 2.1224
    assert found.text() == (
        "MaxBw: 2122.410000, AvgBw: 561.081667, MaxTypicalLat: 1123.550000, "
        "MinTypicalLat: 14.500000, AvgLat: 289.266667"
    )


@given(st.text())
def test_no_text_breaks_the_reading_of_a_pingpong(text: str) -> None:
    row = f"64 10 =10 1k 0s {text} {text} 0\n64 10 =10 1k 0s nan inf 0"
    for one in (text, row):
        found = efa.read_pingpong(one)
        assert found is None or min(found.latencies) > 0
        efa.read_domains(f"provider: efa\n fabric: {one}\n domain: {one}")


def test_the_device_that_fails_or_is_slow_beside_the_others_is_at_fault() -> None:
    good, slow = efa.LoopbackFigures((9000.0,), (20.0,)), efa.LoopbackFigures((900.0,), (90.0,))
    why = "fi_pingpong did not end in time"
    measured = {"e0": good, "e1": slow, "e2": good, "e3": why, "e4": good}
    found = {one.test: one.outcome for one in efa.judge(measured)}
    assert [name for name, outcome in found.items() if outcome is Outcome.FAIL] == [
        "efa-loopback-e1",
        "efa-loopback-e3",
    ]
    # Where half of them fail, or more, it is no device's own fault.
    for one in efa.judge({"e0": good, "e1": why}):
        assert one.outcome is not Outcome.FAIL


@pytest.mark.slow
def test_hardware_that_is_not_there_is_skipped(tmp_path: Path) -> None:
    if gpu.nvml_count() != gpu.NO_DRIVER or efa.devices():
        pytest.skip("this machine has such hardware")
    tests = ("gpu-product", "gpu-memory", "nvlink", "dcgm", "efa-loopback")
    only = [word for name in tests for word in ("--only", name)]
    found = {one["test"]: one for one in call(tmp_path, "InstanceStress", *only)}
    assert {name: one["outcome"] for name, one in found.items()} == dict.fromkeys(tests, "skipped")
    assert found["efa-loopback"]["message"] == "this machine has no EFA device"
    expected = call(tmp_path, "InstanceStress", "--only", "nvlink", "--gpus", "8")[0]
    assert expected["outcome"] == "unknown", "eight should be there"
    expected = call(tmp_path, "InstanceStress", "--only", "efa-loopback", "--efa", "4")[0]
    assert expected["message"] == "this machine has no EFA device; 4 should be there"
    assert expected["outcome"] == "unknown"


def test_efa_devices_are_those_of_its_driver(tmp_path: Path) -> None:
    for name, driver in (("rdmap0s29", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "class" / name / "device").mkdir(parents=True)
        (tmp_path / "class" / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    assert efa.devices(tmp_path / "class") == ["rdmap0s29"]
    assert efa.devices(tmp_path / "absent") == []


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fi_pingpong") is None, reason="needs Debian's libfabric-bin")
def test_a_real_pingpong_over_tcp_is_measured() -> None:
    program, info = tools.find("fi_pingpong"), tools.find("fi_info")
    assert program is not None
    assert info is not None
    provider = "tcp;ofi_rxm"
    done = tools.run([info, "-p", provider, "-t", "FI_EP_RDM"], 30)
    domain = next(one for one in efa.read_domains(done.text.decode()) if one.name == "lo")
    found = efa.measure(program, provider, domain)
    assert isinstance(found, efa.LoopbackFigures), found
    assert len(found.bandwidths) == 6
    assert str(efa.measure(program, "absent", domain)).startswith("fi_pingpong ended with ")


@pytest.mark.slow
def test_a_program_ends_at_its_time_or_with_too_much_output() -> None:
    late = tools.run([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(99)"], 1)
    assert (late.text, late.why()) == (b"1\n", "did not end in time")
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    assert len(tools.run([sys.executable, "-c", endless], 60).text) == tools.OUTPUT_BYTES_MAX
    broken = tools.run([sys.executable, "-c", "raise SystemExit('no host engine')"], 60)
    assert broken.why() == "ended with 1: no host engine"


def diagnosis(*results: Mapping[str, Any], name: str = "software") -> bytes:
    """A document of DCGM 4, as `dcgmi diag -j` writes it (DCGM 4.2 to 4.5)."""
    tests = [{"name": name, "results": results, "test_summary": {"status": "Fail"}}]
    category = {"category": "Deployment", "tests": tests}
    content = {
        "DCGM Diagnostic": {"test_categories": [category]},
        "metadata": {"version": "4.5.3", "Driver Version Detected": "580.126.09"},
    }
    return json.dumps(content).encode() + b"\nDone.\n"


def failure(gpu: int, severity: int, warning: str) -> dict[str, Any]:
    said = {"error_category": 8, "error_id": 29, "error_severity": severity, "warning": warning}
    return {"entity_group": "GPU", "entity_id": gpu, "status": "Fail", "warnings": [said]}


def test_a_setting_that_dcgm_complains_of_is_no_fault() -> None:
    """Use a GPU without persistence mode: level 1 then fails with severity 5 (CONFIG)."""
    off = "Persistence Mode: Persistence mode for GPU {} is disabled."
    (found,) = read_diagnosis(diagnosis(*(failure(n, 5, off.format(n)) for n in range(8))))
    assert found.outcome is Outcome.UNKNOWN
    assert found.message.startswith("not a fault of the hardware: GPU 0: Persistence Mode")
    isolate = failure(3, 2, "double bit error")
    (found,) = read_diagnosis(diagnosis(failure(0, 5, off), isolate, name="memory"))
    assert (found.outcome, found.message) == (Outcome.FAIL, "GPU 3: double bit error")


def test_forms_of_older_versions_are_read() -> None:
    """DCGM 1 to 2 name several GPUs in one text, and write states in capitals (its own tests)."""
    result = {"gpu_ids": "0,1,2,3", "status": "FAIL", "warnings": "page retirement"}
    (found,) = read_diagnosis(diagnosis(result, name="Page Retirement"))
    assert (found.test, found.outcome) == ("dcgm-page-retirement", Outcome.FAIL)
    assert found.message == "GPU 0,1,2,3: page retirement"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["test_categories", "tests", "results", "name", "status", "warnings"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_no_document_breaks_the_reading_of_a_diagnosis(content: Any) -> None:
    list(read_diagnosis(json.dumps({"DCGM Diagnostic": content}).encode()))
