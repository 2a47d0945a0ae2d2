"""A tiny hand-made session for each policy, with every fetched record written out.

256 tokens of which four have keys; records lie in reverse order, so record = 255 - token; k = 2, slack 1, sink 2.
"""

import numpy as np
import pytest
from decode_worker.policy.full import FullPolicy
from decode_worker.policy.none import NonePolicy
from decode_worker.policy.qsac import QsacPolicy

from decode_worker.retrieval.exact import ExactRetriever

from .pretend import Bench, settings

D = 8
X, Y = np.eye(D, dtype=np.float32)[:2]
KEYS = {10: 5 * X, 20: 4 * X, 30: 5 * Y, 40: 4 * Y}  # records 245, 235, 225, 215
QUERIES = [X, X, 0.9 * X + 0.3 * Y, Y, X + Y, X + Y]
FETCHED = {
    # The third query is at cosine .95 of its label; the fourth changes both records and exceeds the slack.
    QsacPolicy: [[[235, 245]], [], [], [[215, 225]], [[245]], []],
    # The same sets without looking at labels: nothing that is held travels twice.
    NonePolicy: [[[235, 245]], [], [], [[215, 225]], [[245]], []],
    FullPolicy: [[], [], [], [], [], []],
}
HITS = {QsacPolicy: 3, NonePolicy: 0, FullPolicy: 0}
CLEARED = {QsacPolicy: 1, NonePolicy: 1, FullPolicy: 0}


@pytest.mark.parametrize("policy_class", FETCHED)
def test_trace_is_the_one_worked_out_by_hand(rng, policy_class):
    policy = policy_class(
        settings(layers=2, kv_heads=1, group=1, slots=1, sink=2, budget=2, slack=0.5), ExactRetriever(1.0)
    )
    bench = Bench(policy, rng)
    keys = np.zeros((2, 256, 1, D), np.float32)
    for token, key in KEYS.items():
        keys[:, token, 0] = key
    reverse = np.broadcast_to(np.arange(255, -1, -1), (2, 1, 256))
    bench.bind(0, 256, 300, [bench.pack(0, 256, keys, reverse)])
    for query, fetched in zip(QUERIES, FETCHED[policy_class], strict=True):
        bench.step(np.broadcast_to(query, (2, 1, 1, D)))
        assert bench.fetched == fetched
    assert policy.counters.hits == HITS[policy_class]
    assert policy.counters.cleared == CLEARED[policy_class]
    assert policy.counters.records_moved == sum(len(run) for step in FETCHED[policy_class] for run in step)


def test_first_sets_make_the_first_step_hit(rng):
    policy = QsacPolicy(settings(), ExactRetriever(1.0))
    bench = Bench(policy, rng)
    keys = rng.standard_normal((3, 256, 2, D), dtype=np.float32)
    bench.bind(0, 256, 300, [bench.pack(0, 256, keys)])
    queries = np.stack([bench.queries(1)[0] for _ in range(3)])
    for ticket in policy.first_sets(0, list(queries), runs_max=3, pairs_max=7):
        assert len(ticket.runs) <= 3
        assert len(ticket.pairs) <= 7
        bench.copy(ticket)
    policy.commit_first_sets(0)
    bench.step(queries[:, None])
    assert bench.fetched == []
    assert policy.counters.lookups == 0, "the first step is not counted"
