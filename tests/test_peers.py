"""The page of benchmarks/peers follows from its data, and its rules judge all tools alike. No peer runs here."""

import json
import sys

import pytest
from references import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import scoreboard
from peers import judged, remake
from peers.judged import judge, score

DATA, PAIRS = judged.committed()


def test_the_page_follows_from_the_data():
    page = (judged.HERE / "README.md").read_text()
    assert page == judged.page(DATA, PAIRS)
    assert len([word for line in page.splitlines() if not line.startswith("|") for word in line.split()]) <= 500


def test_every_base_trace_was_read_by_every_tool():
    assert set(DATA["programs"]) == {path.parent.name for path in judged.PAIRS.glob("*/base.json.gz")}
    assert {frozenset(tools) for tools in DATA["programs"].values()} == {frozenset(DATA["tools"])}
    assert {name: DATA["tools"][name]["version"] for name in remake.PEERS} == remake.PEERS
    failed = [run for tools in DATA["programs"].values() for run in tools.values() if run["status"] != 0]
    assert all(run["message"] for run in failed)


def test_every_stored_advice_has_one_meaning():
    for tools in DATA["programs"].values():
        for tool, run in tools.items():
            for one in run["advice"]:
                judged.meant(tool, one)  # raises if no phrase or several match


def test_what_is_meant_are_changes_that_were_measured():
    known = {row["proposal"] or variant for rows in PAIRS.values() for variant, row in rows.items()}
    ids = {change for phrases in judged.MEANT.values() for _, changes in phrases for change in changes}
    assert ids - known == set()


@pytest.mark.parametrize("program", ["nucleus_sampling", "gaussian_process"])  # small traces
def test_the_readers_advice_is_that_of_the_scoreboard(program, tmp_path):
    (tmp_path / program).symlink_to(judged.PAIRS / program)
    (tmp_path / "results.json").write_text(json.dumps({program: PAIRS[program]}))
    pairs = [one for some in scoreboard.of_folder(tmp_path).values() for one in some]
    assert len(pairs) == len(judged.measured(PAIRS[program])) > 0
    said = DATA["programs"][program]["read-trace"]["advice"]
    for pair in pairs:
        variant = pair.after.split("/")[1]
        places = [at for at, one in enumerate(said, 1) if variant in judge("read-trace", one, PAIRS[program]).variants]
        assert places[:1] == ([pair.rank] if pair.rank else [])
        assert judged.measured(PAIRS[program])[variant].saved == pytest.approx(pair.saved)
        if pair.rank:
            assert said[pair.rank - 1]["saves"] == pytest.approx(pair.promised, abs=1e-4)


@pytest.mark.exhaustive
def test_the_readers_stored_advice_is_what_it_says_now():
    """Each fourth program is read again in a process of its own; another test compares all measured changes."""
    some = sorted(DATA["programs"])[::4]
    committed = judged.committed()[0]
    now = remake.asked_again(committed | {"programs": {name: committed["programs"][name] for name in some}}, 600)
    different = [name for name in some if now["programs"][name] != DATA["programs"][name]]
    assert not different, "benchmarks/peers/remake.py --reader brings results.json up to date"


def row(proposal, us, **more):
    return {"proposal": proposal, "served": 1, "runs": [{"median_us": us}], **more}


ROWS = {
    "base": row("", 100.0),
    "tf32": row("tf32", 99.0),
    "bf16": row("half_precision", 60.0),
    "twice": row("double_batch", 97.0),
    "sync": row("remove_sync", 104.0),
    "graph": {"proposal": "cuda_graph", "served": 1, "runs": [], "failures": ["it failed"]},
}


def test_an_advice_is_right_false_or_neither():
    def verdict(tool, says):
        one = judge(tool, {"says": says}, ROWS)
        return one.variants, one.is_right, one.is_false

    assert verdict("fournex", "Enable mixed precision (FP16/BF16) training.") == (("bf16",), True, False)
    assert verdict("fournex", "Remove .item() calls from the hot path.") == (("sync",), False, True)
    assert verdict("fournex", "Increase batch size to improve GPU occupancy.") == (("twice",), False, False)  # saved 3%
    assert verdict("fournex", "Use CUDA Graphs to …") == ((), False, False)  # its measurement failed
    assert verdict(judged.GUIDE, "Enable Tensor cores (TF32)") == (("tf32",), False, True)
    with pytest.raises(LookupError):
        verdict("fournex", "Buy a larger GPU.")


def test_the_best_change_counts_as_first_also_after_advice_that_was_not_measured():
    advice = ["Use CUDA Graphs to …", "Enable mixed precision.", "Remove .item() calls from the hot path."]
    data = {"programs": {"net": {"fournex": {"advice": [{"says": one} for one in advice]}}}}
    found = score(data, {"net": ROWS}, "fournex", ["net"])
    assert (found["right"], found["first"], found["first_of_measured"], found["with_saving"]) == (1, 0, 1, 1)
    assert (found["advice"], found["judged"], found["right_advice"], found["false_advice"]) == (3, 2, 1, 1)
    silent = score({"programs": {"net": {"fournex": {"advice": []}}}}, {"net": ROWS}, "fournex", ["net"])
    assert (silent["programs"], silent["advised"], silent["right"], silent["first"]) == (1, 0, 0, 0)


def test_a_process_is_measured_and_one_that_is_late_is_ended(tmp_path):
    def run(code, limit, name):
        (tmp_path / name).mkdir()
        return remake.measure([sys.executable, "-c", code], limit, tmp_path / name)

    done = run("kept = b'x' * 300_000_000; print(len(kept)); raise SystemExit(3)", 60, "large")
    assert done["status"] == 3 and done["stdout"].read_text() == "300000000\n" and 300 < done["peak_mb"] < 400
    assert run("print(1)", 60, "small")["peak_mb"] < 40  # not that of this process
    late = run("import time; time.sleep(600)", 0.5, "late")
    assert late["status"] == "timeout" and late["peak_mb"] is None and late["wall_s"] < 600
