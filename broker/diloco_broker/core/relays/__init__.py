"""Relays, as the hub sees them.

A relay connects workers that are near it. They are members of the run like all others, and the relay
forwards their messages unchanged. It keeps only the payloads of their pseudo-gradients: it *holds* a
chunk, reports that to the hub, and sends the weighted mean of held chunks when the hub collects them.
So one place decides what counts, and a relay holds nothing that cannot be sent again: a chunk is *taken*
by a round once a sum with it has arrived, and what a dead relay held is sent again.

`relay` and `relays` are the records, `link` has the rules for connections, `combining` those for chunks.
"""
