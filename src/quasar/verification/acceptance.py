"""The one acceptance rule, for chains and trees, at any temperature.

At each node draw the verifier's own next token x ~ p. If a child of the node carries x, go down to
it; else emit x and stop. Every emitted token is a draw from p, so the output has the verifier's law
whatever is drafted. For a deterministic draft d this equals rejection sampling (arXiv 2211.17192):
that accepts d with probability p(d), else draws from p without d, renormalised, and
P(x = d) = p(d), P(x | x != d) = p(x) / (1 - p(d)) is the same. With noise keyed by position it also
equals plain decoding token by token.
"""

from __future__ import annotations

from collections.abc import Callable

from quasar.types import Draft, Verdict


def accept(draft: Draft, draw: Callable[[int], int]) -> Verdict:
    """`draw(row)` is the verifier's token after row 0 (the last accepted token) or node row - 1."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    tokens: list[int] = []
    path: list[int] = []
    node = -1
    while True:
        token = draw(node + 1)
        tokens.append(token)
        child = children.get((node, token))
        if child is None:
            return Verdict(tuple(tokens), tuple(path))
        path.append(child)
        node = child
