"""Counter-based random numbers."""

import numpy as np

from mtb_core.data.hashing import GOLDEN, derive_keys, mix


def test_is_splitmix64():
    """The stream of key 0 is the published one of SplitMix64 with seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]

    assert mix(GOLDEN * np.arange(1, 5, dtype=np.uint64)).tolist() == published


def test_keys_differ():
    """Keys depend on every part and on the order of the parts; more keys begin with the same ones."""
    seen = {int(derive_keys(*parts)[0]) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**64 - 1,)]}

    assert len(seen) == 6
    assert derive_keys(5, count=4)[:2].tolist() == derive_keys(5, count=2).tolist()
