"""Ring-DTP: the vocabulary projection, its loss and the token embedding over vocabulary shards.

Source: arXiv 2609.14306, Eq. 2-3 and Algorithm 2. The loss and the gradients are those of the plain projection.

Glossary
    *shard*        the rows [r·Vp, (r+1)·Vp) of the vocabulary that rank r owns, Vp = ceil(V / P); short at the end
    *ring*         the P ranks of a group, of which r sends to r + 1
    *hop*          one batch of sends and receives between neighbours
    *piece*        what travels at a time: at most ``vocab_tile`` rows of a shard, or ``token_tile`` tokens
    *round*        one piece of every rank going once around
    *given part*   of a piece, what its owner sends out: weight rows, or hidden states and targets
    *carried part* of a piece, what every rank adds to: states, or accumulators of gradients
    *visit*        a piece being at a rank, which works on it
    *tile*         logits of some tokens and some vocabulary rows, the only logits that ever exist
    *state*        what is known of a token's logits so far: (m, z, t) and, where asked for, two more
    *slopes*       a token's lse and the gradients that came in for it
    *wide*         float64 for float64 inputs, else float32

Files, in reading order: `spans` who owns what; `ring` hops; `tiles` arithmetic; `passes` forward and backward;
`autograd` the shell around them; `agreement` and `call` what is checked and agreed on first; `operator` the public
functions; `embedding` lookup on the same shard; `projection` what a strategy plugs into a head; `gather` the whole
weight, for true logits; `reference` plain torch; `record` counters; `dry` peaks of any size without allocating.
"""

from lightning_longmoe.vocabulary.operator import LogProbs, ring_cross_entropy, ring_log_probs
from lightning_longmoe.vocabulary.record import Record, recording

__all__ = ["LogProbs", "Record", "recording", "ring_cross_entropy", "ring_log_probs"]
