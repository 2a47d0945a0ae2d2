"""Between messages of kvstore.v1 and the types of types.py, for both ends."""

from kvstore_service._proto import store_service_pb2 as pb
from kvstore_service.shared.types import (
    KindSpec,
    Layout,
    PackRef,
    PackReservation,
    PrefixCandidate,
    RingGeometry,
    SidecarKey,
)


def layout_to(layout: Layout) -> pb.Layout:
    kinds = [pb.KindSpec(lanes=k.lanes, d=k.d, dtype=k.dtype, record_bytes=k.record_bytes) for k in layout.kinds]
    return pb.Layout(fingerprint=layout.fingerprint, layers=layout.layers, kinds=kinds)


def layout_of(message: pb.Layout) -> Layout:
    kinds = tuple(KindSpec(k.lanes, k.d, k.dtype, k.record_bytes) for k in message.kinds)
    return Layout(message.fingerprint, message.layers, kinds)


def ref_to(ref: PackRef) -> pb.PackRef:
    return pb.PackRef(pack_id=ref.pack_id, build=ref.build, first_token=ref.first_token, tokens=ref.tokens)


def ref_of(message: pb.PackRef) -> PackRef:
    return PackRef(message.pack_id, message.build, message.first_token, message.tokens)


def candidate_to(item: PrefixCandidate) -> pb.PrefixCandidate:
    return pb.PrefixCandidate(first_token=item.first_token, tokens=item.tokens, token_digest=item.token_digest)


def candidate_of(message: pb.PrefixCandidate) -> PrefixCandidate:
    return PrefixCandidate(message.first_token, message.tokens, message.token_digest)


def reservation_to(item: PackReservation) -> pb.PackReservation:
    return pb.PackReservation(
        parent=item.parent,
        first_token=item.first_token,
        tokens=item.tokens,
        token_digest=item.token_digest,
        record_order=pb.RecordOrder.ValueType(item.record_order),
    )


def reservation_of(message: pb.PackReservation) -> PackReservation:
    return PackReservation(
        message.first_token, message.tokens, message.token_digest, message.parent, message.record_order
    )


def geometry_to(ring: RingGeometry) -> pb.RingGeometry:
    return pb.RingGeometry(tickets=ring.tickets, runs_max=ring.runs_max, pairs_max=ring.pairs_max, device=ring.device)


def geometry_of(message: pb.RingGeometry) -> RingGeometry:
    return RingGeometry(message.tickets, message.runs_max, message.pairs_max, message.device)


def sidecar_key_to(key: SidecarKey) -> pb.SidecarKey:
    return pb.SidecarKey(pack_id=key.pack_id, build=key.build, kind=key.kind, parameters=key.parameters)


def sidecar_key_of(message: pb.SidecarKey) -> SidecarKey:
    return SidecarKey(message.pack_id, message.build, message.kind, message.parameters)
