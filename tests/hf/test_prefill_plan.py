"""The plan of a batch's prefill against a brute-force model of which KV lies where."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixkv.hf.prefill import Row, common_prefix, plan_shared, plan_staircase


@st.composite
def batches(draw):
    """Left-padded prompts over a tiny alphabet, with a consistent set of cached prefixes."""
    count = draw(st.integers(1, 6))
    prompts = draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=count, max_size=count)
    )
    for i in range(1, count):  # long common beginnings are what it is about
        if draw(st.booleans()):
            source = prompts[draw(st.integers(0, i - 1))]
            prompts[i] = source[: draw(st.integers(0, len(source)))] + prompts[i]
    cached = draw(st.lists(st.sampled_from(prompts), max_size=2))
    cached = [prefix[: draw(st.integers(0, len(prefix)))] for prefix in cached]
    ahead = draw(st.integers(1, 3))
    columns = max(map(len, prompts))
    rows = []
    for prompt in prompts:
        limit = max(0, len(prompt) - ahead)
        have = max([common_prefix(np.array(prompt), np.array(c, dtype=np.int64)) for c in cached], default=0)
        rows.append(Row(np.array(prompt, dtype=np.int64), columns - len(prompt), limit, min(have, limit)))
    return rows, columns, ahead, draw(st.sampled_from([1, 4, 10]))


@given(batches())
def test_every_step_reads_only_what_is_there_and_all_rows_end_at_the_same_column(batch):
    rows, columns, ahead, min_saved = batch
    present = [set(range(row.have)) for row in rows]
    computed = [0] * len(rows)
    shared = plan_shared(rows, min_saved)
    climbs, skip = plan_staircase(rows, min_saved)

    for step in shared:
        assert set(range(step.start)) <= present[step.leader]
        computed[step.leader] += step.stop - step.start
        present[step.leader] |= set(range(step.start, step.stop))
        for follower in step.followers:
            prefix = rows[step.leader].tokens[: step.stop]
            assert rows[follower].tokens[: step.stop].tolist() == prefix.tolist()
            assert set(range(step.copy_from)) <= present[follower]
            present[follower] |= set(range(step.copy_from, step.stop))
    for climb in climbs:
        assert climb.start < climb.stop
        for i in climb.rows:
            first = max(0, climb.start - rows[i].pad)
            assert set(range(first)) <= present[i]
            computed[i] += climb.stop - rows[i].pad - first
            present[i] |= set(range(first, climb.stop - rows[i].pad))

    assert computed == [row.computed for row in rows]
    for i, row in enumerate(rows):
        assert set(range(max(0, min(skip, columns - ahead) - row.pad))) <= present[i]
        assert present[i] == set(range(row.have))


@given(batches())
def test_no_distinct_prefix_is_computed_twice_when_forwards_are_free(batch):
    rows, _, _, _ = batch
    lacking = set()
    for row in rows:
        lacking |= {tuple(row.tokens[: i + 1]) for i in range(row.have, row.limit)}
    shared = plan_shared(rows, 1)
    done = [tuple(rows[s.leader].tokens[: i + 1]) for s in shared for i in range(s.start, s.stop)]
    assert len(done) == len(set(done))
    assert set(done) <= lacking
    # What several rows lack is done by the shared steps, so nothing is left that two rows would compute.
    left = [tuple(row.tokens[: i + 1]) for row in rows for i in range(row.have, row.limit)]
    assert len(left) == len(set(left))


def test_a_cold_batch_costs_one_forward_over_the_shared_tokens():
    shared = np.arange(512)
    rows = [Row(np.concatenate((shared, 1000 * (i + 1) + np.arange(32))), 0, 543) for i in range(8)]
    plan = plan_shared(rows, 8)
    assert [(step.start, step.stop, len(step.followers)) for step in plan] == [(0, 512, 7)]
    assert plan_staircase(rows, 8) == ([], 512)


def test_a_cold_row_among_warm_ones_is_brought_up_alone():
    rows = [Row(np.arange(100) + 1000 * i, 0, 99, have) for i, have in enumerate((99, 99, 0, 99))]
    assert plan_shared(rows, 8) == []
    climbs, skip = plan_staircase(rows, 8)
    assert [(c.rows, c.start, c.stop) for c in climbs] == [((2,), 0, 99)]
    assert skip == 99


def test_steps_that_save_less_than_a_forward_are_left_out():
    rows = [Row(np.arange(100) + 1000 * i, 0, 99, have) for i, have in enumerate((99, 97))]
    assert plan_staircase(rows, 8) == ([], 97)
