"""Many writers at once: nothing is lost, nothing is done twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.apiclient import Api
from tests.samples import config_map

WRITERS = 20
CREATORS = 50


def count_up(here: Api) -> int:
    """Add one to the counter, again and again until the version was current; the tries."""
    for tries in range(1, 1000):
        found = here.get("configmaps/counter").made
        found["data"]["n"] = str(int(found["data"]["n"]) + 1)
        answer = here.put("configmaps/counter", found)
        if answer.code == 200:
            return tries
        assert answer.failure == (409, "Conflict")
    raise AssertionError("never current")


def test_counter_loses_no_increment(here: Api) -> None:
    here.post("configmaps", config_map("counter", n="0")).done()
    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(lambda _: count_up(here), range(WRITERS)))
    assert here.get("configmaps/counter").made["data"] == {"n": str(WRITERS)}


def test_one_of_many_creates_of_a_name_wins(here: Api) -> None:
    with ThreadPoolExecutor(WRITERS) as threads:
        bodies = (config_map("one", by=str(number)) for number in range(CREATORS))
        answers = list(threads.map(lambda body: here.post("configmaps", body), bodies))
    codes = [answer.code for answer in answers]
    assert (codes.count(201), codes.count(409)) == (1, CREATORS - 1)
    winner = next(answer for answer in answers if answer.code == 201)
    assert here.get("configmaps/one").made == winner.object


def test_one_of_many_deletes_wins(here: Api) -> None:
    here.post("configmaps", config_map("one")).done()
    with ThreadPoolExecutor(WRITERS) as threads:
        answers = list(threads.map(lambda _: here.delete("configmaps/one"), range(WRITERS)))
    codes = [answer.code for answer in answers]
    assert (codes.count(200), codes.count(404)) == (1, WRITERS - 1)


def test_patches_without_a_version_are_all_done(here: Api) -> None:
    here.post("configmaps", config_map("one")).done()
    with ThreadPoolExecutor(WRITERS) as threads:
        changes = ({"data": {f"k{number}": "x"}} for number in range(WRITERS))
        answers = list(
            threads.map(lambda change: here.patch("merge", "configmaps/one", change), changes)
        )
    # kube-apiserver tries a patch five times on a current object, then says that it lost.
    done = {f"k{number}" for number, answer in enumerate(answers) if answer.code == 200}
    assert {answer.code for answer in answers} <= {200, 409}
    assert set(here.get("configmaps/one").made["data"]) == done


def test_appliers_of_their_own_fields_do_not_disturb_each_other(here: Api) -> None:
    with ThreadPoolExecutor(WRITERS) as threads:
        answers = list(
            threads.map(
                lambda number: here.apply(
                    "configmaps/one", config_map("one", **{f"k{number}": "x"}), f"m{number}"
                ),
                range(WRITERS),
            )
        )
    done = {f"k{number}" for number, answer in enumerate(answers) if answer.code in (200, 201)}
    assert {answer.code for answer in answers} <= {200, 201, 409}
    assert set(here.get("configmaps/one").made["data"]) == done
    assert len(done) >= 2


def test_watcher_sees_what_many_write_in_the_order_of_versions(here: Api) -> None:
    version = here.get("configmaps").made["metadata"]["resourceVersion"]
    with ThreadPoolExecutor(WRITERS) as threads:
        bodies = (config_map(f"m{number}") for number in range(CREATORS))
        made = list(threads.map(lambda body: here.post("configmaps", body).made, bodies))
    with here.watch("configmaps", resourceVersion=version) as events:
        seen = [events.event()["object"] for _ in range(CREATORS)]
    assert seen == sorted(made, key=lambda each: int(each["metadata"]["resourceVersion"]))


def test_list_shows_one_moment(here: Api) -> None:
    """Each round makes a, then b: no list may show a later round of b than of a."""
    here.post("configmaps", config_map("a", n="0")).done()
    here.post("configmaps", config_map("b", n="0")).done()

    def write() -> None:
        for number in range(1, 60):
            for name in "ab":
                change = {"data": {"n": str(number)}}
                here.patch("merge", f"configmaps/{name}", change).done()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not writing.done():
            items = here.get("configmaps").made["items"]
            a, b = (int(item["data"]["n"]) for item in items)
            assert b <= a <= b + 1
        writing.result()
