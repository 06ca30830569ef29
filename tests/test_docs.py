"""The pages agree with the code and the reference traces, and their links and commands work."""

import doctest
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from references import H200, ROOT
from words import RETIRED

from common.flags import tag_of
from tracereader.findings import cheatsheet, steps
from tracereader.trace import read

LONG = H200 / "01_matmul_add/4096_bf16_cold_eager_wait0_schedwarmup0_active20.json.gz"

spec = importlib.util.spec_from_file_location("make", ROOT / "docs/make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
PAGES = make.PAGES


QUICK = ("README.md", "03_mlp.md")


@pytest.mark.parametrize(
    "page",
    [page if page.name in QUICK else pytest.param(page, marks=pytest.mark.exhaustive) for page in PAGES],
    ids=lambda page: page.name,
)
def test_generated_blocks_are_up_to_date(page):
    """Every console block on a reference trace, the cheatsheet and the table of verdicts are made again."""
    text = page.read_text()
    assert make.refreshed(text) == text, "uv run docs/make.py"


def test_the_whole_cheatsheet_has_a_page():
    assert cheatsheet.markdown() in (ROOT / "docs/cheatsheet.md").read_text()


def test_readme_has_at_most_1300_words():
    assert len((ROOT / "README.md").read_text().split()) <= 1_300


def test_the_skill_says_when_to_use_it():
    """Agents read the name, which is that of the folder, and the description before anything else."""
    _, head, _ = SKILL.read_text().split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields["name"] == SKILL.parent.name and 0 < len(fields["description"]) <= 1024


def prose_of(page: Path) -> str:
    """Return a page's hand-written text, without generated blocks, code, and the terms that a table explains."""
    text = make.MADE.sub("", page.read_text())
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    text = re.sub(r"^\| [^|]* \|", "", text, flags=re.M)
    return " ".join(re.sub(r"`[^`]*`", "", text).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_fields_words(page):
    """The reference may explain other terms, as long as a report prints them."""
    assert RETIRED.findall(prose_of(page)) == []


def test_the_pages_thresholds_are_those_of_the_code(monkeypatch):
    page = (ROOT / "docs/thresholds.md").read_text()
    used = {name for _, name, _, _ in make.VALUE.findall(page)}
    assert used == set(make.THRESHOLDS), "each threshold is named on the page, and no other"
    monkeypatch.setitem(make.THRESHOLDS, "idle", "99%")
    changed = make.VALUE.sub(lambda found: found[1] + make.THRESHOLDS[found[2]] + found[4], page)
    assert changed != page and changed.count("99%") == page.count("<!-- =idle -->")


RUNS = r"(?<![\w-])(?:uv run|uvx --from \S+) "


def commands_of(page: Path) -> set[str]:
    """Return the page's commands after `uv run` and `uvx --from …`, without comments after three blanks."""
    text = page.read_text()
    found = set()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M):
        for line in block.splitlines():
            found |= {re.split(r" {3,}| #| \| |'", line[run.end() :])[0] for run in re.finditer(RUNS, line)}
    outside = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    found |= {code for quoted in re.findall(r"`([^`]+)`", outside) for code in re.split(RUNS, quoted)[1:]}
    return {" ".join(command.split()) for command in found}


SKILL = ROOT / "skills/profile-pytorch/SKILL.md"
COMMANDS = [(page.name, command) for page in (*PAGES, SKILL) for command in sorted(commands_of(page))]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda one: one)
def test_every_command_is_one_that_its_program_takes(page, command, scripts, monkeypatch, capsys):
    """Only the flags are read here. make.py and the tests of each script run the commands."""
    words = [word for word in shlex.split(command.replace("\\|", "|")) if word not in ("…", "--offline")]
    if words[0] == "torchrun":
        words = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
        torchruns = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        for name, value in torchruns.items():
            monkeypatch.setenv(name, value)
    program, *flags = [word.replace("…", "x") for word in words]
    if program == "read-trace":
        from tracereader import cli

        # A test does not ask a server: a command with a URL would.
        if not any(part in command for part in ("traces/reference", "tests/traces", "://")):
            cli.main(flags)
            assert "--help lists the flags" not in capsys.readouterr().err
    elif program in ("record-trace", "try-changes"):
        from tracereader.run import record, trying

        own = flags[: flags.index("--")] if "--" in flags else flags
        (record if program == "record-trace" else trying)._flags(own)
    elif Path(program).stem in scripts:
        scripts[Path(program).stem].flags(flags)
    else:
        known = ("pytest", "ruff", "trace-util", "python", "sweep.py", "recompile.py", "read-trace-mcp")
        assert program in known or (program.startswith(("docs/", "benchmarks/")) and (ROOT / program).is_file())


def test_the_recipe_records_three_steps(tmp_path, monkeypatch):
    recipe = re.search(r"```python\n(.*?)```", (ROOT / "docs/your-own-model.md").read_text(), re.S)[1]
    monkeypatch.chdir(tmp_path)
    exec(recipe, {"step": lambda: torch.ones(8, 8) @ torch.ones(8, 8)})
    trace = read(tmp_path / "my_step.json")
    assert [step.name for step in trace.steps] == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert trace.has_shapes


STABLE = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/for-agents.md").read_text(), re.M)


def test_the_names_that_agents_may_rely_on_are_in_json(capsys):
    from tracereader import cli

    folder = H200.parent / "nvidia-h200-x2/06_training"
    ranks = sorted(str(file) for file in folder.glob("4x1024x1024x16_bf16_warm_eager_ddp_slow1_x2_rank*.json.gz"))
    documents = []
    for files in ([str(LONG)], ranks, ranks[:1]):
        assert cli.main([*files, "--json=all"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    one, several, _ = documents
    of_ranks = STABLE[STABLE.index("world_size") :]
    assert len(STABLE) >= 10 and set(of_ranks) <= set(several) and set(STABLE) - set(of_ranks) <= set(one)
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/for-agents.md").read_text(), re.M)
    assert {key for key in steps.WORDS if key} <= set(re.findall(r"`([\w-]+)`", dict(rows)["waits_for"]))
    for name, meaning in rows:
        inside = [] if name == "waits_for" else re.findall(r"`(\w+)`", meaning)
        written = json.dumps([document.get(name) for document in documents])
        assert [word for word in inside if f'"{word}":' not in written and word != "null"] == [], name


def test_every_console_block_is_one_that_is_made():
    for page in PAGES:
        text = page.read_text()
        assert text.count("```console") == len(make.CONSOLE.findall(text)), page.name


def test_links_have_a_target():
    for page in PAGES:
        for target, _, section in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
            if section and not target.startswith("https://"):
                text = (page.parent / target if target else page).read_text()
                titles = re.findall(r"^#+ (.*)$", text, re.M)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert section in anchors | set(re.findall(r'<a id="(\w+)"', text)), f"{page.name}: {target}#{section}"


def test_the_recipe_is_the_scripts_own():
    """Each line that the page quotes is in the script, or in the harness that makes the two files."""
    page = (ROOT / "docs/01_matmul_add.md").read_text()
    quoted = [line for block in re.findall(r"```python\n(.*?)```", page, re.S) for line in block.splitlines()]
    files = (ROOT / "01_matmul_add.py", ROOT / "common/harness.py")
    code = [line for file in files for line in file.read_text().splitlines()]
    assert len(quoted) > 8 and set(quoted) <= set(code)


def test_the_demonstration_of_strides_runs():
    page = (ROOT / "docs/02_linear.md").read_text()
    example = doctest.DocTestParser().get_doctest(page, {}, "02_linear.md", None, 0)
    assert len(example.examples) >= 6
    assert doctest.DocTestRunner().run(example).failed == 0


def test_no_page_names_a_package_registrys_host():
    code = [*(ROOT / "common").rglob("*.py"), *(ROOT / "tracereader").rglob("*.py")]
    for file in [*PAGES, ROOT / "pyproject.toml", ROOT / ".ci/run", *code]:
        assert not re.search(r"pypi\.org|pythonhosted|download\.pytorch", file.read_text()), file.name


FIGURES = [("part 1", figure) for figure in make.PART_1] + [("part 2", figure) for figure in make.PART_2]


def test_each_recording_has_what_the_page_shows():
    """A row without a prediction is of a change that was not proposed; times are in milliseconds."""
    rows = json.loads((ROOT / "docs/recordings.json").read_text())
    assert len(rows) > 100
    for row in rows:
        assert row["program"] and row["change"] and row["card"] in ("H100", "H200") and isinstance(row["taught"], str)
        assert "predicted_ms" in row or not row["proposed"]
        times = [row["recorded_ms"], row.get("predicted_ms", 1.0), *row.get("unprofiled_ms", ())]
        assert all(0 < ms < 1_000 for ms in times)
        assert "unprofiled_ms" in row or "recorded_after_ms" in row
    table = make.opportunities.recordings()
    assert all(row["program"] in table for row in rows if row["program"].startswith("NeRF"))


def test_no_figure_of_the_articles_is_missing():
    assert [figure.number for figure in make.PART_1] == [str(number) for number in range(1, 22)]
    assert [figure.number for figure in make.PART_2] == [str(number) for number in range(1, 15)]
    page = (ROOT / "docs/articles.md").read_text()
    for _, figure in FIGURES:
        assert f"| **{figure.number}** {figure.title} | `uv run {figure.run}`<br>" in page


@pytest.mark.parametrize(("part", "figure"), FIGURES, ids=lambda one: one if isinstance(one, str) else one.number)
def test_a_figures_command_shows_it_on_the_reference_traces(scripts, part, figure):
    """The run writes the named trace, and for each machine there are lines with the figure, or a reason."""
    script, *flags = figure.run.split()
    folder, tag = figure.trace.split("/")
    assert folder == Path(script).stem
    settled = scripts[folder].flags(flags)
    assert tag_of(settled) == tag
    lines, _ = make.seen_in(figure, "nvidia-h200")
    assert lines, "the H200's trace shows it"
    lines, why = make.seen_in(figure, "cpu")
    assert lines or why


def test_the_reference_has_every_section_and_every_head_of_a_table(monkeypatch, capsys):
    from tracereader import cli
    from tracereader.findings.steps import WORDS
    from tracereader.show import report, series, starts, table, text
    from tracereader.show.sections import SECTIONS

    page = (ROOT / "docs/reference.md").read_text()
    for section in SECTIONS:
        assert f'<a id="{section}"></a>{section} |' in page
    for word in WORDS.values():
        assert word.startswith("idle, for") or f"| {word} |" in page, word
    heads = set()

    def noted(out, some, *rest, **named):
        heads.update(some[1:])
        return text.print_columns(out, some, *rest, **named)

    for module in (report, series, starts, table):
        monkeypatch.setattr(module, "print_columns", noted)
    for trace in (LONG, LONG.parent.parent / "03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz"):
        assert cli.main([str(trace), "--all"]) == 0
    capsys.readouterr()
    assert len(heads) > 20
    heads = {re.sub(r"( [\d.,]+)? (µs|ms|s)$", "", head) for head in heads}  # the unit follows the figures
    missing = {head for head in heads - {""} if not any(word in page for word in (f"| {head}", f", {head}"))}
    plain_words = {
        "of",
        "µs",
        "of the window",
        "of GPU work",
        "pieces",
        "activities",
        "times",
        "calls",
        "launches",
        "total µs",
        "self µs",
        "GPU µs",
        "CPU µs",
    }
    of_two_words = {"self CPU", "total CPU", "self GPU", "total GPU", "median µs", "grid x block"}
    assert missing <= plain_words | of_two_words, missing - plain_words - of_two_words


def test_a_sections_title_links_to_its_row_of_the_reference(monkeypatch):
    from tracereader.show import text
    from tracereader.show.sections import SECTIONS

    anchors = re.findall(r'<a id="(\w+)"></a>', text.REFERENCE.read_text())
    assert set(SECTIONS) <= set(anchors) and len(anchors) == len(set(anchors))
    page = text.REFERENCE.as_uri()
    assert text.head("steps", "steps") == f"[bold][link={page}#steps]steps[/link][/bold]"
    monkeypatch.setattr(text, "REFERENCE", ROOT / "docs/none.md")
    assert text.head("steps", "steps") == "[bold]steps[/bold]", "the reader can be installed without the pages"


def test_every_claim_of_the_articles_has_a_row():
    rows = re.findall(r"^\| ([\d ]+) \|", (ROOT / "docs/articles.md").read_text(), re.M)
    named = {claim for row in rows for claim in row.split()}
    told_in_a_screen = {"26", "36"}
    assert named | told_in_a_screen == {f"{number:02}" for number in range(1, 60)}
