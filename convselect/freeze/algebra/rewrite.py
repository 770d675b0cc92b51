"""All rewritings of a graph, until none applies."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from torch import fx

from convselect.freeze.algebra import spelling, writing
from convselect.freeze.algebra.activations import activations, gates
from convselect.freeze.algebra.attention import attentions
from convselect.freeze.algebra.bench import dead_code
from convselect.freeze.algebra.branches import common_factors, parallel_layers
from convselect.freeze.algebra.constants import is_mutation
from convselect.freeze.algebra.folding import (
    constants_together,
    into_layer_before,
    into_layers_after,
    products_and_sums,
)
from convselect.freeze.algebra.norms import batch_norms
from convselect.freeze.algebra.pools import averages_first
from convselect.freeze.algebra.products import layers_in_a_row

_ROUNDS = 12

# What removes calls comes first: readers are counted.
RULES: tuple[Callable[[fx.Graph], int], ...] = (
    dead_code,
    spelling.identities,
    spelling.repeated_calls,
    spelling.paddings,
    spelling.linear_layers,
    spelling.views_of_views,
    spelling.image_means,
    attentions,
    batch_norms,
    products_and_sums,
    gates,
    activations,
    into_layer_before,
    parallel_layers,
    common_factors,
    into_layers_after,
    layers_in_a_row,
    averages_first,
    constants_together,
)


def rewrite(graph: fx.Graph) -> dict[str, int]:
    """Simplify a graph of ATen operators by identities of algebra, in place; how often each rule applied, by its name.

    The graph is that of a functionalised forward in evaluation mode without gradients, as `capture` writes it:
    parameters and buffers are `get_attr` nodes, and `meta["val"]` of every value has its shape, strides and element
    type. Results stay the same up to rounding, in shape, type and strides (but for dimensions of size 1). What is
    computed from parameters and buffers alone becomes expressions in front of the graph (see `constants.Constants`);
    none is evaluated. New nodes have a `meta["val"]` too, some of it on the meta device. A graph that writes to its
    arguments, parameters or buffers stays as it is.

    Raises:
        ValueError: if a value has no `meta["val"]`.
    """
    counts: Counter[str] = Counter()
    counts["views_in_place"] = writing.views_in_place(graph)
    counts["writes_to_own"] = writing.writes_to_own(graph)
    if not any(is_mutation(node) for node in graph.nodes):
        without = 0  # rules in a row that did not apply
        for rule in itertools.islice(itertools.cycle(RULES), _ROUNDS * len(RULES)):
            applied = rule(graph)
            counts[rule.__name__] += applied
            without = 0 if applied else without + 1
            if without == len(RULES):
                break
    graph.lint()
    return {name: count for name, count in counts.items() if count}
