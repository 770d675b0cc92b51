"""`convselect report`: writes one HTML page about a network or a file of measured times.

    networks.py       a model -> `NetworkReport`: per layer the candidates, the choice and the gain; end-to-end
    end_to_end.py     the whole network, plain and converted
    measurements.py   a store or CSV of times -> `DataReport`: which algorithms win, and how good a model's choices are
    charts.py         figures -> rectangles and texts in an SVG's coordinates
    page.py           a report -> HTML, with the templates beside it

The page is self-contained: it includes its style and figures, and there are no scripts.
"""

from convselect.report.measurements import DataReport, of_data
from convselect.report.networks import NetworkReport, of_model
from convselect.report.page import render

__all__ = ["DataReport", "NetworkReport", "of_data", "of_model", "render"]
