"""The pages say what the code and the reference traces say, and point at what is there."""

import importlib.util
import re

import pytest
from references import ROOT

from tracereader.findings import cheatsheet

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
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_page_names_a_package_registrys_host():
    code = [*(ROOT / "common").rglob("*.py"), *(ROOT / "tracereader").rglob("*.py")]
    for file in [*PAGES, ROOT / "pyproject.toml", ROOT / ".ci/run", *code]:
        assert not re.search(r"pypi\.org|pythonhosted|download\.pytorch", file.read_text()), file.name


def test_every_claim_of_the_articles_has_a_row():
    rows = re.findall(r"^\| ([\d ]+) \|", (ROOT / "docs/claims.md").read_text(), re.M)
    named = {claim for row in rows for claim in row.split()}
    told_in_a_screen = {"26", "36"}
    assert named | told_in_a_screen == {f"{number:02}" for number in range(1, 60)}
