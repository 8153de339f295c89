"""Which settings are compared: the default set, and what a person may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import RunConfig
from engine.errors import InputError
from engine.quality_sets import (
    COMBINED,
    DROP,
    DROP_RAW,
    FAMILIES,
    FEWER,
    LOSSLESS,
    SUBSTITUTE,
    check_fit,
    configured,
    default_variants,
    fewer_experts,
    parse_sets,
    read_sets,
    variant,
)

MANY = {"n-expert-used": "1", "drop-cold-experts": "1", "drop-renorm": "true"}
HUGE = "+".join(f"{key}={','.join([value] * 100)}" for key, value in MANY.items())


def test_the_default_set_has_every_family() -> None:
    found = default_variants(4)
    assert {v.family for v in found} == set(FAMILIES)
    assert [v.name for v in found if v.family == DROP] == [
        *("drop 0.25", "drop 0.5", "drop 0.75", "drop 1")
    ]
    assert [v.strength for v in found if v.family == FEWER] == [3, 2, 1]
    assert len({v.name for v in found}) == len(found)


@pytest.mark.parametrize(
    ("top_k", "fewer"), [(1, []), (2, [1]), (4, [3, 2, 1]), (8, [7, 6, 4, 2]), (10, [9, 8, 5, 2])]
)
def test_fewer_experts_of_any_top_k(top_k: int, fewer: list[int]) -> None:
    assert fewer_experts(top_k) == fewer


@pytest.mark.parametrize(
    ("settings", "name", "family"),
    [
        ({"routing.drop-cold-experts": 0.5}, "drop 0.5", DROP),
        (
            {"routing.drop-cold-experts": 0.5, "routing.drop-renorm": False},
            "drop 0.5 raw",
            DROP_RAW,
        ),
        (
            {"routing.drop-cold-experts": 0.5, "routing.cold-policy": "substitute"},
            "substitute 0.5",
            SUBSTITUTE,
        ),
        ({"routing.n-expert-used": 3}, "top-3", FEWER),
        (
            {"routing.n-expert-used": 3, "routing.drop-cold-experts": 1.0},
            "top-3 drop 1",
            COMBINED,
        ),
        ({"routing.cold-policy": "substitute", "routing.drop-renorm": False}, LOSSLESS, LOSSLESS),
    ],
)
def test_a_setting_is_named_by_what_it_does(
    settings: dict[str, object], name: str, family: str
) -> None:
    found = variant(settings)
    assert (found.name, found.family) == (name, family)


def test_what_is_dropped_in_prefill_too_is_a_family_of_its_own() -> None:
    found = variant({"routing.drop-cold-experts": 0.5, "routing.drop-in-prefill": True})
    assert found.name == "drop 0.5 +prefill"
    assert found.family not in FAMILIES


def test_sets_from_the_command_line() -> None:
    found = parse_sets(
        ["drop-cold-experts=0.5,1+drop-renorm=true,false", "n-expert-used=2", "n-expert-used=2,1"]
    )
    assert [v.name for v in found] == [
        *("drop 0.5", "drop 0.5 raw", "drop 1", "drop 1 raw", "top-2", "top-1")
    ]
    assert found[0].settings == {"routing.drop-cold-experts": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop-cold-experts", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("n-expert-used=", "write it as key=value"),
        ("drop-cold=0.5", "did you mean routing.drop-cold-experts"),
        ("cache-mb=2000", "stream.cache-mb is not lossy"),
        ("drop-cold-experts=0.5,2", "2.0 is out of range"),
        ("drop-cold-experts=0.5,,1", "'' is a text"),
        ("drop-renorm=maybe", "true or false"),
        ("n-expert-used=1+n-expert-used=2", "is there twice"),
        ("drop-cold-experts=0", "all lossless"),
        ("drop-renorm=false", "all lossless"),
        (HUGE, "1000000 settings are too many"),
        ("drop-cold-experts=" + ",".join(f"0.{n:03d}" for n in range(1, 300)), "too many"),
    ],
)
def test_bad_sets_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=r"set-of|lossless|too many") as caught:
        parse_sets([text])
    assert message in str(caught.value)


def test_sets_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sets.toml"
    path.write_text(
        "[[sets]]\ndrop-cold-experts = [0.5, 1]\ncold-policy = 'substitute'\n"
        "[[sets]]\nrouting.n-expert-used = 2\n"
    )
    assert [v.name for v in read_sets(path)] == ["substitute 0.5", "substitute 1", "top-2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no [[sets]]"),
        ("sets = 3", "has no [[sets]]"),
        ("sets = [3]", "number 1: holds no settings"),
        ("[[sets]]\n[[sets]]\n", "number 1: holds no settings"),
        ("[[set]]\nn-expert-used = 1", "there is no 'set' here"),
        ("[[sets]]\nn-expert-used = []", "lists no value"),
        ("[[sets]]\nn-expert-used = ['two']", "'two' is a text"),
        ("[[sets]]\nrouting = 3", "routing is no table"),
        ("[[sets]]\nn-experts = 3", "there is no setting 'n-experts'"),
        ("[[sets]\n", "is not valid TOML"),
    ],
)
def test_bad_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sets.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_sets(path)
    assert message in str(caught.value) and "sets.toml" in str(caught.value)


def test_a_models_own_top_k_is_no_setting() -> None:
    both = parse_sets(["n-expert-used=4,2", "n-expert-used=4+drop-cold-experts=0.5"])
    assert [v.name for v in check_fit(both, 4, 16)] == ["top-2", "drop 0.5"]
    with pytest.raises(InputError, match="16 experts per layer and routes to 4"):
        check_fit(parse_sets(["n-expert-used=17"]), 4, 16)


def test_a_lossy_profile_is_a_setting_itself() -> None:
    assert configured(RunConfig()) is None
    found = configured(RunConfig().replace({"routing.drop-cold-experts": 0.75}))
    assert found is not None and found.name == "drop 0.75"
