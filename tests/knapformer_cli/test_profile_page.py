"""report.html in a real browser: Chromium, offline, wide and narrow, light and dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from knapformer_cli.profile.command import profile_command

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIGURES = ["work", "routing", "seconds", "steps", "mix", "traffic", "memory"]
# A text of a picture, its size in pixels of the screen, and by how much it leaves its picture.
TEXTS = """() => [...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().width)
  .map(t => {
    const m = t.getScreenCTM(), box = t.getBoundingClientRect(), svg = t.ownerSVGElement;
    const all = svg.getBoundingClientRect();
    return [t.textContent, parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b),
      Math.max(all.left - box.left, box.right - all.right, all.top - box.top, box.bottom - all.bottom)];
  })"""
WORDS = """() => [...document.querySelectorAll('main *')]
  .filter(e => e.closest('svg') === null && e.offsetWidth)
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .map(e => parseFloat(getComputedStyle(e).fontSize))"""
COLOURS = """() => ['color', 'backgroundColor']
  .map(key => getComputedStyle(document.body)[key].match(/\\d+/g).map(Number))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of the joint workload, and one of a cluster too large to draw rank by rank."""
    made = {}
    for name, ranks in (("joint", 32), ("large", 128)):
        folder = tmp_path_factory.mktemp(name)
        profile_command(
            ["data=paper_joint", f"profile.ranks={ranks}", "profile.steps=2", f"run.dir={folder}"]
        )
        made[name] = folder / "report.html"
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize("name", ["joint", "large"])
@pytest.mark.parametrize("width", [1280, 700, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_reads_well_offline(
    browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = "wide" if width > 899 else "narrow"
    for figure in FIGURES:
        picture = "img" if figure == "routing" else f"svg.{drawn}"
        box = page.locator(f"#{figure} {picture}").bounding_box()
        assert box is not None and box["width"] > 0.7 * min(width, 760) and box["height"] > 100, figure
        assert page.locator(f"#{figure} svg:visible").count() == (0 if figure == "routing" else 1)
    assert page.evaluate("document.querySelector('#routing img').naturalWidth") > 500
    for words, size, beyond in page.evaluate(TEXTS):
        assert size >= 10, f"{words} is {size:.1f} pixels high"
        assert beyond <= 6, f"{words} leaves its picture by {beyond:.1f} pixels"
    assert min(page.evaluate(WORDS)) >= 12
    ink, paper = page.evaluate(COLOURS)
    assert (sum(ink) < sum(paper)) == (scheme == "light") and abs(sum(ink) - sum(paper)) > 500
    context.close()


def test_a_block_says_what_it_is_under_the_pointer(browser, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["joint"].as_uri())
    titles = page.eval_on_selector_all("#work svg.wide title", "all => all.map(e => e.textContent)")
    assert len(titles) > 2 * 89 and len(set(titles)) > 89
    assert any(title.startswith("rank 31: ") and "512 px × 85 frames" in title for title in titles)
    split = page.eval_on_selector_all(
        "#work svg.wide [id$='after-split'] title", "all => all.map(e => e.textContent)"
    )
    assert split and all("split over" in title for title in split)
    page.close()


def test_the_page_is_one_small_file(pages: dict[str, Path]) -> None:
    for path in pages.values():
        text = path.read_text()
        assert len(text.encode()) < 6e6
        assert "<script" not in text and "http" not in text.replace("http://www.w3.org", "")
        assert "modelled" in text and "balancer.layout=elastic" in text
