"""Words of product-quantisation codes as they lie in memory."""

import numpy as np


def frame_codes(p, codes):
    """Codes [tokens, M] as lanes of words [frames * frame_words, word_codes]; tokens that a frame lacks are code 0.

    Word k of a frame has, token by token, the codes of the sub-spaces ``k*run`` to ``k*run + run - 1``.
    """
    codes = np.asarray(codes)
    frames = -(-len(codes) // p.frame)
    padded = np.zeros((frames * p.frame, p.subspaces), dtype=np.int64)
    padded[: len(codes)] = codes
    cut = padded.reshape(frames, p.frame, p.frame_words, p.run)
    return cut.transpose(0, 2, 1, 3).reshape(frames * p.frame_words, p.word_codes)
