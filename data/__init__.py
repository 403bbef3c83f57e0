"""Mixed pictures and clips from WebDataset shards, in one order that ranks, workers and restarts keep.

Read in this order: config, samples, geometry, images, video, captions (one sample); tar, remote, shards,
index, manifest (what there is); order (which comes next); decode, loader (hands it to the trainer).
"""
