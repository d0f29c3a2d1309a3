"""Plots are SVG that any reader can parse, with one mark a task and escaped names."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from benchmarks.kernelbench.plots import Curve, Dot, draw_curves, draw_dots

SVG = "{http://www.w3.org/2000/svg}"
DOTS = [Dot("slow <1>", 0.5, 0.4, 0.6, False), Dot("fast", 3.0, 2.9, 3.1, True)]


def test_every_task_is_a_circle_in_ascending_order_filled_where_something_was_swapped_in() -> None:
    circles = list(ET.fromstring(draw_dots(DOTS[::-1], "label")).iter(f"{SVG}circle"))
    assert [circle.get("fill") for circle in circles] == ["none", "var(--first)"]
    assert float(circles[0].get("cx", "nan")) < float(circles[1].get("cx", "nan"))
    assert float(circles[0].get("cy", "nan")) > float(circles[1].get("cy", "nan"))
    assert circles[0].findtext(f"{SVG}title") == "slow <1>: 0.500x"


def test_several_curves_have_a_legend_and_one_has_none() -> None:
    curve = Curve("level <1>", [(0.5, 1.0), (2.0, 0.0)])
    one = ET.fromstring(draw_curves([curve], "label", "p", logarithmic_y=False))
    two = ET.fromstring(draw_curves([curve, curve], "label", "p", logarithmic_y=False))
    assert len(list(one.iter(f"{SVG}polyline"))) == 1
    assert "level <1>" not in "".join(one.itertext())
    assert "".join(two.itertext()).count("level <1>") == 2


def test_points_lie_inside_the_picture() -> None:
    curve = Curve("all", [(0.0, 1.0), (5.0, 1.5), (60.0, 4.0)])
    picture = ET.fromstring(draw_curves([curve], "label", "seconds", logarithmic_y=True))
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    (line,) = picture.iter(f"{SVG}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)


def test_there_is_no_plot_of_nothing() -> None:
    assert draw_curves([], "label", "p", logarithmic_y=False) == ""
