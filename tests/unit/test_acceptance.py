"""The acceptance rule: exact paths, and the law of what it emits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quasar.types import Draft, Verdict
from quasar.verification.acceptance import accept


def test_chain_paths():
    draft = Draft.chain((5, 6, 7))
    assert accept(draft, [5, 6, 7, 8].__getitem__) == Verdict((5, 6, 7, 8), (0, 1, 2))
    assert accept(draft, [5, 9, 7, 8].__getitem__) == Verdict((5, 9), (0,))
    assert accept(draft, [1, 6, 7, 8].__getitem__) == Verdict((1,), ())
    assert accept(Draft(), [3].__getitem__) == Verdict((3,), ())


def test_tree_paths():
    #        root -> 5 -> 6 -> 8
    #             -> 9 -> 6
    draft = Draft((5, 9, 6, 6, 8), (-1, -1, 0, 1, 2))
    assert accept(draft, [5, 6, 0, 8, 0, 4].__getitem__) == Verdict((5, 6, 8, 4), (0, 2, 4))
    assert accept(draft, [9, 0, 6, 0, 7, 0].__getitem__) == Verdict((9, 6, 7), (1, 3))
    assert accept(draft, [5, 7, 0, 0, 0, 0].__getitem__) == Verdict((5, 7), (0,))


def test_only_visited_rows_are_drawn():
    drawn = []

    def draw(row):
        drawn.append(row)
        return 5 if row == 0 else 1

    accept(Draft.chain((5, 6, 7)), draw)
    assert drawn == [0, 1]


@st.composite
def trees(draw):
    size = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens, used = [], {}
    for parent in parents:
        choice = draw(st.integers(0, 5).filter(lambda t, p=parent: t not in used.get(p, set())))
        used.setdefault(parent, set()).add(choice)
        tokens.append(choice)
        if len(used[parent]) == 5:
            break
    return Draft(tuple(tokens), tuple(parents[: len(tokens)]))


@given(trees(), st.integers(0, 2**32 - 1))
def test_emission_does_not_depend_on_the_draft(draft, seed):
    """With the next token a function of the prefix, any draft gives the plain sequence."""

    def following(prefix):
        return int(np.random.default_rng([seed, *prefix]).integers(0, 6))

    def prefix_of(row):
        prefix, node = [], row - 1
        while node >= 0:
            prefix.append(draft.tokens[node])
            node = draft.parents[node]
        return tuple(reversed(prefix))

    verdict = accept(draft, lambda row: following(prefix_of(row)))
    plain = ()
    for _ in verdict.tokens:
        plain += (following(plain),)
    assert verdict.tokens == plain
    assert tuple(draft.tokens[node] for node in verdict.path) == verdict.tokens[:-1]


def test_the_law_is_the_verifiers(seeds=20_000):
    """Two steps from a known Markov law, drafted by the likeliest tokens: frequencies fit."""
    law = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    draft = Draft.chain((0, 0))
    rng = np.random.default_rng(7)
    counts = np.zeros((3, 3))
    for _ in range(seeds):
        verdict = accept(draft, lambda row: int(rng.choice(3, p=law[0])))
        first = verdict.tokens[0]
        second = verdict.tokens[1] if len(verdict.tokens) > 1 else int(rng.choice(3, p=law[first]))
        counts[first, second] += 1
    expected = law[0][:, None] * law * seeds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 26.1  # 99.9 % quantile for 8 degrees of freedom
