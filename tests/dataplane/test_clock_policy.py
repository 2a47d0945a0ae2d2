from kvstore_service._native import ClockPolicy

NONE = 2**32 - 1


def admitted(frames, weight=0):
    policy = ClockPolicy(frames)
    for frame in range(frames):
        policy.admit(frame, weight)
    return policy


def test_the_used_frame_gets_a_second_chance():
    policy = admitted(4)
    policy.use(0)
    policy.use(2)
    assert policy.victim() == 1
    policy.remove(1)
    assert policy.victim() == 3
    policy.remove(3)
    assert policy.victim() == 0  # its chance is spent


def test_nothing_admitted_means_no_victim():
    policy = ClockPolicy(3)
    assert policy.victim() == NONE
    assert policy.coldest() == NONE


def test_weight_outlives_plain_frames_and_decays():
    policy = ClockPolicy(3)
    policy.admit(0, 3)
    policy.admit(1, 0)
    assert policy.victim() == 1
    policy.remove(1)
    assert policy.victim() == 0  # alone, it is worn down in a bounded number of steps


def test_read_ahead_takes_only_cold_frames_and_wears_nothing_down():
    policy = admitted(3, weight=1)
    policy.use(0)
    for _ in range(20):
        assert policy.coldest() == NONE
    policy.admit(1, 0)
    assert policy.coldest() == 1
    policy.use(1)
    assert policy.coldest() == NONE
