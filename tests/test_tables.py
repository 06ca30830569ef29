"""Many embedding tables that are looked up one after the other, with a column of indices each."""

import json
import statistics

import pytest
import torch
from cpu_programs import record
from raw_events import raw_steps
from references import ROOT
from test_graph_changes import in_step
from test_opportunities import priced_changes, raw_events
from torch import nn
from torch.nn import functional as F

from tracereader.changes.equal_passes import loops
from tracereader.trace import read

COLUMNS, WIDTH = 12, 4
SIZES = [5 + 3 * place for place in range(COLUMNS)]
INDICES = torch.stack([torch.arange(8) % size for size in SIZES], 1)
PAIRS = ROOT / "benchmarks/pairs"


class Tables(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tables = nn.ModuleList(kind(size) for size in SIZES)

    def forward(self):
        return torch.cat([table(self.column(place)) for place, table in enumerate(self.tables)], 1)

    def column(self, place):
        return INDICES[:, place]


class Bags(Tables):
    def column(self, place):
        return INDICES[:, place : place + 1]


class Pooled(Tables):
    """A few codes in each column, whose embeddings are averaged, beside what marks those that are there."""

    def column(self, place):
        return INDICES[:, place : place + 1].expand(-1, 3)

    def forward(self):
        found = []
        for place, one in enumerate(self.tables):
            codes = self.column(place)
            there = (codes != 0).to(torch.float)[..., None]
            found.append((one(codes) * there).sum(1) / there.sum(1).clamp(min=1))
        return torch.cat(found, 1)


class Interrupted(Pooled):
    """The embeddings of the sixth column are not only averaged."""

    def forward(self):
        found = []
        for place, one in enumerate(self.tables):
            there = one(self.column(place))
            for _ in range(20 * (place == 5)):
                there = there.sin()
            found.append(there.mean(1))
        return torch.cat(found, 1)


class Led(Pooled):
    """The codes of the next column come from the embeddings of this one."""

    def __init__(self, kind, codes_of):
        super().__init__(kind)
        self.codes_of = codes_of

    def forward(self):
        codes, found = self.column(0), []
        for one in self.tables:
            found.append(one(codes).mean(1))
            codes = self.codes_of(found[-1])
        return torch.cat(found, 1)


def picked(x):
    return x.argsort(1)[:, :3]


def summed(x):
    return (x.sigmoid().cumsum(1) < 1).sum(1, keepdim=True)


def converted(x):
    return x.mean(1, keepdim=True).to(torch.long).clamp(min=0)


class Recurrent(Tables):
    def __init__(self, kind):
        super().__init__(kind)
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self):
        state = torch.zeros(len(INDICES), WIDTH)
        for place, one in enumerate(self.tables):
            state = one(self.column(place)) + torch.addmm(self.bias, state, self.weight)
        return state


class Words(nn.Module):
    """The words of a sentence in turn. Each pass needs the one before it."""

    def __init__(self):
        super().__init__()
        self.table, self.cell = nn.Embedding(50, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self):
        state = torch.zeros(len(INDICES), WIDTH)
        for place in range(COLUMNS):
            state = self.cell(torch.cat([state, self.table(INDICES[:, place])], 1)).relu()
        return state


class Numbers(nn.Module):
    """Columns of numbers, which are no indices."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, WIDTH)) for _ in range(COLUMNS))

    def forward(self):
        x = torch.rand(8, COLUMNS)
        return sum(F.embedding((x[:, place] * 8).long(), one) for place, one in enumerate(self.weights))


def table(size):
    return nn.Embedding(size, WIDTH)


def bag(size):
    return nn.EmbeddingBag(size, WIDTH)


def table_and_layer(size):
    """What follows the lookup may need another pass's result, as far as the trace shows."""
    return nn.Sequential(nn.Embedding(size, WIDTH), nn.Linear(WIDTH, WIDTH))


LOOKUPS = {
    "tables": (lambda: Tables(table), [COLUMNS]),
    "bags": (lambda: Bags(bag), [COLUMNS]),
    "pooled": (lambda: Pooled(table), [COLUMNS]),
    "interrupted": (lambda: Interrupted(table), [6, 6]),
    "picked": (lambda: Led(table, picked), []),
    "summed": (lambda: Led(table, summed), []),
    "converted": (lambda: Led(table, converted), []),
    "recurrent": (lambda: Recurrent(table), []),
    "layers": (lambda: Tables(table_and_layer), []),
    "words": (Words, []),
    "numbers": (Numbers, []),
}


@pytest.mark.parametrize(("make", "found"), LOOKUPS.values(), ids=LOOKUPS)
def test_lookups_of_columns_of_indices_do_not_need_each_other(make, found, tmp_path):
    model = make()
    record(lambda: model().sum().backward(), tmp_path / "trace.json")
    trace = read(tmp_path / "trace.json.gz")
    assert [len(loop.starts) for loop in loops(trace, trace.steps[-1])] == found


def test_the_lookups_of_a_tabular_model_are_named_and_the_measured_saving_is_in_the_range():
    """The change also put ten layers of one number each together."""
    file = PAIRS / "tabular_transformer/base.json.gz"
    events = raw_events(file)
    ops = in_step(events, raw_steps(events)[-1], "cpu_op")
    lookups = [one for one in ops if one["name"] == "aten::embedding"]
    one = priced_changes(file)["larger_batch"]
    assert f"each of {len(lookups)} passes looks up an embedding" in one.evidence
    assert "one table with the rows of all" in one.how
    measured = json.loads((PAIRS / "results.json").read_text())["tabular_transformer"]
    before, after = (
        statistics.mean(run["median_us"] for run in measured[name]["runs"]) for name in ("base", "one_table")
    )
    low, high = one.estimated_savings
    assert low < 1 - after / before < high
