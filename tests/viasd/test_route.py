"""Routes: masks, JSON, and the models they fit."""

from itertools import pairwise

import pytest

from viasd import InvalidInput, Route, RouteMismatch


def test_round_trip(tmp_path):
    route = Route(
        (True, False, True, True),
        (True, True, False, True),
        model="m",
        revision="r1",
        config_hash="abc",
        score=1.5,
        settings={"skip_ratio": 0.25, "theta": 10},
        calibration_hash="def",
    )
    route.save(tmp_path / "route.json")
    assert Route.load(tmp_path / "route.json") == route


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.45, 0.5, 1.0])
@pytest.mark.parametrize("num_layers", [2, 3, 12, 30])
def test_spread_bypasses_the_shares_asked_for(num_layers, ratio):
    route = Route.spread(num_layers, attention=ratio, mlp=1.0 - ratio)
    assert route.num_layers == num_layers
    assert route.attention.count(False) == round(ratio * (num_layers - 2))
    assert route.mlp.count(False) == round((1.0 - ratio) * (num_layers - 2))


def test_spread_is_even():
    bypassed = [i for i, keep in enumerate(Route.spread(30, attention=0.5, mlp=0.0).attention) if not keep]
    gaps = {b - a for a, b in pairwise(bypassed)}
    assert gaps == {2}


def test_skip_ratio_counts_middle_sub_layers():
    assert Route((True, False, True, True), (True, True, True, True)).skip_ratio == 0.25
    assert Route((True, True), (True, True)).skip_ratio == 0.0


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_spread_refuses_ratios_outside_0_1(ratio):
    with pytest.raises(InvalidInput, match="mlp must lie in"):
        Route.spread(8, attention=0.5, mlp=ratio)


@pytest.mark.parametrize(
    ("attention", "mlp", "message"),
    [
        ((True, True), (True, True, True), "got 2 and 3"),
        ((True,), (True,), "at least 2"),
        ((False, True), (True, True), "first and the last"),
        ((True, True), (True, False), "first and the last"),
        ((1, 1), (True, True), "attention must be a sequence of bools"),
        ("ab", (True, True), "attention must be a sequence of bools"),
    ],
)
def test_masks_that_cannot_work_are_refused(attention, mlp, message):
    with pytest.raises(InvalidInput, match=message):
        Route(attention, mlp)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("not json", "cannot read"),
        ("[1]", "not a route file"),
        ('{"format": "other"}', "not a route file"),
        ('{"format": "viasd-route-1", "attention": [true, true]}', "missing fields .'mlp'"),
        ('{"format": "viasd-route-1", "attention": [true], "mlp": [true], "speed": 1}', "unknown fields .'speed'"),
        ('{"format": "viasd-route-1", "attention": 5, "mlp": [true, true]}', "attention must be"),
    ],
)
def test_files_that_are_not_routes_are_refused(tmp_path, content, message):
    path = tmp_path / "route.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        Route.load(path)


def test_a_route_for_another_model_is_refused():
    route = Route.spread(6, attention=0.5, mlp=0.5)
    route.check(6, "abc", "any model with six layers")
    with pytest.raises(RouteMismatch, match="made for 6 layers, but small has 4"):
        route.check(4, "abc", "small")
    made_for = Route(route.attention, route.mlp, model="big", config_hash="abc")
    made_for.check(6, "abc", "big")
    with pytest.raises(RouteMismatch, match=r"made for big \(config abc\), not for other \(config xyz\)"):
        made_for.check(6, "xyz", "other")
