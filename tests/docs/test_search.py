"""A search finds a page for users first: the site's own search, with its weights, in a browser."""

import pytest

FOR_USERS = ("tutorial/", "how-to/", "explanation/", "help/", "reference/", "coming-from/", "gallery/")
SEARCHES = {
    "accuracy": "help/troubleshooting",
    "address already in use": "help/troubleshooting",
    "API": "reference/python/index",
    "augmentation": "explanation/training-methods",
    "batch size": "how-to/large-batches",
    "checkpoint": "how-to/survive",
    "data loading": "how-to/data",
    "docker": "how-to/kubernetes",
    "export": "how-to/export",
    "fine-tune": "how-to/fine-tune",
    "GPU idle": "help/troubleshooting",
    "gradient accumulation": "explanation/training-methods",
    "hang": "help/troubleshooting",
    "install": "how-to/install",
    "kubernetes": "how-to/kubernetes",
    "learning rate": "explanation/learning-rate-and-batch",
    "mixed precision": "explanation/fast-arithmetic",
    "mixup": "reference/recipe/data-augment",
    "NaN": "help/troubleshooting",
    "no space left": "help/troubleshooting",
    "OOM": "help/troubleshooting",
    "out of memory": "help/troubleshooting",
    "predict": "how-to/predict",
    "pretrained": "how-to/fine-tune",
    "profile": "how-to/profile",
    "reproducible": "help/faq",
    "resume": "how-to/survive",
    "shared memory": "help/troubleshooting",
    "Slurm": "how-to/slurm",
    "slow": "how-to/profile",
    "tensorboard": "how-to/track",
    "timm": "how-to/other-trainers",
    "wandb": "how-to/track",
}
"""A page that each search must have among its first hits."""
FIRST = 4


@pytest.fixture(scope="module")
def search(browser, address):
    """Return a function that types a query, as a reader does, and returns the pages found, the best first."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(address)
    query = page.locator("[data-md-component=search-query]")
    query.click()
    meta = page.locator(".md-search-result__meta")
    meta.filter(has_text="Type to start").wait_for(timeout=20_000)

    def type_query(text):
        query.fill(text[:-1])
        query.press_sequentially(text[-1])  # the one key that starts a search
        meta.filter(has_not_text="Type to start").wait_for(timeout=20_000)
        found = page.eval_on_selector_all(".md-search-result__item > a", "all => all.map((each) => each.href)")
        query.fill("")
        query.press("Backspace")
        meta.filter(has_text="Type to start").wait_for(timeout=20_000)
        urls = [url.removeprefix(address).partition("?")[0].partition("#")[0] for url in found]
        return list(dict.fromkeys(url.removesuffix(".html") for url in urls))

    yield type_query
    context.close()


@pytest.mark.parametrize("text", SEARCHES)
def test_a_search_finds_a_page_for_users_first(search, text):
    found = search(text)
    assert found, text
    assert found[0].startswith(FOR_USERS), found[:FIRST]
    assert SEARCHES[text] in found[:FIRST], found[:FIRST]


def test_records_of_decisions_are_not_found(search):
    assert [page for page in search("decision") if page.startswith("adr/")] == []
