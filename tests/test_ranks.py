"""Several ranks of one run: every figure is compared with one that the test computes from the raw events."""

import gzip
import itertools
import json
import re
from typing import get_args

import pytest
from references import LARGE_FILE, ROOT

from tracereader import cli
from tracereader.figures import reading
from tracereader.figures.rank import Call, Group, NotRead, Part, RankTrace, Times
from tracereader.figures.ranks import joined
from tracereader.findings import ranks as findings
from tracereader.show.export import merged
from tracereader.show.page.ranked import page
from tracereader.show.ranks import opened
from tracereader.show.view import View

FOLDER = ROOT / "tests/traces/ranks"


def _ranks_of(first):
    return sorted(first.parent.glob(first.name.replace("_rank0", "_rank*")))


# Rung 6's on two H200s, recorded by torch 2.11.
RECORDED = sorted((ROOT / "traces/reference").glob("*/*/*_rank0.json.gz"))
REFERENCES = {path.name.removesuffix("_rank0.json.gz"): _ranks_of(path) for path in RECORDED}
RUNS = {name: sorted(FOLDER.glob(f"{name}_rank*.json.gz")) for name in ("ddp_straggler", "fsdp", "gloo_ddp_slow")}
# fsdp has many more collectives than the others.
LARGE = {name: pytest.mark.exhaustive for name, (first, *_) in REFERENCES.items() if first.stat().st_size > LARGE_FILE}
LARGE |= {"fsdp": pytest.mark.exhaustive}
ALL_RUNS = [pytest.param(name, marks=LARGE.get(name, ())) for name in (*RUNS, *REFERENCES)]


def document(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def slices(path):
    return [event for event in document(path)["traceEvents"] if event["ph"] == "X"]


def end(event):
    return event["ts"] + event["dur"]


def pieces(spans, but=()):
    """Return the time that some intervals cover and others do not, by cutting at every edge."""
    change = {}
    for which, some in ((0, spans), (1, but)):
        for start, stop in some:
            change.setdefault(start, [0, 0])[which] += 1
            change.setdefault(stop, [0, 0])[which] -= 1
    inside = outside = 0
    for left, right in itertools.pairwise(sorted(change)):
        inside, outside = inside + change[left][0], outside + change[left][1]
        if inside and not outside:
            yield left, right


def length(spans, but=()):
    return sum(right - left for left, right in pieces(spans, but))


def spans(events, start, stop):
    return [(max(one["ts"], start), min(end(one), stop)) for one in events if one["ts"] < stop and end(one) > start]


def marks(events):
    found = [e for e in events if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"]
    return sorted(found, key=lambda e: e["ts"])


def worked_out(paths):
    """Return by rank the window, compute and exposed communication, and the waits, all from the raw events."""
    figures, parts = [], []
    for path in paths:
        events = slices(path)
        steps = marks(events)
        start, stop = steps[0]["ts"], end(steps[-1])
        kernels = [e for e in events if e["cat"] == "kernel"]
        if kernels:
            calls = {
                e["args"]["correlation"] for e in events
                if e["cat"].startswith("cuda_") and start <= e["ts"] < stop and "correlation" in e["args"]
            }  # fmt: skip
            work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
            stop = max([stop, *(end(e) for e in work if e["args"]["correlation"] in calls)])
            # Before the first recorded activity, nothing shows whether the GPU was idle.
            start = max(start, min(e["ts"] for e in work if end(e) > start))
            collectives = [e for e in kernels if "nccl" in e["name"]]
            computing = spans([e for e in kernels if "nccl" not in e["name"]], start, stop)
            mine = [e for e in collectives if e["args"]["correlation"] in calls]
        else:
            collectives = mine = [e for e in events if e["name"].startswith("gloo:")]
            threads = {e["tid"] for e in mine}
            ops = [e for e in events if e["cat"] == "cpu_op" and e["tid"] not in threads]
            # One thread only: what it hands over is no computing.
            assert len({e["tid"] for e in ops}) == 1
            handed = spans([e for e in ops if e["name"].startswith("c10d::")], start, stop)
            ops = spans([e for e in ops if not e["name"].startswith("c10d::")], start, stop)
            computing = list(pieces(ops, but=handed))
        figures.append(
            {
                "window_us": stop - start,
                "compute_us": length(computing),
                "exposed_communication_us": length(spans(collectives, start, stop), but=computing),
            }
        )
        parts.append(sorted(mine, key=lambda e: e["ts"]))
    for one in figures:
        one |= {"waited_for_others_us": 0.0, "arrived_last": 0}
    for same in zip(*parts, strict=True):
        last = max(e["ts"] for e in same)
        for one, event in zip(figures, same, strict=True):
            one["waited_for_others_us"] += last - event["ts"]
            one["arrived_last"] += event["ts"] == last
    return figures, len(parts[0])


def as_json(capsys, *words):
    assert cli.main([*map(str, words), "--json=all"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ALL_RUNS)
def test_every_figure_of_a_rank(name, capsys):
    paths = RUNS.get(name) or REFERENCES[name]
    expected, count = worked_out(paths)
    ours = as_json(capsys, *paths)
    assert (ours["version"], ours["world_size"], ours["collectives"]) == (3, 2, count)
    assert [one["rank"] for one in ours["ranks"]] == [0, 1]
    for one, raw in zip(ours["ranks"], expected, strict=True):
        for key, value in raw.items():
            assert one[key] == pytest.approx(value, rel=1e-4, abs=0.1), key
        parts = ("compute_us", "exposed_communication_us", "exposed_copy_us", "idle_us")
        assert sum(one[key] for key in parts) == pytest.approx(one["window_us"])
        for step in one["steps"]:
            assert sum(step[key] for key in parts) == pytest.approx(step["us"])
            assert sum(phase["us"] for phase in step["phases"]) == pytest.approx(step["us"])


def test_a_gpu_counts_as_idle_only_between_recorded_activities(capsys):
    """Rank 0's first recorded activity was launched before the recording, 9.3 ms after its first step's start."""
    for path, one in zip(RUNS["ddp_straggler"], as_json(capsys, *RUNS["ddp_straggler"])["ranks"], strict=True):
        events = slices(path)
        work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        first, last = min(e["ts"] for e in work), max(map(end, work))
        assert first > marks(events)[0]["ts"] + 5000
        assert one["window_us"] == pytest.approx(last - first, abs=0.1)
        busy = length([(e["ts"], end(e)) for e in work])
        assert one["idle_us"] == pytest.approx(last - first - busy, abs=0.1)


@pytest.mark.parametrize("name", ["ddp_straggler", *(pytest.param(one, marks=mark) for one, mark in LARGE.items())])
def test_the_regime_is_that_of_the_rank_that_sets_the_pace(name, capsys, monkeypatch):
    """The report on this rank alone has the same word and the same figures."""
    paths = RUNS.get(name) or REFERENCES[name]
    ours = as_json(capsys, *paths, "--only", "short")
    pace = ours["pace_setter"]
    assert ours["straggler"] in (pace, None)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main([str(paths[pace]), "--only", "short"]) == 0
    alone = capsys.readouterr().out
    word, because = ours["regime"], ours["regime_because"]
    assert f"\n{word[0].upper()}{word[1:]}." in alone
    sets = f"rank {pace} {'waits least for others' if ours['straggler'] is None else 'sets the pace'}: its"
    assert because.startswith(sets)
    told = because.removeprefix(sets).split("; ")
    assert all(sentence[1:] in alone for sentence in told)
    assert cli.main([*map(str, paths), "--only", "short"]) == 0
    assert f"{word[0].upper()}{word[1:]}. R{sets[1:]} GPU is" in capsys.readouterr().out


def test_ranks_without_gpu_work_have_no_regime(capsys):
    ours = as_json(capsys, *RUNS["gloo_ddp_slow"], "--only", "short")
    assert ours["regime"] is ours["regime_because"] is None and ours["pace_setter"] == ours["straggler"] == 1


def test_the_straggler_of_two_h200s(capsys):
    """Rank 1 multiplies 60 more matrices after its forward pass. It is last 42 times, and rank 0 waits 89.25 ms."""
    ours = as_json(capsys, *RUNS["ddp_straggler"])
    waiting, slow = ours["ranks"]
    assert (slow["arrived_last"], waiting["arrived_last"], ours["straggler"]) == (42, 0, 1)
    assert waiting["waited_for_others_us"] == pytest.approx(89_252, abs=1)
    names = ["forward", "outside the annotations", "backward", "optimizer"]
    assert [phase["name"] for phase in slow["steps"][1]["phases"]] == names
    events = slices(RUNS["ddp_straggler"][1])
    later = [one for one in events if one["cat"] == "user_annotation" and one["ts"] >= marks(events)[2]["ts"]]
    marked = {one["name"]: one for one in later}
    first, last = end(marked["forward"]), marked["backward"]["ts"]
    calls = {e["args"]["correlation"] for e in events if e["cat"].startswith("cuda_") and first <= e["ts"] < last}
    more = [e for e in events if e["cat"] == "kernel" and e["args"]["correlation"] in calls]
    assert sum("nvjet" in one["name"] for one in more) == 60
    computed = slow["steps"][-1]["phases"][1]["compute_us"]
    assert computed == pytest.approx(sum(e["dur"] for e in more), rel=0.02)
    (why,) = (line for line in ours["in_short"] if "slower" in line)
    assert why == "rank 1 is slower than rank 0 because it computes 10.8 ms longer per step outside the annotations"


def test_a_cpu_that_launches_late_is_distinguished_from_a_rank_that_computes_more(capsys):
    ours = as_json(capsys, *RUNS["fsdp"])
    assert ours["straggler"] == 0
    late = ours["ranks"][0]
    assert late["compute_us"] < ours["ranks"][1]["compute_us"]
    assert late["idle_not_launched_us"] > 0.9 * late["idle_us"]
    (why,) = (line for line in ours["in_short"] if "slower" in line)
    late = "its CPU launches late: the GPU waits 28.7 ms longer per step for launches, 17.1 ms of it in forward"
    assert why == f"rank 0 is slower than rank 1 because {late}"


def test_the_most_that_faster_launching_saves_is_given_if_no_change_is_known(capsys):
    """The ops of this run were not recorded, so nothing shows what its CPU does meanwhile."""
    steps = as_json(capsys, *RUNS["fsdp"])["ranks"][0]["steps"]
    late, whole = (sorted(one[key] for one in steps)[1] / 1e3 for key in ("idle_not_launched_us", "us"))
    assert cli.main([*map(str, RUNS["fsdp"]), "--only", "try"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"The GPU of rank 0 waits {late:.1f} ms of a step of {whole:.1f} ms for launches" in told


def without_labels(found):
    """Return a trace without the program's annotations; torch's remain."""
    torchs = ("ProfilerStep#", "gloo:", "nccl:")
    found["traceEvents"] = [
        e for e in found["traceEvents"] if e.get("cat") != "user_annotation" or e["name"].startswith(torchs)
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=LARGE.get(name, ()))
        for name in (*RUNS, *(one for one in REFERENCES if "slow" in one or "fsdp" in one))
    ],
)
def test_the_reason_needs_no_annotations(name, tmp_path, capsys):
    """The rank, the reason and the amount are also reported for steps without annotations."""
    ours = as_json(capsys, *(changed(tmp_path, path, without_labels) for path in RUNS.get(name) or REFERENCES[name]))
    slow = ours["straggler"]
    assert not any(step["phases"] for one in ours["ranks"] for step in one["steps"])
    usual = {
        key: [sorted(step[key] for step in one["steps"])[1] for one in ours["ranks"]]
        for key in ("compute_us", "idle_not_launched_us")
    }
    part, key = ("launches late", "idle_not_launched_us") if "fsdp" in name else ("computes", "compute_us")
    reason = ours["loss"]["reasons"][0]
    assert (ours["loss"]["rank"], reason["part"], reason["phase"]) == (slow, part, None)
    assert reason["more_us"] == pytest.approx(usual[key][slow] - usual[key][1 - slow], rel=1e-6)
    said = f"because {'it computes' if part == 'computes' else 'its CPU launches late'}"
    assert sum(said in line for line in ours["in_short"]) == 1


@pytest.mark.exhaustive
def test_a_rank_that_waits_for_its_data_is_named(tmp_path, capsys):
    """Launches that the DataLoader delays do not count as late launches."""
    zero, one = RUNS["fsdp"]
    events = slices(zero)
    waits = [(mark["ts"] + 0.001, mark["ts"] + mark["dur"] / 2) for mark in marks(events)]

    def loads(found):
        without_labels(found)
        for mark, (start, stop) in zip(marks(events), waits, strict=True):
            label = {"name": "enumerate(DataLoader)#_Iter.__next__", "ts": start, "dur": stop - start}
            found["traceEvents"].append({**mark, **label})

    ours = as_json(capsys, changed(tmp_path, zero, loads), changed(tmp_path, one, without_labels))
    busy = [(e["ts"], end(e)) for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    idle = [length([wait], but=busy) for wait in waits]
    found = [step["idle_loading_us"] for step in ours["ranks"][0]["steps"]]
    assert sum(found) == pytest.approx(sum(idle), rel=0.1)  # but what lies before the first kernel
    parts = {reason["part"]: reason["more_us"] for reason in ours["loss"]["reasons"]}
    assert parts["waits for data"] == pytest.approx(sorted(found)[1])
    assert any("longer per step for the DataLoader" in line for line in ours["in_short"])


def transfers(slow_by):
    """Return eight ranks in four groups of two with 20 all-gathers each. Those of ranks 4 and 5 are slower."""
    parts = {rank: [] for rank in range(8)}
    for seq in range(20):
        for rank in parts:
            pair = (rank - rank % 2, rank - rank % 2 + 1)
            start = 10_000_000 * seq + 1000 * rank
            took = 100_000 * (slow_by if 4 in pair else 1)
            parts[rank].append((pair, "all-gather", 10**7, seq, start, 10_000_000 * seq + 10**4 + took))
    return joined([of_rank(rank, 8, "one", some) for rank, some in parts.items()])


def test_a_slow_link_is_found_by_equal_messages_of_other_groups():
    link = findings.slow_link(transfers(30))
    assert (link.ranks, link.kind, link.bytes) == ((4, 5), "all-gather", 10**7)
    took = [30 * 100 + 10 - 5, 100 + 10 - 3]  # from the second rank's start to the end
    assert link.transfer_us == pytest.approx(took[0])
    assert link.more_us == pytest.approx(20 * (took[0] - link.others_us)) and link.others_us == pytest.approx(took[1])
    assert findings.slow_link(transfers(1)) is None


def test_bandwidth_follows_nccls_definition(capsys):
    ours = as_json(capsys, *RUNS["fsdp"])
    kernels = [[e for e in slices(path) if e["cat"] == "kernel"] for path in RUNS["fsdp"]]
    named = [[e for e in some if "Collective name" in e["args"]] for some in kernels]
    by_rank = zip(*(sorted(some, key=lambda e: e["ts"]) for some in named), strict=True)
    matched = sorted(ours["matched"], key=lambda one: min(one["starts_us"]))
    for one, same in zip(matched, by_rank, strict=True):
        args, last = same[0]["args"], max(same, key=lambda e: e["ts"])
        gathers = "allgather" in args["Collective name"]
        moved = 2 * args["Out msg nelems" if gathers else "In msg nelems"]  # bf16
        assert one["bytes"] == moved
        assert one["transfer_us"] == pytest.approx(last["dur"])
        assert one["bus_gb_s"] == pytest.approx(moved / last["dur"] / 1e3 / 2)  # (n - 1) / n of two ranks
    best = max(one["bus_gb_s"] for one in ours["matched"])
    assert all(one["of_best"] == pytest.approx(one["bus_gb_s"] / best) for one in ours["kinds"])


@pytest.mark.parametrize("name", RUNS)
def test_the_answer_is_in_the_first_lines_and_the_whole_fits_a_screen_or_two(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(list(map(str, RUNS[name]))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 86  # the header alone is not wrapped
    answer = " ".join(lines[:10])
    assert "the pace" in answer or "gloo" in name
    assert re.search(r"rank \d keeps the others waiting", answer) and re.search(r"rank \d waits .* ms", answer)
    assert re.search(r"rank \d is slower than rank \d because .* (in\s+forward|outside\s+the\s+annotations)", answer)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_lines_give_times_per_step(name, capsys):
    """The waits and the communication of a window would be longer than the step that the header gives."""
    ours = as_json(capsys, *RUNS[name])
    waiting = max(ours["ranks"], key=lambda one: one["waited_exposed_us"])
    us, exposed = (waiting[key] / len(waiting["steps"]) / 1e3 for key in ("waiting_us", "waited_exposed_us"))
    cost = f"({waiting['waited_exposed_us'] / sum(one['us'] for one in waiting['steps']):.1%} of the step)"
    assert (
        f"rank {waiting['rank']} waits {us:,.1f} ms per step, and computes nothing for {exposed:,.1f} ms of that {cost}"
    ) in ours["in_short"]
    steps = {one["rank"]: [sum(step[key] for step in one["steps"]) for key in FIGURES] for one in ours["ranks"]}
    worst = max(steps, key=lambda rank: steps[rank][2] / steps[rank][0])
    us, all_us, exposed_us = steps[worst]
    count = len(ours["steps"]) * 1e3
    (told,) = (line for line in ours["in_short"] if line.startswith("communication: "))
    assert told.startswith(f"communication: rank {worst} {all_us / count:,.1f} ms per step, ")
    assert told.endswith(f"; {exposed_us / count:,.1f} ms exposed ({exposed_us / us:.1%} of the step)")


FIGURES = ("us", "communication_us", "exposed_communication_us")


def changed(tmp_path, path, change):
    """Return the path of a changed copy of a trace."""
    found = document(path)
    change(found)
    copy = tmp_path / path.name.removesuffix(".gz")
    copy.write_text(json.dumps(found))
    return copy


def later(us, host=None):
    def change(found):
        for event in found["traceEvents"]:
            if "ts" in event:
                event["ts"] = round(event["ts"] + us, 3)
        if host:
            found["host_name"] = host

    return change


@pytest.mark.parametrize(
    ("host", "ahead"),
    [
        ("another", 150_000),
        ("this one", 150_000),
        *(pytest.param(None, us, marks=pytest.mark.exhaustive) for us in (150_000, 400)),
    ],
)
def test_clocks_of_two_hosts_are_aligned_by_their_collectives(tmp_path, capsys, host, ahead):
    """The hosts' names differ, or the time stamps themselves show that there are two clocks."""
    zero, one = RUNS["ddp_straggler"]
    here = changed(tmp_path, zero, later(0, "this one" if host else None))
    there = changed(tmp_path, one, later(ahead, host))
    plain, shifted = as_json(capsys, zero, one), as_json(capsys, here, there)
    clocks = shifted["clocks"]
    assert clocks["aligned"] and not plain["clocks"]["aligned"]
    assert clocks["ahead_us"]["1"] == pytest.approx(ahead, abs=clocks["apart_us"])
    assert shifted["ranks"][1]["arrived_last"] == 42
    waits = [one["ranks"][0]["waited_for_others_us"] for one in (plain, shifted)]
    assert waits[1] == pytest.approx(waits[0], abs=42 * clocks["apart_us"])
    assert waits[1] == pytest.approx(waits[0], rel=0.01)
    assert cli.main([str(here), str(there)]) == 0
    assert f"clocks of 2 {'hosts' if host == 'another' else 'ranks'} aligned" in capsys.readouterr().out


def test_hosts_are_known_by_the_names_that_torchs_handler_gives_the_files(tmp_path, capsys):
    """The number in the name is the process's. rank_3 has the same form, and names no host."""
    for number, path in enumerate(RUNS["ddp_straggler"]):
        (process,) = {event["pid"] for event in slices(path) if event["cat"] == "cpu_op"}
        for folder, name in (("handler", f"node{number}-a_{process}"), ("own", f"rank_{number}")):
            (tmp_path / folder).mkdir(exist_ok=True)
            copy = tmp_path / folder / f"{name}.1795411832315989345.pt.trace.json.gz"
            copy.write_bytes(path.read_bytes())
    paths = {folder: sorted((tmp_path / folder).iterdir()) for folder in ("handler", "own")}
    assert [one["host"] for one in as_json(capsys, *paths["handler"])["ranks"]] == ["node0-a", "node1-a"]
    assert [one["host"] for one in as_json(capsys, *paths["own"])["ranks"]] == [None, None]
    assert cli.main(list(map(str, paths["handler"]))) == 0
    assert "2 of 2 ranks on 2 hosts" in capsys.readouterr().out
    recorded = changed(tmp_path, paths["handler"][1], later(0, "node7"))
    assert as_json(capsys, paths["handler"][0], recorded)["ranks"][1]["host"] == "node7"


def of_rank(rank, world_size, host, parts):
    """Return the data of a rank with only these collectives: group, kind, bytes, number, start and end."""
    members = list(dict.fromkeys(one[0] for one in parts))
    calls = list(dict.fromkeys(Call(members.index(group), kind, size, "") for group, kind, size, *_ in parts))
    return RankTrace(
        path=f"{rank}", rank=rank, world_size=world_size, host=host, device="", on_gpu=True, start=0, end=10**9,
        total=Times("", 1e6, 1, 1, 1, 0, 0, 0), steps=(), left_out=(), exposed=(), hidden=0, unnamed=0,
        groups=tuple(Group(f"{group}", "", len(group), group) for group in members), calls=tuple(calls),
        parts=tuple(
            Part(calls.index(Call(members.index(group), kind, size, "")), seq, start, end)
            for group, kind, size, seq, start, end in parts
        ),
        unprofiled_step_us=None, lane=None,
    )  # fmt: skip


def test_clocks_of_four_hosts_are_aligned_whichever_collectives_they_share():
    """Two hosts share all collectives with the first. The fourth shares some with only one of these two."""
    ahead = {0: 0, 1: 7_000_000, 2: -3_000_000, 3: 11_000_000}
    parts = {rank: [] for rank in ahead}
    for seq in range(20):
        for group in ((0, 1, 2), *[(2, 3)] * (seq < 5)):
            for rank in group:
                start = 10_000_000 * (2 * seq + len(group)) + ahead[rank]
                parts[rank].append((group, "all-reduce", 8, seq, start, start + 10**6))
    found = joined([of_rank(rank, 4, f"host {rank}", parts[rank]) for rank in ahead])
    assert found.clocks.ahead_us == {rank: ns / 1e3 for rank, ns in ahead.items()}
    assert found.clocks.apart_us == 0 and not found.clocks.not_aligned
    assert len(found.matched) == 25 and {one.waits_us for one in found.matched} == {(0, 0, 0), (0, 0)}


@pytest.mark.parametrize("flags", [(), ("--json=all",)])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--step", "99"), "--step 99: the ranks hold ProfilerStep#"),
        (("--only", "names"), "--only names: a report on ranks has the sections short, try, gpu, steps, work, lanes"),
    ],
)
def test_a_rank_step_or_section_that_does_not_exist_is_refused(capsys, flags, asked, said):
    assert cli.main([*map(str, RUNS["fsdp"]), *asked, *flags]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


def renumbered(rank, of):
    def change(found):
        found["distributedInfo"] |= {"rank": rank, "world_size": of}

    return change


def test_a_missing_rank_is_reported(tmp_path, capsys):
    zero, one = (changed(tmp_path, path, renumbered(rank, 3)) for rank, path in enumerate(RUNS["fsdp"]))
    assert cli.main([str(zero), str(one)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 3 ranks" in shown and "missing: rank 2; who waits" in shown
    assert "last of those read in 113 of 114 collectives" in shown
    short = as_json(capsys, zero, one, "--only", "short")
    assert short["missing"] == [2] and short["straggler"] == 0 and not {"ranks", "matched", "kinds"} & set(short)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_truncated_rank_is_reported_and_the_others_are_read(tmp_path, capsys, packed):
    zero, one = (changed(tmp_path, path, renumbered(rank, 3)) for rank, path in enumerate(RUNS["fsdp"]))
    cut = tmp_path / "cut_rank2.json"
    data = gzip.compress(zero.read_bytes()) if packed else zero.read_bytes()
    cut.write_bytes(data[: len(data) // 2].replace(b'"rank": 0', b'"rank": 2'))
    assert cli.main([str(zero), str(one), str(cut), *["--ranks"] * packed]) == 0
    shown = capsys.readouterr().out
    assert "114 collectives matched" in shown and "cut_rank2.json" in shown
    assert ("broken gzip" if packed else "cut short") in shown


def test_ranks_of_another_run_are_reported_and_left_out(capsys):
    others = RUNS["ddp_straggler"]
    assert cli.main(["--ranks", str(others[0]), *map(str, RUNS["fsdp"])]) == 0
    shown = capsys.readouterr().out
    assert "114 collectives matched" in shown
    said = r"left out: .*ddp_straggler_rank0.*from another run, or by a clock that is off: rank 0 was recorded [\d.]+ s"
    assert re.search(said, shown)


def without_step(number):
    """Return a change that removes a step's annotation, so that its events belong to no step."""

    def change(found):
        found["traceEvents"] = [e for e in found["traceEvents"] if e.get("name") != f"ProfilerStep#{number}"]

    return change


def test_only_steps_that_all_ranks_have_are_counted(tmp_path, capsys):
    """The raw kernels of the two common steps give the waits of each of these steps, not of three."""
    zero, one = RUNS["fsdp"]
    paths = zero, changed(tmp_path, one, without_step(2))
    ours = as_json(capsys, *paths)
    starts = [sorted(e["ts"] for e in slices(path) if "nccl" in e["name"])[-76:] for path in RUNS["fsdp"]]
    waited = [sum(max(0, other - mine) for mine, other in zip(*some, strict=True)) for some in (starts, starts[::-1])]
    assert ours["collectives"] == 76 and ours["unmatched"] == 0
    for rank, us in zip(ours["ranks"], waited, strict=True):
        assert rank["waited_for_others_us"] == pytest.approx(us, abs=1)
        assert [step["name"] for step in rank["steps"]] == ["ProfilerStep#3", "ProfilerStep#4"]
        assert rank["hidden"] <= rank["collectives"] == 76
    counted = ours["ranks"][0]
    assert counted["window_us"] == pytest.approx(sum(step["us"] for step in counted["steps"]))
    told = f"rank 1 waits {ours['ranks'][1]['waiting_us'] / 2e3:,.1f} ms per step"
    assert any(one.startswith(told) for one in ours["in_short"])
    assert cli.main(list(map(str, paths))) == 0
    assert "only steps that all ranks have are counted: rank 1 has no #2" in capsys.readouterr().out


def test_the_page_draws_the_compute_of_one_step(tmp_path):
    """The middle step of the trace with fewer steps is another one. Only its collectives are drawn."""
    zero, one = RUNS["fsdp"]
    summary, traces = opened([zero, changed(tmp_path, one, without_step(2))], View())
    assert [one.lane.step for one in traces] == ["ProfilerStep#3", "ProfilerStep#4"]
    figures, slices, _ = page(summary, traces, None)
    waits = [[one.waits_us[rank] > 0 for one in summary.matched] for rank in (0, 1)]
    drawn = [one["slices"] - len(some) - sum(some) for one, some in zip(slices["tracks"], waits, strict=True)]
    assert figures["drawn"] == "ProfilerStep#3" and drawn == [len(traces[0].lane.pieces), 0]


MESH = sorted((ROOT / "tests/traces/h200-x4/mesh_slow").glob("*.json.gz"))


def test_a_rank_without_the_steps_of_the_others_is_left_out(tmp_path, capsys):
    def without_steps(found):
        for number in range(100):
            without_step(number)(found)

    paths = *MESH[:3], changed(tmp_path, MESH[3], without_steps)
    assert cli.main([*map(str, paths), "--only", "short"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 of 4 ranks" in shown and "missing: rank 3" in shown and "cannot be matched" not in shown
    assert re.search(r"left out: \S+rank3.json: rank 3 has no step #\d+, which most others have", shown)


@pytest.mark.parametrize("change", ["no rank", "rank of another", "another world size"])
def test_one_odd_file_in_four_is_left_out(change, tmp_path, capsys):
    def odd(found):
        match change:
            case "no rank":
                del found["distributedInfo"]
            case "rank of another":
                found["distributedInfo"]["rank"] = 1
            case _:
                found["distributedInfo"]["world_size"] = 8

    paths = [*MESH[:3], changed(tmp_path, MESH[3], odd)]
    assert cli.main([*map(str, paths), "--only", "short"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 4 ranks" in shown and "missing: rank 3" in shown and "left out: " in shown
    del paths[0]  # of three files, one odd one is too much: they may be runs to compare
    assert cli.main([*map(str, paths), "--only", "short"]) == 0
    assert "run 2 is about as fast as run 1" in capsys.readouterr().out


@pytest.mark.parametrize("listed", [True, False])
def test_groups_of_one_name_are_distinguished_by_their_ranks(listed, tmp_path, capsys):
    """Without a list of ranks anywhere, groups of one name cannot be told apart, so nothing of them is matched."""

    def renamed(found):
        for event in found["traceEvents"]:
            args = event.get("args", {})
            if "Process Group Name" in args:
                args["Process Group Name"] = args["Process Group Description"]
                del args["Process Group Ranks"]
        groups = found["distributedInfo"]["pg_config"]
        for one in groups:
            one["pg_name"] = one["pg_desc"]
        if not listed:
            groups.clear()

    paths = [changed(tmp_path, path, renamed) for path in MESH]
    ours, expected = as_json(capsys, *paths), as_json(capsys, *MESH)
    if not listed:
        assert not ours["matched"] and ours["unmatched"] == sum(len(one["ranks"]) for one in expected["matched"])
        return
    assert {tuple(one["ranks"]) for one in ours["groups"]} == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert [one | {"group": ""} for one in ours["matched"]] == [one | {"group": ""} for one in expected["matched"]]


def test_a_collective_that_one_rank_lacks_shifts_no_other(tmp_path, capsys):
    def without_one(found):
        events = found["traceEvents"]
        first = next(e for e in events if "Collective name" in e.get("args", {}) and e["cat"] == "kernel")
        calls = [e for e in events if e.get("args", {}).get("correlation") == first["args"]["correlation"]]
        for one in calls:  # its launch, too: a launch without a kernel would be a lost record
            events.remove(one)

    zero, one = RUNS["ddp_straggler"]
    ours = as_json(capsys, zero, changed(tmp_path, one, without_one))
    assert (ours["collectives"], ours["unmatched"]) == (28, 27)  # the first step's are not guessed at


@pytest.mark.exhaustive
def test_sequence_numbers_match_collectives_in_another_order(tmp_path, capsys):
    """Newer versions of torch record sequence numbers, which also match if a rank lacks a collective."""

    def numbered(drop):
        def change(found):
            named = sorted(
                (e for e in found["traceEvents"] if "Collective name" in e.get("args", {}) and e["cat"] == "kernel"),
                key=lambda e: e["ts"],
            )
            for number, event in enumerate(named):
                event["args"]["Seq"] = 1000 + number
            if drop:  # with its launch, so that it is no lost record
                dropped = named[5]["args"]["correlation"]
                found["traceEvents"] = [
                    e for e in found["traceEvents"] if e.get("args", {}).get("correlation") != dropped
                ]

        return change

    zero, one = (changed(tmp_path, path, numbered(rank)) for rank, path in enumerate(RUNS["ddp_straggler"]))
    ours = as_json(capsys, zero, one)
    assert (ours["collectives"], ours["unmatched"], ours["ranks"][1]["arrived_last"]) == (41, 1, 41)


def test_collectives_are_matched_within_their_groups(tmp_path, capsys):
    """There are two groups of two, as in a mesh. Only its own group waits for a late rank."""

    def moved(rank, group, ahead):
        def change(found):
            renumbered(rank, 4)(found)
            for event in found["traceEvents"]:
                if "Process Group Ranks" in event.get("args", {}):
                    event["args"] |= {"Process Group Name": str(group[0]), "Process Group Ranks": str(group)}
                if "ts" in event:
                    event["ts"] = round(event["ts"] + ahead, 3)

        return change

    paths = []
    for number, name in enumerate(("fsdp", "ddp_straggler")):
        group = [2 * number, 2 * number + 1]
        # The second run was recorded 3.3 s before the first.
        paths += [
            changed(tmp_path, path, moved(rank, group, 3_350_000 * number))
            for rank, path in zip(group, RUNS[name], strict=True)
        ]
    ours = as_json(capsys, *paths)
    assert ours["collectives"] == 114 + 42 and not ours["not_read"]
    waited = [one["waited_for_others_us"] for one in ours["ranks"]]
    expected = [one["waited_for_others_us"] for name in ("fsdp", "ddp_straggler") for one in worked_out(RUNS[name])[0]]
    assert waited == pytest.approx(expected, rel=1e-4, abs=0.1)
    assert [one["arrived_last"] for one in ours["ranks"]] == [113, 1, 0, 42]
    assert [one["others_waited_us"] > 0 for one in ours["ranks"]] == [True, True, False, True]


def all_named_alike(around):
    """Give all collectives' kernels one name, as an older NCCL does. around: the slice around each launch."""

    def change(found):
        for event in found["traceEvents"]:
            if event["ph"] == "X" and event["cat"] == "kernel" and event["name"].startswith("nccl"):
                event["name"] = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
                event["args"] = {key: event["args"][key] for key in ("device", "stream", "correlation")}
            elif event["name"] == "record_param_comms":
                event |= around(event["args"])

    return change


@pytest.mark.parametrize(
    ("around", "sized"),
    [
        (lambda args: {}, True),
        pytest.param(
            lambda args: {"name": f"c10d::{args['Collective name']}_", "args": {}},
            False,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            lambda args: {"name": f"nccl:{args['Collective name']}", "cat": "user_annotation", "args": {}},
            False,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["record_param_comms", "c10d", "nccl"],
)
def test_the_ops_around_its_launch_describe_a_collective(tmp_path, capsys, around, sized):
    plain = as_json(capsys, *RUNS["fsdp"])
    ours = as_json(capsys, *(changed(tmp_path, path, all_named_alike(around)) for path in RUNS["fsdp"]))
    assert ours["collectives"] == plain["collectives"] == 114
    kinds = [{(one["kind"], one["bytes"] if sized else None) for one in found["kinds"]} for found in (plain, ours)]
    assert kinds[0] == kinds[1] and {kind for kind, _ in kinds[0]} == {"all-gather", "reduce-scatter"}
    for one, other in zip(ours["ranks"], plain["ranks"], strict=True):
        assert one["waited_for_others_us"] == other["waited_for_others_us"]


@pytest.mark.parametrize(
    ("around", "says"),
    [
        (lambda args: {"args": {}}, "cannot be matched"),
        (lambda args: {"name": "nccl:send 0->1", "args": {}}, "cannot be matched"),  # no rank receives
    ],
)
def test_kernels_without_a_description_are_no_collectives_but_are_reported(tmp_path, capsys, around, says):
    paths = [changed(tmp_path, path, all_named_alike(around)) for path in RUNS["fsdp"]]
    (answer,) = as_json(capsys, *paths)["in_short"]
    assert says in answer and "no collective" not in answer


@pytest.mark.exhaustive
def test_other_traces_are_still_compared(tmp_path, capsys):
    assert cli.main([str(RUNS["fsdp"][0]), str(RUNS["ddp_straggler"][0])]) == 0  # rank 0 twice
    assert "per step instead of" in capsys.readouterr().out
    assert cli.main([str(RUNS["fsdp"][0]), str(RUNS["ddp_straggler"][1])]) == 0  # 3 s apart
    assert "per step instead of" in capsys.readouterr().out
    here = changed(tmp_path, RUNS["fsdp"][0], later(0, "here"))
    there = changed(tmp_path, RUNS["fsdp"][1], later(7_200_000_000, "there"))  # as another day's run of the same
    assert cli.main([str(here), str(there)]) == 0
    assert "per step instead of" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_several_processes_return_the_same_as_one(monkeypatch):
    paths = [path for name in ("fsdp", "gloo_ddp_slow") for path in RUNS[name]]
    at_once = reading.read_ranks(paths, 10**9, None)
    monkeypatch.setattr(reading, "_processes", lambda sizes: 2)
    assert reading.read_ranks([*paths, paths[0].with_name("none.json")], 10**9, None) == (
        at_once[0],
        {str(paths[0].with_name("none.json")): NotRead("unreadable", "no such file")},
    )


def test_a_killed_process_is_reported(monkeypatch):
    monkeypatch.setattr(reading, "_processes", lambda sizes: 2)
    monkeypatch.setattr(reading.sys, "executable", "/bin/false")  # as one that the system ends for want of memory
    kept, why = reading.read_ranks(RUNS["fsdp"], 10**9, None)
    assert kept == [] and set(why.values()) == {NotRead("killed")}


def test_each_reason_for_leaving_a_trace_out_has_words():
    reasons = get_args(NotRead.__annotations__["reason"])
    told = [findings.why_not_read(NotRead(reason, "its text", 3, 8, 4, 2.5)) for reason in reasons]
    assert len(told) == 10 and all(told)


def test_perfetto_gets_one_trace_in_which_the_ranks_are_distinguished(tmp_path):
    zero, one = RUNS["ddp_straggler"]
    paths = [changed(tmp_path, zero, later(0, "here")), changed(tmp_path, one, later(150_000, "there"))]
    summary, _ = opened(paths, View())
    name, content = merged(summary, 10**9)
    assert name.name == "2_ranks_ddp_straggler_rank0.json.gz"
    events = json.loads(gzip.decompress(content))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 0 CPU", "rank 0 GPU 0", "rank 1 CPU", "rank 1 GPU 1"} <= set(names.values())
    shift = summary.clocks.ahead_us[1]
    for rank, path in enumerate(paths):
        mine = [e for e in events if e["ph"] == "X" and names[e["pid"]].startswith(f"rank {rank} ")]
        raw = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert [(e["name"], e["dur"]) for e in mine] == [(e["name"], e["dur"]) for e in raw]
        assert all(
            after["ts"] == pytest.approx(before["ts"] - shift * rank, abs=0.002)
            for after, before in zip(mine, raw, strict=True)
        )


def test_a_rank_that_is_slow_in_one_recorded_step_is_named_with_it(capsys, monkeypatch):
    """In the two steps after it, the rank takes a little longer, too, and the median over all three would hide it."""
    folder = ROOT / "tests/traces/h200-x2/computes_in_one"
    more = {}
    for rank in (0, 1):
        events = slices(folder / f"rank{rank}.json.gz")
        called = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
        for mark in (e for e in events if e["name"] == "forward" and e["cat"] == "user_annotation"):
            inside = (
                e["dur"]
                for e in events
                if e.get("cat") == "kernel" and mark["ts"] <= called.get(e["args"]["correlation"], 0) < end(mark)
            )
            more.setdefault(rank, []).append(sum(inside))
    extra = [other - one for one, other in zip(more[0], more[1], strict=True)]
    assert extra.index(max(extra)) == 2 and max(extra) > 10 * sorted(extra)[-2]
    summary = joined(reading.read_ranks(sorted(folder.iterdir()), 10**9, None)[0])
    loss = findings.loss(summary)
    assert (loss.rank, loss.steps) == (1, ("ProfilerStep#3",))
    (computes,) = (one for one in loss.reasons if one.part == "computes")
    assert computes.phase == "forward" and computes.phase_us == pytest.approx(max(extra), rel=0.02)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([str(folder), "--only", "short"]) in (0, None)
    assert "in 1 of 5 steps (#3), rank 1 is slower than rank 0 because it computes" in " ".join(
        capsys.readouterr().out.split()
    )
