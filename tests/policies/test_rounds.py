"""Which prompts go back to the annotators."""

from policies.rounds import choose


def test_the_reasons_take_turns_in_proportion_and_never_meet() -> None:
    nats = [float(n) for n in range(20)]  # the last are farthest
    uncertainty = [-float(n) for n in range(20)]  # the first are most uncertain
    chosen = choose(nats, uncertainty, pick=10, random_share=0.2, seed=0)
    places = [place for place, _ in chosen]
    assert len(set(places)) == 10
    by_reason = {reason: [p for p, why in chosen if why == reason] for _, reason in chosen}
    assert {reason: len(found) for reason, found in by_reason.items()} == {
        "random": 2,
        "divergent": 4,
        "uncertain": 4,
    }
    taken = set(by_reason["random"])
    assert by_reason["divergent"] == [p for p in range(19, 0, -1) if p not in taken][:4]
    assert by_reason["uncertain"] == [p for p in range(20) if p not in taken][:4]


def test_all_or_none_at_random_and_never_more_than_there_are() -> None:
    chosen = choose([1.0, 2.0], [1.0, 2.0], pick=9, random_share=1.0, seed=0)
    assert sorted(chosen) == [(0, "random"), (1, "random")]
    assert [why for _, why in choose([1.0, 2.0], [2.0, 1.0], pick=2, random_share=0, seed=0)] == [
        "divergent",
        "uncertain",
    ]
