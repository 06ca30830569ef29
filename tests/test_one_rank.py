"""One rank of many, read alone: its communication, and what its trace does not show. The traces are made of events."""

import itertools
import json

import pytest
from raw_events import event, raw_steps, raw_work
from references import ROOT, proposals
from test_opportunities import raw_events

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.ranks import joined
from tracereader.figures.reading import read_ranks
from tracereader.findings import communication
from tracereader.findings import ranks as findings
from tracereader.trace import read

STEPS, BYTES = 3, {"BFloat16": 2, "Float": 4}
# NCCL's definition of the bytes on the bus for each byte of the larger buffer (nccl-tests, doc/PERFORMANCE.md).
FACTORS = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "_allgather_base": lambda n: (n - 1) / n,
    "_reduce_scatter_base": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "all_to_all": lambda n: (n - 1) / n,
}


class Made:
    """Events of a rank's trace: collectives on a stream of their own, products on another."""

    def __init__(self, ranks=16, described=True):
        self.events, self.ids, self.now = [], itertools.count(1), 1000.0
        self.ranks, self.described = ranks, described

    def kernel(self, name, ts, dur, stream, call, tid=1, **args):
        number = next(self.ids)
        self.events += [
            event("cudaLaunchKernel", "cuda_runtime", call, 4, tid=tid, correlation=number),
            event(name, "kernel", ts, dur, tid=stream, device=0, stream=stream, correlation=number, **args),
        ]

    def collective(self, name, ts, dur, sent, received, size, group="0", described="", dtype="BFloat16"):
        self.events.append(event(f"c10d::{name}_", "cpu_op", ts - 30, 20))
        args = {"Collective name": name, "In msg nelems": sent, "Out msg nelems": received, "Group size": size,
                "dtype": dtype, "Process Group Name": group, "Process Group Description": described}  # fmt: skip
        self.kernel(f"ncclDevKernel_{name}(x)", ts, dur, 20, ts - 25, **(args if self.described else {}))

    def product(self, ts, dur):
        self.events.append(event("aten::mm", "cpu_op", ts - 30, 10))
        self.kernel("ampere_sgemm_128x64_nn", ts, dur, 7, ts - 28)

    def written(self, path, rank=0, **more):
        found = {"schemaVersion": 1, "traceEvents": self.events}
        if self.ranks:
            groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": self.ranks}]
            found["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": self.ranks, "pg_config": groups}
        path.write_text(json.dumps(found | more))
        return path


def of_one_rank(tmp_path, made=None, collectives=(("_allgather_base", 12_500_000, 200_000_000, 16),), us=90_000):
    """Write steps of one product and these collectives, one after the other."""
    made = made or Made()
    for step in range(STEPS):
        begin = made.now
        at = begin + 100
        for name, sent, received, size, *more in collectives:
            made.collective(name, at, us, sent, received, size, *more)
            at += us + 100
        made.product(at, 10_000)
        made.now = at + 10_100
        made.events.append(event(f"ProfilerStep#{step + 5}", "user_annotation", begin, made.now - begin))
    return made.written(tmp_path / "rank0.json")


def report(capsys, path, *flags):
    capsys.readouterr()
    assert cli.main([str(path), *flags]) == 0
    return capsys.readouterr().out


def rate(name, sent, received, size, us, dtype="BFloat16"):
    return max(sent, received) * BYTES[dtype] / (us * 1e-6) * FACTORS[name](size) / 1e9


def test_the_first_lines_have_the_exposed_share_the_bandwidth_and_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = of_one_rank(tmp_path)
    lines = report(capsys, path).splitlines()
    first = " ".join(" ".join(lines[:25]).split())
    gb_s = rate("_allgather_base", 12_500_000, 200_000_000, 16, 90_000)
    assert round(gb_s, 1) == 4.2
    assert f"reaches {gb_s:.1f} GB/s (all-gather of 400.0 MB over 16 ranks), or more if other ranks are late" in first
    # The mean of the steps from the first kernel of one to that of the next: 90 ms of 100.3.
    assert "90% of the busy time is exposed communication" in first and "read-trace FOLDER/ shows it" in first
    assert "rank 0 of 16" in first


@pytest.mark.parametrize(("file", "says"), [
    ("tests/traces/h200-x4/mesh_slow/rank1.json.gz", "so NVLink (450 in each direction) connects them, and this rank"),
    ("tests/traces/h200-x2/accumulated_ddp_once/rank0.json.gz", "it does not use NVLink, or it waits for peers"),
    ("tests/traces/ranks/fsdp_rank1.json.gz", "and this rank waits for peers in slower ones"),
])  # fmt: skip
def test_the_fastest_large_collective_shows_whether_nvlink_connects_the_ranks(file, says):
    """NCCL copied through the host's memory in the second of these jobs of one host."""
    summary, best = summarize(read(ROOT / file)), 0.0
    events = raw_events(ROOT / file)
    kinds = {"allreduce": 2, "_allgather_base": 1, "_reduce_scatter_base": 1}
    marks = raw_steps(events)
    for mark in marks:
        for one in raw_work(events, mark):
            said = one["args"]
            if "nccl" not in one["name"] or said.get("Collective name") not in kinds:
                continue
            sent = max(said["In msg nelems"], said["Out msg nelems"]) * BYTES[said["dtype"]]
            factor = kinds[said["Collective name"]] * (said["Group size"] - 1) / said["Group size"]
            best = max(best, sent / one["dur"] / 1e3 * factor if sent >= 2e6 else 0.0)
    found = summary.communication
    assert (found.nvlink_gb_s, found.pcie_gb_s) == (450, 64)
    assert (best > 64) == ("connects" in says or "slower ones" in says)
    told = communication.beside_the_links(found)
    assert f"the fastest reaches {best:.0f} GB/s" in told and says in told


def test_a_job_of_several_hosts_is_compared_with_a_network_too(tmp_path, capsys):
    path = of_one_rank(tmp_path)
    document = json.loads(path.read_text())
    assert not communication.beside_the_links(summarize(read(path)).communication), "unknown device"
    path.write_text(json.dumps(document | {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}))
    told = communication.beside_the_links(summarize(read(path)).communication)
    assert "NVLink has 450, PCIe 64, a network of 400 Gb/s 50: it does not use NVLink, or it waits for peers" in told
    assert told in " ".join(report(capsys, path, "--only", "short").split())


def test_small_collectives_say_nothing_of_the_link(tmp_path):
    path = of_one_rank(tmp_path, collectives=[("allreduce", 2_000, 2_000, 16)], us=20_000)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}))
    assert not communication.beside_the_links(summarize(read(path)).communication)


@pytest.mark.parametrize(
    "one",
    [
        ("allreduce", 50_000_000, 50_000_000, 16, "0", "", "Float"),
        ("_allgather_base", 1_000_000, 8_000_000, 8),
        ("_reduce_scatter_base", 8_000_000, 1_000_000, 8),
        ("broadcast", 3_000_000, 3_000_000, 4),
        ("all_to_all", 4_000_000, 5_000_000, 4),
    ],
)
def test_the_bus_bandwidth_is_nccls(tmp_path, one, capsys):
    path = of_one_rank(tmp_path, collectives=[one], us=20_000)
    found = json.loads(report(capsys, path, "--json", "--only", "short"))["communication"]
    (row,) = found["collectives"]
    name, sent, received, size, *more = one
    assert row["bus_gb_s"] == pytest.approx(rate(name, sent, received, size, 20_000, *more[2:]))
    assert (row["size"], row["per_step"], row["us"]) == (size, 1, 20_000)
    assert found["is_one_of_many"] and found["ranks"] == 16


def test_several_groups_have_a_row_each(tmp_path, capsys):
    pair = [
        ("allreduce", 1_000_000, 1_000_000, 2, "tp", "tensor"),
        ("allreduce", 1_000_000, 1_000_000, 8, "dp", "data"),
    ]
    path = of_one_rank(tmp_path, collectives=pair, us=20_000)
    rows = summarize(read(path)).communication.collectives
    assert {(one.group, one.size): round(one.bus_gb_s, 6) for one in rows} == {
        ("tensor", 2): round(rate("allreduce", 1e6, 1e6, 2, 20_000), 6),
        ("data", 8): round(rate("allreduce", 1e6, 1e6, 8, 20_000), 6),
    }
    table = report(capsys, path, "--only", "short")
    assert "tensor" in table and "data" in table


def test_an_older_trace_without_sizes_says_less(tmp_path, capsys):
    made = Made(ranks=None, described=False)
    text = " ".join(report(capsys, of_one_rank(tmp_path, made)).split())
    assert "GB/s (" not in text
    assert "does not record the collectives' sizes and groups" in text and "FOLDER/" in text


def test_one_kernel_of_coalesced_collectives_moves_the_sum_of_their_bytes(tmp_path):
    made = Made()
    for step in range(STEPS):
        begin = made.now
        for place in range(2):
            args = {"Collective name": "allgather_into_tensor_coalesced", "In msg nelems": 1000, "dtype": "Float",
                    "Out msg nelems": 16_000, "Group size": 16, "Process Group Name": "0"}  # fmt: skip
            made.events.append(event("record_param_comms", "cpu_op", begin + 10 + 10 * place, 5, **args))
        made.kernel("ncclDevKernel_AllGather_RING_LL(x)", begin + 60, 500, 20, begin + 40)
        made.product(begin + 600, 100)
        made.now = begin + 1000
        made.events.append(event(f"ProfilerStep#{step}", "user_annotation", begin, 1000))
    (row,) = summarize(read(made.written(tmp_path / "t.json"))).communication.collectives
    assert (row.kind, row.bytes, row.size, row.per_step) == ("all-gather", 2 * 16_000 * 4, 16, 1)
    assert row.bus_gb_s == pytest.approx(2 * 16_000 * 4 / 500e-6 * 15 / 16 / 1e9)


def test_a_trace_of_all_ranks_asks_for_no_others(tmp_path):
    one = Made(ranks=None)
    path = of_one_rank(tmp_path, one, [("allreduce", 1000, 1000, 1)], us=20_000)
    found = summarize(read(path))
    assert not found.communication.is_one_of_many
    assert not any("FOLDER" in said for said in communication.in_words(found))


def test_no_change_of_one_rank_shortens_a_collective():
    """All ranks' traces show what fewer collectives save. One rank may wait in them for another one."""
    path = ROOT / "tests/traces/h200-x2/accumulated_ddp_every/rank0.json.gz"
    exposed = summarize(read(path)).communication.exposed_us
    found = {one.change: one for one in proposals(path)}
    assert found["reduce_once"].needs_other_ranks and found["reduce_once"].is_unknown
    assert all(one.step_us_after > 0.99 * exposed for one in found.values())


def test_ranks_whose_communication_is_not_matched_are_not_compared_by_their_waits(tmp_path):
    paths = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        made = Made(ranks=4, described=False)
        for step in range(STEPS):
            begin = made.now
            made.collective("allreduce", begin + 100, 5000, 1, 1, 4)
            made.product(begin + 5200, 1000)
            made.now = begin + 6300
            made.events.append(event(f"ProfilerStep#{step}", "user_annotation", begin, 6300))
        info = {"backend": "nccl", "rank": rank, "world_size": 4}  # the groups are not listed
        paths.append(made.written(folder / "t.json", distributedInfo=info))
    ranks, left_out = read_ranks(paths, 10**9, None)
    summary = joined(ranks, left_out)
    assert "not known who waits for whom" in " ".join(findings.sentences(summary))
    assert "waits least" not in findings.regime(summary)[1] and findings.regime(summary)[1].startswith("rank ")


def test_a_report_of_the_cpu_names_its_communication(tmp_path, capsys):
    events = []
    for step in range(STEPS):
        at = 1000 + step * 200_000
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", at, 199_000),
            event("aten::mm", "cpu_op", at + 10, 20_000),
            event("c10d::allreduce_", "cpu_op", at + 20_020, 50),
            event("gloo:all_reduce", "user_annotation", at + 20_080, 173_000, tid=2),
        ]
    info = {"backend": "gloo", "rank": 1, "world_size": 2}
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": info}))
    found = summarize(read(path)).communication
    assert found.on_cpu and found.exposed_us == pytest.approx(173_000)
    text = " ".join(report(capsys, path).split())
    assert f"{found.exposed_share:.0%} of the step is exposed communication" in text and "all-reduce" in text
    assert 0.86 < found.exposed_share < 0.88
