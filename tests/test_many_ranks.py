"""A thousand ranks with known delays: the report names the late ranks and fits one screen."""

import gc
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from functools import cache
from statistics import median

import msgspec
import pytest
from many_ranks import ON_A_HOST, Delay, made, piped, recorded
from references import ROOT

from tracereader import cli
from tracereader.figures.rank import RankTrace
from tracereader.figures.ranks import joined
from tracereader.findings import ranks as findings
from tracereader.show import ranks as show
from tracereader.show.view import View

FOLDER = ROOT / "tests/traces/ranks"
COLLECTIVES = 42  # as recorded: 14 in each of three steps
SLOW_HOST = range(64, 72)


@pytest.fixture(autouse=True)
def _without_garbage_collection():
    """Garbage collection is off as in the command, because it would visit millions of live objects again and again."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def summary_of(count=1024, **delays):
    return joined(made(count, COLLECTIVES, **delays))


@cache
def mesh():
    """A mesh of 1,024 ranks in which rank 517 computes longer."""
    return summary_of(tensor=8, delays={517: Delay(11_000_000)})


def shown(summary, capsys, monkeypatch, view=View(only=("short", "gpu", "steps", "work")), columns=120):  # noqa: B008
    """Print the report without proposals, because these read the traces of two ranks again."""
    monkeypatch.setenv("COLUMNS", str(columns))
    capsys.readouterr()
    show.explain(summary, [], view)
    return capsys.readouterr().out


def said(text):
    return " ".join(text.split())


REASONS = {
    "compute_us": ("computes", "it computes 11.0 ms longer per step in forward"),
    "idle_not_launched_us": (
        "launches late",
        "its CPU launches late: the GPU waits 11.0 ms longer per step for launches in forward",
    ),
    "idle_loading_us": ("waits for data", "it waits 11.0 ms longer per step for the DataLoader"),
}


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        pytest.param(*one, marks=() if one == ("compute_us", 8) else pytest.mark.exhaustive)
        for one in itertools.product(REASONS, (1, 8))
    ],
)
def test_the_straggler_of_a_thousand_ranks_is_named_with_its_reason(field, tensor, capsys, monkeypatch):
    """This includes a mesh, in which the other ranks of its tensor-parallel group are late in their other groups."""
    part, why = REASONS[field]
    summary = summary_of(tensor=tensor, delays={517: Delay(11_000_000, field)})
    assert findings.straggler(summary).rank == 517
    loss = findings.loss(summary)
    assert (loss.rank, [one.part for one in loss.reasons]) == (517, [part])
    assert loss.reasons[0].more_us == pytest.approx(11_000, abs=5)
    (cost,) = findings.costs(summary)
    assert cost.ranks == (517,) and cost.more_us == pytest.approx(11_000, abs=5)
    assert not findings.slow_hosts(summary) and findings.slow_link(summary) is None
    text = said(shown(summary, capsys, monkeypatch))
    assert "in short rank 517 keeps the others waiting" in text
    assert f"rank 517 on node064, 11.0 ms: {why}" in text


@pytest.mark.parametrize(
    ("steps", "said_of"), [((1,), "in 1 of 5 steps (#1), "), ((1, 3), "in 2 of 5 steps (#1 and #3), ")]
)
def test_a_straggler_in_some_steps_is_named_with_them(steps, said_of, capsys, monkeypatch):
    """The median over all steps hides what it does in two of five. Its cost is spread over all of them."""
    summary = joined(made(16, 70, steps=5, delays={5: Delay(11_000_000, steps=steps)}))
    loss = findings.loss(summary)
    assert findings.straggler(summary).rank == loss.rank == 5
    assert loss.steps == tuple(f"ProfilerStep#{number}" for number in steps)
    (cost,) = findings.costs(summary)
    assert cost.ranks == (5,) and cost.steps == loss.steps
    assert cost.more_us == pytest.approx(11_000 * len(steps) / 5, abs=5)
    text = said(shown(summary, capsys, monkeypatch))
    why = "it computes 11.0 ms longer per step in forward"
    assert f"{said_of}rank 5 is slower than the other ranks' median because {why}" in text
    assert f"rank 5, {findings.ms(cost.more_us)}: {said_of}{why}" in text.replace(" on node000", "")
    one = said(shown(summary, capsys, monkeypatch, View(rank=5)))
    assert f"{said_of}rank 5 takes 11.0 ms longer per step than the other ranks' median because it computes" in one


def blurred(ranks):
    """Return the ranks with collectives that end up to 10 µs later, differently on each of them."""

    def later(one):
        off = one.rank * 7919 % 10_000
        return tuple(msgspec.structs.replace(part, end=part.end + off) for part in one.parts)

    return [msgspec.structs.replace(one, parts=later(one)) for one in ranks]


def test_slow_ranks_are_named_though_their_order_is_not_known(capsys, monkeypatch):
    """Three ranks are equally late, and the clocks do not decide which of them is the last one."""
    summary = joined(blurred(made(8, COLLECTIVES, delays={rank: Delay(5_000_000) for rank in range(3)})))
    assert summary.clocks.lead_us < 2 * summary.clocks.apart_us
    text = said(shown(summary, capsys, monkeypatch, View(only=("short",))))
    assert "3 ranks take longer per step than the median of all: rank " in text and "it is not known" not in text


def test_the_waits_for_a_slow_link_are_said_though_the_order_is_not_known(capsys, monkeypatch):
    summary = joined(blurred(made(32, COLLECTIVES, tensor=4, slow={(4, 5, 6, 7): 40})))
    assert summary.clocks.lead_us < 2 * summary.clocks.apart_us
    text = said(shown(summary, capsys, monkeypatch, View(only=("short",))))
    assert "the ranks wait for each other: rank " in text and "it is not known" not in text


def test_a_late_launch_is_not_said_to_be_in_the_last_phase():
    """The GPU's wait for the first kernel of a step is at the end of the step before."""
    ranks = made(8, COLLECTIVES, delays={5: Delay(11_000_000, "idle_not_launched_us")})

    def reversed_phases(one):
        steps = tuple(msgspec.structs.replace(step, phases=step.phases[::-1]) for step in one.steps)
        return msgspec.structs.replace(one, steps=steps)

    for some, phase in ((ranks, "forward"), ([reversed_phases(one) for one in ranks], None)):
        (reason,) = findings.loss(joined(some)).reasons
        assert (reason.part, reason.phase) == ("launches late", phase)


def test_slow_ranks_on_every_host_make_no_slow_host():
    """Half of the ranks of three of four hosts are slow. That a host is slow would explain none of them."""
    late = {rank: Delay(5_000_000) for rank in range(28) if rank % 2}
    summary = summary_of(32, delays=late)
    assert {one.ranks[0] for one in findings.costs(summary)} == set(late)
    assert findings.slow_hosts(summary) == ()


@pytest.mark.exhaustive
def test_a_slow_host_is_named_and_none_of_its_ranks_is_the_straggler(capsys, monkeypatch):
    """If one of the ranks were faster, the others would wait equally long for the remaining ranks of the host."""
    summary = summary_of(delays={rank: Delay(5_000_000) for rank in SLOW_HOST})
    assert findings.straggler(summary) is None
    (host,) = findings.slow_hosts(summary)
    assert (host.host, host.slow, host.part) == ("node008", tuple(SLOW_HOST), "computes")
    assert host.more_us == pytest.approx(5_000, abs=5)
    text = said(shown(summary, capsys, monkeypatch))
    assert re.search(r"node008 +8 of 8 +5\.0 +they compute longer", text)
    slowest = r"rank (\d+) on node008, the slowest of 8 there, 5\.0 ms"
    assert re.findall(r"rank \d+ on node008", text) == [f"rank {re.search(slowest, text)[1]} on node008"]


def test_one_slow_rank_makes_no_slow_host():
    assert findings.slow_hosts(summary_of(128, delays={64: Delay(5_000_000)})) == ()
    assert findings.slow_hosts(summary_of(128, delays={rank: Delay(5_000_000) for rank in (3, 40, 77)})) == ()


@pytest.mark.exhaustive
def test_a_slow_link_is_named_by_message_and_bandwidth(capsys, monkeypatch):
    summary = summary_of(tensor=2, slow={(4, 5): 40})
    (cost,) = findings.costs(summary)
    assert cost.ranks == (4, 5) and not cost.reasons
    link = cost.link
    mine = [one for one in summary.matched if (one.kind, one.bytes, one.ranks) == (link.kind, link.bytes, (4, 5))]
    others = [
        one for one in summary.matched
        if (one.kind, one.bytes, one.size) == (link.kind, link.bytes, 2) and one.ranks != (4, 5)
    ]  # fmt: skip
    assert link.transfer_us == pytest.approx(median(one.transfer_us for one in mine))
    assert link.bus_gb_s == pytest.approx(link.others_gb_s / 40, rel=0.1)
    theirs = median(one.transfer_us for one in others)
    assert link.more_us == pytest.approx(sum(one.transfer_us - theirs for one in mine) / 3)
    text = said(shown(summary, capsys, monkeypatch))
    rates = f"at {link.bus_gb_s:,.3g} GB/s, other groups {link.others_gb_s:,.3g} GB/s"
    assert f"probably a slow link: all-gather of 25.2 MB {rates}" in text


@pytest.mark.exhaustive
def test_the_five_that_cost_most_are_shown_and_all_on_demand(capsys, monkeypatch):
    late = {rank: Delay(2_000_000 + 10_000 * rank) for rank in range(7, 1000, 100)}
    summary = summary_of(delays=late)
    costliest = sorted(late, reverse=True)
    assert [one.ranks[0] for one in findings.costs(summary)] == costliest
    text = shown(summary, capsys, monkeypatch)
    assert re.findall(r"^  rank (\d+) on node", text, re.M) == [str(rank) for rank in costliest[:5]]
    text = shown(summary, capsys, monkeypatch, View(all=True, only=("short",)))
    assert re.findall(r"^  rank (\d+) on node", text, re.M) == [str(rank) for rank in costliest]


def test_equal_ranks_cost_nothing():
    summary = summary_of(256)
    assert findings.costs(summary) == () and findings.straggler(summary) is None
    assert findings.sentences(summary)[0].startswith("no rank loses much time by waiting")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_thousand_ranks_fit_one_screen(columns, capsys, monkeypatch):
    summary = mesh()
    text = shown(summary, capsys, monkeypatch, columns=columns)
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= columns
    by_rank = [one.total.compute_us / 1e3 for one in summary.ranks]
    expected = [min(by_rank), sorted(by_rank)[len(by_rank) // 2], max(by_rank)]
    cells = re.search(r"^compute +(.*)$", text, re.M)[1].split()
    assert cells == [*(f"{ms:,.1f}" for ms in expected), "517"]
    assert re.search(r"^window of 1,024 ranks, ms +min +median +max +rank that has the max$", text, re.M)


@pytest.mark.parametrize("columns", [80, 120])
def test_no_table_of_a_mesh_of_pipelines_wraps(columns, capsys, monkeypatch):
    """Eight ranks with collectives and messages have all columns; those on waits get a table of their own."""
    ranks = [with_messages(one, other) for one, other in zip(made(8, COLLECTIVES), piped(4, 2, 6, 3), strict=True)]
    summary = joined(ranks)
    assert summary.matched and summary.messages
    for view in (View(only=("gpu", "steps", "work")), View(rank=5, only=("gpu", "steps", "work"))):
        lines = shown(summary, capsys, monkeypatch, view, columns).splitlines()
        assert max(map(len, lines)) <= columns and not [line for line in lines if re.match(r" {4}\S.* · ", line)]
        waits = [one.message_waits.us / 1e3 for one in summary.ranks if view.rank in (None, one.rank)]
        assert all(f" {ms:,.1f}" in "\n".join(lines) for ms in waits)


LATE = Delay(11_000_000)


def with_messages(one, other):
    """Return a rank with the messages of another, which begin when its own window begins."""
    group = len(one.groups)
    calls = [msgspec.structs.replace(call, group=group) for call in other.calls]
    off = one.start - other.start
    return msgspec.structs.replace(
        one, groups=(*one.groups, *other.groups), calls=(*one.calls, *calls),
        messages=tuple(
            msgspec.structs.replace(part, call=part.call + len(one.calls), start=part.start + off, end=part.end + off)
            for part in other.messages
        ),
    )  # fmt: skip


def test_kinds_of_groups_are_distinguished_and_each_names_its_late_rank(capsys, monkeypatch):
    summary = mesh()
    kinds = {one.name: one for one in findings.group_kinds(summary)}
    assert set(kinds) == {"tensor parallel (mesh_tp)", "data parallel (mesh_dp)"}
    for name, groups, size in (("tensor parallel (mesh_tp)", 128, 8), ("data parallel (mesh_dp)", 8, 128)):
        one = kinds[name]
        assert (one.groups, one.size) == (groups, size)
        assert one.worst.last in range(512, 520) and (size > 8 or one.worst.last == 517)
        mine = [each for each in summary.matched if each.size == size]
        waited = sum(sum(each.waits_us) for each in mine) / 1024 / 3
        assert one.waited_us == pytest.approx(waited)
    text = said(shown(summary, capsys, monkeypatch))
    assert "tensor parallel (mesh_tp), ranks 512–519: 100% of the waiting is for rank 517" in text
    unnamed = findings.group_kinds(summary_of(128, tensor=8, described=False))
    assert {one.name for one in unnamed} == {"groups of 8 ranks", "groups of 16 ranks"}


def test_ranks_that_are_late_together_are_named_together(capsys, monkeypatch):
    """The ranks of the straggler's tensor parallel group arrive with it, and which of them is last says nothing."""
    summary = mesh()
    for one in summary.groups:
        mine = [each for each in summary.matched if each.ranks == one.ranks and each.group.startswith(one_name(one))]
        waited = [sum(us) for us in zip(*(each.waits_us for each in mine), strict=True)]
        assert one.late == tuple(rank for rank, us in zip(one.ranks, waited, strict=True) if us < max(waited) / 2)
    summary = summary_of(128, tensor=8, delays={rank: Delay(11_000_000) for rank in (16, 24, 48)})
    text = said(shown(summary, capsys, monkeypatch))
    assert "data parallel (mesh_dp), ranks 3, 11, 19, 27 and 12 more: 3 ranks of 16 arrive late: 19, 27 and 51" in text
    even = said(shown(summary_of(128, tensor=8), capsys, monkeypatch))
    assert "arrive late" not in even and "of the waiting is for" not in even


def one_name(group):
    return {"mesh_tp": "1 ", "mesh_dp": "2 "}[group.description]


def test_groups_with_missing_ranks_are_of_the_kind_of_the_others():
    ranks = [one for one in made(64, COLLECTIVES, tensor=8) if one.rank not in (11, 12, 40)]
    kinds = findings.group_kinds(joined(ranks))
    assert all(one.groups == 8 for one in kinds)
    assert sorted(one.name for one in kinds) == ["data parallel (mesh_dp)", "tensor parallel (mesh_tp)"]


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("mesh_fsdp", "data parallel (mesh_fsdp)"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline parallel (PIPELINE_MODEL_PARALLEL_GROUP)"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert parallel (EXPERT_MODEL_PARALLEL_GROUP)"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "tensor and data parallel (TENSOR_AND_DATA_PARALLEL_GROUP)"),
        ("default_pg", "all ranks"),
        ("rollout", "rollout of 8 ranks"),
    ],
)
def test_the_name_of_a_group_follows_its_description(description, name):
    ranks = made(16, COLLECTIVES, tensor=1 if description == "default_pg" else 8)
    described = [
        msgspec.structs.replace(
            one, groups=tuple(msgspec.structs.replace(group, description=description) for group in one.groups)
        )
        for one in ranks
    ]
    assert name in {one.name for one in findings.group_kinds(joined(described))}


def test_a_late_rank_that_was_not_read_makes_no_slow_link(capsys, monkeypatch):
    """Its group seems to transfer for as long as it waits for that rank."""
    ranks = made(32, COLLECTIVES, tensor=4, delays={6: LATE})
    assert findings.straggler(joined(ranks)).rank == 6
    summary = joined([one for one in ranks if one.rank != 6])
    assert findings.slow_link(summary) is None
    text = said(shown(summary, capsys, monkeypatch, View(only=("short",))))
    assert "after the last rank that was read arrived" in text and "after the last rank arrived" not in text
    late = joined([one for one in made(8, COLLECTIVES, delays={6: LATE}) if one.rank != 6])
    assert findings.sentences(late)[0].startswith("no rank loses much time by waiting for a rank that was read: ")


def test_torchs_list_of_groups_completes_a_truncated_list_of_ranks(tmp_path):
    """A kernel's description truncates a long list of ranks; distributedInfo has it in full."""

    def truncated(found, rank):
        found["distributedInfo"] |= {"rank": rank, "world_size": 4, "pg_config": [
            {"pg_name": "7", "pg_desc": "mesh_dp", "pg_size": 3, "ranks": [0, 1, 3]},
            {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
        ]}  # fmt: skip
        for event in found["traceEvents"]:
            if "Process Group Ranks" in event.get("args", {}):
                event["args"] |= {"Process Group Name": "7", "Group size": 3, "Process Group Ranks": "[0, 1, ...]"}

    paths = []
    for number, rank in enumerate((0, 1)):
        found = json.loads(gzip.decompress((FOLDER / f"ddp_straggler_rank{number}.json.gz").read_bytes()))
        truncated(found, rank)
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_text(json.dumps(found))
    summary, traces = show.opened(paths, View())
    assert {(one.description, one.size, one.members) for each in traces for one in each.groups} == {
        ("mesh_dp", 3, (0, 1, 3))
    }
    assert [(one.name, one.worst.ranks) for one in findings.group_kinds(summary)] == [
        ("data parallel (mesh_dp)", (0, 1))
    ]


def test_one_rank_is_shown_in_full(capsys, monkeypatch):
    summary = mesh()
    text = shown(summary, capsys, monkeypatch, View(rank=517))
    assert "rank 517 takes 11.0 ms longer per step than the other ranks' median because it computes" in said(text)
    assert [line.split()[0] for line in text.splitlines() if re.match(r"#\d rank 517", line)] == ["#0", "#1", "#2"]
    found = json.loads(show.as_json(summary, View(rank=517, only=("short", "gpu", "work"))))
    assert [one["rank"] for one in found["ranks"]] == [517] and all(517 in one["ranks"] for one in found["matched"])
    assert len(found["matched"]) == COLLECTIVES and len(found["groups"]) == 2
    waited = said(shown(summary, capsys, monkeypatch, View(rank=3)))
    assert "rank 3 is not slower than the other ranks' median" in waited
    mine = [(one.waits_us[one.ranks.index(3)], one.last) for one in summary.matched if 3 in one.ranks]
    for_it = {last: sum(us for us, each in mine if each == last) for _, last in mine}
    assert f"of it for rank {max(for_it, key=for_it.get)}" in waited


@pytest.mark.exhaustive
def test_the_encoded_ranks_are_small_and_decode_to_the_same():
    """A rank's encoded data grows with its collectives, but not with the size of its groups."""
    sizes = []
    for collectives in (420, 840):
        one = made(256, collectives)[0]
        sent = msgspec.msgpack.encode(one)
        assert msgspec.msgpack.decode(sent, type=RankTrace) == one
        sizes.append(len(sent))
    assert (sizes[1] - sizes[0]) / 420 < 100
    assert sizes[0] < 100_000


@pytest.mark.exhaustive
def test_two_thousand_collectives_of_each_of_a_thousand_ranks_are_merged_in_little_memory():
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    # In a process of its own, because other tests may have needed more memory in this one. getrusage() would not do:
    # a new process takes over the peak of the one that started it.
    program = (
        "import gc, re, pathlib; gc.disable(); from many_ranks import Delay, made; from test_many_ranks import joined; "
        "from tracereader.findings import ranks; "
        "found = joined(made(1024, 2000, tensor=8, delays={517: Delay(200_000_000)})); "  # an eighth of a step
        "status = pathlib.Path('/proc/self/status').read_text(); "
        r"print(ranks.straggler(found).rank, re.search(r'VmHWM:\s+(\d+) kB', status)[1])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert not ended.returncode, ended.stderr
    rank, most_kb = map(int, ended.stdout.split())
    assert rank == 517 and most_kb < 2e6


# As files: sixteen ranks on eight hosts, each a copy of one of two recorded ones.


def files(folder, run, slow, groups=None, hosts=8, stretched=(), loads=()):
    """Write sixteen traces. The ranks in `slow` are copies of the recorded late rank, the others of the waiting rank.

    groups: how many ranks a group has. stretched: the ranks whose transfers take three times as long. loads: those
    whose steps begin in the DataLoader.
    """
    late = {"ddp_straggler": 1, "fsdp": 0}[run]
    size = groups or 16
    texts = [gzip.decompress((FOLDER / f"{run}_rank{number}.json.gz").read_bytes()) for number in (1 - late, late)]
    for rank in range(16):
        found = json.loads(texts[rank in slow])
        first = rank - rank % size
        found["host_name"] = f"node{rank * hosts // 16}"
        found["distributedInfo"] |= {"rank": rank, "world_size": 16, "pg_config": []}
        group = {"Process Group Name": str(first), "Group size": size}
        group["Process Group Ranks"] = str(list(range(first, first + size)))
        marks = []
        for event in found["traceEvents"]:
            if "Process Group Ranks" in event.get("args", {}):
                event["args"] |= group
                if rank in stretched and event["cat"] == "kernel":
                    event["dur"] *= 3
            if event.get("name", "").startswith("ProfilerStep#") and event.get("cat") == "user_annotation":
                marks.append(event)
        for mark in marks if rank in loads else ():
            label = {"name": "enumerate(DataLoader)#_Iter.__next__", "ts": mark["ts"] + 0.001, "dur": mark["dur"] / 2}
            found["traceEvents"].append(mark | label)
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    return sorted(folder.glob("*.json"))


def report(paths, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(["--only", "short", *map(str, paths)]) == 0
    return said(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_a_straggler_among_files_is_named(tmp_path, capsys, monkeypatch):
    text = report(files(tmp_path, "ddp_straggler", slow={5}), capsys, monkeypatch)
    assert "16 of 16 ranks on 8 hosts" in text
    assert "in short rank 5 keeps the others waiting: it is last in 42 of 42 collectives" in text
    assert re.search(
        r"what costs most: .* rank 5 on node2, 5\.\d ms: it computes 10\.8 ms longer per step outside", text
    )


@pytest.mark.exhaustive
def test_a_slow_host_among_files_is_named(tmp_path, capsys, monkeypatch):
    text = report(files(tmp_path, "ddp_straggler", slow={6, 7}), capsys, monkeypatch)
    assert re.search(r"node3 +2 of 2 +5\.\d +they compute longer", text)


@pytest.mark.exhaustive
def test_late_launches_and_a_slow_link_among_files_are_named(tmp_path, capsys, monkeypatch):
    paths = files(tmp_path, "fsdp", slow={9}, groups=2, hosts=1, stretched={12, 13})
    text = report(paths, capsys, monkeypatch)
    assert re.search(r"rank 9, [\d.]+ ms: its CPU launches late", text)
    assert re.search(r"ranks 12 and 13, [\d.,]+ ms: probably a slow link: \S+ of [\d.]+ MB at [\d.]+ GB/s", text)


@pytest.mark.exhaustive
def test_waiting_for_data_among_files_is_named(tmp_path, capsys, monkeypatch):
    text = report(files(tmp_path, "fsdp", slow={9}, loads={9}), capsys, monkeypatch)
    assert "in short rank 9 keeps the others waiting" in text
    assert re.search(r"rank 9 on node4, [\d.]+ ms: .*it waits [\d.]+ ms longer per step for the DataLoader", text)


def test_a_rank_that_was_not_read_is_refused(capsys):
    traces = sorted(map(str, FOLDER.glob("fsdp_rank*.json.gz")))
    assert cli.main([*traces, "--rank", "7"]) == 2
    assert "--rank 7: it is not among the 2 ranks that were read" in capsys.readouterr().err
    assert cli.main([traces[0], "--rank", "0"]) == 2
    assert "--rank shows one of several ranks" in capsys.readouterr().err
    assert cli.main([*traces, "--rank", "0"]) == 0
    assert "collectives, ms" in capsys.readouterr().out


def test_the_recorded_program_is_that_of_the_traces():
    assert len(recorded()) == 14 and ON_A_HOST == 8
