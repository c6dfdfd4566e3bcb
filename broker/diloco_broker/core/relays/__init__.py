"""Relays, as the hub sees them: `relays` has the records, `link` the rules.

A relay connects workers that are near it. They are members of the run like all others; what they say
goes through the relay as it is. Only the buffers of their pseudo-gradients stay there: the relay *holds*
a chunk, tells the hub of it, and when the hub asks sends the weighted mean of those that it holds in
their place. So one place decides what counts, and a relay has nothing that cannot be lost: a chunk is
*taken* by a round once a sum with it is here, and what a relay that is gone held is sent again.
"""
