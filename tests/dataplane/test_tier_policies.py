"""The tier's policies against plain Python models of them, on random traces."""

import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore_service import _native
from kvstore_service._native import TIER_POLICIES, NativeError, TierPolicy

FRAMES = 48
LOOKS_MAX = 1024


class Model:
    """Frames of one domain in lists, the first one next; `counts` and `weights` are shared by all domains."""

    def __init__(self, counts: dict[int, int], weights: dict[int, int]) -> None:
        self.counts, self.weights = counts, weights
        self.frames: list[int] = []

    def admit(self, frame: int, key: int) -> None:
        self.frames.append(frame)

    def use(self, frame: int) -> None:
        self.counts[frame] = 1

    def weigh(self, frame: int, weight: int) -> None:
        self.weights[frame] = max(weight, self.weights[frame])

    def remove(self, frame: int) -> None:
        self.frames.remove(frame)

    def wear(self, frame: int) -> bool:
        self.weights[frame] -= (worn := self.weights[frame] > 0)
        return worn

    def passed_over(self, frame: int) -> bool:
        """The clock's second chance."""
        if self.counts[frame]:
            self.counts[frame] = 0
            return True
        return self.wear(frame)

    def sweep(self, pinned: Collection[int], passed_over: Callable[[int], bool], looks: int = LOOKS_MAX) -> int | None:
        passed = None
        for step in range(len(self.frames) * 9):
            if step >= looks and passed is not None:
                break
            self.frames.append(frame := self.frames.pop(0))
            if frame in pinned:
                continue
            passed = frame
            if not passed_over(frame):
                break
        return passed

    def victim(self, pinned: Collection[int]) -> int | None:
        return self.sweep(pinned, self.passed_over)


class Fifo(Model):
    def use(self, frame: int) -> None:
        pass

    def passed_over(self, frame: int) -> bool:
        return self.wear(frame)


class Lru(Fifo):
    def use(self, frame: int) -> None:
        if frame in self.frames:
            self.frames.remove(frame)
            self.frames.append(frame)


class Uses:
    """What all domains of an Lfu share."""

    def __init__(self) -> None:
        self.admitted = 0
        self.owners: list[Lfu] = []
        self.ghosts: list[list[Ghost | None]] = [[None] * 4 for _ in range(32)]
        self.own: dict[int, Lfu] = {}  # by frame, as the next two
        self.keys: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.marks: dict[int, int] = {}


@dataclass
class Ghost:
    key: int
    owner: object
    since: int
    uses: int

    def at(self, other_round: int) -> int:
        return _faded(self.uses, max(0, other_round - self.since))


class Lfu(Model):
    def __init__(self, counts: dict[int, int], weights: dict[int, int], shared: Uses) -> None:
        super().__init__(counts, weights)
        self.shared = shared
        self.uses = 0
        self.new: list[int] = []
        self.stay_new = 0  # in parts of 64

    def round(self) -> int:
        return (self.uses + self.shared.admitted) // 64

    def admit(self, frame: int, key: int) -> None:
        self.new.append(frame)
        if frame in self.shared.own:  # this is the common one, the other was first
            return
        self.shared.admitted += 1
        self.shared.own[frame], self.shared.keys[frame], self.shared.since[frame] = self, key, self.round()
        self.shared.marks[frame] = 0
        line = self.line(key)
        for i, ghost in enumerate(line):
            if ghost and ghost.owner is self and ghost.key == key:
                self.counts[frame] = ghost.at(self.round())
                line[i] = None

    def use(self, frame: int) -> None:
        self.shared.marks[frame] = min(255, self.shared.marks[frame] + 1)

    def count(self, frame: int) -> None:
        """The marks that its uses have left, as uses of this moment."""
        if marks := self.shared.marks[frame]:
            self.shared.marks[frame] = 0
            self.shared.own[frame].uses += marks
            self.settle(frame)
            self.counts[frame] = min(1024, self.counts[frame] + 64 * marks)

    def weigh(self, frame: int, weight: int) -> None:
        self.count(frame)
        self.settle(frame)
        super().weigh(frame, weight)

    def remove(self, frame: int) -> None:
        (self.new if frame in self.new else self.frames).remove(frame)
        if frame not in self.shared.own:
            return
        self.count(frame)
        self.settle(frame)
        del self.shared.own[frame]
        if not self.counts[frame]:
            return
        ghost = Ghost(self.shared.keys[frame], self, self.shared.since[frame], self.counts[frame])
        line = self.line(ghost.key)
        line[self.place(line)] = ghost

    def line(self, key: int) -> list[Ghost | None]:
        return self.shared.ghosts[_mixed(key) % 32]

    def place(self, line: list[Ghost | None]) -> int:
        """The first free one, or of the owner that would have most, itself before others, the least."""
        if None in line:
            return line.index(None)
        ghosts = [ghost for ghost in line if ghost]
        owners = [ghost.owner for ghost in ghosts]
        most = max(owners, key=lambda owner: owners.count(owner) + 1.5 * (owner is self))
        least: int | None = None
        for i, ghost in enumerate(ghosts):
            if ghost.owner is most:
                other = ghosts[least] if least is not None else None
                last = max(ghost.since, other.since) if other else 0
                if other is None or ghost.at(last) < other.at(last):
                    least = i
        assert least is not None
        return least

    def settled(self, frame: int) -> tuple[int, int]:
        rounds = self.shared.own[frame].round() - self.shared.since[frame]
        return _faded(self.counts[frame], rounds), max(0, self.weights[frame] - rounds)

    def settle(self, frame: int) -> None:
        self.counts[frame], self.weights[frame] = self.settled(frame)
        self.shared.since[frame] = self.shared.own[frame].round()

    def rank(self, frame: int) -> int:
        self.count(frame)
        overdue = self.counts[frame] * (self.shared.own[frame].round() - self.shared.since[frame]) > 256 * 64
        uses, weight = self.settled(frame)
        return weight + (0 if overdue else (uses + 64) // 128)

    def victim(self, pinned: Collection[int]) -> int | None:
        seen: list[int] = []
        new, held = len(self.new), len(self.frames)

        def sample(queue: list[int], count: int, most: int) -> int:
            """Looks at no more than `most`; returns at how many."""
            for looks in range(most):
                if len(seen) >= count:
                    return looks
                queue.append(frame := queue.pop(0))
                seen.extend([frame] if frame not in pinned else [])
            return most

        left = new - sample(self.new, 2 if new > self.stay_new // 64 else 1, min(8, new))
        if seen:
            self.stay_new = max(0, self.stay_new - 1)
        elif self.stay_new < (new + held) // 4 * 64:
            self.stay_new += 64
        sample(self.frames, 8, held)
        sample(self.new, 8, min(8, left) if seen else left)
        victim = min(seen, key=self.rank, default=None)
        for frame in seen:
            if frame in self.new and frame != victim:
                self.new.remove(frame)
                self.frames.append(frame)
        return victim


def _faded(uses: int, rounds: int) -> int:
    """Half of it after 32 rounds; in between on a straight line."""
    return uses * (64 - rounds % 32) // 64 >> rounds // 32


class S3Fifo(Model):
    def __init__(self, counts: dict[int, int], weights: dict[int, int], ghosts: list[int]) -> None:
        super().__init__(counts, weights)
        self.small: list[int] = []
        self.main: list[int] = []
        self.keys: dict[int, int] = {}
        self.ghosts = ghosts  # keys of all domains, the latest last

    def admit(self, frame: int, key: int) -> None:
        self.keys[frame] = key
        place = _place(key)
        since = next((i for i, ghost in enumerate(reversed(self.ghosts)) if _place(ghost) == place), None)
        remembered = since is not None and self.ghosts[-1 - since] == key and since < len(self.main)
        (self.main if self.weights[frame] or remembered else self.small).append(frame)

    def use(self, frame: int) -> None:
        self.counts[frame] = min(3, self.counts[frame] + 1)

    def remove(self, frame: int) -> None:
        (self.small if frame in self.small else self.main).remove(frame)

    def victim(self, pinned: Collection[int]) -> int | None:
        passed, busy = None, {"small": 0, "main": 0}
        for step in range(12 * (len(self.small) + len(self.main))):
            left = {name: busy[name] < len(getattr(self, name)) for name in busy}
            if not any(left.values()) or (step >= LOOKS_MAX and passed is not None):
                break
            full = len(self.small) * 10 >= len(self.small) + len(self.main)
            name = "small" if left["small"] and (full or not left["main"]) else "main"
            queue = getattr(self, name)
            queue.append(frame := queue.pop(0))
            if frame in pinned:
                busy[name] += 1
                continue
            busy[name], passed = 0, frame
            if name == "main":
                if self.counts[frame]:
                    self.counts[frame] -= 1
                elif not self.wear(frame):
                    break
            elif self.counts[frame] > 1 or self.weights[frame]:
                self.small.remove(frame)
                self.main.append(frame)
                self.counts[frame] = 0
            else:
                break
        if passed in self.small:
            self.ghosts.append(self.keys[passed])
        return passed


def _mixed(key: int) -> int:
    key = ((key ^ key >> 32) * 0x9E3779B97F4A7C15) % (1 << 64)
    return key ^ key >> 29


def _place(key: int) -> int:
    """Where its ghost is kept: a later one there takes its place."""
    return _mixed(key) % 64


MODELS = {"clock": Model, "fifo": Fifo, "lru": Lru, "lfu": Lfu, "s3fifo": S3Fifo}


class Tier:
    """A model of a whole tier: the domains of owners, and the common one."""

    def __init__(self, policy: str) -> None:
        more: dict[str, list[object]] = {"lfu": [Uses()], "s3fifo": [[]]}
        self.shared: list[object] = [{}, {}, *more.get(policy, [])]
        self.domains = {-1: MODELS[policy](*self.shared)}
        self.policy = policy
        self.of: dict[int, list[Model]] = {}

    def domain(self, owner: int) -> Model:
        if owner not in self.domains:
            self.domains[owner] = MODELS[self.policy](*self.shared)
        return self.domains[owner]

    def admit(self, frame: int, key: int, weight: int, owner: int, alone: bool) -> None:
        common = self.domain(-1)
        common.counts[frame], common.weights[frame] = 0, weight
        self.of[frame] = [self.domain(owner), *([] if alone else [common])]
        for domain in self.of[frame]:
            domain.admit(frame, key)

    def use(self, frames: list[int]) -> None:
        for frame in frames:
            for domain in self.of[frame] if self.policy == "lru" else self.of[frame][:1]:
                domain.use(frame)

    def remove(self, frame: int) -> None:
        for domain in self.of.pop(frame):
            domain.remove(frame)


@pytest.mark.parametrize("policy", TIER_POLICIES)
def test_a_policy_chooses_as_its_model_does(policy: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    native, model = TierPolicy(policy, FRAMES), Tier(policy)
    free = list(range(FRAMES))
    for _ in range(20_000):
        held = list(model.of)
        match rng.choices(("admit", "use", "weigh", "remove"), (40, 50, 5, 5))[0]:
            case "admit":
                owner = rng.randrange(3)
                if not free:
                    pinned = rng.sample(held, rng.choice((0, 5, FRAMES - 3, FRAMES)))
                    among = rng.choice((owner, -1))
                    frame = native.victim(among, pinned)
                    assert frame == model.domain(among).victim(pinned)
                    if frame is None:
                        continue
                    native.remove(frame)
                    model.remove(frame)
                    free.append(frame)
                frame, key = free.pop(), rng.randrange(100)
                weight, alone = rng.choice((0, 0, 0, 2, 7)), owner == 2
                native.admit(frame, key, weight, owner, alone)
                model.admit(frame, key, weight, owner, alone)
            case "use" if held:
                used = rng.sample(held, min(len(held), rng.randrange(1, 6)))
                native.use(used)
                model.use(used)
            case "weigh" if held:
                frame, weight = rng.choice(held), rng.randrange(8)
                native.weigh(frame, weight)
                model.domain(-1).weigh(frame, weight)
            case "remove" if held:
                frame = rng.choice(held)
                native.remove(frame)
                model.remove(frame)
                free.append(frame)


@pytest.mark.parametrize("policy", TIER_POLICIES)
def test_a_frame_that_may_go_is_found_wherever_it_is(policy: str) -> None:
    native = TierPolicy(policy, FRAMES)
    for frame in range(FRAMES):
        native.admit(frame, frame, frame % 8)
        for _ in range(frame % 5):
            native.use([frame])
    for left in random.sample(range(FRAMES), 10):
        assert native.victim(pinned=[frame for frame in range(FRAMES) if frame != left]) == left
    assert native.victim(pinned=list(range(FRAMES))) is None
    assert native.victim(owner=7) is None


@pytest.mark.parametrize("policy", TIER_POLICIES)
def test_looks_are_bounded_when_everything_was_just_used(policy: str) -> None:
    frames = 4096
    native = TierPolicy(policy, frames)
    for frame in range(frames):
        native.admit(frame, frame, 7)
        native.use([frame])
    asked: set[int] = set()
    if policy == "lfu":  # which takes the least of eight in any case
        assert native.victim(looks=16) in range(16)
    else:
        assert native.victim(looks=16) == 15, "the last one that it passed over"
    for _ in range(3):
        victim = native.victim()
        assert victim is not None
        assert victim not in asked
        asked.add(victim)
        native.remove(victim)


@pytest.mark.parametrize("policy", TIER_POLICIES)
def test_looks_are_bounded_where_few_frames_can_go(policy: str) -> None:
    """What lies behind those that were looked at is found by later calls."""
    frames = 4 * LOOKS_MAX
    native = TierPolicy(policy, frames)
    for frame in range(frames):
        native.admit(frame, frame)
    last = frames - LOOKS_MAX // 2
    pinned = [*range(last), *range(last + 1, frames)]
    victims = [native.victim(pinned=pinned) for _ in range(5)]
    assert victims[0] is None
    assert last in victims


@pytest.mark.parametrize("policy", TIER_POLICIES)
def test_a_frame_that_has_nothing_is_refused(policy: str) -> None:
    native = TierPolicy(policy, 4)
    native.admit(0, 0)
    native.remove(0)
    for act in (lambda: native.use([0]), lambda: native.weigh(1, 3), lambda: native.remove(0), lambda: native.use([4])):
        with pytest.raises(NativeError, match=r"frame \d has nothing; admit it first"):
            act()
    with pytest.raises(NativeError, match="frame 4 of 4"):
        native.admit(4, 0)


@pytest.mark.parametrize("policy", TIER_POLICIES)
def test_a_read_ahead_takes_nothing_that_was_used_or_has_a_weight(policy: str) -> None:
    native = TierPolicy(policy, 4)
    for frame in range(4):
        native.admit(frame, frame, weight=1)
    native.use([0, 1, 2, 3])
    for _ in range(20):
        assert native.coldest() is None
    native.remove(2)
    native.admit(2, 50, 0)
    for frame in (0, 1, 3) * 4:
        native.use([frame])
    assert native.coldest(pinned=[2]) is None
    if policy != "s3fifo":  # what is new there has yet to show whether it comes again
        assert native.coldest() == 2
    native.use([2])
    assert native.coldest() is None


@pytest.mark.parametrize("policy", ["lfu", "s3fifo"])
def test_what_is_used_again_stays_when_much_passes_through(policy: str) -> None:
    hot = np.tile(np.arange(40), 50)
    scan = np.arange(1000, 1000 + 4 * len(hot))
    keys = np.column_stack([hot, hot, scan.reshape(-1, 4)]).astype(np.uint64)
    hits = {name: _native.replay(name, 100, keys.ravel()).reshape(keys.shape) for name in (policy, "lru")}
    again = {name: found[len(hot) // 2 :, 0].mean() for name, found in hits.items()}
    assert again[policy] > 0.9 > 0.1 > again["lru"]


def test_lfu_lets_new_extents_that_were_read_together_go_first() -> None:
    """Those of a run are pinned while its later ones look for a place; they are new once more when it is over."""
    native = TierPolicy("lfu", 100)
    native_key = itertools.count(1000)
    for frame in range(100):
        native.admit(frame, frame)
    hot = set(range(0, 100, 2))
    for _ in range(4):
        native.use(sorted(hot))
    for _ in range(50):
        run: list[int] = []
        for _ in range(16):
            victim = native.victim(pinned=run)
            assert victim is not None
            native.remove(victim)
            hot.discard(victim)
            native.admit(victim, next(native_key))
            native.use([victim])
            run.append(victim)
        native.use(sorted(hot))
    assert len(hot) == 50


def test_lfu_keeps_a_hint_for_three_rounds_only() -> None:
    """A round: as many uses and reads as there are frames, to a power of two; of uses between two looks one counts."""
    native = TierPolicy("lfu", 64)
    for frame in range(64):
        native.admit(frame, frame, weight=3)
    for uses in range(127):
        native.use([0] * (1 + uses))
        assert native.coldest() is None
        assert native.coldest(owner=0) is None
    native.use([0])
    assert native.coldest() == 1
    native.weigh(1, 3)
    assert native.coldest() == 2
    assert native.coldest(pinned=list(range(1, 64))) is None


def test_lfu_lets_a_read_ahead_have_what_has_not_been_used_for_some_rounds() -> None:
    native = TierPolicy("lfu", 64)
    for frame in range(64):
        native.admit(frame, frame)
    native.use(list(range(1, 64)))
    native.use([1] * 20)
    assert native.coldest() == 0
    native.use([0, 1])
    for _ in range(3 * 64 - (64 + 63 + 1)):
        assert native.coldest() is None
        native.use([63])
    assert native.coldest() is None  # the last use is counted when its frame is looked at
    assert native.coldest() == 2
    assert native.coldest(pinned=[frame for frame in range(64) if frame != 1]) is None  # used more often


def test_what_a_neighbour_uses_fades_no_counts() -> None:
    native = TierPolicy("lfu", FRAMES)
    mine, its = range(0, FRAMES, 2), range(1, FRAMES, 2)
    for frame in range(FRAMES):
        native.admit(frame, frame, owner=frame % 2)
    for _ in range(4):
        native.use(list(mine))
    assert native.coldest(pinned=list(its)) is None
    for _ in range(1000):
        native.use([1] * 100)
        assert native.coldest(owner=1, pinned=list(its)) is None  # looks at all of them
    assert native.coldest(pinned=list(its)) is None
    for _ in range(12):
        victim = native.victim()
        assert victim in its
        native.remove(victim)


def test_what_others_read_takes_the_place_of_what_its_owner_no_longer_uses() -> None:
    native = TierPolicy("lfu", FRAMES)
    left = set(range(0, FRAMES, 2))
    for frame in range(FRAMES):
        native.admit(frame, frame, owner=frame % 2)
    for _ in range(16):
        native.use(sorted(left))
    for key in range(1000, 1000 + 40 * FRAMES):
        victim = native.victim()
        assert victim is not None
        native.remove(victim)
        left.discard(victim)
        assert len(left) == 24 or key > 1000 + 12 * FRAMES  # but not soon
        native.admit(victim, key, owner=1)
        native.use([victim])
    assert not left


def test_a_neighbours_ghosts_leave_those_of_others() -> None:
    """What was often used and evicted is known when it comes again, however much somebody else reads."""
    native = TierPolicy("lfu", 4096)
    for frame in range(32):
        native.admit(frame, frame, owner=0)
        native.use([frame] * 8)
    for key in range(10_000, 30_000):
        native.admit(4000, key, owner=1)
        native.use([4000] * 8)
    for frame in range(32):
        native.remove(frame)
    for key in range(30_000, 50_000):
        native.admit(4000, key, owner=1)
        native.use([4000] * 8)
    for frame in range(32):
        native.admit(frame, frame, owner=0)
        native.admit(100 + frame, 100 + frame, owner=0)
        native.use([100 + frame])
    for _ in range(8):
        victim = native.victim(owner=0)
        assert victim is not None
        assert victim >= 100
        native.remove(victim)


def test_lfu_forgets_what_was_used_often_once() -> None:
    """Another set of extents, as often used, has the tier before long."""
    sets = np.stack([np.tile(np.arange(80) + 1000 * i, 100) for i in range(2)]).astype(np.uint64)
    hits = _native.replay("lfu", 100, sets.ravel())
    assert hits[-2000:].all()


def test_a_replay_counts_as_a_plain_cache() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    keys = np.random.default_rng(seed).zipf(1.3, 5000).astype(np.uint64)
    held: dict[int, None] = {}
    hits = []
    for key in keys.tolist():
        hits.append(key in held)
        held.pop(key, None)
        held[key] = None
        if len(held) > 32:
            del held[next(iter(held))]
    assert _native.replay("lru", 32, keys).tolist() == hits


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(NativeError, match="lfu, clock, s3fifo, lru, fifo"):
        TierPolicy("belady", 4)
