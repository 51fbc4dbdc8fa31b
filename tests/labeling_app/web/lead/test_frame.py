"""The addresses of the pages for leads."""


def test_runs_without_a_loop_says_how_to_start_with_one(ask):
    [page] = ask([("GET", "/lead/runs", None)])
    assert page.status_code == 404
    assert "This board was started without a loop." in page.text
    assert "rlhf label --loop loop.yaml" in page.text
    assert 'href="/lead/data"' in page.text
    [page] = ask([("GET", "/lead/data", None)])
    assert 'href="/lead/runs"' not in page.text
