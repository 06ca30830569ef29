"""The gradients of gathered rows, for which backward sorts the indices, from raw events.

On an H200, the gathers of seven programs took their rows with index_select instead of an embedding or an index.
guest_profiles' step took 3.4 ms instead of 6.6, two_towers' 9.1 instead of 11.9, speech_pretraining's 120 instead of
136, knowledge_graph's 18.6 instead of 21.2, click_model's 23.2 instead of 25.7, mmoe_recommender's 19.6 instead of
21.5, word_vectors' 1.16 instead of 1.37.
"""

import math
import re

import pytest
from raw_events import end
from test_graph_changes import in_step
from test_kept_promises import base, saved
from test_later_workloads import edited, ms, without_shapes
from test_opportunities import priced_changes
from test_small_work import typical

from tracereader import cli
from tracereader.changes import prices

INDEXED, EMBEDDED = "aten::_index_put_impl_", "aten::embedding_dense_backward"
CALLS = ("cuda_runtime", "cuda_driver")


def sorted_rows(path):
    """Return for each op that sorts indices: its CPU time, the GPU time that goes (µs), and the number of values."""
    events, mark = typical(path)
    ops, calls = in_step(events, mark, "cpu_op"), in_step(events, mark, *CALLS)
    work = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    found = []
    for op in (e for e in ops if e["name"] in (INDEXED, EMBEDDED)):
        inside = [e for e in ops if op["ts"] < e["ts"] and end(e) <= end(op) and e["tid"] == op["tid"]]
        if any(e["name"] == "aten::nonzero" for e in inside):
            continue  # a mask
        zeros = [e for e in inside if e["name"] == "aten::zeros" and op["name"] == EMBEDDED]
        made = [
            e
            for e in calls
            if e["tid"] == op["tid"] and op["ts"] <= e["ts"] < end(op)
            and not any(one["ts"] <= e["ts"] < end(one) for one in zeros)
        ]  # fmt: skip
        values = math.prod(op["args"]["Input Dims"][0 if op["name"] == EMBEDDED else 2])
        made = [work[e["args"]["correlation"]] for e in made if e["args"]["correlation"] in work]
        gpu_us, sorts = sum(e["dur"] for e in made), any("RadixSort" in e["name"] for e in made)
        if sorts and values / prices.ATOMIC_ADDS + prices.LEAST_KERNEL_US < gpu_us:
            found.append((op["dur"], gpu_us, values))
    return found


@pytest.mark.parametrize(
    "program", ["hash_grid_image", "protein_gat", "two_towers", "guest_profiles", "gat_link_prediction"]
)
def test_what_sorting_the_indices_takes_is_counted(program):
    rows, one = sorted_rows(program), priced_changes(base(program))["index_select"]
    gathers, gpu_time, cpu_time = re.search(
        r"the indices of (\d+) gathers?: ([\d.]+ \S+) of GPU time, ([\d.]+ \S+) of CPU time", one.evidence
    ).groups()
    cpu_us, gpu_us, _ = (sum(some) for some in zip(*rows, strict=True))
    assert int(gathers) == len(rows)
    assert ms(gpu_time) == pytest.approx(gpu_us / 1e3, rel=0.05) and ms(cpu_time) == pytest.approx(
        cpu_us / 1e3, rel=0.05
    )
    # One kernel and one launch of each op stay.
    assert 0.4 * cpu_us < one.saves_us < 1.05 * cpu_us


@pytest.mark.parametrize(
    "program", ["guest_profiles", "two_towers", "speech_pretraining", "mmoe_recommender", "word_vectors"]
)
def test_what_index_select_saved_is_in_the_range_or_within_a_tenth_of_the_step(program):
    one = priced_changes(base(program))["index_select"]
    low, high = one.estimated_savings
    assert low - 0.1 <= saved(program, "index_select") <= high + 0.1
    assert ("nn.Embedding" not in one.how) == (program == "speech_pretraining")


@pytest.mark.parametrize(
    ("program", "gathers"), [("detection_loss", 0), ("shop_graph", 1), ("globe_mesh", 26), ("click_model", 1)]
)
def test_masks_and_rows_that_are_sorted_fast_are_left_as_they_are(program, gathers):
    """A mask takes each row once. Rows of many values are added as fast after sorting, few indices are not sorted."""
    assert len(sorted_rows(program)) == gathers
    assert "index_select" not in priced_changes(base(program))


def test_few_indices_of_an_embedding_are_not_sorted():
    """One of both gathers takes 2,048 rows, the other one 12,288."""
    assert len(sorted_rows("word_vectors")) == 1
    assert "the indices of 1 gather:" in priced_changes(base("word_vectors"))["index_select"].evidence


def test_the_comparison_sees_that_rows_are_gathered_without_sorting(capsys):
    before, after = str(base("guest_profiles")), str(base("guest_profiles").with_name("index_select.json.gz"))
    said = "proposed it (gather rows without sorting their indices)"
    assert cli.main([before, after]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert cli.main([after, before]) == 0
    assert "proposed it" not in capsys.readouterr().out


def changed(names, place, value):
    """Return an edit of one of the concrete inputs of these ops."""

    def edit(events):
        for e in events:
            if e["name"] in names:
                e["args"]["Concrete Inputs"][place] = value

    return edit


@pytest.mark.parametrize(("place", "value"), [(3, "0"), (4, "True")])
def test_an_embedding_whose_gradient_depends_on_more_than_its_indices_is_left_out(tmp_path, place, value):
    """Rows for padding have no gradient, and one that is scaled by the frequency of an index needs their number."""
    assert "index_select" in priced_changes(base("two_towers"))
    edit = changed((EMBEDDED,), place, value)
    assert "index_select" not in priced_changes(edited(base("two_towers"), tmp_path, edit))


def test_without_shapes_the_number_of_values_is_unknown(tmp_path):
    assert "index_select" not in priced_changes(edited(base("hash_grid_image"), tmp_path, without_shapes))


@pytest.mark.parametrize(
    ("program", "node"), [("hash_grid_image", "IndexBackward0"), ("two_towers", "EmbeddingBackward0")]
)
def test_only_the_gradient_of_a_gather_follows_from_how_the_program_gathers(tmp_path, program, node):
    """A program may add rows itself, and the backward of other ops may sort, too."""

    def another_ones(events):
        for e in events:
            if e["name"] == node:
                e["name"] = "AnotherBackward0"

    assert "index_select" not in priced_changes(edited(base(program), tmp_path, another_ones))
