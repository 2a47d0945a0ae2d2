"""Thresholds, resident heads and profile files."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from decode_worker.calibration.profile import Profile, ProfileError


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8


def test_thresholds_are_the_papers():
    profile = replace(Profile.default(Shape(1, 5, 5)), kv_importance=np.array([[0.5, 0.8, 0.9, 0.95, 1]], np.float32))
    np.testing.assert_allclose(profile.thresholds()[0], [-0.95, -0.29, 0.25, 0.54, 0.80], atol=0.005)


def test_resident_heads_are_the_most_difficult_that_fit():
    similarity = np.array([[0, 0], [0.95, 0.5], [0.2, 0.95]], np.float32)
    profile = replace(Profile.default(Shape()), mean_similarity=similarity)
    np.testing.assert_allclose(profile.difficulty(), 0.8 - (similarity - 0.1), rtol=1e-5)
    assert profile.resident_heads(100, 99).tolist() == [[True, True], [False, False], [False, False]]
    assert profile.resident_heads(100, 100).tolist() == [[True, True], [False, False], [True, False]]
    assert profile.resident_heads(100, 250).tolist() == [[True, True], [False, True], [True, False]]
    # .95 - .1 > .8: such a head is never worth its memory.
    assert profile.resident_heads(100, 10**6).tolist() == [[True, True], [False, True], [True, False]]
    assert not profile.resident_heads(100, 0, layer0=False).any()


def test_profile_file_with_a_hash_beside_it(tmp_path):
    projection = np.ones((3, 2, 8, 256), np.float32)
    np.savez(tmp_path / "hash.npz", projection=projection, centre=np.zeros((3, 2, 8), np.float32))
    content = {"kv_importance": [[1, 0.5]] * 3, "eta": 0.7, "hash": "hash.npz"}
    (tmp_path / "headgate_profile.json").write_text(json.dumps(content))
    profile = Profile.load("auto", Shape(), directory=tmp_path, p=2)
    assert (profile.eta, profile.p, profile.margin) == (0.7, 2, 0.1)
    assert profile.kv_importance[0].tolist() == [1, 0.5]
    np.testing.assert_array_equal(profile.hash_parameters(3, 2, 8)[0], projection)
    assert Profile.load("off", Shape(), directory=tmp_path).eta == 0.8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kv_importance": [[1, 1]]}, "shape"),
        ({"kv_importance": [[1, 2]] * 3}, "must lie in"),
        ({"etta": 0.8}, "unknown keys etta"),
        ({"eta": 2}, "must lie in"),
        ({"hash": "absent.npz"}, "hash="),
    ],
)
def test_unusable_profiles_are_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=message):
        Profile.load(path, Shape())


def test_default_hash_is_the_documented_one():
    projection, centre = Profile.default(Shape()).hash_parameters(3, 2, 8)
    expected = np.random.default_rng(0x48474154).standard_normal((3, 2, 8, 256), dtype=np.float32)
    np.testing.assert_array_equal(projection, expected)
    assert not centre.any()
