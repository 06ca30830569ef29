"""Sends and receives between ranks: each figure is compared with one that the test computes from the raw events."""

import json

import msgspec
import pytest
from many_ranks import piped
from test_many_ranks import said, shown
from test_ranks import FOLDER, RUNS, as_json, changed, end, length, marks, slices, spans

from tracereader import cli
from tracereader.changes import prices
from tracereader.changes import ranks as rank_changes
from tracereader.figures.rank import Call, Group, Part
from tracereader.figures.ranks import joined
from tracereader.findings import ranks as findings
from tracereader.replay import graph_of
from tracereader.show.ranks import opened
from tracereader.show.view import View
from tracereader.trace import read

GLOO = sorted(FOLDER.glob("gloo_pipeline_rank*.json.gz"))
RANKS = (1, 5)  # of the two recorded ranks, in a group of three


def messages_of(path):
    """Return the rank's sends and receives of a gloo trace: step, whether it sends, start of the call, and end."""
    found = []
    events = slices(path)
    steps = marks(events)
    for event in events:
        if event["name"] in ("gloo:send", "gloo:recv"):
            calls = [e for e in events if e["name"].startswith("c10d::") and e["ts"] <= event["ts"] < end(e)]
            step = next(one["name"] for one in steps if one["ts"] <= event["ts"] < end(one))
            found.append((step, event["name"] == "gloo:send", calls[-1]["ts"], end(event)))
    return sorted(found, key=lambda one: one[2])


def test_messages_of_gloo_are_matched_by_their_order(capsys):
    """Two stages of a pipeline, recorded on two CPUs. Its sends are asynchronous."""
    ours = as_json(capsys, *GLOO)
    raw = [messages_of(path) for path in GLOO]
    expected = []
    for source, destination in ((0, 1), (1, 0)):
        sent = [one for one in raw[source] if one[1]]
        received = [one for one in raw[destination] if not one[1]]
        assert [one[0] for one in sent] == [one[0] for one in received] and len(sent) == 6
        for (step, _, ready, _), (_, _, posted, _) in zip(sent, received, strict=True):
            expected.append((step, source, destination, max(0, ready - posted)))
    found = [(one["step"], *one["ranks"], one["waits_us"][1]) for one in ours["messages"]]
    for one, other in zip(sorted(found), sorted(expected), strict=True):
        assert one[:3] == other[:3] and one[3] == pytest.approx(other[3], abs=0.01)
    assert (ours["collectives"], ours["unmatched_messages"], ours["unnamed"]) == (0, 0, 0)
    assert {one["bytes"] for one in ours["messages"]} == {4 * 96 * 96}


@pytest.mark.parametrize("both", [True, False])
def test_messages_of_gloo_with_tags_are_matched_by_them(tmp_path, capsys, both):
    """The receiver posts the receives of each step in another order than they are sent. Without tags it would be seen
    as the same order. both: whether both ranks recorded the tags.
    """

    def tagged(found, rank):
        calls = [e for e in found["traceEvents"] if e.get("name") in ("c10d::send", "c10d::recv_")]
        for step in marks([e for e in found["traceEvents"] if e["ph"] == "X"]):
            for name in ("c10d::send", "c10d::recv_"):
                mine = [e for e in calls if e["name"] == name and step["ts"] <= e["ts"] < end(step)]
                for at, event in enumerate(sorted(mine, key=lambda e: e["ts"])):
                    event["args"]["Concrete Inputs"][3] = str(at if name == "c10d::send" else len(mine) - 1 - at)
                    if rank and not both:
                        del event["args"]["Concrete Inputs"]

    paths = [changed(tmp_path, path, lambda found, rank=rank: tagged(found, rank)) for rank, path in enumerate(GLOO)]
    ours = as_json(capsys, *paths)
    raw = [messages_of(path) for path in GLOO]
    expected = []
    for source, destination in ((0, 1), (1, 0)):
        for step in ours["steps"]:
            sent = [one[2] for one in raw[source] if one[0] == step and one[1]]
            received = [one[2] for one in raw[destination] if one[0] == step and not one[1]]
            pairs = zip(sent, received[::-1] if both else received, strict=True)
            expected += [(step, source, max(0, ready - posted)) for ready, posted in pairs]
    found = [(one["step"], one["ranks"][0], one["starts_us"][0] - one["starts_us"][1]) for one in ours["messages"]]
    assert len(found) == 12 and ours["unmatched_messages"] == 0
    found = [(step, source, max(0, us)) for step, source, us in found]
    for one, other in zip(sorted(found), sorted(expected), strict=True):
        assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], abs=0.01)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_peer_of_a_message_of_gloo_is_an_input_of_its_op(tmp_path, capsys, recorded):
    """Of three ranks, two are read. Without record_shapes nothing names the peer."""

    def of_three(found):
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 3, "ranks": [0, 1, 2]}
        found["distributedInfo"] |= {"world_size": 3, "pg_config": [group]}
        for event in found["traceEvents"]:
            if event.get("name", "").startswith("c10d::") and not recorded:
                event["args"].pop("Concrete Inputs")

    ours = as_json(capsys, *(changed(tmp_path, path, of_three) for path in GLOO))
    assert (len(ours["messages"]), ours["unnamed"]) == ((12, 0) if recorded else (0, 24))


def test_a_rank_computes_while_an_asynchronous_send_is_open(capsys):
    """The slice of such a send lasts until the program waits for it, and ops lie in it."""
    ours = as_json(capsys, *GLOO)
    for one, path in zip(ours["ranks"], GLOO, strict=True):
        events = slices(path)
        steps = marks(events)
        start, stop = steps[0]["ts"], end(steps[-1])
        ops = [e for e in events if e["cat"] == "cpu_op" and not e["name"].startswith("c10d::")]
        assert one["compute_us"] == pytest.approx(length(spans(ops, start, stop)), abs=0.1)
        calls = [(begin, until) for _, _, begin, until in messages_of(path)]
        exposed = length(calls, but=spans(ops, start, stop))
        assert one["exposed_communication_us"] == pytest.approx(exposed, abs=0.1)
        names = {phase["name"]: phase for phase in one["steps"][0]["phases"]}
        marked = [e for e in events if e["name"] == "forward" and e["ts"] < end(steps[0])]
        assert names["forward"]["us"] == pytest.approx(sum(e["dur"] for e in marked), abs=0.1)


def test_the_report_of_a_pipeline_on_cpus(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(list(map(str, GLOO))) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    ours = as_json(capsys, *GLOO)
    waits = ours["ranks"][1]["message_waits"]
    share = waits["us"] / sum(mark["dur"] for mark in marks(slices(GLOO[1])))
    assert (
        f"12 messages matched\nin short   pipeline bubble: rank 1 computes nothing for {waits['us'] / 2e3:.1f} ms"
        in shown
    )
    assert f"({share:.1%} of it) while it waits for messages" in said(shown)
    assert "rank 0 computes longest" in said(shown)
    (answer, *_) = as_json(capsys, GLOO[0], "--ranks")["in_short"]
    assert answer == "only rank 0 could be read, so there is no rank to compare it with"


# From the collectives of two H200s: each second kernel becomes a send of the first rank, the others are its receives.

GROUP = {"Process Group Name": "9", "Process Group Description": "mesh_pp", "Group size": 3, "dtype": "BFloat16",
         "Process Group Ranks": "[1, 5, 6]", "In msg nelems": 1000, "Out msg nelems": 1000}  # fmt: skip


def described(sends, number, newer):
    """Return torch's description of a message on one of the two ranks. newer: whether it has the peer's global rank."""
    peer = 1 - number
    return {
        **GROUP, "Collective name": "send" if sends else "recv", "Rank": peer,
        **({("Dst Rank" if sends else "Src Rank"): RANKS[peer]} if newer else {}),
    }  # fmt: skip


def on_the_kernel(number, kernel, launch, sends):
    kernel["args"] |= described(sends, number, newer=True) | {"Seq": 17 * number}
    return []


def by_its_number(number, kernel, launch, sends):
    kernel["args"] |= described(sends, number, newer=False)
    return []


def around_the_launch(number, kernel, launch, sends):
    return [comms(launch, launch["ts"] - 0.5, launch["dur"] + 1, described(sends, number, newer=True))]


def before_the_launch(number, kernel, launch, sends):
    """As batch_isend_irecv is recorded: the descriptions of its messages, then the launch that starts them all."""
    at = launch["ts"] - 0.6
    batch = {"name": "nccl:coalesced", "cat": "user_annotation", "ts": launch["ts"] - 0.1, "dur": launch["dur"] + 0.2}
    return [comms(launch, at, 0.2, described(sends, number, newer=True)), {**launch, **batch, "args": {}}]


def comms(launch, ts, dur, args):
    return {**launch, "name": "record_param_comms", "cat": "cpu_op", "ts": round(ts, 3), "dur": dur, "args": args}


def as_messages(tmp_path, describe, changes=lambda found, number: None):
    """Write the two ranks with messages, and return the paths and the raw kernels of the steps by rank."""
    paths, kernels = [], []
    for number, path in enumerate(RUNS["ddp_straggler"]):

        def change(found, number=number):
            found["distributedInfo"] = {"backend": "nccl", "rank": RANKS[number], "world_size": 8}
            events = found["traceEvents"]
            named = sorted(
                (e for e in events if e.get("cat") == "kernel" and "Collective name" in e["args"]),
                key=lambda e: e["ts"],
            )
            calls = {
                e["args"]["correlation"]: e for e in events
                if e.get("cat", "").startswith("cuda_") and "correlation" in e.get("args", {})
            }  # fmt: skip
            events[:] = [e for e in events if e.get("name") != "record_param_comms"]
            for at, kernel in enumerate(named):
                kernel["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
                kernel["args"] = {key: kernel["args"][key] for key in ("device", "stream", "correlation")}
                events += describe(number, kernel, calls[kernel["args"]["correlation"]], (at + number) % 2 == 0)
            changes(found, number)

        paths.append(changed(tmp_path, path, change))
        kernels.append(sorted((e for e in slices_of(paths[-1]) if "SendRecv" in e["name"]), key=lambda e: e["ts"]))
    return paths, kernels


def slices_of(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize(
    "describe",
    [
        on_the_kernel,
        *(
            pytest.param(one, marks=pytest.mark.exhaustive)
            for one in (by_its_number, around_the_launch, before_the_launch)
        ),
    ],
)
def test_messages_of_nccl_are_matched_however_they_are_described(tmp_path, capsys, describe):
    """A rank's sequence number of a message differs from the peer's, so their order decides."""
    paths, kernels = as_messages(tmp_path, describe)
    ours = as_json(capsys, *paths)
    assert (ours["collectives"], len(ours["messages"]), ours["unmatched_messages"]) == (0, 42, 0)
    for at, (one, *both) in enumerate(zip(ours["messages"], *kernels, strict=True)):
        source = at % 2
        last = max(e["ts"] for e in both)
        expected = [max(0, last - e["ts"]) for e in (both[source], both[1 - source])]
        if end(both[source]) <= last:
            expected[0] = 0
        assert one["ranks"] == [RANKS[source], RANKS[1 - source]] and one["bytes"] == 2000
        assert one["waits_us"] == pytest.approx(expected, abs=0.01)
        assert one["transfer_us"] == pytest.approx(max(0, min(map(end, both)) - last), abs=0.01)
    waited = sum(one["waits_us"][one["ranks"].index(1)] for one in ours["messages"])
    (here, there) = ours["ranks"]
    assert 0 < here["message_waits"]["us"] < waited and there["message_waits"]["us"] < 0.1 * waited
    assert {(one["source"], one["destination"], one["description"]) for one in ours["pairs"]} == {
        (1, 5, "mesh_pp"), (5, 1, "mesh_pp")
    }  # fmt: skip
    assert ours["in_short"][0].startswith("pipeline bubble: rank 1 computes nothing for")


@pytest.mark.exhaustive
def test_an_annotation_alone_names_both_ranks_of_a_message(tmp_path, capsys):
    def only_annotated(number, kernel, launch, sends):
        name = f"nccl:send {number}->{1 - number}" if sends else f"nccl:recv {number}<-{1 - number}"
        around = {"name": name, "cat": "user_annotation", "ts": launch["ts"] - 0.5, "dur": launch["dur"] + 1}
        return [{**launch, **around, "args": {}}]

    def two_ranks(found, number):
        found["distributedInfo"] = {"backend": "nccl", "rank": number, "world_size": 2}

    ours = as_json(capsys, *as_messages(tmp_path, only_annotated, two_ranks)[0])
    assert [one["ranks"] for one in ours["messages"]] == [[0, 1], [1, 0]] * 21


def test_one_kernel_may_send_and_receive(tmp_path, capsys):
    """In the middle of a pipeline, batch_isend_irecv sends to one stage and receives from the same or another."""

    def both(number, kernel, launch, sends):
        at = launch["ts"] - 0.6
        found = [described(way, number, newer=True) for way in (True, False)]
        return [comms(launch, at + 0.2 * place, 0.1, args) for place, args in enumerate(found)]

    paths, kernels = as_messages(tmp_path, both)
    ours = as_json(capsys, *paths)
    assert len(ours["messages"]) == 84 and ours["pipeline"]  # by the group's description
    pairs = {(one["source"], one["destination"]): one for one in ours["pairs"]}
    late = sum(max(0, there["ts"] - here["ts"]) for here, there in zip(*kernels, strict=True))
    waits = [sum(one["waits_us"][1] for one in ours["messages"] if one["ranks"] == [5, 1])]
    assert set(pairs) == {(1, 5), (5, 1)} and waits == [pytest.approx(late, abs=1)]


@pytest.mark.exhaustive
def test_a_message_without_its_other_end_is_reported(tmp_path, capsys):
    """The other messages of its step are not guessed at."""

    def without_one(found, number):
        if number:
            events = found["traceEvents"]
            dropped = next(e for e in events if "SendRecv" in e.get("name", ""))["args"]["correlation"]
            # With its launch, so that it is no lost record.
            found["traceEvents"] = [e for e in events if e.get("args", {}).get("correlation") != dropped]

    paths, _ = as_messages(tmp_path, on_the_kernel, without_one)
    ours = as_json(capsys, *paths)
    assert (len(ours["messages"]), ours["unmatched_messages"]) == (35, 13)  # 7 of 14 in the step, both ends but one
    assert cli.main(list(map(str, paths))) == 0
    assert "not matched: 13 sends and receives" in capsys.readouterr().out


def test_a_message_whose_peer_was_not_read_is_no_failure(tmp_path, capsys):
    def to_the_third(found, number):
        for event in found["traceEvents"]:
            for key in ("Dst Rank", "Src Rank"):
                if key in event.get("args", {}):
                    event["args"][key] = 6

    ours = as_json(capsys, *as_messages(tmp_path, on_the_kernel, to_the_third)[0])
    assert (ours["messages"], ours["unmatched_messages"]) == ([], 0)
    assert "6" in ", ".join(map(str, ours["missing"]))


# Made pipelines, whose bubbles are known.


def test_the_bubble_of_each_stage_is_that_of_its_schedule():
    """The first receive waits for all earlier stages, and the first stage for all forward and backward passes."""
    stages, count, forward, backward, transfer = 4, 6, 4000, 8000, 50
    summary = joined(piped(stages, 1, count))
    assert findings.is_pipeline(summary)
    one_more = forward + transfer
    for stage, one in enumerate(summary.ranks):
        fill = stage * one_more - transfer if stage else 0
        # The last stage's last forward pass, one backward pass, and the way back through the stages between.
        gradient = (stages + count - 1) * one_more - transfer + backward
        gradient += (stages - 2 - stage) * (transfer + backward)
        own_forward = (stage + count) * one_more - transfer if stage else count * forward
        drain = gradient - own_forward if stage < stages - 1 else 0
        waits = one.message_waits
        assert waits.us == pytest.approx(fill + drain)
        assert waits.first_us == pytest.approx(fill if stage else drain) and waits.last_us == 0
        assert waits.first_sends == (stage == 0)
        assert waits.messages == 2 * count * ((stage > 0) + (stage < stages - 1))


def test_the_slowest_stage_of_a_pipeline_is_named(capsys, monkeypatch):
    summary = joined(piped(4, 2, 6, steps=3, slower={2: 1.5}))
    told = findings.sentences(summary)
    worst = max(summary.ranks, key=lambda one: one.message_waits.us / one.total.us)
    assert told[0].startswith(f"pipeline bubble: rank {worst.rank} computes nothing for")
    slow = "stage 2 (ranks 4 and 5) computes longest: 108.0 ms per step, the median of the other stages 72.0 ms"
    assert any(line.startswith(slow) for line in told)
    text = said(shown(summary, capsys, monkeypatch))
    assert f"{2 * 2 * 3 * 6 * 3} messages matched" in text
    pairs = [one for one in summary.pairs if one.places == (1, 2)]
    waits = sum(one.receiver_waited_us for one in pairs) / 2 / 3 / 1e3
    assert len(pairs) == 2 and f"stage 1 to 2 2 1.0 MB 18 {waits:.1f} " in text


def test_one_slow_rank_makes_no_slow_stage():
    """In one of two pipelines stage 1 computes twice as long. Its other rank is as fast as all others."""
    slow, even = piped(4, 2, 6, steps=3, slower={1: 2}), piped(4, 2, 6, steps=3)
    summary = joined([even[at] if at % 2 else one for at, one in enumerate(slow)])
    assert findings.slowest_stage(summary) is None and findings.pace_setter(summary).rank == 2
    assert not any("sets the pace of a pipeline" in line for line in findings.sentences(summary))
    assert findings.slowest_stage(joined(slow)).ranks == (2, 3)


def test_the_changes_of_a_pipeline_are_priced(tmp_path, capsys):
    """The slowest stage computes as long as the mean one; half of the first and last waits of a step is saved.

    These two ranks compute nearly the same. A step of equal stages takes at least their mean time and one more part of
    it for each other stage.
    """
    paths, _ = as_messages(tmp_path, before_the_launch)
    compute = [sorted(step["compute_us"] for step in each["steps"])[1] for each in as_json(capsys, *paths)["ranks"]]
    slow, _ = opened(paths, View())
    case = rank_changes.RankCase(slow, slow.ranks[1], graph_of(read(paths[1])))
    even = rank_changes.balance_stages(case)
    before, after = case.graph.step_us(), even.graph.step_us()
    assert before - after == pytest.approx(compute[1] - sum(compute) / 2, rel=0.05)
    sent = min(one.messages for one in slow.pairs) / len(slow.steps)
    assert even.least_us == pytest.approx(sum(compute) / 2 * (1 + 1 / sent), rel=0.01)
    summary, _ = opened(paths, View())
    rank = summary.ranks[0]
    case = rank_changes.RankCase(summary, rank, graph_of(read(paths[0])))
    after = rank_changes.microbatches(case).graph
    expected = {}
    for step in summary.steps:
        received = [each for each in summary.messages if each.step == step and each.ranks == (5, 1)]
        for each in (received[0], received[-1]):
            expected[round(each.starts_us[1], 3)] = each.waits_us[1] / 2
    saved = [work.us - after.dur[after.activity[id(work)]] / 1e3 for work, _ in case.messages]
    saved = sorted(us for us in saved if us > 0.01)
    assert len(saved) == 6 and saved == pytest.approx(sorted(expected.values()), abs=0.01)
    slower = [after.dur[after.activity[id(work)]] / 1e3 / work.us for work in case.computing if work.us > 10]
    assert slower == pytest.approx([prices.SMALLER_IS_SLOWER] * len(slower), rel=0.01)


def test_a_rank_whose_peers_were_not_read_does_not_seem_to_wait_least():
    """Its messages are not matched, so its waits are not known. No communication is said to lie outside the steps."""
    ranks = piped(4, 1, 6, slower={1: 2})
    summary = joined([one for one in ranks if one.rank != 2])
    assert min(summary.ranks, key=lambda one: one.message_waits.us).rank == 3
    assert findings.pace_setter(summary).rank == findings.pace_setter(joined(ranks)).rank == 1
    alone = joined([one for one in ranks if one.rank in (0, 1)])
    told = [line for line in findings.sentences(alone) if line.startswith("exposed: ")]
    assert not any("outside the steps" in line for line in told)


@pytest.mark.exhaustive
def test_a_thousand_stages_fit_one_screen(capsys, monkeypatch):
    summary = joined(piped(8, 128, 8))
    text = shown(summary, capsys, monkeypatch, View(only=("short", "gpu", "work")), columns=80)
    assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 80
    assert "pipeline bubble: rank" in text and findings.is_pipeline(summary)
    one = json.loads(as_text(summary, rank=130))
    assert {(pair["source"], pair["destination"]) for pair in one["pairs"]} == {
        (2, 130), (130, 2), (130, 258), (258, 130)
    }  # fmt: skip
    assert {tuple(pair["places"]) for pair in one["pairs"]} == {(0, 1), (1, 0), (1, 2), (2, 1)}


def as_text(summary, rank):
    from tracereader.show import ranks as show

    return show.as_json(summary, View(rank=rank, only=("short", "work")))


def test_clocks_of_hosts_that_share_no_collective_are_aligned_by_their_messages(capsys, monkeypatch):
    """Each stage is on a host of its own. A host from which nothing comes back is left out."""
    ranks = piped(4, 1, 6)
    ahead = (0, 7_000_000, -3_000_000, 11_000_000)
    moved = [later(one, ns, f"host {one.rank}") for one, ns in zip(ranks, ahead, strict=True)]
    plain, shifted = joined(ranks), joined(moved)
    assert shifted.clocks.ahead_us == {rank: ns / 1e3 for rank, ns in enumerate(ahead)}
    assert shifted.clocks.by_messages_us == pytest.approx(50) and not shifted.clocks.not_aligned  # a transfer
    assert [one.waits_us for one in shifted.messages] == [one.waits_us for one in plain.messages]
    text = said(shown(shifted, capsys, monkeypatch, View(only=("short",))))
    assert "clocks of 4 hosts aligned by their messages in both directions (up to 11.0 ms apart)" in text
    one_way = [without_backward(one) for one in moved]
    assert joined(one_way).clocks.not_aligned == (1, 2, 3)


def later(one, ns, host):
    return msgspec.structs.replace(
        one, host=host, start=one.start + ns, end=one.end + ns, exposed=tuple(edge + ns for edge in one.exposed),
        messages=tuple(Part(part.call, None, part.start + ns, part.end + ns) for part in one.messages),
    )  # fmt: skip


def without_backward(one):
    forward = [number for number, call in enumerate(one.calls) if call.pair[0] < call.pair[1]]
    return msgspec.structs.replace(one, messages=tuple(part for part in one.messages if part.call in forward))


def test_without_a_description_the_first_messages_show_a_pipeline():
    """In a ring, as of attention over a long context, every rank sends first. Its name says so otherwise."""
    assert findings.is_pipeline(joined(piped(4, 2, 3, description="")))
    assert not findings.is_pipeline(joined(piped(4, 2, 3, description="mesh_cp")))
    ranks = piped(4, 1, 1, description="")
    ring = [ring_of(one, 4) for one in ranks]
    summary = joined(ring)
    assert len(summary.messages) == 8 and not findings.is_pipeline(summary)


def test_a_rank_that_sends_to_all_others_is_no_pipeline():
    """As where one rank hands out the data or the weights."""
    ranks = piped(3, 1, 1, description="")
    calls = [Call(0, "send", 8, "ProfilerStep#0", (0, other)) for other in (1, 2)]
    groups, start = (Group("3", "", 3, (0, 1, 2)),), 10**18
    star = [
        msgspec.structs.replace(
            one, calls=tuple(calls), groups=groups, exposed=(),
            messages=tuple(
                Part(call, None, start + 900 * call, start + 900 * call + 500)
                for call in range(2) if one.rank in calls[call].pair
            ),
        )
        for one in ranks
    ]  # fmt: skip
    summary = joined(star)
    assert len(summary.messages) == 2 and not findings.is_pipeline(summary)


def ring_of(one, count):
    """Return the rank with two rounds in which it sends to the next rank while it receives from the one before."""
    after, before = (one.rank + 1) % count, (one.rank - 1) % count
    calls = [Call(0, "send", 8, "ProfilerStep#0", pair) for pair in ((one.rank, after), (before, one.rank))]
    starts = [10**18 + 1000 * place for place in range(2)]
    parts = [Part(call, None, start, start + 500) for start in starts for call in range(2)]
    group = Group("3", "", count, tuple(range(count)))
    return msgspec.structs.replace(one, calls=tuple(calls), groups=(group,), messages=tuple(parts), exposed=())
