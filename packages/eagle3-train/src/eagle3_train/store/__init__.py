"""Captured samples on disk: safetensors shards, an index, and the target's head.

    STORE/index.json                meta, the order of the samples, what each shard holds
    STORE/part-0.json               what writer 0 has closed so far
    STORE/shard-0-00000.safetensors the tensors of many samples, laid end to end
    STORE/head.safetensors          the target's lm_head weight [V,T]

Every file is renamed into place when whole, and named by an index after that, so whatever an index
names exists. Writers share nothing but the folder.
"""

from eagle3_train.store.format import StoreMeta
from eagle3_train.store.reader import FeatureStore
from eagle3_train.store.rolling import RollingStore, RollingWriter
from eagle3_train.store.sample import Sample, check_finite, head_digest, sample_key
from eagle3_train.store.writer import StoreWriter, remove_damaged

__all__ = [
    "FeatureStore",
    "RollingStore",
    "RollingWriter",
    "Sample",
    "StoreMeta",
    "StoreWriter",
    "check_finite",
    "head_digest",
    "remove_damaged",
    "sample_key",
]
