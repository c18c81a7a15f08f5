from __future__ import annotations

import pytest

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.machines import (
    GPUS,
    HOSTS,
    LINK_SHARE,
    NO_DRIVES,
    Cluster,
    Resource,
    default_machine,
    find_gpu,
    gpu_of_device,
    parse_drives,
    parse_network,
    share_of_rank,
)


@pytest.mark.parametrize(
    ("texts", "drives"),
    [
        (["7GB/s"], (1, 7e9, 7e9)),
        (["2x7GB/s"], (2, 14e9, 14e9)),
        (["7GB/s/5GB/s"], (1, 7e9, 5e9)),
        (["2 x 7.5 gb/s / 5GB/s", "3GB/s"], (3, 18e9, 13e9)),
    ],
)
def test_drives_that_are_not_here(texts: list[str], drives: tuple[int, float, float]) -> None:
    found = parse_drives(texts)
    assert found is not None
    assert (found.count, found.read_bytes, found.write_bytes) == drives and found.takes_turns
    more = found.times(found.count + 1)
    assert more.read_bytes == pytest.approx(found.read_bytes * (found.count + 1) / found.count)


def test_what_is_no_drive_is_a_directory() -> None:
    assert parse_drives(["/mnt/nvme0", "2x7"]) is None
    with pytest.raises(ConfigError, match="mixes drives and directories"):
        parse_drives(["/mnt/nvme0", "7GB/s"])
    with pytest.raises(ConfigError, match="2x7GBs is not a speed of drives; write 2x7GB/s"):
        parse_drives(["2x7GBs"])
    with pytest.raises(ConfigError, match="faster than 0"):
        parse_drives(["0x7GB/s"])


def test_gpus_by_name() -> None:
    assert find_gpu("RTX4090")[0] == "rtx4090" and find_gpu("a100")[0] == "a100-80"
    with pytest.raises(ConfigError, match=r"^GPU 'rtx409' is not known; did you mean rtx4090"):
        find_gpu("rtx409")
    assert all(gpu.host in HOSTS for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_devices_as_torch_names_them(device: str, preset: str | None) -> None:
    assert gpu_of_device(device) == preset


def test_ranks_of_a_machine_share_its_host_and_drives() -> None:
    drives = parse_drives(["4x7GB/s"]) or NO_DRIVES
    one, eight = share_of_rank("h100", drives, Cluster()), share_of_rank("h100", drives, Cluster(8))
    assert eight.read_bytes == one.read_bytes / 8 and eight.host_bytes == one.host_bytes / 8
    assert eight.upload_bytes == one.upload_bytes == 64e9 * LINK_SHARE  # the host's memory is fast enough for all
    assert eight.flops == one.flops
    assert one.network_bytes == 0 and eight.network_bytes == 450e9 * LINK_SHARE
    assert Resource.NETWORK not in one.resources()


def test_machines_talk_through_their_ports() -> None:
    far = share_of_rank("h100", NO_DRIVES, Cluster(64, 8))
    assert far.network_bytes == 8 * 50e9 * LINK_SHARE  # slower than NVLink
    desktops = share_of_rank("rtx4090", NO_DRIVES, Cluster(4, 4))
    assert desktops.network_bytes == 12.5e9 * LINK_SHARE
    assert Resource.READ not in desktops.resources()


def test_a_network_by_its_rate() -> None:
    slow = parse_network("10Gbit/s")
    assert slow == parse_network("1.25 GB/s") == 1.25e9
    desktops = share_of_rank("rtx4090", NO_DRIVES, Cluster(4, 2, slow))
    assert desktops.network_bytes == slow * LINK_SHARE
    assert default_machine("cpu", 4, cluster=Cluster(2, 2, slow)).network_bytes == slow * LINK_SHARE
    for text in ("10", "10Gbit", "0Gbit/s", "fast"):
        with pytest.raises(ConfigError, match=r"write the rate of a machine's network as 10Gbit/s, or 1\.25GB/s"):
            parse_network(text)


def test_states_of_a_machine_stay_in_it() -> None:
    hybrid = share_of_rank("h100", NO_DRIVES, Cluster(64, 8, is_hybrid=True))
    assert hybrid.network_bytes == 450e9 * LINK_SHARE and hybrid.replica_bytes == 50e9 * LINK_SHARE
    alone = share_of_rank("rtx4090", NO_DRIVES, Cluster(2, 2, is_hybrid=True))
    assert alone.network_bytes == alone.replica_bytes == 12.5e9 * LINK_SHARE
    assert hybrid.faster(Resource.NETWORK, 2.0).replica_bytes == 2 * hybrid.replica_bytes


def test_a_faster_resource_is_that_resource_alone() -> None:
    machine = share_of_rank("h100", parse_drives(["7GB/s/5GB/s"]) or NO_DRIVES, Cluster())
    faster = machine.faster(Resource.UPLOAD, 2.0)
    assert faster.upload_bytes == 2 * machine.upload_bytes and faster.download_bytes == machine.download_bytes
    # A drive that takes turns is one resource.
    quick = machine.faster(Resource.READ, 2.0)
    assert (quick.read_bytes, quick.write_bytes) == (14e9, 10e9)
    assert Resource.WRITE not in machine.resources() and machine.title(Resource.READ) == "drives"


def test_a_rate_says_where_it_comes_from() -> None:
    own, assumed = (share_of_rank(name, NO_DRIVES, Cluster()).source for name in ("rtx4090", "b200"))
    assert own.startswith("rtx4090 computes at 0.891 of its 165 TFLOPS (a published run: LLMQ, Qwen2.5-7B")
    assert assumed.startswith("b200 computes at 0.602 of its 2250 TFLOPS, assumed from h100 (a published run: LLMQ")
    fp32 = share_of_rank("h100", NO_DRIVES, Cluster(), "float32")
    assert "0.602 of its 67 TFLOPS, assumed from bf16" in fp32.source and fp32.flops == 0.602 * 67e12


def test_what_has_no_name_is_said_not_to_be_known() -> None:
    assert default_machine("cpu", 4).is_host
    assert "not measured" in default_machine("cpu", 4).source
    source = default_machine("A card of 2031", 4).source
    assert source.startswith("A card of 2031 is not known here, so as if rtx4090 computes at 0.891")
    assert default_machine("NVIDIA H200", 4).source.startswith("h200 computes")
