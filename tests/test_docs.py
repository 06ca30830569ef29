"""The pages say what the code and the reference traces say, and point at what is there."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest
from references import H200, ROOT

from common.flags import tag_of
from tracereader.findings import cheatsheet

LONG = H200 / "01_matmul_add/4096_bf16_cold_eager_wait0_schedwarmup0_active20.json.gz"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

spec = importlib.util.spec_from_file_location("make", ROOT / "docs/make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_made_is_up_to_date(page):
    """Every console block on a reference trace, run again; the cheatsheet; the table of verdicts."""
    text = page.read_text()
    assert make.refreshed(text) == text, "uv run docs/make.py"


def test_readme_holds_the_whole_cheatsheet():
    readme = (ROOT / "README.md").read_text()
    assert cheatsheet.markdown() in readme


def test_every_console_block_is_one_that_is_made():
    for page in PAGES:
        text = page.read_text()
        assert text.count("```console") == len(make.CONSOLE.findall(text)), page.name


def test_links_lead_somewhere():
    for page in PAGES:
        for target, _, section in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
            if section and not target.startswith("https://"):
                text = (page.parent / target if target else page).read_text()
                titles = re.findall(r"^#+ (.*)$", text, re.M)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert section in anchors | set(re.findall(r'<a id="(\w+)"', text)), f"{page.name}: {target}#{section}"


def test_the_recipe_is_the_scripts_own():
    """Each line that the page quotes stands in the script, or in the harness that makes the two files."""
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


def test_no_figure_of_the_articles_is_missing():
    assert [figure.number for figure in make.PART_1] == [str(number) for number in range(1, 22)]
    assert [figure.number for figure in make.PART_2] == [str(number) for number in range(1, 15)]
    page = (ROOT / "docs/figures.md").read_text()
    for _, figure in FIGURES:
        assert f"| **{figure.number}** {figure.title} | `uv run {figure.run}`<br>" in page


@pytest.mark.parametrize(("part", "figure"), FIGURES, ids=lambda one: one if isinstance(one, str) else one.number)
def test_a_figures_command_shows_it_on_the_reference_traces(scripts, part, figure):
    """The run writes the trace that is named, and of each machine there are lines that tell the figure, or a reason."""
    script, *flags = figure.run.split()
    folder, tag = figure.trace.split("/")
    assert folder == Path(script).stem
    settled = scripts[folder].flags(flags)
    assert tag_of(settled) == tag
    lines, _ = make.seen_in(figure, "nvidia-h200")
    assert lines, "the H200's trace shows it"
    lines, why = make.seen_in(figure, "cpu")
    assert lines or why


def test_the_glossary_has_every_section_and_every_head_of_a_table(monkeypatch, capsys):
    from tracereader import cli
    from tracereader.command import SECTIONS
    from tracereader.findings.steps import WORDS
    from tracereader.show import report, series, starts, table, text

    page = (ROOT / "docs/glossary.md").read_text()
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
    missing = {head for head in heads - {""} if not any(word in page for word in (f"| {head}", f", {head}"))}
    plain_words = {
        "µs",
        "of the window",
        "of GPU work",
        "pieces",
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


def test_a_sections_head_leads_to_the_glossary(monkeypatch):
    from tracereader.show import text

    page = (ROOT / "docs/glossary.md").as_uri()
    assert text.head("steps", "steps") == f"[bold][link={page}#steps]steps[/link][/bold]"
    monkeypatch.setattr(text, "GLOSSARY", ROOT / "docs/none.md")
    assert text.head("steps", "steps") == "[bold]steps[/bold]", "the reader alone comes without the pages"


def test_every_claim_of_the_articles_has_a_row():
    rows = re.findall(r"^\| ([\d ]+) \|", (ROOT / "docs/claims.md").read_text(), re.M)
    named = {claim for row in rows for claim in row.split()}
    told_in_a_screen = {"26", "36"}
    assert named | told_in_a_screen == {f"{number:02}" for number in range(1, 60)}
