"""The orders of records inside a pack: each of all tokens, and what it is named for."""

from __future__ import annotations

import pytest
import torch

from decode_worker import packing
from decode_worker.importance import hot_records
from decode_worker.packing import CHUNK_TOKENS, ORDERS
from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service.client import LEARNT, RECORD_ORDERS

HEADS, TOKENS, DIM, CLUSTERS = 2, 512, 32, 8


def found(name: str, keys: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(packing.record_order(ORDERS[name], keys, importance).astype("int64"))


def clustered_keys(tokens_together: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, H, d] around far centres, and which of them each token's is near, [n]."""
    member = torch.randint(CLUSTERS, (TOKENS // tokens_together,)).repeat_interleave(tokens_together)
    return 10 * torch.randn(CLUSTERS, HEADS, DIM)[member] + 0.1 * torch.randn(TOKENS, HEADS, DIM), member


def runs(values: torch.Tensor) -> int:
    return 1 + int((values.diff() != 0).sum())


@pytest.fixture(params=range(3))
def seed(request: pytest.FixtureRequest) -> int:
    print(f"seed {request.param}")
    torch.manual_seed(request.param)
    return int(request.param)


def test_names_and_numbers_are_those_of_the_protocol() -> None:
    numbers = {name.removeprefix("RECORD_ORDER_").lower(): number for name, number in pb.RecordOrder.items()}
    assert numbers == {name: number for number, name in enumerate(RECORD_ORDERS)}
    assert set(ORDERS.names) == set(RECORD_ORDERS[1:LEARNT])


@pytest.mark.parametrize("name", ORDERS.names)
@pytest.mark.parametrize("tokens", [256, 1024])
def test_an_order_has_every_token_once(seed: int, name: str, tokens: int) -> None:
    order = found(name, torch.randn(tokens, HEADS, DIM), torch.rand(HEADS, tokens))
    assert (order.sort(dim=1).values == torch.arange(tokens)).all()


@pytest.mark.parametrize("name", ORDERS.names)
def test_keys_without_a_difference_have_an_order(name: str) -> None:
    order = found(name, torch.zeros(256, 1, DIM), torch.zeros(1, 256))
    assert sorted(order[0].tolist()) == list(range(256))


def test_tokens_follow_each_other(seed: int) -> None:
    assert (found("token", torch.randn(TOKENS, HEADS, DIM), torch.rand(HEADS, TOKENS)) == torch.arange(TOKENS)).all()


@pytest.mark.parametrize("name", [name for name in ORDERS.names if ORDERS[name].hot_first])
def test_the_important_come_first(seed: int, name: str) -> None:
    importance = torch.rand(HEADS, TOKENS)
    order = found(name, clustered_keys()[0], importance)
    first = order[:, : hot_records(TOKENS)].sort(dim=1).values
    assert (first == importance.topk(hot_records(TOKENS), dim=1).indices.sort(dim=1).values).all()


def test_importance_falls(seed: int) -> None:
    importance = torch.rand(HEADS, TOKENS)
    falling = importance.gather(1, found("importance", clustered_keys()[0], importance))
    assert (falling.diff(dim=1) <= 0).all()


@pytest.mark.parametrize(("name", "together"), [("cluster", 1), ("pack", 1), ("chunk", CHUNK_TOKENS)])
def test_similar_keys_lie_side_by_side(seed: int, name: str, together: int) -> None:
    keys, member = clustered_keys(together)
    order = found(name, keys, torch.rand(HEADS, TOKENS))
    for head in range(HEADS):
        assert runs(member[order[head]]) < runs(member) / 2


def test_chunks_stay_whole(seed: int) -> None:
    order = found("chunk", torch.randn(TOKENS, HEADS, DIM), torch.rand(HEADS, TOKENS))
    chunks = order.unflatten(1, (-1, CHUNK_TOKENS))
    assert (chunks.diff(dim=2) == 1).all()
    assert (chunks[:, :, 0] % CHUNK_TOKENS == 0).all()
